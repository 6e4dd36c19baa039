"""GPUs: which rank has which, whether two have the same, and whether CuPy, NCCL and MPI can use them.

NVML is asked, which makes no context and needs no CuPy.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from allreduce.arrays import gpu
from allreduce.doctor.findings import (
    EXTRA,
    Finding,
    Needs,
    Rank,
    alike,
    by_node,
    grouped,
    named,
    nbytes,
    ok,
    plural,
    problem,
    some,
    warning,
)
from allreduce.topology import Topology

PRESENT = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def look(topology: Topology, first: str) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": [], "driver": None, "trouble": "", "cupy": None, "mine": None}
    found["present"] = len(list(PRESENT.iterdir())) if PRESENT.is_dir() else 0
    found["visible"] = os.environ.get(VISIBLE)
    found["cuda_aware"] = gpu.mpi_is_cuda_aware()
    try:
        found["driver"], found["devices"] = _devices(found["visible"])
    except ImportError:
        found["trouble"] = f"the library that tells more of them is missing: {EXTRA}"
    except Exception as error:  # NVMLError, which belongs to the library
        found["trouble"] = f"{type(error).__name__}: {error}" if found["present"] else ""
    if found["devices"]:
        found["mine"] = topology.node_rank % len(found["devices"])  # as gpu.choose_device has it
        found["cupy"] = _cupy()
    return found


def judge(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    having = [rank for rank in ranks if rank.facts["gpus"]["devices"]]
    without = [rank for rank in ranks if rank not in having]
    if having:
        yield _assigned(having)
        yield from _duplicates(having)
    else:
        yield _none(ranks)
    if having and without:
        told = some(sorted({rank.facts["gpus"]["trouble"] for rank in without} - {""}))
        text = f"{named(without)} see{'s' * (len(without) == 1)} none, and others do{f' ({told})' if told else ''}"
        advice = f"ask the scheduler for GPUs on every host (--gpus-per-node), and look at {VISIBLE} there"
        yield warning("missing", text, advice)
    if having:
        yield from _software(having)
    yield _cuda_aware(having or ranks)


def _none(ranks: Sequence[Rank]) -> Finding:
    first = next((rank for rank in ranks if rank.facts["gpus"]["present"]), ranks[0])
    facts = first.facts["gpus"]
    if not facts["present"]:
        return ok("devices", "none: training runs on CPUs")
    text = f"{first.host} has {plural(facts['present'], 'GPU')}, and no rank sees one"
    advice = facts["trouble"] or f"{VISIBLE}={facts['visible']}: unset it, or start the container with --gpus all"
    return warning("devices", text, advice)


def _mine(rank: Rank) -> dict[str, Any]:
    return rank.facts["gpus"]["devices"][rank.facts["gpus"]["mine"]]


def _assigned(ranks: Sequence[Rank]) -> Finding:
    texts = []
    for here in by_node(ranks):
        pairs = [f"rank {rank.rank}: GPU {rank.facts['gpus']['mine']}" for rank in here]
        kinds = {f"{_mine(rank)['name']}, {nbytes(_mine(rank)['bytes'])}" for rank in here}
        texts.append(f"{here[0].host} ({' and '.join(sorted(kinds))}): {some(pairs, ', ')}")
    return ok("which rank has which", some(texts))


def _duplicates(ranks: Sequence[Rank]) -> Iterator[Finding]:
    texts = [
        f"{named(sharing)} on {host} ({uuid[:12]})"
        for (host, uuid), sharing in grouped(ranks, lambda rank: (rank.host, _mine(rank)["uuid"])).items()
        if len(sharing) > 1
    ]
    if texts:
        advice = (
            "as many ranks a node as it has GPUs; NCCL refuses to share one, and ranks that do slow each other down"
        )
        yield warning("duplicates", f"one GPU is shared by {some(texts)}", advice)


def _software(ranks: Sequence[Rank]) -> Iterator[Finding]:
    missing = [rank for rank in ranks if rank.facts["gpus"]["cupy"] is None]
    broken = [rank for rank in ranks if rank.facts["gpus"]["cupy"] and rank.facts["gpus"]["cupy"]["trouble"]]
    if missing:
        text = f"not installed on {named(missing)}: --device cuda and the backend nccl need it"
        yield warning("CuPy", text, gpu.EXTRA)
    if broken:
        facts = broken[0].facts["gpus"]
        text = f"does not work on {named(broken)}: {facts['cupy']['trouble']}"
        advice = f"the driver is for CUDA {_version(facts['driver'])} at most: {gpu.EXTRA}"
        yield problem("CuPy", text, advice)
    if not (missing or broken):
        facts = ranks[0].facts["gpus"]
        cupy, newest = facts["cupy"], _version(facts["driver"])
        yield ok("CuPy", f"{cupy['version']} for CUDA {_version(cupy['runtime'])}; the driver takes up to {newest}")
        yield _nccl(ranks)


def _nccl(ranks: Sequence[Rank]) -> Finding:
    """On ranks that all have a CuPy that works."""
    numbers = grouped(ranks, lambda rank: rank.facts["gpus"]["cupy"]["nccl"])
    if None in numbers:
        where = f" on {named(numbers[None])}" if len(numbers) > 1 else ""
        return warning("NCCL", f"CuPy finds none{where}: the backend nccl is not available", gpu.EXTRA)
    kinds = {f"{number // 10_000}.{number // 100 % 100}.{number % 100}": some for number, some in numbers.items()}
    return alike("NCCL", kinds, "install the same on all hosts: ranks of different ones may not connect")


def _cuda_aware(ranks: Sequence[Rank]) -> Finding:
    name = "CUDA-aware MPI"
    without = [rank for rank in ranks if not rank.facts["gpus"]["cuda_aware"]]
    if not without:
        return ok(name, "MPI takes arrays in GPU memory")
    if len(ranks) == 1 or not ranks[0].facts["gpus"]["devices"]:
        return ok(name, "no, and nothing here asks for it")
    where = f" on {named(without)}" if len(without) < len(ranks) else ""
    text = f"no{where}: arrays in GPU memory go through pinned host memory, unless the backend is nccl"
    advice = "fine with nccl; else an MPI that was built with CUDA (ALLREDUCE_CUDA_AWARE=1 if it can't say so itself)"
    return warning(name, text, advice)


def _version(number: int | None) -> str:
    """CUDA's way of writing 12.8 is 12080."""
    return "?" if not number else f"{number // 1000}.{number % 1000 // 10}"


