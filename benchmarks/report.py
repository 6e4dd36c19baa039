"""One page of several runs of benchmarks.bandwidth, with other numbers of ranks: which backend is the fastest where.

for n in 2 3 4; do mpirun -n $n python -m benchmarks.bandwidth --json n$n.json; done
python -m benchmarks.report n2.json n3.json n4.json --html report.html
"""

import argparse
import sys

from benchmarks.lib import cli, outputs, report
from benchmarks.lib.results import FileError, load


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a file that benchmarks.bandwidth --json wrote")
    parser.add_argument("--html", metavar="FILE", default="report.html", help="the page (default: report.html)")


def _report(options: argparse.Namespace) -> int:
    runs = sorted((load(path) for path in options.runs), key=lambda run: (run.nodes, run.ranks))
    kinds = sorted({run.kind() for run in runs})
    if len(kinds) > 1:
        raise FileError(
            f"the runs measured different calls: {'; '.join(kinds)}; give runs of one dtype, operation and --compress"
        )
    outputs.write(options.html, report.page(*runs))
    if options.html != outputs.STDOUT:
        print(options.html)
    return 0


main = cli.serial_command("benchmarks.report", __doc__, add_options, _report)

if __name__ == "__main__":
    sys.exit(main())
