"""Command lines of benchmarks: options, output, and one report of an error that all ranks raise.

A benchmark has a function that adds options to a parser, and one that measures; `command` and `serial_command` return
its `main`.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.errors import AllReduceError, OptionError
from allreduce.notices import near
from allreduce.topology import Topology
from allreduce.transport.control import everywhere, raise_together, root_value
from benchmarks.lib import outputs, sizes
from benchmarks.lib.outputs import Screen
from benchmarks.lib.results import FileError
from trainers import arguments
from trainers.cli.parser import Parser

Action = Callable[[Topology, argparse.Namespace, Screen], int]
INTERRUPTED = 130  # exit code, as in a shell
NCCL_TYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
NCCL_OPS = {"avg": "mean"}


def command(
    name: str, about: str | None, options: Callable[[Parser], object], action: Action, epilog: str | None = None
) -> Callable[..., int]:
    """Return the `main` of a benchmark that mpirun starts: main(arguments=None, program="") -> exit code. Collective.

    name: of the module: "benchmarks.bandwidth". about, epilog: texts of --help. options: adds the benchmark's options
        to a parser. action: measures, and returns the exit code. It is called after a check that its files (see
        outputs.FILES) can be written.

    An error that all ranks raise is printed in one line, by rank 0, and the exit code is 2. After Ctrl-C the exit code
    is 130 with a single rank; with more ranks the launcher decides: MPICH's passes the signal on (130); Open MPI's
    kills the ranks, drops their last output, and returns 1.
    """

    def main(arguments: Sequence[str] | None = None, program: str = f"python -m {name}") -> int:
        parser = Parser(prog=f"mpirun -n N {program}", description=about, epilog=epilog)
        options(parser)
        with Topology() as topology:
            given = list(sys.argv[1:] if arguments is None else arguments)
            parsed = _parse_together(parser, given, topology.world)

            def act() -> int:
                outputs.check(topology.world, parsed)
                line = f"mpirun -n {topology.size} {program} {shlex.join(given)}".rstrip()
                return action(topology, parsed, Screen(topology.rank == 0, getattr(parsed, "json", None), line))

            return _reported(name, topology.world, act)

    return main


def serial_command(
    name: str, about: str | None, options: Callable[[Parser], object], action: Callable[[argparse.Namespace], int]
) -> Callable[..., int]:
    """Return the `main` of a command without MPI. Its exit code is 2 after a FileError or OSError."""

    def main(arguments: Sequence[str] | None = None, program: str = f"python -m {name}") -> int:
        parser = Parser(prog=program, description=about)
        options(parser)
        parsed = parser.parse_args(arguments)
        try:
            if problems := outputs.problems(parsed):
                raise FileError("; ".join(problems))
            return action(parsed)
        except (FileError, OSError) as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            return 2

    return main


def _parse_together(parser: argparse.ArgumentParser, given: list[str], comm: MPI.Intracomm) -> argparse.Namespace:
    """Parse on rank 0 first, so that help and errors appear once, and all ranks exit alike. Collective."""
    code, parsed = None, None
    if comm.rank == 0:
        try:
            parsed = parser.parse_args(given)
        except SystemExit as stop:
            code = int(stop.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    code, given = root_value(comm, [code, given], "parse the command line")
    if code is not None:
        sys.exit(code)
    return parsed or parser.parse_args(given)


def _reported(name: str, comm: MPI.Intracomm, action: Callable[[], int]) -> int:
    try:
        return action()
    except AllReduceError as error:
        if comm.size > 1 and not everywhere(error, comm):
            raise
        if comm.rank == 0:
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()  # mpirun kills all ranks when one exits with a nonzero code, so rank 0 prints first
        return 2
    except KeyboardInterrupt:
        if comm.size > 1:
            raise  # the excepthook prints it and ends the job; the others would wait for this rank
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def size(text: str) -> int:
    """A size, for argparse."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> np.dtype:
    """A dtype by nccl-tests' name or NumPy's, for argparse."""
    try:
        return dtypes.parse(NCCL_TYPES.get(text, text))
    except AllReduceError as error:
        raise argparse.ArgumentTypeError(f"{error} (or nccl-tests' {', '.join(NCCL_TYPES)})") from None


def op(text: str) -> str:
    """An operation by nccl-tests' name or this library's, for argparse."""
    name = NCCL_OPS.get(text, text)
    if name not in ops.OPS:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; use one of {', '.join([*ops.OPS, *NCCL_OPS])}")
    return name


