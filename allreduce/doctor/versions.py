"""Versions that differ between ranks: of Python, of libraries, of this package and its files; and kinds of CPUs."""

import importlib.metadata
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import allreduce
from allreduce.doctor.findings import OK, PROBLEM, WARNING, Finding, Needs, Place, Rank, grouped, named, of_kinds
from allreduce.machine import identify

AREA = "versions"
LIBRARIES = ("numpy", "mpi4py", "ml_dtypes", "torch")
PREFIXES = ("cupy", "nvidia-nccl")  # of names with a CUDA version behind them
TRIED = {"torch": ("2.7.0", "2.13.0", "2.15.0")}  # with this version of allreduce, oldest first
ALIKE = "allreduce"  # of different code the ranks may make different calls
ADVICE = "install the same on all hosts: one environment in a folder that all of them see, or one container image"


def look(place: Place) -> dict[str, Any]:
    return {"versions": versions(), "cpu": identify()["cpu"]}


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    names = dict.fromkeys(name for rank in ranks for name in rank.facts["versions"]["versions"])
    findings, same = [], []
    for name in names:
        found = grouped(ranks, lambda rank, name=name: rank.facts["versions"]["versions"].get(name))  # type: ignore[misc]
        if len(found) == 1:
            same.append(f"{name} {next(iter(found))}")
            continue
        text = "; ".join(f"{version or 'missing'} on {named(group)}" for version, group in found.items())
        findings.append(Finding(AREA, name, PROBLEM if name == ALIKE else WARNING, text, ADVICE))
    findings.append(Finding(AREA, "the same", OK, ", ".join(same)))
    return [*findings, *_tried(ranks), _processors(ranks)]


def _tried(ranks: Sequence[Rank]) -> list[Finding]:
    """Which versions of a library were tried, and whether those of the ranks lie between them."""
    findings = []
    for name, tried in TRIED.items():
        found = {rank.facts["versions"]["versions"].get(name) for rank in ranks} - {None}
        if not found:
            continue
        text = f"{', '.join(sorted(found))}; this version of allreduce was tried with {', '.join(tried)}"
        if all(_minor(tried[0]) <= _minor(version) <= _minor(tried[-1]) for version in found):
            findings.append(Finding(AREA, f"{name}, tried", OK, text))
        else:
            advice = f"if something fails with it, install {name}=={tried[-1]}"
            findings.append(Finding(AREA, f"{name}, tried", WARNING, text, advice))
    return findings


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


def _processors(ranks: Sequence[Rank]) -> Finding:
    kinds = grouped(ranks, lambda rank: rank.facts["versions"]["cpu"])
    return of_kinds(AREA, "CPU", kinds, "in every step all ranks wait for the slowest: use hosts of one kind")
