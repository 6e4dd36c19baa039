"""Summarizes a trace: how each rank spent its time, and which rank the others waited for.

    mpirun -n 4 python -m trainers --trace trace.json
    python -m benchmarks.timeline trace.json

To see every step, open the file in https://ui.perfetto.dev.
Exit code: 0, or 2 when the file can't be read.
"""

import argparse
import io
import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TextIO

from allreduce.notices import shown
from benchmarks.lib import cli, outputs, plot
from benchmarks.lib.results import FileError
from trainers.files import model_file

MOST_BYTES, MOST_SLICES = 1 << 30, 1 << 22
PIECE = 1 << 20  # characters that are read at a time; every event is shorter
LIST, NAMED_LIST, SPACE = re.compile(r"\s*\["), re.compile(r'"traceEvents"\s*:\s*\['), re.compile(r"\s*")
MOST_RANKS, MOST_THREADS = 1 << 20, 1 << 10
LONGEST_US = 1e15  # thirty years
DIGITS = 3  # of a time in microseconds: Trace writes nanoseconds
WANTED = "give a file that --trace, Timeline or create(trace=) wrote"
WAIT, REDUCE, OTHER = "wait", "reduce", "other"
KINDS = ("data", "compute", "agree", WAIT, REDUCE, "communication", "update", "epoch")  # in the order of a step


class Slice(NamedTuple):
    """An activity of a rank from `begin` to `end`, in microseconds. last: the rank that joined a call last, or None."""

    rank: int
    row: int
    kind: str
    begin: float
    end: float
    last: int | None
    call: tuple[str, int] | None


@dataclass(frozen=True)
class Summary:
    """Sums of a trace, in seconds.

    shares: (rank, row) -> kind -> time in slices of this kind, without the slices inside them. "other" is the time
        outside of all slices and in unknown kinds. The times of a row add up to `seconds`.
    waits: (waiting rank, rank waited for) -> seconds, on the waiting rank's main row. late: rank -> number of calls
        that it joined last.
    """

    seconds: float
    ranks: int
    calls: int
    shares: dict[tuple[int, int], dict[str, float]]
    waits: dict[tuple[int, int], float]
    late: Counter[int]


def load(path: str) -> list[Slice]:
    """Return the slices of a trace file, sorted by time. Raises FileError."""
    try:
        with model_file.open_regular(path) as file:
            if model_file.size(file) > MOST_BYTES:
                raise FileError(f"{path} has {model_file.size(file)} bytes; at most {MOST_BYTES} are read")
            found = list(itertools.islice(_slices(file), MOST_SLICES + 1))
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror or error}); {WANTED}") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}: it is not text; {WANTED}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a trace ({error or type(error).__name__}); {WANTED}") from None
    if not found:
        raise FileError(f"{path}: nothing was recorded in it; {WANTED}")
    if len(found) > MOST_SLICES:
        raise FileError(f"{path} has more than {MOST_SLICES} events; trace a shorter run")
    return sorted(found, key=lambda each: (each.begin, -each.end))


def _slices(file: IO[bytes]) -> Iterator[Slice]:
    for number, event in enumerate(_events(io.TextIOWrapper(file, "utf-8"))):
        if not isinstance(event, dict):
            raise ValueError(f"event {number} is not an object")
        if event.get("ph") == "X":
            yield _slice(number, event)


def _events(text: TextIO) -> Iterator[Any]:
    """Yield the events of a trace one by one, because parsing the whole file would take many times its size in memory.

    Ignores what follows the list of events.
    """
    decoder, buffer = json.JSONDecoder(), text.read(PIECE)
    begin = LIST.match(buffer) or NAMED_LIST.search(buffer)  # the format's two shapes
    if begin is None:
        json.loads(buffer)  # which raises an error if it is not JSON
        raise ValueError("it has no list of events")
    place, first, more = begin.end(), True, buffer
    while True:
        if more and len(buffer) - place < PIECE:
            more = text.read(PIECE)
            buffer, place = buffer[place:] + more, 0
        place = SPACE.match(buffer, place).end()  # type: ignore[union-attr]  # SPACE matches everywhere
        if buffer.startswith("]", place):
            return
        if not first:
            if not buffer.startswith(",", place):
                raise ValueError("a comma is missing between two events, or the end")
            place = SPACE.match(buffer, place + 1).end()  # type: ignore[union-attr]
        event, place = decoder.raw_decode(buffer, place)
        first = False
        yield event


