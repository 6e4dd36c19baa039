"""Compares two files of `benchmarks.bandwidth --json`, and reports regressions.

    python -m benchmarks.compare before.json after.json --threshold 10%

Wrong results are regressions. A size is a regression if its median and its minimum are both slower by more than the
threshold: other load on the machine raises medians, but seldom minima. A backend is a regression if the geometric
means of both over all sizes are slower by more than the threshold.
Exit code: 0 no regression, 1 regressions, 2 the files can't be compared.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.lib import cli
from benchmarks.lib.columns import columns
from benchmarks.lib.results import TITLES, FileError, Result, Run, load
from benchmarks.lib.sizes import show

Key = tuple[str, str, int]  # backend, memory, size


@dataclass(frozen=True)
class Ratio:
    """Times of the second run divided by those of the first: above 1 is slower. size: None for the means of all."""

    backend: str
    memory: str
    size: int | None
    before: float | None  # us
    after: float | None
    median: float
    least: float

    def slower(self, threshold: float) -> bool:
        return min(self.median, self.least) > 1 + threshold

    def row(self, threshold: float) -> list[str]:
        times = ["" if each is None else f"{each:.2f}" for each in (self.before, self.after)]
        size = "all" if self.size is None else show(self.size)
        mark = "slower" if self.slower(threshold) else ""
        return [self.backend, self.memory, size, *times, f"{self.median:.3f}", f"{self.least:.3f}", mark]

    def __str__(self) -> str:
        size, average = ("all sizes", " on average") if self.size is None else (show(self.size), "")
        return f"{self.backend}, {TITLES[self.memory]}, {size}: {self.median:.2f}x the time{average}"


def ratios(before: Run, after: Run) -> list[Ratio]:
    """Return the ratios for every backend, memory and size that both runs measured."""
    old: dict[Key, Result] = {(each.backend, each.memory, each.size): each for each in before.results}
    found = []
    for new in after.results:
        was = old.get((new.backend, new.memory, new.size))
        if was is not None:
            median, least = new.time_us / was.time_us, new.min_us / was.min_us
            found.append(Ratio(new.backend, new.memory, new.size, was.time_us, new.time_us, median, least))
    return found


def means(found: Sequence[Ratio]) -> list[Ratio]:
    """Return the geometric means of the ratios of each backend and memory over all sizes."""
    grouped: dict[tuple[str, str], list[Ratio]] = {}
    for each in found:
        grouped.setdefault((each.backend, each.memory), []).append(each)
    medians = {key: geometric_mean(each.median for each in group) for key, group in grouped.items()}
    least = {key: geometric_mean(each.least for each in group) for key, group in grouped.items()}
    return [Ratio(*key, None, None, None, medians[key], least[key]) for key in sorted(grouped)]


def only_in(one: Run, other: Run) -> list[str]:
    """Return one line for each backend and memory that only `one` measured, with the number of sizes."""
    common = {(each.backend, each.memory, each.size) for each in other.results}
    counts = Counter((e.backend, e.memory) for e in one.results if (e.backend, e.memory, e.size) not in common)
    return [
        f"{backend}, {TITLES[memory]}, {count} size{'s' * (count != 1)}" for (backend, memory), count in counts.items()
    ]


def differences(before: Run, after: Run) -> list[str]:
    """Return a line for each difference between the machines and topologies of two runs."""
    found = []
    for name in ("cpu", "cores", "mpi", "numpy", "mpi4py", "python"):
        old, new = before.machine.get(name), after.machine.get(name)
        if old != new:
            found.append(f"{name}: {old} before, {new} after")
    if before.place() != after.place():
        found.append(f"{before.place()} before, {after.place()} after")
    return found


def report(found: Sequence[Ratio], threshold: float) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and a line for each regression."""
    every = [*sorted(found, key=lambda one: (one.backend, one.memory, one.size or 0)), *means(found)]
    heads = ["backend", "memory", "size", "before(us)", "after(us)", "ratio", "min", ""]
    lines = columns(heads, [each.row(threshold) for each in every], left=(0, 1, 7))
    lines.insert(1 + len(found), "# geometric means over all sizes (above 1: slower than before)")
    return lines, [str(each) for each in every if each.slower(threshold)]


def _compare(args: argparse.Namespace) -> int:
    before, after = load(args.before), load(args.after)
    if before.kind() != after.kind():
        raise FileError(f"{before.kind()} can't be compared with {after.kind()}")
    found = ratios(before, after)
    if not found:
        raise FileError(f"{args.before} and {args.after} have no backend and size in common")
    for difference in differences(before, after):
        print(f"warning: measured under other conditions: {difference}", file=sys.stderr)
    for path, lonely in ((args.before, only_in(before, after)), (args.after, only_in(after, before))):
        for which in lonely:
            print(f"warning: only in {path}: {which}", file=sys.stderr)
    lines, regressions = report(found, args.threshold)
    wrong = [each for each in after.results if each.wrong]
    told = (f"{e.backend}, {TITLES[e.memory]}, {show(e.size)}: {e.wrong} wrong elements" for e in wrong)
    regressions = [*told, *regressions]
    print("\n".join(lines))
    limit = f"{args.threshold:.0%}"
    if regressions:
        count = f"{len(regressions)} regression{'s' * (len(regressions) != 1)}"
        print(f"# {count} beyond {limit}:", *(f"#   {line}" for line in regressions), sep="\n")
        return 1
    print(f"# no regression beyond {limit} in {len(found)} comparisons")
    return 0


def _threshold(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"must be a fraction such as 10% or 0.1, got {text!r}")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE.json")
    parser.add_argument("after", metavar="AFTER.json")
    parser.add_argument("--threshold", type=_threshold, default=0.1, metavar="SHARE", help="default 10%%")


main = cli.serial_command("benchmarks.compare", __doc__, add_options, _compare)


if __name__ == "__main__":
    sys.exit(main())
