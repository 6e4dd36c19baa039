"""The results of a run of benchmarks.bandwidth, as they are saved, compared, plotted and fitted."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.files import ContentError, json_of, read_text
from allreduce.notices import shown
from trainers.errors import printable

FORMAT, VERSION = "allreduce bandwidth", 1
WANTED = "give a file that python -m benchmarks.bandwidth --json FILE wrote"
MEMORIES = ("allocated", "foreign")
COLD = ", cold"  # ending of a kind of memory: calls after a pause in which other work fills the caches
TITLES = {"allocated": "arrays from allocate()", "foreign": "foreign arrays"}
TITLES |= {f"{memory}{COLD}": f"{title}, cold caches" for memory, title in TITLES.items()}
MOST_BYTES = 1 << 24  # of a file; a result takes 300
MOST_RANKS, MOST_COUNT = 1 << 20, 1 << 62
LEAST_US, MOST_US = 1e-6, 1e15  # thirty years
LONGEST_TEXT = 1000  # of texts that are shown


class FileError(ContentError):
    """An error about a file without results of this version. Its text, which may quote the file, is made printable."""

    def __init__(self, text: object) -> None:
        super().__init__(printable(str(text)))


@dataclass(frozen=True)
class Result:
    """The result of one backend for one size and kind of memory. Times are of the slowest rank."""

    backend: str
    memory: str  # a key of TITLES: "allocated" by the backend, or "foreign"; COLD may follow
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
    """All results of one run, with the machine and the settings."""

    machine: dict[str, Any]
    node_sizes: list[int]
    simulated: bool
    dtype: str
    op: str
    date: str
    command: str
    skipped: dict[str, str] = field(default_factory=dict)  # backend -> why
    compress: str | None = None  # of all backends; files of earlier versions don't have it
    results: list[Result] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return sum(self.node_sizes)

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    def kind(self) -> str:
        """The calls that were measured: "float32 sum, compress=None"."""
        return f"{self.dtype} {self.op}, compress={self.compress}"

    def calls(self) -> str:
        """The calls that were measured, and their ranks: "float32 sum, compress=None, 4 ranks on 1 node"."""
        return f"{self.kind()}, {self.place()}"

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
    """Return a Result. seconds: the time of each iteration on the slowest rank."""
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


def merge(run: Run, others: Sequence[Run]) -> None:
    """Add the results of other jobs to a run: each backend with the name of its MPI library, and of several results of
    one call the fastest."""
    fastest: dict[tuple[str, str, int], Result] = {}
    for other in others:
        for each in other.results:
            named = replace(each, backend=f"{each.backend} ({other.machine.get('mpi', 'another MPI')})")
            key = (named.backend, named.memory, named.size)
            fastest[key] = min(fastest.get(key, named), named, key=lambda result: result.time_us)
    run.results += fastest.values()


def to_json(run: Run, advice: str = "") -> str:
    head = {"format": FORMAT, "version": VERSION, "ranks": run.ranks, "nodes": run.nodes}
    return json.dumps({**head, **asdict(run), "advice": advice}, indent=1) + "\n"


def from_json(text: str) -> Run:
    """Read a run that `to_json` wrote. Raises ContentError if the text is invalid."""
    found = json_of(text, FORMAT, VERSION, "it holds no results of benchmarks.bandwidth --json")
    if found.get("results") == []:
        raise FileError("it holds no measurement")
    try:
        results = [_checked(Result(**result)) for result in found["results"]]
        run = Run(**{**{name: found[name] for name in Run.__dataclass_fields__ if name in found}, "results": results})
        _check(run)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"it is incomplete or damaged ({type(error).__name__}: {error})") from None
    return run


def _check(run: Run) -> None:
    """Raise ValueError if a value has a wrong type, or a text is not printable."""
    machine, nodes = run.machine, run.node_sizes
    if not isinstance(machine, dict) or not all(
        isinstance(value, str | int | float | None) for value in machine.values()
    ):
        raise ValueError(f"machine={shown(machine)}")
    if not isinstance(nodes, list) or not nodes or not all(_is_count(size, 1) for size in nodes):
        raise ValueError(f"node_sizes={shown(nodes)}")
    if type(run.simulated) is not bool or sum(nodes) > MOST_RANKS or not isinstance(run.skipped, dict):
        raise ValueError(f"simulated={shown(run.simulated)}, {sum(nodes)} ranks, skipped={shown(run.skipped)}")
    if not _is_count(machine.get("cores", 1), 1):
        raise ValueError(f"cores={shown(machine['cores'])}")
    texts = [run.dtype, run.op, run.date, *machine, *(value for value in machine.values() if isinstance(value, str))]
    for text in texts:
        _check_text(text)
    for text in (run.command, run.compress or "", *run.skipped, *run.skipped.values()):
        _check_text(text.replace("\n", " ") if isinstance(text, str) else text)


def _checked(result: Result) -> Result:
    """Return a result after checking its numbers. Raises ValueError."""
    counts = (result.size, result.count, result.iterations)
    times = (result.time_us, result.min_us, result.p99_us)
    rates = (result.algbw, result.busbw)
    _check_text(result.backend)
    if (
        result.memory not in TITLES
        or not all(_is_count(count, 1) for count in counts)
        or not all(_is_number(time) and LEAST_US <= time <= MOST_US for time in times)
        or not all(_is_number(rate) and 0 <= rate < math.inf for rate in rates)
        or not (result.wrong is None or _is_count(result.wrong, 0))
    ):
        raise ValueError(shown(result, 300))
    return result


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MOST_COUNT


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _check_text(text: Any) -> None:
    if not isinstance(text, str) or not text.isprintable() or len(text) > LONGEST_TEXT:
        raise ValueError(f"{shown(text)} is not a short printable text")


def load(path: str | Path) -> Run:
    """Load the run in a file. Raises FileError."""
    try:
        return from_json(read_text(path, MOST_BYTES))
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror or error}); {WANTED}") from None
    except ContentError as error:
        raise FileError(f"{path}: {error}; {WANTED}") from None


def to_csv(run: Run) -> str:
    """Return the results as CSV, a line for each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = list(Result.__dataclass_fields__)
    writer.writerow([*columns[:4], "type", "redop", "ranks", "nodes", *columns[4:]])
    for result in run.results:
        values = list(asdict(result).values())
        writer.writerow([*values[:4], run.dtype, run.op, run.ranks, run.nodes, *values[4:]])
    return text.getvalue()