def _slice(number: int, event: dict[str, Any]) -> Slice:
    begin, duration = (_number(number, event, name, LONGEST_US) for name in ("ts", "dur"))
    rank, row = _integer(number, event, "pid", MOST_RANKS), _integer(number, event, "tid", MOST_THREADS)
    about = event.get("args", {})
    if not isinstance(about, dict):
        raise ValueError(f"event {number}: args={shown(about)}")
    last = _integer(number, about, "last", MOST_RANKS) if "last" in about else None
    call = None
    if "call" in about:
        call = shown(about.get("series")), _integer(number, about, "call", 1 << 40)
    kind = event.get("cat")
    # Rounded to nanoseconds, as written: a sum of two floats could be larger than the beginning of the next slice.
    begin, end = round(begin, DIGITS), round(begin + duration, DIGITS)
    return Slice(rank, row, kind if kind in KINDS else OTHER, begin, end, last, call)


def _number(number: int, event: dict[str, Any], name: str, most: float) -> float:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"event {number}: {name}={shown(value)}")
    return float(value)


def _integer(number: int, event: dict[str, Any], name: str, most: int) -> int:
    value = _number(number, event, name, most)
    if value != math.floor(value):
        raise ValueError(f"event {number}: {name}={shown(value)}")
    return int(value)


def summary(slices: list[Slice]) -> Summary:
    """Sum up slices into a Summary. slices: sorted by time, at least one."""
    begin, end = min(each.begin for each in slices), max(each.end for each in slices)
    shares = {row: _own_times(those, end - begin) for row, those in rows(slices).items()}
    waits: dict[tuple[int, int], float] = {}
    late: dict[tuple[str, int], int] = {}
    for each in slices:
        if each.last is None:
            continue
        if each.call is not None:
            late[each.call] = each.last
        if each.kind == WAIT and each.row == 0:
            pair = each.rank, each.last
            waits[pair] = waits.get(pair, 0.0) + (each.end - each.begin) / 1e6
    ranks = len({each.rank for each in slices})
    return Summary((end - begin) / 1e6, ranks, len(late), shares, waits, Counter(late.values()))


def rows(slices: list[Slice]) -> dict[tuple[int, int], list[Slice]]:
    """Return (rank, row) -> its slices, in their order."""
    found: dict[tuple[int, int], list[Slice]] = {}
    for each in slices:
        found.setdefault((each.rank, each.row), []).append(each)
    return dict(sorted(found.items()))


def _own_times(row: list[Slice], whole: float) -> dict[str, float]:
    """Return the seconds of each kind in one row, without nested slices."""
    own = dict.fromkeys((*KINDS, OTHER), 0.0)
    around: list[Slice] = []  # the open slices, in order of begin; time counts for the last one
    turn = row[0].begin

    def advance(until: float) -> None:
        nonlocal turn
        while around and turn < until:
            end = min(around[-1].end, until)
            own[around[-1].kind] += max(end - turn, 0.0) / 1e6
            turn = max(turn, end)
            if around[-1].end <= turn:
                around.pop()
        turn = max(turn, until)

    for each in row:
        advance(each.begin)
        around.append(each)
    advance(max(each.end for each in row))
    own[OTHER] += max(whole / 1e6 - sum(own.values()), 0.0)
    return own


MOST_ROWS = 64
COLOURS = {
    "data": "#8dd3c7",
    "compute": "#1f77b4",
    "agree": "#f4a6a6",
    "wait": "#d62728",
    "reduce": "#ff8c00",
    "communication": "#ff8c00",
    "update": "#2ca02c",
    "epoch": "#b39ddb",
    OTHER: "#bbbbbb",
}


