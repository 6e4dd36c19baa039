"""Memory: what ranks share in /dev/shm, what they have besides, what malloc does with it, and each other's."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    nbytes,
    of_kinds,
    some,
)
from allreduce.transport.shared_segment import LARGEST_BYTES, SHARED_MEMORY, SPARE_BYTES

AREA = "memory"
ELEMENT = 4  # bytes of a float32
COPIES = 4  # of the parameters' bytes on every rank: parameters, gradients, and the two moments of Adam
OURS = "ALLREDUCE_MALLOC"  # see trainers/malloc.py
OTHERS = ("jemalloc", "tcmalloc", "mimalloc")
UNLIMITED = 1 << 60
CONTROL_GROUP = Path("/sys/fs/cgroup")
GROUPS = (  # of both versions: the limit, and what is used of it
    (CONTROL_GROUP / "memory.max", CONTROL_GROUP / "memory.current"),
    (CONTROL_GROUP / "memory/memory.limit_in_bytes", CONTROL_GROUP / "memory/memory.usage_in_bytes"),
)


def look(place: Place) -> dict[str, Any]:
    shared = os.statvfs(SHARED_MEMORY)
    return {
        "shared_path": SHARED_MEMORY,
        "shared_bytes": shared.f_blocks * shared.f_frsize,
        "shared_free": shared.f_bavail * shared.f_frsize,
        "available": _available(),
        "malloc": _malloc(),
        "reach": place.topology.reach.works,
    }


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    nodes = list(by_node(ranks).values())
    return [_shared(nodes, needs), _room(nodes, needs), _told(ranks), _reach(nodes)]


def _shared(nodes: Sequence[Sequence[Rank]], needs: Needs) -> Finding:
    """A buffer of gradients for each rank, the parameters once when the update is sharded, and a stage."""
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
        return Finding(AREA, path, OK, f"{nbytes(least)} free: enough for {model}")
    advice = f"docker run --shm-size=8g, or mount -o remount,size=8g {path}; "
    advice += (
        "MPI itself dies of bus errors with so little"
        if fatal
        else '"shared" refuses without it, and "auto" falls back to ordinary memory, which is slower'
    )
    return Finding(AREA, path, PROBLEM if fatal or needs.asked else WARNING, f"{some(short)} for {model}", advice)


def _room(nodes: Sequence[Sequence[Rank]], needs: Needs) -> Finding:
    short = []
    known = [here for here in nodes if here[0].facts["memory"]["available"] is not None]
    for here in known:
        available, wanted = here[0].facts["memory"]["available"], needs.parameters * ELEMENT * COPIES * len(here)
        if available < wanted:
            short.append(f"{here[0].host}: {nbytes(available)} available, {nbytes(wanted)} wanted")
    model = f"parameters, gradients and Adam's state of {count(needs.parameters)} parameters a rank"
    if short:
        advice = 'fewer ranks a node, update="sharded" (its state is divided by the ranks), or a smaller model'
        return Finding(AREA, "room", PROBLEM if needs.asked else WARNING, f"{some(short)} for {model}", advice)
    if not known:
        return Finding(AREA, "room", OK, "this system does not say how much memory is available")
    least = min(here[0].facts["memory"]["available"] for here in known)
    return Finding(AREA, "room", OK, f"{nbytes(least)} available: enough for {model}")


def _told(ranks: Sequence[Rank]) -> Finding:
    kinds = grouped(ranks, lambda rank: rank.facts["memory"]["malloc"])
    return of_kinds(AREA, "malloc", kinds, "give all ranks the same environment (mpirun -x NAME exports NAME)")


def _reach(nodes: Sequence[Sequence[Rank]]) -> Finding:
    apart = [here[0].host for here in nodes if len(here) > 1 and not here[0].facts["memory"]["reach"]]
    if not apart:
        text = "ranks of a node copy straight from each other's memory (process_vm_readv)"
        if all(len(here) == 1 for here in nodes):
            text = "every rank is alone on its node"
        return Finding(AREA, "reach", OK, text)
    text = f"{some(apart, ', ')}: ranks may not read each other's memory, so arrays not from allocate() cost two copies"
    advice = "docker run --cap-add SYS_PTRACE (or --ipc=host --pid=host); else sysctl kernel.yama.ptrace_scope=0"
    return Finding(AREA, "reach", WARNING, text, advice)


def count(parameters: int) -> str:
    """ "25M", "1.5B" """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.4g}{unit}"
    return str(parameters)


def _malloc() -> str:
    """What malloc does with memory that a training step frees, in words."""
    preloaded = next((name for name in OTHERS if name in os.environ.get("LD_PRELOAD", "")), None)
    if preloaded:
        return f"{preloaded}, by LD_PRELOAD: left as it is"
    library, version = platform.libc_ver()
    if library != "glibc":
        return f"{library or 'a malloc'} that trainers leave as it is"
    tuned = [name for name in os.environ if name.startswith("MALLOC_")]
    tuned += ["GLIBC_TUNABLES"] if "malloc" in os.environ.get("GLIBC_TUNABLES", "") else []
    name = f"glibc {version}"
    if OURS in os.environ:
        kept = os.environ[OURS] != "default"
        return f"{name}: {'trainers have it keep freed memory' if kept else 'left as it is'}, as {OURS} says"
    if tuned:
        return f"{name}: left as {', '.join(sorted(tuned))} has it"
    return f"{name}: trainers have it keep the memory that a step frees ({OURS}=default stops that)"


def _available() -> int | None:
    """Bytes that the ranks of this machine, or of this container, can still have."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min(free, _left_in_container())


def _left_in_container() -> int:
    for limit, used in GROUPS:
        try:
            return max(0, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # "max", or no such group
            continue
    return UNLIMITED