def _devices(visible: str | None) -> tuple[int, list[dict[str, Any]]]:
    """The driver's CUDA version, and the devices that this process sees. Raises ImportError or pynvml.NVMLError.

    visible: CUDA_VISIBLE_DEVICES, which NVML does not know: numbers and UUIDs, or beginnings of these. As in CUDA, an
    entry that names no device hides those behind it.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        seen = handles if visible is None else []
        for entry in [] if visible is None else visible.split(","):
            meant = [index for index, uuid in enumerate(uuids) if entry in (str(index), uuid[: len(entry) or None])]
            if entry.startswith("MIG-"):  # a part of a GPU
                seen.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
            elif len(meant) == 1:
                seen.append(handles[meant[0]])
            else:
                break
        return pynvml.nvmlSystemGetCudaDriverVersion(), [
            {
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "name": pynvml.nvmlDeviceGetName(handle),
                "bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            }
            for handle in seen
        ]
    finally:
        pynvml.nvmlShutdown()


def _cupy() -> dict[str, Any] | None:
    """What CuPy says; None where there is none. It is imported only where there is a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return None
    found: dict[str, Any] = {"version": "?", "runtime": None, "nccl": None, "trouble": ""}
    try:
        cupy = gpu.cupy()
        found["version"], found["runtime"] = cupy.__version__, cupy.cuda.runtime.runtimeGetVersion()
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # of CuPy's own kinds
        return found | {"trouble": str(error)}
    try:
        from cupy.cuda import nccl

        return found | {"nccl": nccl.get_version()}
    except Exception:  # CuPy was built without it, or its library is missing
        return found
