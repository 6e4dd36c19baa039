"""What a run of the bandwidth benchmark found: the record that is saved, compared, plotted and fitted to."""

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION = "allreduce bandwidth", 1
WANTED = "give a file that python -m benchmarks.bandwidth --json FILE wrote"
WANTED = "give a file that python -m benchmarks.bandwidth --json FILE wrote"
MEMORIES = ("allocated", "foreign")
TITLES = {"allocated": "arrays from allocate()", "foreign": "foreign arrays"}


class FileError(ValueError):
    """A file that holds no results of this version."""


@dataclass(frozen=True)
class Result:
    """One backend reducing arrays of one size in one kind of memory. Times are of the slowest rank."""

    backend: str
    memory: str  # "allocated" by the backend, or "foreign"
    size: int  # bytes
    count: int  # elements
    iterations: int
    time_us: float  # median over the iterations
    min_us: float
    p99_us: float
    algbw: float  # GB/s: size / time
    busbw: float  # GB/s: algbw * 2 (n - 1) / n, comparable with the speed of the hardware
    wrong: int | None  # elements, summed over the ranks; None: not verified


@dataclass
class Run:
    """All results of one run, and where and how they were measured."""

    machine: dict[str, Any]
    node_sizes: list[int]
    simulated: bool
    dtype: str
    op: str
    date: str
    command: str
    skipped: dict[str, str] = field(default_factory=dict)  # backend -> why
    results: list[Result] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return sum(self.node_sizes)

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    def of(self, memory: str) -> list[Result]:
        return [result for result in self.results if result.memory == memory]

    def backends(self) -> list[str]:
        return list(dict.fromkeys(result.backend for result in self.results))

    def place(self) -> str:
        """ "4 ranks on 2 simulated nodes (2+2)"."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        nodes = f"{self.nodes} {'simulated ' * self.simulated}node{'s' * (self.nodes != 1)}"
        return f"{ranks} on {nodes}" + (f" ({'+'.join(map(str, self.node_sizes))})" if self.nodes > 1 else "")


def summarize(
    backend: str, memory: str, count: int, itemsize: int, ranks: int, seconds: np.ndarray, wrong: int | None
) -> Result:
    """A Result from the time of each iteration, in seconds, already the maximum over the ranks."""
    size = count * itemsize
    middle, least, most = np.median(seconds), seconds.min(), np.percentile(seconds, 99)
    algbw = float(size / middle / 1e9)
    return Result(
        backend=backend,
        memory=memory,
        size=size,
        count=count,
        iterations=len(seconds),
        time_us=float(middle * 1e6),
        min_us=float(least * 1e6),
        p99_us=float(most * 1e6),
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        wrong=wrong,
    )


def to_json(run: Run, verdict: Iterable[str] = ()) -> str:
    head = {"format": FORMAT, "version": VERSION, "ranks": run.ranks, "nodes": run.nodes}
    return json.dumps({**head, **asdict(run), "verdict": list(verdict)}, indent=1) + "\n"


def from_json(text: str) -> Run:
    """The run that `to_json` wrote; FileError says what is wrong with the text."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FileError(f"it is no JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileError("it holds no results of benchmarks.bandwidth --json")
    if found.get("version") != VERSION:
        raise FileError(f"it has version {found.get('version')} of the format, and this is version {VERSION}")
    try:
        fields = {name: found[name] for name in Run.__dataclass_fields__}
        fields["results"] = [_checked(Result(**result)) for result in found["results"]]
        if not isinstance(found["machine"], dict) or min(found["node_sizes"]) < 1:
            raise ValueError(f"machine {found['machine']}, node_sizes {found['node_sizes']}")
        return Run(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"it is incomplete or damaged ({type(error).__name__}: {error})") from None


def _checked(result: Result) -> Result:
    """The same result, if its figures can be divided by."""
    figures = (result.size, result.count, result.time_us, result.min_us, result.p99_us)
    if result.memory not in MEMORIES or not all(0 < figure < math.inf for figure in figures):
        raise ValueError(str(result))
    return result


def load(path: str | Path) -> Run:
    """The run saved in a file; FileError says what is wrong with it and what to give instead."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror or error}); {WANTED}") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}: it is no text; {WANTED}") from None
    except FileError as error:
        raise FileError(f"{path}: {error}; {WANTED}") from None


def to_csv(run: Run) -> str:
    """One line for each result."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = list(Result.__dataclass_fields__)
    writer.writerow([*columns[:4], "type", "redop", "ranks", "nodes", *columns[4:]])
    for result in run.results:
        values = list(asdict(result).values())
        writer.writerow([*values[:4], run.dtype, run.op, run.ranks, run.nodes, *values[4:]])
    return text.getvalue()
