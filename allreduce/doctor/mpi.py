"""The MPI library, and versions that differ between ranks: of Python, of libraries, of this package; kinds of CPUs."""

import importlib.metadata
import platform
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

import allreduce
from allreduce.doctor.findings import (
    PROBLEM,
    WARNING,
    Finding,
    Needs,
    Rank,
    alike,
    grouped,
    named,
    ok,
    problem,
    warning,
)
from allreduce.machine import identify, mpi_library
from allreduce.process import launcher
from allreduce.topology import Topology
from allreduce.transport import ulfm

THREADS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}
FIRST_WITH_ULFM = 5  # of Open MPI
LIBRARIES = ("numpy", "mpi4py", "ml_dtypes", "torch")
PREFIXES = ("cupy", "nvidia-nccl")  # of names with a CUDA version behind them
TRIED = {"torch": ("2.7.0", "2.13.0", "2.15.0")}  # with this version of allreduce, oldest first
SAME = "install the same on all hosts: one environment in a folder that all of them see, or one container image"


def look_at_mpi(topology: Topology, first: str) -> dict[str, Any]:
    launch = launcher.mistaken(topology.size)
    return {
        "library": mpi_library(),
        "threads": THREADS.get(MPI.Query_thread(), "unknown"),
        "ulfm": ulfm.in_force(),
        "launch": launch and launch._asdict(),
    }


def judge_mpi(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    libraries = grouped(ranks, lambda rank: rank.facts["mpi"]["library"])
    advice = "load the same MPI library on all hosts, that of the mpirun which starts the job"
    yield alike("library", libraries, advice, PROBLEM)
    facts = ranks[0].facts["mpi"]
    if facts["launch"] is not None:
        launch = launcher.Launch(**facts["launch"])
        text = f"{launch.launcher} has started {launch.processes} processes ({launch.variable}), and MPI sees 1 rank: "
        advice = f"{launch.remedy}; where each process is to be a job of its own: {launcher.ALONE}=1"
        yield problem("launcher", text + "each is alone", advice)
    yield _threads(ranks)
    yield ok("a lost rank", _lost_rank(facts))


def _threads(ranks: Sequence[Rank]) -> Finding:
    lesser = [rank for rank in ranks if rank.facts["mpi"]["threads"] != "MPI_THREAD_MULTIPLE"]
    if not lesser:
        return ok("threads", "MPI_THREAD_MULTIPLE: gradients can be reduced in the background")
    text = f"{lesser[0].facts['mpi']['threads']} on {named(lesser)}: nothing can be reduced in the background"
    advice = "remove mpi4py.rc.threads and mpi4py.rc.thread_level, or use an MPI that was built with thread support"
    return warning("threads", text, advice)


def _lost_rank(facts: dict[str, Any]) -> str:
    """What a lost rank does to the job. The user chooses that, so it is no fault."""
    if facts["ulfm"]:
        return "ULFM is in force: with --on-failure continue the others go on without it"
    version = re.match(r"Open MPI v(\d+)", facts["library"])
    if version and int(version[1]) >= FIRST_WITH_ULFM:
        return "ends the job; with mpirun --with-ft ulfm and --on-failure continue the others would go on"
    return "ends the job, and this MPI has nothing else to offer: train with --checkpoint, and go on with --resume"


# Versions


def look_at_versions(topology: Topology, first: str) -> dict[str, Any]:
    return {"versions": versions(), "cpu": identify()["cpu"]}


def judge_versions(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    names = dict.fromkeys(name for rank in ranks for name in rank.facts["versions"]["versions"])
    same = []
    for name in names:
        kinds = grouped(ranks, lambda rank, name=name: rank.facts["versions"]["versions"].get(name, "missing"))  # type: ignore[misc]
        if len(kinds) == 1:
            same.append(f"{name} {next(iter(kinds))}")
        else:  # ranks with different code of ours may make different calls
            yield alike(name, kinds, SAME, PROBLEM if name == "allreduce" else WARNING)
    yield ok("the same", ", ".join(same))
    yield from _tried(ranks)
    kinds = grouped(ranks, lambda rank: rank.facts["versions"]["cpu"])
    yield alike("CPU", kinds, "in every step all ranks wait for the slowest: use hosts of one kind")


def _tried(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """Which versions of a library were tried, and whether those of the ranks lie between them."""
    for name, tried in TRIED.items():
        found = {rank.facts["versions"]["versions"].get(name) for rank in ranks} - {None}
        if not found:
            continue
        text = f"{', '.join(sorted(found))}; this version of allreduce was tried with {', '.join(tried)}"
        if all(_minor(tried[0]) <= _minor(version) <= _minor(tried[-1]) for version in found):
            yield ok(f"{name}, tried", text)
        else:
            yield warning(f"{name}, tried", text, f"if something fails with it, install {name}=={tried[-1]}")


def _minor(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


def versions() -> dict[str, str]:
    """The version of everything that ranks should have in common, where it is installed. Nothing is imported."""
    installed = {
        name.lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"]) and name.lower().startswith((*LIBRARIES, *PREFIXES))
    }
    others = {name: installed[name] for name in sorted(installed) if name in LIBRARIES or name.startswith(PREFIXES)}
    return {"Python": platform.python_version(), **others, "allreduce": f"{allreduce.__version__} ({_code()})"}


def _code() -> str:
    """A short hash of this package's files: checkouts of one version may differ."""
    folder, value = Path(allreduce.__file__).parent, 0
    for path in sorted(folder.rglob("*.py")):
        value = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(folder).as_posix().encode(), value))
    return f"code {value:08x}"
