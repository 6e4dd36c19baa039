"""The command line of the library: python -m allreduce doctor"""

import argparse
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import mpi4py
import numpy as np
from mpi4py import MPI

from allreduce import Topology, __version__
from allreduce.doctor import command as doctor
from allreduce.doctor.network import advise_if_late
from allreduce.errors import AllReduceError, LauncherError, OptionError
from allreduce.health import abort
from allreduce.health.stall import STALL, TIMEOUT
from allreduce.machine import mpi_library
from allreduce.notices import near
from allreduce.transport import processes
from allreduce.transport.control import raise_together

FAILED = 2  # exit code if the doctor can't run; 0 to 2 are the level of its worst finding
BAD_OPTIONS = 64  # EX_USAGE of sysexits.h
PATIENCE = {STALL: "20", TIMEOUT: "90"}  # the doctor's waits are short if ranks can reach each other


class Parser(argparse.ArgumentParser):
    """An argument parser that raises OptionError for bad arguments, and prints on one rank only.

    shown: whether this rank prints.
    """

    def __init__(self, shown: bool, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)
        self._shown = shown

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = rest[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(rest)}{near(unknown, self._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} ({self.prog} --help shows all)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._shown:
            super()._print_message(message, file)


def main(arguments: Sequence[str] | None = None, program: str = "python -m allreduce") -> int:
    """Run the doctor on all ranks; returns the exit code, the same on each. program: its name in --help. Collective."""
    abort.set_error_exit_code(FAILED)
    for variable, seconds in PATIENCE.items():
        os.environ.setdefault(variable, seconds)
    try:
        with advise_if_late():
            try:
                topology = Topology()
            except LauncherError:  # which the doctor reports
                topology = Topology(MPI.COMM_SELF)
        return _main(sys.argv[1:] if arguments is None else arguments, topology, program)
    except AllReduceError as error:  # the ranks can't reach each other, so no collective exit is possible
        abort.end_job(f"{type(error).__name__}: {error}\n", FAILED)
    except Exception:
        if processes.here()[1] > 1:
            raise  # the excepthook ends the job with FAILED
        traceback.print_exc()
        return FAILED


def _main(arguments: Sequence[str], topology: Topology, program: str) -> int:
    shown = topology.rank == 0
    try:
        code = doctor.run(parse(arguments, shown, program), topology)
    except OptionError as error:
        if shown:
            print(f"allreduce: error: {error}", file=sys.stderr, flush=True)
            abort.log_job(str(error))
        code = BAD_OPTIONS
    raise_together(topology.world, None)  # a nonzero exit ends the job: rank 0 prints first
    return code


def parse(arguments: Sequence[str], shown: bool, program: str = "python -m allreduce") -> argparse.Namespace:
    """Return the doctor's options. Raises the same OptionError on all ranks; --help and --version exit."""
    parser = Parser(shown, prog=f"{program} doctor", description=f"doctor: {doctor.ABOUT}", epilog=doctor.MORE)
    libraries = f"{mpi_library()}, mpi4py {mpi4py.__version__}, NumPy {np.__version__}"
    version = f"allreduce {__version__} ({libraries}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", nargs="?", choices=["doctor"], default="doctor", help=argparse.SUPPRESS)
    doctor.add_options(parser)
    return parser.parse_args(arguments or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
