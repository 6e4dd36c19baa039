"""The MPI library: which one, with threads or without, and what becomes of the others when a rank is lost."""

import re
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from allreduce.doctor.findings import OK, PROBLEM, WARNING, Finding, Needs, Place, Rank, grouped, named
from allreduce.machine import mpi_library
from allreduce.process import launcher
from allreduce.transport import ulfm

AREA = "MPI"
THREADS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}
FIRST_WITH_ULFM = 5  # of Open MPI


def look(place: Place) -> dict[str, Any]:
    launch = launcher.mistaken(place.topology.size)
    return {
        "library": mpi_library(),
        "threads": THREADS.get(MPI.Query_thread(), "unknown"),
        "ulfm": ulfm.in_force(),
        "launch": launch and launch._asdict(),
    }


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    return [*_library(ranks), _threads(ranks), _losses(ranks)]


def _library(ranks: Sequence[Rank]) -> list[Finding]:
    facts = ranks[0].facts["mpi"]
    libraries = grouped(ranks, lambda rank: rank.facts["mpi"]["library"])
    findings = []
    if len(libraries) > 1:
        text = "; ".join(f"{library} on {named(some)}" for library, some in libraries.items())
        advice = "load the same MPI library on all hosts, that of the mpirun which starts the job"
        findings.append(Finding(AREA, "library", PROBLEM, text, advice))
    else:
        findings.append(Finding(AREA, "library", OK, facts["library"]))
    if facts["launch"] is not None:
        launch = launcher.Launch(**facts["launch"])
        text = f"{launch.launcher} has started {launch.processes} processes ({launch.variable}), and MPI sees 1 rank: "
        advice = f"{launch.remedy}; where each process is to be a job of its own: {launcher.ALONE}=1"
        findings.append(Finding(AREA, "launcher", PROBLEM, text + "each is alone", advice))
    return findings


def _threads(ranks: Sequence[Rank]) -> Finding:
    lesser = [rank for rank in ranks if rank.facts["mpi"]["threads"] != "MPI_THREAD_MULTIPLE"]
    if not lesser:
        return Finding(AREA, "threads", OK, "MPI_THREAD_MULTIPLE: gradients can be reduced in the background")
    text = f"{lesser[0].facts['mpi']['threads']} on {named(lesser)}: nothing can be reduced in the background"
    advice = "remove mpi4py.rc.threads and mpi4py.rc.thread_level, or use an MPI that was built with thread support"
    return Finding(AREA, "threads", WARNING, text, advice)


def _losses(ranks: Sequence[Rank]) -> Finding:
    """A choice of the user's, and no fault: always ok."""
    facts = ranks[0].facts["mpi"]
    if facts["ulfm"]:
        text = "ULFM is in force: with --on-failure continue the others go on without it"
        return Finding(AREA, "a lost rank", OK, text)
    version = re.match(r"Open MPI v(\d+)", facts["library"])
    if version and int(version[1]) >= FIRST_WITH_ULFM:
        text = "ends the job; with mpirun --with-ft ulfm and --on-failure continue the others would go on"
    else:
        text = "ends the job, and this MPI has nothing else to offer: train with --checkpoint, and go on with --resume"
    return Finding(AREA, "a lost rank", OK, text)
