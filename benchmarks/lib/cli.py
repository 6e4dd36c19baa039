"""The command lines: parsed on rank 0 for all ranks, types of options, one report of an error that all ranks raise."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.transport.control import everywhere, raise_together, root_value
from benchmarks.lib import sizes
from benchmarks.lib.results import FileError
from trainers.datasets.parser import Parser

Action = Callable[[Topology, argparse.Namespace], int]
INTERRUPTED = 130  # exit code, as a shell has it
NCCL_TYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
NCCL_OPS = {"avg": "mean"}


def parser(program: str, about: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a module that mpirun starts; texts are shown as they are written."""
    return Parser(prog=f"mpirun -n N python -m {program}", description=about, epilog=epilog)


def parse_together(parser: argparse.ArgumentParser, argv: Sequence[str] | None, comm: MPI.Intracomm) -> Any:
    """Rank 0 parses and tells the others: help and errors appear once, and all ranks exit alike. Collective."""
    given = list(sys.argv[1:] if argv is None else argv)
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


def command(parser: Callable[[], argparse.ArgumentParser], action: Action) -> Callable[..., int]:
    """The `main` of a module that mpirun starts: main(argv=None) measures and prints; the exit code. Collective."""
    return lambda argv=None: run(parser(), argv, action)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None, action: Action) -> int:
    """The whole of a command that mpirun starts: all ranks parse, and do the action together; the exit code.

    An error that all ranks raise is printed in one line, by rank 0, and the exit code is 2. Ctrl-C on a single rank
    gives 130; with more ranks the launcher decides: MPICH's hands the signal on, and the code is 130; Open MPI's ends
    the ranks by itself, drops what they print last, and its code is 1.
    """
    with Topology() as topology:
        options = parse_together(parser, argv, topology.world)
        return _reported(parser.prog.rpartition(" ")[2], topology.world, lambda: action(topology, options))


def _reported(program: str, comm: MPI.Intracomm, main: Callable[[], int]) -> int:
    try:
        return main()
    except AllReduceError as error:
        if comm.size > 1 and not everywhere(error, comm):
            raise
        if comm.rank == 0:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()  # mpirun kills all ranks when one ends with a code, so rank 0 speaks first
        return 2
    except KeyboardInterrupt:
        if comm.size > 1:
            raise  # the hook of Topology says so and ends the job; the others would wait for this rank
        print(f"{program}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def alone(program: str, action: Callable[[], int]) -> int:
    """What a command without MPI does; the exit code, 2 after an error that names a file."""
    try:
        return action()
    except (FileError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2


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
    """An operation by nccl-tests' name or ours, for argparse."""
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
    bounds = f">= {least}" if most == math.inf else f"from {least:g} to {most:g}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(
                f"must be {'an integer' if kind is int else 'a number'} {bounds}, got {text!r}"
            )
        return value

    return parse


def names(text: str) -> list[str]:
    """A comma-separated list without repetitions, for argparse."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("give at least one name")
    return found


def add_some(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], separator: str = ",", default: Any = None
) -> None:
    """An option that takes some of the known names, or all. default: all."""
    names, about = list(known), f"{separator} ".join(known)

    def parse(text: str) -> list[str]:
        given = names if text == "all" else [part.strip() for part in text.split(separator) if part.strip()]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; {hint}use all, or some of {about}")
        return list(dict.fromkeys(given))

    default = names if default is None else default
    parser.add_argument(
        option,
        type=parse,
        default=default,
        metavar=f"A{separator}B",
        help=f"all, or some of: {about} (default: {separator.join(default) if len(default) < len(names) else 'all'})",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON, to stdout without FILE"
    )


def add_measuring_options(parser: argparse.ArgumentParser, budget: str) -> None:
    """The options of everything that measures."""
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
    """Refuse an operation that has no meaning for a dtype. Collective."""
    error: AllReduceError | None = None
    try:
        ops.resolve(name, element, comm.size)
    except AllReduceError as refused:
        error = OptionError(f"-o {name} -d {element}: {refused}")
    raise_together(comm, error)