def draw(slices: list[Slice], title: str, kind: str = "png") -> bytes:
    """Return the picture as the content of a file. kind: "png", "svg" or "pdf"."""
    from matplotlib.figure import Figure

    shown = dict(list(rows(slices).items())[:MOST_ROWS])
    figure = Figure(figsize=(12, 1.6 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    begin = slices[0].begin
    kinds = [kind for kind in COLOURS if any(each.kind == kind for each in slices)]
    for place, those in enumerate(shown.values()):
        for what in kinds:
            spans = [((each.begin - begin) / 1e3, (each.end - each.begin) / 1e3) for each in those if each.kind == what]
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=COLOURS[what], label=None if place else what)
    axes.set_yticks(range(len(shown)), [name(*row) for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.set_title(title, parse_math=False)  # a file may have any name
    figure.legend(loc="outside lower center", ncols=len(kinds), frameon=False)
    return plot.content(figure, kind)


def name(rank: int, row: int) -> str:
    """Return the name of a row: row 0 is the main thread, other rows are background threads."""
    return f"rank {rank}" if row == 0 else f"rank {rank}, background"


MOST_PAIRS, MOST_ROWS = 12, 64  # that are shown
MUCH = 0.1  # of a row's time outside of all spans


def report(found: Summary) -> list[str]:
    """Return the lines of the report."""
    kinds = [kind for kind in (*KINDS, OTHER) if any(times[kind] > 0 for times in found.shares.values())]
    plural = "s" * (found.ranks != 1)
    lines = [f"# {found.ranks} rank{plural}, {found.seconds:.3f} s; share of the time:"]
    lines.append(f"# {'':<20}" + "".join(f"{kind:>14}" for kind in kinds))
    for row, times in list(found.shares.items())[:MOST_ROWS]:
        shares = "".join(f"{times[kind] / found.seconds if found.seconds else 0:>14.1%}" for kind in kinds)
        lines.append(f"  {name(*row):<20}{shares}")
    if len(found.shares) > MOST_ROWS:
        lines.append(f"  and {len(found.shares) - MOST_ROWS} rows more")
    if any(times[OTHER] > MUCH * found.seconds for times in found.shares.values()):
        lines.append("# other: outside of all spans: the program's own work between steps, different start times,")
        lines.append("# idle background threads, and waits for a core where ranks share cores")
    return [*lines, *_waits(found)]


def _waits(found: Summary) -> list[str]:
    if not found.waits:
        return ["# no rank waited for another"]
    lines = ["# which rank waited for the last rank of a call, and how long:"]
    pairs = sorted(found.waits.items(), key=lambda pair: -pair[1])
    for (who, whom), seconds in pairs[:MOST_PAIRS]:
        lines.append(f"  rank {who} waited {seconds:.3f} s for rank {whom}")
    if len(pairs) > MOST_PAIRS:
        lines.append(f"  and {len(pairs) - MOST_PAIRS} pairs more")
    if not found.late:  # the trace is of another program, or incomplete
        return lines
    rank, times = max(found.late.items(), key=lambda each: (each[1], -each[0]))
    lost = sum(seconds for (_, whom), seconds in found.waits.items() if whom == rank)
    part = lost / (found.seconds * (found.ranks - 1)) if found.ranks > 1 and found.seconds else 0.0
    lines.append(
        f"# rank {rank} came last most often, to {times} of {found.calls} calls; the others waited {lost:.3f} s for "
        f"it, {part:.1%} of their time"
    )
    return lines


def _sum_up(args: argparse.Namespace) -> int:
    slices = load(args.trace)
    print("\n".join(report(summary(slices))))
    if args.plot:
        outputs.write(args.plot, draw(slices, os.path.basename(args.trace), plot.kind_of(args.plot)))
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument("--plot", metavar="FILE", help="draw it too (.png, .svg or .pdf; needs matplotlib)")


main = cli.serial_command("benchmarks.timeline", __doc__, add_options, _sum_up)


if __name__ == "__main__":
    sys.exit(main())
