"""Checks of a host and its software: MPI, versions, cores, memory, GPUs.

Each check is a local function that gathers facts on a rank, without MPI calls that wait, and a pure one that yields the
findings from the facts of all ranks.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpi4py import MPI

import allreduce
from allreduce import kernels
from allreduce.arrays import gpu
from allreduce.doctor.findings import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Needs,
    Rank,
    alike,
    by_node,
    count,
    grouped,
    named,
    ok,
    plural,
    problem,
    some,
    spans,
    warning,
)  # fmt: skip
from allreduce.machine import cores, identify, mpi_library
from allreduce.notices import nbytes
from allreduce.process import launcher, proc, start
from allreduce.topology import Topology
from allreduce.transport.shared_segment import SHARED_MEMORY, SPARE_BYTES, STAGING_BYTES

Nodes = Sequence[Sequence[Rank]]  # the ranks of each node

# MPI and its launcher

MULTIPLE = "MPI_THREAD_MULTIPLE"
THREADS = {getattr(MPI, f"THREAD_{name}"): f"MPI_THREAD_{name}" for name in ("SINGLE", "FUNNELED", "SERIALIZED")}


def gather_mpi(topology: Topology) -> dict[str, Any]:
    launch = launcher.unrecognized_launch(topology.size)
    return {
        "library": mpi_library(),
        "threads": THREADS.get(MPI.Query_thread(), MULTIPLE),
        "unguarded": start.unguarded(),
        "launch": launch and (str(launch), launch.advice),
    }


def judge_mpi(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    advice = "load the same MPI library on all hosts, that of the mpirun which starts the job"
    yield alike("library", ranks, lambda rank: rank.facts["library"], advice, PROBLEM)
    if found := next((rank.facts["launch"] for rank in ranks if rank.facts["launch"]), None):
        yield problem("launcher", *found)
    if lesser := [rank for rank in ranks if rank.facts["threads"] != MULTIPLE]:
        text = f"{lesser[0].facts['threads']} on {named(lesser)}: nothing can be reduced in the background"
        advice = "remove mpi4py.rc.threads and mpi4py.rc.thread_level, or use an MPI that was built with thread support"
        yield warning("threads", text, advice)
    else:
        yield ok("threads", f"{MULTIPLE}: gradients can be reduced in the background")
    if unguarded := [rank for rank in ranks if rank.facts["unguarded"]]:
        cause, _, advice = unguarded[0].facts["unguarded"].rpartition("; ")
        yield warning("recovery", f"{named(unguarded)}: {cause}", advice)


# Versions

TRIED = json.loads(Path(__file__).with_name("tried.json").read_text())  # versions that were tested, oldest first
LIBRARIES = tuple(name for name in TRIED if name != "Python")
PREFIXES = ("cupy", "nvidia-nccl")  # of package names that end in a CUDA version
SAME = "install the same on all hosts: one environment in a folder that all of them see, or one container image"
SLOWEST = "in every step all ranks wait for the slowest: use hosts of one kind"


def gather_versions(topology: Topology) -> dict[str, Any]:
    """Return the versions of installed packages that ranks should have in common, and the CPU. Imports nothing."""
    installed = {
        name.lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"]) and name.lower().startswith((*LIBRARIES, *PREFIXES))
    }
    others = {name: installed[name] for name in sorted(installed) if name in LIBRARIES or name.startswith(PREFIXES)}
    folder, value = Path(allreduce.__file__).parent, 0
    for path in sorted(folder.rglob("*.py")):  # checkouts of one version may differ
        value = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(folder).as_posix().encode(), value))
    ours = f"{allreduce.__version__} (code {value:08x})"
    versions = {"Python": platform.python_version(), **others, "allreduce": ours}
    return {"versions": versions, "cpu": identify()["cpu"], "kernels": kernels.status()}


def judge_versions(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    same = []
    for name in dict.fromkeys(name for rank in ranks for name in rank.facts["versions"]):
        level = PROBLEM if name == "allreduce" else WARNING  # different versions of it may make different calls
        found = alike(name, ranks, lambda rank, name=name: rank.facts["versions"].get(name, "missing"), SAME, level)  # type: ignore[misc]
        if found.level == OK:
            same.append(f"{name} {found.text}")
        else:
            yield found
    yield ok("the same", ", ".join(same))
    for name, tried in TRIED.items():
        versions = {rank.facts["versions"].get(name) for rank in ranks} - {None}
        if any(numbers(version)[:2] > numbers(tried[-1])[:2] for version in versions):
            text = f"{', '.join(sorted(versions))}; this version of allreduce was tried with {', '.join(tried)}"
            yield warning(f"{name}, tried", text, f"if something fails with it, use {name} {tried[-1]}")
    yield ok("newest tried", ", ".join(f"{name} {tried[-1]}" for name, tried in TRIED.items()))
    why = "all ranks wait for those without the C library, and exact=True and int8 are refused"
    yield alike("kernels", ranks, lambda rank: rank.facts["kernels"], why)
    yield alike("CPU", ranks, lambda rank: rank.facts["cpu"], SLOWEST)


def numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.partition("+")[0].split("."))


# Cores


def gather_cores(topology: Topology) -> dict[str, Any]:
    return {"cores": cores(), "of": os.cpu_count() or 1, "quota": proc.core_quota(), "threads": _threads()}


def _threads() -> int:
    """Return the threads of a matrix product: as BLAS libraries report; for PyTorch, OMP_NUM_THREADS or all cores."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    assumed = int(told) if told.isdecimal() and int(told) else len(cores())
    counts = [assumed] if importlib.util.find_spec("torch") is not None else []
    with suppress(ImportError):
        import threadpoolctl

        counts += [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return max(counts, default=assumed)


def judge_cores(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    nodes = by_node(ranks)
    if len({len(here) for here in nodes}) == 1:
        where = f"on each of {len(nodes)} nodes" if len(nodes) > 1 else f"on one node, {ranks[0].host}"
        yield ok("ranks per node", f"{len(nodes[0])} {where}")
    else:
        text = some([f"{len(here)} on {here[0].host}" for here in nodes], ", ")
        advice = "use nodes of equal size: then all ranks send slices across nodes, not only each node's first rank"
        yield warning("ranks per node", text, advice)
    yield _cores_per_rank(nodes)
    bound = [  # to the same few cores while other cores of the node are free
        f"{here[0].host}: {named(sharing)} on {plural(len(bound), 'core')} ({spans(bound)})"
        for here in nodes
        if _usable_cores(here) >= len(here)
        for bound, sharing in grouped(here, lambda rank: tuple(rank.facts["cores"])).items()
        if len(sharing) > len(bound)
    ]
    if bound:
        advice = "--bind-to core (a core for each rank), or --bind-to none; with threads: --map-by slot:PE=N"
        yield problem("binding", some(bound) + ", while others are free", advice)
    yield _blas_threads(ranks, nodes)


def _cores_per_rank(nodes: Nodes) -> Finding:
    crowded = [here for here in nodes if _usable_cores(here) < len(here)]
    if not crowded:
        return ok("cores per rank", f"at least {min(_usable_cores(here) / len(here) for here in nodes):.3g}")
    texts = [f"{h[0].host}: {plural(len(h), 'rank')} on {plural(_usable_cores(h), 'core')}" for h in crowded]
    room, facts, allowed = _usable_cores(crowded[0]), crowded[0][0].facts, len(_union(crowded[0]))
    advice = f"start at most {plural(int(room), 'rank')} on such a node; more bring no speed"
    if room < allowed:  # by the quota
        advice = f"the container may use {room:g} cores: give it more (docker run --cpus N), or start fewer ranks"
    elif allowed < facts["of"]:
        advice = (
            f"the ranks are bound to {allowed} of {facts['of']} cores: --bind-to none or --bind-to core, and ask the "
            "scheduler for as many cores as ranks"
        )
    return warning("cores per rank", f"{some(texts)}; ranks wait for each other's cores", advice)


def _blas_threads(ranks: Sequence[Rank], nodes: Nodes) -> Finding:
    shown = spans({rank.facts["threads"] for rank in ranks})
    for here in nodes:
        threads, room = sum(rank.facts["threads"] for rank in here), _usable_cores(here)
        if threads > max(room, len(here)):
            text = f"{shown} a rank: {here[0].host} has {threads} threads for {plural(room, 'core')}"
            advice = f"export OMP_NUM_THREADS={max(1, int(room) // len(here))} (and the same for all ranks)"
            return warning("BLAS threads", text, advice)
    return ok("BLAS threads", f"{shown} a rank")


def _union(here: Sequence[Rank]) -> set[int]:
    return set().union(*(rank.facts["cores"] for rank in here))


def _usable_cores(here: Sequence[Rank]) -> float:
    """Return the number of cores that the ranks of a node may keep busy."""
    return min(len(_union(here)), here[0].facts["quota"] or float("inf"))


# Memory

ELEMENT = 4  # bytes of a float32
COPIES = 4  # of the parameters' bytes on every rank: parameters, gradients, and the two moments of Adam


def gather_memory(topology: Topology) -> dict[str, Any]:
    shared = shutil.disk_usage(SHARED_MEMORY)
    free = {"shared_path": SHARED_MEMORY, "shared_bytes": shared.total, "shared_free": shared.free}
    return {**free, "available": proc.available_bytes(), "cma": topology.cma.works}


def judge_memory(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    nodes = by_node(ranks)
    yield _shared(nodes, needs)
    yield _memory(nodes, needs)
    apart = [here[0].host for here in nodes if len(here) > 1 and not here[0].facts["cma"]]
    if apart:
        text = "ranks may not read each other's memory, so arrays not from allocate() cost two copies"
        advice = "docker run --cap-add SYS_PTRACE (or --ipc=host --pid=host); else sysctl kernel.yama.ptrace_scope=0"
        yield warning("CMA", f"{some(apart, ', ')}: {text}", advice)
    elif all(len(here) == 1 for here in nodes):
        yield ok("CMA", "every rank is alone on its node")
    else:
        yield ok("CMA", "ranks of a node copy straight from each other's memory (process_vm_readv)")


def _shared(nodes: Nodes, needs: Needs) -> Finding:
    """Check shared memory: space for each rank's gradients, the parameters of a sharded update, a staging buffer."""
    path, free, fatal = nodes[0][0].facts["shared_path"], [], False
    for here in nodes:
        spare = len(here) * SPARE_BYTES
        wanted = needs.parameters * ELEMENT * (len(here) + 1) + STAGING_BYTES + spare
        free.append((here[0].host, here[0].facts["shared_free"], wanted if len(here) > 1 else 0))
        fatal = fatal or (len(here) > 1 and here[0].facts["shared_free"] < spare)
    effect = '"shared" refuses without it, and "auto" falls back to ordinary memory, which is slower'
    if fatal:
        effect = "with so little, MPI itself crashes with bus errors"
    advice = f"docker run --shm-size=8g, or mount -o remount,size=8g {path}; {effect}"
    model = f"a model of {count(needs.parameters)} parameters"
    return _room(path, free, model, advice, PROBLEM if fatal or needs.asked else WARNING)


def _memory(nodes: Nodes, needs: Needs) -> Finding:
    wanted = needs.parameters * ELEMENT * COPIES
    free = [(here[0].host, here[0].facts["available"], wanted * len(here)) for here in nodes]
    model = f"parameters, gradients and Adam's state of {count(needs.parameters)} parameters a rank"
    advice = 'fewer ranks a node, update="sharded" (its state is divided by the ranks), or a smaller model'
    return _room("memory", free, model, advice, PROBLEM if needs.asked else WARNING)


def _room(name: str, free: Sequence[tuple[str, int | None, int]], model: str, advice: str, level: str) -> Finding:
    """Compare the bytes that each node has, where that is known, with the bytes that `model` wants there. free: (host,
    has, wants) of each node; containers of several hosts may have one name."""
    known = [(host, has, wants) for host, has, wants in free if has is not None]
    short = [f"{host}: {nbytes(has)} free, {nbytes(wants)} wanted" for host, has, wants in known if has < wants]
    if short:
        return Finding(level, name, f"{some(short)} for {model}", advice)
    if not known:
        return ok(name, "unknown on this system")
    return ok(name, f"{nbytes(min(has for _, has, _ in known))} free: enough for {model}")


# GPUs: the one of each rank

PRESENT = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gather_gpus(topology: Topology) -> dict[str, Any]:
    found: dict[str, Any] = {"device": None, "visible": os.environ.get(VISIBLE), "missing": str(gpu.missing() or "")}
    found["present"] = len(list(PRESENT.iterdir())) if PRESENT.is_dir() else 0
    found["cuda_aware"] = gpu.mpi_is_cuda_aware()
    with suppress(Exception):  # no CuPy, or its own errors: `missing` says what it is
        runtime = gpu.cupy().cuda.runtime
        if devices := runtime.getDeviceCount():
            device = topology.node_rank % devices
            properties, identity = runtime.getDeviceProperties(device), gpu.identity(runtime, device)
            name = properties["name"].decode()
            found["device"] = {"name": name, "bytes": properties["totalGlobalMem"], "identity": identity}
    return found


def judge_gpus(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    having, lacking = ([rank for rank in ranks if rank.facts[key]] for key in ("device", "missing"))
    told = some(sorted({rank.facts["missing"] for rank in lacking}))
    present = next((rank for rank in ranks if rank.facts["present"]), None)
    if having:
        yield alike("devices", having, _kind, SLOWEST)
    elif present:
        text = f"{present.host} has {plural(present.facts['present'], 'GPU')}, and no rank can use one: {told}"
        visible = present.facts["visible"]
        hidden = f"{VISIBLE}={visible}: unset it, or start the container with --gpus all"
        yield warning("devices", text, gpu.EXTRA if visible is None else hidden)
    else:
        yield ok("devices", "none: training runs on CPUs")
    shared = grouped(having, lambda rank: rank.facts["device"]["identity"]).values()
    if twice := [f"{named(each)} on {each[0].host}" for each in shared if len(each) > 1]:
        advice = "as many ranks on a node as it has GPUs; NCCL refuses a shared GPU, and its ranks slow each other down"
        yield warning("duplicates", f"one GPU is shared by {some(twice)}", advice)
    if having and lacking:
        advice = f"ask the scheduler for GPUs on every host (--gpus-per-node), and look at {VISIBLE} there"
        without = not all(rank.facts["device"] for rank in lacking)
        yield warning("missing", f"{named(lacking)}: {told}", advice if without else gpu.EXTRA)
    yield _cuda_aware(having or ranks)


def _kind(rank: Rank) -> str:
    return f"{rank.facts['device']['name']}, {nbytes(rank.facts['device']['bytes'])}"


def _cuda_aware(ranks: Sequence[Rank]) -> Finding:
    name = "CUDA-aware MPI"
    without = [rank for rank in ranks if not rank.facts["cuda_aware"]]
    if not without:
        return ok(name, 'yes: "native" hands arrays in GPU memory to MPI')
    if len(ranks) == 1 or not ranks[0].facts["device"]:
        return ok(name, "no, and it is not needed here")
    where = f" on {named(without)}" if len(without) < len(ranks) else ""
    text = f'no{where}: "native" copies arrays in GPU memory to pinned host memory first, as all backends but nccl do'
    advice = "fine with nccl; else use an MPI built with CUDA (ALLREDUCE_CUDA_AWARE=1 if MPI does not report it)"
    return warning(name, text, advice)
