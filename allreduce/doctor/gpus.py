"""GPUs: which rank has which, whether two have the same, and whether CuPy, NCCL and MPI can use them.

The driver is asked (libcuda), which makes no context and needs no CuPy; it numbers the devices as a program sees
them, after CUDA_VISIBLE_DEVICES.
"""

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allreduce.arrays import gpu
from allreduce.doctor.findings import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Needs,
    Place,
    Rank,
    by_node,
    grouped,
    named,
    nbytes,
    of_kinds,
    plural,
    some,
)

AREA = "GPUs"
DRIVER = "libcuda.so.1"
PRESENT = Path("/proc/driver/nvidia/gpus")
IDENTIFY = (
    "cuDeviceGetUuid_v2",
    "cuDeviceGetUuid",
)  # the first tells parts (MIG) of a GPU apart; older drivers lack it
UUID_BYTES, NAME_BYTES = 16, 128


def look(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": [], "driver": None, "trouble": "", "cupy": None, "mine": None}
    try:
        found["driver"], found["devices"] = _devices()
    except OSError as error:
        found["trouble"] = str(error)
    found["present"] = len(list(PRESENT.iterdir())) if PRESENT.is_dir() else 0
    found["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    found["cuda_aware"] = gpu.mpi_is_cuda_aware()
    if found["devices"]:
        found["mine"] = place.topology.node_rank % len(found["devices"])  # as gpu.choose_device has it
        found["cupy"] = _cupy()
    return found


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    without = [rank for rank in ranks if not rank.facts["gpus"]["devices"]]
    if len(without) == len(ranks):
        return [_none(ranks), _aware(ranks)]
    having = [rank for rank in ranks if rank.facts["gpus"]["devices"]]
    findings = [_assigned(having), *_duplicates(having)]
    if without:
        told = some(sorted({rank.facts["gpus"]["trouble"] for rank in without} - {""}))
        text = f"{named(without)} see{'s' * (len(without) == 1)} none, and others do{f' ({told})' if told else ''}"
        advice = "ask the scheduler for GPUs on every host (--gpus-per-node), and look at CUDA_VISIBLE_DEVICES there"
        findings.append(Finding(AREA, "missing", WARNING, text, advice))
    return [*findings, *_software(having), _aware(having)]


def _none(ranks: Sequence[Rank]) -> Finding:
    first = next((rank for rank in ranks if rank.facts["gpus"]["present"]), ranks[0])
    facts = first.facts["gpus"]
    if not facts["present"]:
        return Finding(AREA, "devices", OK, "none: training runs on CPUs")
    text = f"{first.host} has {plural(facts['present'], 'GPU')}, and no rank sees one"
    reason = facts["trouble"] or f"CUDA_VISIBLE_DEVICES={facts['visible']}"
    return Finding(AREA, "devices", WARNING, text, f"{reason}: unset it, or start the container with --gpus all")


def _mine(rank: Rank) -> dict[str, Any]:
    return rank.facts["gpus"]["devices"][rank.facts["gpus"]["mine"]]


def _assigned(ranks: Sequence[Rank]) -> Finding:
    texts = []
    for here in by_node(ranks).values():
        pairs = [f"rank {rank.rank}: GPU {rank.facts['gpus']['mine']}" for rank in here]
        kinds = {f"{_mine(rank)['name']}, {nbytes(_mine(rank)['bytes'])}" for rank in here}
        texts.append(f"{here[0].host} ({' and '.join(sorted(kinds))}): {some(pairs, ', ')}")
    return Finding(AREA, "which rank has which", OK, some(texts))


def _duplicates(ranks: Sequence[Rank]) -> list[Finding]:
    texts = []
    for (host, number, _), sharing in grouped(ranks, lambda rank: (rank.host, _mine(rank)["uuid"], "")).items():
        if len(sharing) > 1:
            texts.append(f"{named(sharing)} on {host} ({number[:12]})")
    if not texts:
        return []
    text = f"one GPU is shared by {some(texts)}"
    advice = "as many ranks a node as it has GPUs; NCCL refuses to share one, and ranks that do slow each other down"
    return [Finding(AREA, "duplicates", WARNING, text, advice)]


def _software(ranks: Sequence[Rank]) -> list[Finding]:
    missing = [rank for rank in ranks if rank.facts["gpus"]["cupy"] is None]
    broken = [rank for rank in ranks if rank.facts["gpus"]["cupy"] and rank.facts["gpus"]["cupy"]["trouble"]]
    findings = []
    if missing:
        text = f"not installed on {named(missing)}: --device cuda and the backend nccl need it"
        findings.append(Finding(AREA, "CuPy", WARNING, text, gpu.EXTRA))
    if broken:
        facts = broken[0].facts["gpus"]
        text = f"does not work on {named(broken)}: {facts['cupy']['trouble']}"
        advice = f"the driver is for CUDA {_version(facts['driver'])} at most: {gpu.EXTRA}"
        findings.append(Finding(AREA, "CuPy", PROBLEM, text, advice))
    if findings:
        return findings
    facts = ranks[0].facts["gpus"]
    cupy = facts["cupy"]
    text = f"{cupy['version']} for CUDA {_version(cupy['runtime'])}; the driver takes up to {_version(facts['driver'])}"
    return [Finding(AREA, "CuPy", OK, text), _nccl(ranks)]


def _nccl(ranks: Sequence[Rank]) -> Finding:
    """On ranks that all have a CuPy that works."""
    numbers = grouped(ranks, lambda rank: rank.facts["gpus"]["cupy"]["nccl"])
    if None in numbers:
        where = f" on {named(numbers[None])}" if len(numbers) > 1 else ""
        return Finding(AREA, "NCCL", WARNING, f"CuPy finds none{where}: the backend nccl is not available", gpu.EXTRA)
    kinds = {f"{number // 10_000}.{number // 100 % 100}.{number % 100}": some for number, some in numbers.items()}
    return of_kinds(AREA, "NCCL", kinds, "install the same on all hosts: ranks of different ones may not connect")


def _aware(ranks: Sequence[Rank]) -> Finding:
    name = "CUDA-aware MPI"
    without = [rank for rank in ranks if not rank.facts["gpus"]["cuda_aware"]]
    if not without:
        return Finding(AREA, name, OK, "MPI takes arrays in GPU memory")
    if len(ranks) == 1 or not ranks[0].facts["gpus"]["devices"]:
        return Finding(AREA, name, OK, "no, and nothing here asks for it")
    where = f" on {named(without)}" if len(without) < len(ranks) else ""
    text = f"no{where}: arrays in GPU memory go through pinned host memory, unless the backend is nccl"
    advice = "fine with nccl; else an MPI that was built with CUDA (ALLREDUCE_CUDA_AWARE=1 if it can't say so itself)"
    return Finding(AREA, name, WARNING, text, advice)


def _version(number: int | None) -> str:
    """CUDA's way of writing 12.8 is 12080."""
    return "?" if not number else f"{number // 1000}.{number % 1000 // 10}"


def _devices() -> tuple[int | None, list[dict[str, Any]]]:
    """The driver's CUDA version, and the devices that this process sees. Raises OSError in its words."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None, []

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise OSError(f"{name} of the NVIDIA driver says {code}")

    identify = next(name for name in IDENTIFY if hasattr(driver, name))
    version, number, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDriverGetVersion", ctypes.byref(version))
    call("cuDeviceGetCount", ctypes.byref(number))
    found = []
    for index in range(number.value):
        name, uuid = ctypes.create_string_buffer(NAME_BYTES), ctypes.create_string_buffer(UUID_BYTES)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, NAME_BYTES, device)
        call(identify, uuid, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        found.append({"uuid": uuid.raw.hex(), "name": name.value.decode(errors="replace"), "bytes": size.value})
    return version.value, found


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
        found["trouble"] = str(error)
        return found
    try:
        from cupy.cuda import nccl

        found["nccl"] = nccl.get_version()
    except Exception:  # CuPy was built without it, or its library is missing
        found["nccl"] = None
    return found
