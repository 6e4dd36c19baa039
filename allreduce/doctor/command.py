"""The command `doctor`: its options, its progress, and what it says in the end."""

import argparse
import sys
import time
from collections.abc import Callable

from allreduce.doctor import examination, report
from allreduce.doctor.findings import Needs, exit_code
from allreduce.health import abort
from allreduce.notices import on_terminal
from allreduce.topology import Topology
from allreduce.transport.control import together

ABOUT = "says whether this place is fit for training, and what to do where it is not"
DEFAULT_PARAMETERS = 25_000_000  # a ResNet-50's
DEFAULT_SECONDS = 10.0
LAUNCHER_SECONDS = 0.2
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
MORE = """\
Run it as the training will be run, under the same launcher, with as many ranks on the same hosts:
  mpirun -n 4 python -m allreduce doctor
  srun -N 2 --ntasks-per-node 8 python -m allreduce doctor --parameters 350M --json doctor.json
Alone (python -m allreduce doctor) it looks at this machine only.

A finding is ok, a warning (training works, and something makes it slow or fragile) or a problem (something does not
work). Below each that is not ok stands what to do. The exit code is that of the worst finding: 0 all is ok, 1 there
are warnings, 2 there are problems, or it could not look (ranks don't meet, say); 64 is for bad options.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parameters", type=parameters, metavar="N",
        help="of the model to be trained, such as 350M: what it needs of /dev/shm and of memory (default: 25M); when "
        "given, too little of them is a problem, and not only a warning",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all facts and findings; - writes them to standard output")
    parser.add_argument(
        "--seconds", type=seconds, default=DEFAULT_SECONDS, metavar="S",
        help=f"for measuring pairs of ranks, at most; 0 leaves that out (default: {DEFAULT_SECONDS:g})",
    )  # fmt: skip


def run(chosen: argparse.Namespace, topology: Topology) -> int:
    """Examine, report on rank 0, and return the exit code, the same on all ranks. Collective."""
    together(topology.world, lambda: report.check_target(chosen.json) if topology.rank == 0 else None)
    needs = Needs(chosen.parameters or DEFAULT_PARAMETERS, asked=chosen.parameters is not None)
    tell = _progress(topology.rank == 0)
    found = examination.examine(topology, needs, chosen.seconds, tell)
    tell("")
    title = f"allreduce doctor: {topology}"
    together(topology.world, lambda: report.show(title, found, chosen.json) if topology.rank == 0 else None)
    code = exit_code(found.findings)
    if found.unreachable:  # messages to them are still under way, so MPI would not come to its end
        abort.end_job("some ranks don't answer\n", code)
    return code


def _progress(shown: bool) -> Callable[[str], None]:
    """What shows, on a terminal, how far the examination has come: a line that is written over."""
    if not (shown and on_terminal()):
        return lambda text: None

    def tell(text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
        if not text:  # a launcher passes on what comes next, on the standard output, by a way of its own
            time.sleep(LAUNCHER_SECONDS)

    return tell


def parameters(text: str) -> int:
    """A number of parameters, for argparse: 25000000, 25M, 1.5B."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in UNITS else (text, "")
    try:
        value = float(number.replace("_", "")) * UNITS.get(unit, 1)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 10**15:
        raise argparse.ArgumentTypeError(f"must be a number of parameters such as 350M, 1.5B or 25000000, got {text!r}")
    return round(value)


def seconds(text: str) -> float:
    """A time to measure, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 3600, got {text!r}")
    return value
