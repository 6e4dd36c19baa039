"""A host: the cores that its ranks have and the threads that want them, /dev/shm and memory."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from allreduce.doctor.findings import (
    EXTRA,
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
    nbytes,
    ok,
    plural,
    problem,
    some,
    spans,
    warning,
)
from allreduce.machine import cores
from allreduce.topology import Topology
from allreduce.transport.shared_segment import LARGEST_BYTES, SHARED_MEMORY, SPARE_BYTES

CONTROL_GROUP = Path("/sys/fs/cgroup")  # a container's limits, which no library reads
ELEMENT = 4  # bytes of a float32
COPIES = 4  # of the parameters' bytes on every rank: parameters, gradients, and the two moments of Adam
MALLOC = "ALLREDUCE_MALLOC"  # see trainers/malloc.py
OTHER_MALLOCS = ("jemalloc", "tcmalloc", "mimalloc")


# Cores


def look_at_cores(topology: Topology, first: str) -> dict[str, Any]:
    return {"cores": cores(), "of": os.cpu_count() or 1, "quota": _quota(), "threads": _threads()}


def judge_cores(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    yield _ranks_per_node(ranks)
    yield _cores_per_rank(ranks)
    yield from _binding(ranks)
    yield _blas_threads(ranks)


def _ranks_per_node(ranks: Sequence[Rank]) -> Finding:
    nodes = by_node(ranks)
    if len({len(here) for here in nodes}) == 1:
        where = f"on each of {len(nodes)} nodes" if len(nodes) > 1 else f"on one node, {ranks[0].host}"
        return ok("ranks per node", f"{len(nodes[0])} {where}")
    text = some([f"{len(here)} on {here[0].host}" for here in nodes], ", ")
    advice = "nodes of one size are faster: all ranks carry slices between them, and not the first of each node alone"
    return warning("ranks per node", text, advice)


def _cores_per_rank(ranks: Sequence[Rank]) -> Finding:
    rooms = [(here, _room(here)) for here in by_node(ranks)]
    oversubscribed = [(here, room) for here, room in rooms if room < len(here)]
    if not oversubscribed:
        return ok("cores per rank", f"at least {min(room / len(here) for here, room in rooms):.3g}")
    texts = [f"{here[0].host}: {plural(len(here), 'rank')} on {plural(room, 'core')}" for here, room in oversubscribed]
    here, room = oversubscribed[0]
    facts, allowed = here[0].facts["cores"], len(_union(here))
    if facts["quota"] is not None and facts["quota"] < allowed:
        advice = (
            f"the container may use {facts['quota']:g} cores: give it more (docker run --cpus N), or start fewer ranks"
        )
    elif allowed < facts["of"]:
        advice = (
            f"the ranks are bound to {allowed} of {facts['of']} cores: --bind-to none or --bind-to core, and ask the "
            "scheduler for as many cores as ranks"
        )
    else:
        advice = f"start at most {plural(int(room), 'rank')} on such a node; more bring no speed"
    return warning("cores per rank", f"{some(texts)}; ranks wait for each other's cores", advice)


def _binding(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """Ranks that were bound to the same few cores while others of their node's are free."""
    found = [
        f"{here[0].host}: {named(sharing)} on {plural(len(bound), 'core')} ({spans(bound)})"
        for here in by_node(ranks)
        if _room(here) >= len(here)
        for bound, sharing in grouped(here, lambda rank: tuple(rank.facts["cores"]["cores"])).items()
        if len(sharing) > len(bound)
    ]
    if found:
        advice = "--bind-to core (a core for each rank), or --bind-to none; with threads: --map-by slot:PE=N"
        yield problem("binding", some(found) + ", while others are free", advice)


def _blas_threads(ranks: Sequence[Rank]) -> Finding:
    shown = spans(sorted({rank.facts["cores"]["threads"] for rank in ranks}))
    for here in by_node(ranks):
        threads, room = sum(rank.facts["cores"]["threads"] for rank in here), _room(here)
        if threads > max(room, len(here)):
            text = f"{shown} a rank: {here[0].host} has {threads} threads for {plural(room, 'core')}"
            advice = f"export OMP_NUM_THREADS={max(1, int(room) // len(here))} (and the same for all ranks)"
            return warning("BLAS threads", text, advice)
    return ok("BLAS threads", f"{shown} a rank")


def _union(here: Sequence[Rank]) -> set[int]:
    return set().union(*(rank.facts["cores"]["cores"] for rank in here))


def _room(here: Sequence[Rank]) -> float:
    """The cores that the ranks of a node may keep busy."""
    quota = here[0].facts["cores"]["quota"]
    return len(_union(here)) if quota is None else min(len(_union(here)), quota)