def nodes(text: str) -> int | list[int]:
    """Ranks per simulated node: one number, or one per node."""
    try:
        parts = [int(part) for part in text.split(",")]
    except ValueError:
        parts = [0]
    if min(parts) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of ranks, or one per node such as 3,1, got {text!r}")
    return parts[0] if len(parts) == 1 else parts


def at_least(least: float, kind: Callable[[str], Any] = int, most: float = math.inf) -> Callable[[str], Any]:
    """A number of at least `least` and at most `most`, for argparse."""
    if kind is int:
        return arguments.integer(int(least), most)
    bounds = f">= {least}" if most == math.inf else f"from {least:g} to {most:g}"
    return arguments.number(f"a number {bounds}", lambda value: least <= value <= most)


def several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A comma-separated list of values that `parse` takes, for argparse."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def names(text: str) -> list[str]:
    """A comma-separated list without repetitions, for argparse."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("give at least one name")
    return found


def add_some(
    parser: argparse.ArgumentParser,
    option: str,
    known: Iterable[str],
    separator: str = ",",
    default: Sequence[str] | None = None,
    about: str = "",
) -> None:
    """Add an option whose value is some of the names `known`. default: all of them. about: describes them in --help."""
    allowed = list(known)
    default = allowed if default is None else default
    some, chosen = f"{separator} ".join(allowed), separator.join(default) or "none"

    def parse(text: str) -> list[str]:
        given = allowed if text == "all" else [part.strip() for part in text.split(separator) if part.strip()]
        for name in given:
            if name not in allowed:
                hint = f"{near(name, allowed) or ';'} use all, or some of {some}"
                raise argparse.ArgumentTypeError(f"{name!r} can't be given{hint}")
        return list(dict.fromkeys(given))

    text = f"{about}: all, or some of {some}".removeprefix(": ")
    text += f" (default: {'all' if len(default) == len(allowed) else chosen})"
    shape: dict[str, Any] = {"nargs": "?", "const": "all", "metavar": f"A{separator}B"}
    parser.add_argument(option, type=parse, default=default, help=text, **shape)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON, to stdout without FILE"
    )


def add_sizes(parser: argparse.ArgumentParser, first: str, last: str) -> None:
    """Add the smallest and the largest size of an array, with these defaults."""
    for short, option, default, text in (("-b", "min", first, "smallest"), ("-e", "max", last, "largest")):
        about = f"{text} size (default {default}); units K, M, G"
        parser.add_argument(short, f"--{option}bytes", type=size, default=default, metavar="SIZE", help=about)


def swept(comm: MPI.Intracomm, args: argparse.Namespace, element: np.dtype, step: int | None = None) -> list[int]:
    """Return the sizes that the options ask for. Raises OptionError on all ranks if there are none. Collective."""
    found = sizes.whole(sizes.sweep(args.minbytes, args.maxbytes, args.stepfactor, step), element.itemsize)
    if not found:
        problem = f"-b {args.minbytes} -e {args.maxbytes}: no size between them holds an element of {element}"
        raise_together(comm, OptionError(f"{problem}; -e must be at least -b and {element.itemsize}"))
    return found


def add_measuring_options(parser: argparse.ArgumentParser, budget: str) -> None:
    """Add the options of commands that measure calls."""
    parser.add_argument("-n", "--iters", type=at_least(1), metavar="N", help="timed iterations; by default the budget")
    parser.add_argument(
        "-w", "--warmup_iters", type=at_least(0), metavar="N", help="iterations before timing; default 5"
    )
    parser.add_argument(
        "--budget",
        type=at_least(0.01, float),
        metavar="SECONDS",
        help="time for measuring, divided over the sizes, when -n is not given: each size gets between 5 and 1000 "
        f"iterations (default {budget}; large sizes with their 5 may take longer)",
    )
    parser.add_argument(
        "--ranks-per-node", type=nodes, metavar="R", help="simulate nodes of R ranks (or of 3,1 ranks) on this machine"
    )


def checked_op(comm: MPI.Intracomm, name: str, element: np.dtype) -> None:
    """Raise OptionError on all ranks if an operation is not defined for a dtype. Collective."""
    error: AllReduceError | None = None
    try:
        ops.resolve(name, element, comm.size)
    except AllReduceError as refused:
        error = OptionError(f"-o {name} -d {element}: {refused}")
    raise_together(comm, error)
