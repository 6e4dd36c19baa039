"""The command line of the library: python -m allreduce doctor"""

import argparse
import difflib
import os
import platform
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import mpi4py
import numpy as np
from mpi4py import MPI

from allreduce import Topology, __version__
from allreduce.doctor import command as doctor
from allreduce.doctor.network import said_when_late
from allreduce.errors import AllReduceError, LauncherError, OptionError
from allreduce.health import abort
from allreduce.health.stall import STALL, TIMEOUT
from allreduce.machine import mpi_library
from allreduce.transport import processes
from allreduce.transport.control import raise_together

COMMANDS: dict[str, ModuleType] = {"doctor": doctor}
FAILED = 2  # exit codes: 0 to 2 say what the doctor has found; it is a problem when it can't look
BAD_OPTIONS = 64  # as sysexits.h has it
PATIENCE = {STALL: "20", TIMEOUT: "90"}  # waits are short here, where ranks can reach each other
EXAMPLES = """\
examples:
  python -m allreduce doctor                 this machine
  mpirun -n 4 python -m allreduce doctor     these ranks, the hosts under them and the network between
  python -m allreduce doctor --help          what it looks at, and what its exit code says

To train:            mpirun -n 4 python -m trainers --help
To measure backends: mpirun -n 4 python -m benchmarks.bandwidth --help
"""


class Parser(argparse.ArgumentParser):
    """Raises OptionError for bad arguments, and is silent on all ranks but one.

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
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant(unknown, self._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} ({self.prog} --help shows all)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._shown:
            super()._print_message(message, file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on all ranks; returns the exit code, the same on each. Collective."""
    abort.fail_with(FAILED)
    for variable, seconds in PATIENCE.items():
        os.environ.setdefault(variable, seconds)
    try:
        with said_when_late():
            topology = _topology()
        return _main(sys.argv[1:] if arguments is None else arguments, topology)
    except AllReduceError as error:  # of ranks that can't reach each other; they may be anywhere
        abort.end_job(f"{type(error).__name__}: {error}\n", FAILED)
    except Exception:
        if processes.here()[1] > 1:
            raise  # which ends the job with this code
        traceback.print_exc()
        return FAILED


def _topology() -> Topology:
    """The topology of all ranks, or of this one alone where the launcher is a wrong one: then that is a finding."""
    try:
        return Topology()
    except LauncherError:
        return Topology(MPI.COMM_SELF)


def _main(arguments: Sequence[str], topology: Topology) -> int:
    shown = topology.rank == 0
    try:
        name, chosen = parse(arguments, shown)
        code: int = COMMANDS[name].run(chosen, topology)
    except OptionError as error:
        if shown:
            print(f"allreduce: error: {error}", file=sys.stderr, flush=True)
            abort.write_down(str(error))
        code = BAD_OPTIONS
    raise_together(topology.world, None)  # the first rank that leaves with a code ends the job, so let rank 0 print
    return code


def parse(arguments: Sequence[str], shown: bool) -> tuple[str, argparse.Namespace]:
    """The command, and its options. Raises OptionError, the same on all ranks; --help and --version exit."""
    top = Parser(shown, prog="python -m allreduce", usage="%(prog)s COMMAND [OPTION...]", epilog=EXAMPLES)
    top.description = "commands:\n" + "".join(f"  {name:<10} {module.ABOUT}\n" for name, module in COMMANDS.items())
    top.add_argument("--version", action="version", version=version())
    if arguments and arguments[0] in COMMANDS:
        module = COMMANDS[arguments[0]]
        parser = Parser(shown, prog=f"python -m allreduce {arguments[0]}", description=module.ABOUT, epilog=module.MORE)
        module.add_options(parser)
        return arguments[0], parser.parse_args(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        top.error(f"no command is called {arguments[0]!r}{meant(arguments[0], COMMANDS)}")
    top.parse_args(arguments)
    top.print_help()
    sys.exit(0)


def meant(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where nothing is like it."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def version() -> str:
    """This package's version, and those of what it stands on."""
    libraries = f"{mpi_library()}, mpi4py {mpi4py.__version__}, NumPy {np.__version__}"
    return f"allreduce {__version__} ({libraries}, Python {platform.python_version()})"


if __name__ == "__main__":
    sys.exit(main())