def _quota() -> float | None:
    """The cores' worth of time that a container may use; None for no limit."""
    try:
        if (CONTROL_GROUP / "cpu.max").exists():
            quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        else:
            quota, period = ((CONTROL_GROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def _threads() -> int:
    """The threads that a matrix product of this rank takes: BLAS libraries tell; PyTorch takes OMP_NUM_THREADS."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    assumed = int(told) if told.isdecimal() and int(told) else len(cores())
    counts = [assumed] if importlib.util.find_spec("torch") is not None else []
    try:
        import threadpoolctl
    except ImportError:
        return assumed
    counts += [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return max(counts, default=assumed)


# Memory


def look_at_memory(topology: Topology, first: str) -> dict[str, Any]:
    shared = shutil.disk_usage(SHARED_MEMORY)
    return {
        "shared_path": SHARED_MEMORY,
        "shared_bytes": shared.total,
        "shared_free": shared.free,
        "available": _available(),
        "malloc": _malloc(),
        "reach": topology.reach.works,
    }


def judge_memory(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    nodes = by_node(ranks)
    yield _shared(nodes, needs)
    yield _memory(nodes, needs)
    kinds = grouped(ranks, lambda rank: rank.facts["memory"]["malloc"])
    yield alike("malloc", kinds, "give all ranks the same environment (mpirun -x NAME exports NAME)")
    yield _reach(nodes)


def _shared(nodes: Sequence[Sequence[Rank]], needs: Needs) -> Finding:
    """A buffer of gradients for each rank, the parameters once when the update is sharded, and a staging buffer."""
    short, fatal = [], False
    for here in nodes:
        facts, ranks = here[0].facts["memory"], len(here)
        wanted = needs.parameters * ELEMENT * (ranks + 1) + LARGEST_BYTES + ranks * SPARE_BYTES
        if ranks > 1 and facts["shared_free"] < wanted:
            short.append(f"{here[0].host}: {nbytes(facts['shared_free'])} free, {nbytes(wanted)} wanted")
            fatal = fatal or facts["shared_free"] < ranks * SPARE_BYTES
    path = nodes[0][0].facts["memory"]["shared_path"]
    model = f"a model of {count(needs.parameters)} parameters"
    if not short:
        least = min(here[0].facts["memory"]["shared_free"] for here in nodes)
        return ok(path, f"{nbytes(least)} free: enough for {model}")
    advice = f"docker run --shm-size=8g, or mount -o remount,size=8g {path}; " + (
        "MPI itself dies of bus errors with so little"
        if fatal
        else '"shared" refuses without it, and "auto" falls back to ordinary memory, which is slower'
    )
    return Finding(path, PROBLEM if fatal or needs.asked else WARNING, f"{some(short)} for {model}", advice)


def _memory(nodes: Sequence[Sequence[Rank]], needs: Needs) -> Finding:
    known = {here[0].host: (here[0].facts["memory"]["available"], len(here)) for here in nodes}
    known = {host: pair for host, pair in known.items() if pair[0] is not None}
    if not known:
        return ok("memory", f"unknown; {EXTRA} tells how much is available")
    wanted = needs.parameters * ELEMENT * COPIES
    short = [
        f"{host}: {nbytes(available)} available, {nbytes(wanted * ranks)} wanted"
        for host, (available, ranks) in known.items()
        if available < wanted * ranks
    ]
    model = f"parameters, gradients and Adam's state of {count(needs.parameters)} parameters a rank"
    if short:
        advice = 'fewer ranks a node, update="sharded" (its state is divided by the ranks), or a smaller model'
        return Finding("memory", PROBLEM if needs.asked else WARNING, f"{some(short)} for {model}", advice)
    least = min(available for available, _ in known.values())
    return ok("memory", f"{nbytes(least)} available: enough for {model}")


def _reach(nodes: Sequence[Sequence[Rank]]) -> Finding:
    if all(len(here) == 1 for here in nodes):
        return ok("reach", "every rank is alone on its node")
    apart = [here[0].host for here in nodes if len(here) > 1 and not here[0].facts["memory"]["reach"]]
    if not apart:
        return ok("reach", "ranks of a node copy straight from each other's memory (process_vm_readv)")
    text = f"{some(apart, ', ')}: ranks may not read each other's memory, so arrays not from allocate() cost two copies"
    advice = "docker run --cap-add SYS_PTRACE (or --ipc=host --pid=host); else sysctl kernel.yama.ptrace_scope=0"
    return warning("reach", text, advice)


def _malloc() -> str:
    """What malloc does with memory that a training step frees, in words."""
    preloaded = next((name for name in OTHER_MALLOCS if name in os.environ.get("LD_PRELOAD", "")), None)
    if preloaded:
        return f"{preloaded}, by LD_PRELOAD: left as it is"
    library, version = platform.libc_ver()
    if library != "glibc":
        return f"{library or 'a malloc'} that trainers leave as it is"
    tuned = [name for name in os.environ if name.startswith("MALLOC_")]
    tuned += ["GLIBC_TUNABLES"] if "malloc" in os.environ.get("GLIBC_TUNABLES", "") else []
    name = f"glibc {version}"
    if MALLOC in os.environ:
        kept = os.environ[MALLOC] != "default"
        return f"{name}: {'trainers have it keep freed memory' if kept else 'left as it is'}, as {MALLOC} says"
    if tuned:
        return f"{name}: left as {', '.join(sorted(tuned))} has it"
    return f"{name}: trainers have it keep the memory that a step frees ({MALLOC}=default stops that)"


def _available() -> int | None:
    """Bytes that the ranks of this machine, or of this container, can still have; None where psutil is missing."""
    try:
        import psutil
    except ImportError:
        return None
    free: int = psutil.virtual_memory().available
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # of both versions
        folder = CONTROL_GROUP if limit == "max" else CONTROL_GROUP / "memory"
        try:
            bytes_of = [int((folder / f"memory.{name}").read_text()) for name in (limit, used)]
        except (OSError, ValueError):  # "max", or no such group
            continue
        return min(free, max(0, bytes_of[0] - bytes_of[1]))
    return free
