"""Who waits for whom? Sums up a trace: where each rank's time went, and which rank the others waited for.

    mpirun -n 4 python -m trainers --trace trace.json
    python -m benchmarks.timeline trace.json

To look at every step open the file in https://ui.perfetto.dev.
Exit code: 0, or 2 when the file can't be read.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.showing import outputs, plot, trace_plot
from benchmarks.showing.results import FileError
from benchmarks.showing.trace_file import KINDS, OTHER, Summary, load, summary
from trainers.cli.options import Parser

MOST_PAIRS, MOST_ROWS = 12, 64  # that are shown
MUCH = 0.1  # of a row's time outside of all spans


def report(found: Summary) -> list[str]:
    """The lines of the report."""
    shown = [kind for kind in (*KINDS, OTHER) if any(times[kind] > 0 for times in found.shares.values())]
    plural = "s" * (found.ranks != 1)
    lines = [f"# {found.ranks} rank{plural}, {found.seconds:.3f} s; share of the time:"]
    lines.append(f"# {'':<20}" + "".join(f"{kind:>14}" for kind in shown))
    for row, times in list(found.shares.items())[:MOST_ROWS]:
        shares = "".join(f"{times[kind] / found.seconds if found.seconds else 0:>14.1%}" for kind in shown)
        lines.append(f"  {trace_plot.name(*row):<20}{shares}")
    if len(found.shares) > MOST_ROWS:
        lines.append(f"  and {len(found.shares) - MOST_ROWS} rows more")
    if any(times[OTHER] > MUCH * found.seconds for times in found.shares.values()):
        lines.append("# other: outside of all spans. The program's own work between steps, a start that differs from")
        lines.append("# rank to rank, idle time of the background, and waits for a core where ranks share cores")
    return [*lines, *_waits(found)]


def _waits(found: Summary) -> list[str]:
    if not found.waits:
        return ["# no rank waited for another"]
    lines = ["# who waited for whom, for the rank that came last:"]
    pairs = sorted(found.waits.items(), key=lambda pair: -pair[1])
    for (who, whom), seconds in pairs[:MOST_PAIRS]:
        lines.append(f"  rank {who} waited {seconds:.3f} s for rank {whom}")
    if len(pairs) > MOST_PAIRS:
        lines.append(f"  and {len(pairs) - MOST_PAIRS} pairs more")
    if not found.late:  # a trace of another program's, or one of which a part was left out
        return lines
    rank, times = max(found.late.items(), key=lambda each: (each[1], -each[0]))
    lost = sum(seconds for (_, whom), seconds in found.waits.items() if whom == rank)
    part = lost / (found.seconds * (found.ranks - 1)) if found.ranks > 1 and found.seconds else 0.0
    lines.append(
        f"# rank {rank} came last most often, to {times} of {found.calls} calls; the others waited {lost:.3f} s for "
        f"it, {part:.1%} of their time"
    )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Sum up a file; the exit code."""
    args = _parser().parse_args(argv)
    try:
        if args.plot and (problem := plot.missing(args.plot) or outputs.unwritable(args.plot)):
            raise FileError(problem)
        slices = load(args.trace)
        print("\n".join(report(summary(slices))))
        if args.plot:
            picture = trace_plot.draw(slices, os.path.basename(args.trace), Path(args.plot).suffix[1:].lower())
            outputs.write(args.plot, picture)
    except (FileError, OSError) as error:
        print(f"benchmarks.timeline: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument("--plot", metavar="FILE", help="draw it too (.png, .svg or .pdf; needs matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
