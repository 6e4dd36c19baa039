"""Cores: how many a rank has, by its affinity, and how many threads want them."""

import ctypes
import importlib.util
import os
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
    named,
    plural,
    some,
    spans,
)
from allreduce.machine import cores

AREA = "cores"
COUNTERS = (  # what BLAS libraries say how many threads they use
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
    "MKL_Get_Max_Threads",
)
CONTROL_GROUP = Path("/sys/fs/cgroup")


def look(place: Place) -> dict[str, Any]:
    return {"cores": cores(), "of": os.cpu_count() or 1, "quota": _quota(), "threads": _threads()}


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    return [_ranks_per_node(ranks), _cores_per_rank(ranks), *_collisions(ranks), _blas(ranks)]


def _ranks_per_node(ranks: Sequence[Rank]) -> Finding:
    nodes = by_node(ranks)
    sizes = sorted({len(here) for here in nodes.values()})
    if len(sizes) == 1:
        where = f"on each of {len(nodes)} nodes" if len(nodes) > 1 else f"on one node, {ranks[0].host}"
        return Finding(AREA, "ranks per node", OK, f"{sizes[0]} {where}")
    text = some([f"{len(here)} on {here[0].host}" for here in nodes.values()], ", ")
    advice = "nodes of one size are faster: all ranks carry slices between them, and not the first of each node alone"
    return Finding(AREA, "ranks per node", WARNING, text, advice)


def _cores_per_rank(ranks: Sequence[Rank]) -> Finding:
    crowded, least = [], float("inf")
    for here in by_node(ranks).values():
        room = _room(here)
        least = min(least, room / len(here))
        if room < len(here):
            crowded.append((here, room))
    if not crowded:
        return Finding(AREA, "cores per rank", OK, f"at least {least:.3g}")
    text = some([f"{here[0].host}: {plural(len(here), 'rank')} on {_cores(room)}" for here, room in crowded])
    text += "; ranks wait for each other's cores"
    here, room = crowded[0]
    allowed, quota = len(_union(here)), here[0].facts["cores"]["quota"]
    if quota is not None and quota < allowed:
        advice = f"the container may use {quota:g} cores: give it more (docker run --cpus N), or start fewer ranks"
    elif allowed < here[0].facts["cores"]["of"]:
        advice = (
            f"the ranks are bound to {allowed} of {here[0].facts['cores']['of']} cores: --bind-to none or "
            "--bind-to core, and ask the scheduler for as many cores as ranks"
        )
    else:
        advice = f"start at most {plural(int(room), 'rank')} on such a node; more bring no speed"
    return Finding(AREA, "cores per rank", WARNING, text, advice)


def _collisions(ranks: Sequence[Rank]) -> list[Finding]:
    """Ranks that were bound to the same few cores while others of their node's are free."""
    found = []
    for here in by_node(ranks).values():
        if _room(here) < len(here):
            continue
        for bound, sharing in grouped(here, lambda rank: tuple(rank.facts["cores"]["cores"])).items():
            if len(sharing) > len(bound):
                found.append(f"{here[0].host}: {named(sharing)} on {_cores(len(bound))} ({spans(bound)})")
    if not found:
        return []
    advice = "--bind-to core (a core for each rank), or --bind-to none; with threads: --map-by slot:PE=N"
    return [Finding(AREA, "binding", PROBLEM, some(found) + ", while others are free", advice)]


def _blas(ranks: Sequence[Rank]) -> Finding:
    counts = sorted({rank.facts["cores"]["threads"] for rank in ranks})
    shown = spans(counts)
    for here in by_node(ranks).values():
        threads, room = sum(rank.facts["cores"]["threads"] for rank in here), _room(here)
        if threads > max(room, len(here)):
            text = f"{shown} a rank: {here[0].host} has {threads} threads for {_cores(room)}"
            advice = f"export OMP_NUM_THREADS={max(1, int(room) // len(here))} (and the same for all ranks)"
            return Finding(AREA, "BLAS threads", WARNING, text, advice)
    return Finding(AREA, "BLAS threads", OK, f"{shown} a rank")


def _union(here: Sequence[Rank]) -> set[int]:
    return set().union(*(rank.facts["cores"]["cores"] for rank in here))


def _room(here: Sequence[Rank]) -> float:
    """The cores that the ranks of a node may keep busy."""
    quota = here[0].facts["cores"]["quota"]
    return min(len(_union(here)), float("inf") if quota is None else quota)


def _cores(number: float) -> str:
    return f"{number:g} core{'s' * (number != 1)}"


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
    """The threads that a matrix product of this rank takes: NumPy's BLAS tells; PyTorch takes OMP_NUM_THREADS."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    assumed = int(told) if told.isdecimal() and int(told) else len(cores())
    asked = [assumed] if importlib.util.find_spec("torch") is not None else []
    return max([*_blas_threads(), *asked], default=assumed)


def _blas_threads() -> list[int]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if "blas" in line.lower() or "mkl_rt" in line}
    counts = []
    for path in paths:
        if not (path.startswith("/") and ".so" in path):
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError:  # it is another file now, or none
            continue
        counts += [getattr(library, name)() for name in COUNTERS if hasattr(library, name)][:1]
    return counts
