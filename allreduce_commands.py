"""The console scripts: `allreduce COMMAND` and `allreduce-train`.

They do the same as `python -m benchmarks.bandwidth`, `python -m trainers` and so on. But `python -m` first looks for a
package in the working directory, where the user's own folder `trainers` or `benchmarks` hides ours. This module is in
none of the packages, because `allreduce` imports neither `trainers` nor `benchmarks`.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BAD_ARGUMENTS = 2  # exit code after wrong arguments


class Command(NamedTuple):
    """module: has `main(arguments, program)`, where program is the command's name in texts. about: what it does.

    options: the module whose `add_options` declares the options, if it is another one.
    """

    module: str
    about: str
    options: str = ""


COMMANDS = {
    "train": Command("trainers.cli.main", "train a small network on all ranks together", "trainers.cli.options"),
    "doctor": Command(
        "allreduce.__main__", "check MPI, cores, memory, network and versions", "allreduce.doctor.command"
    ),
    "bench": Command("benchmarks.bandwidth", "measure which backend is the fastest, at each size"),
    "report": Command("benchmarks.report", "make one page of several results of bench"),
    "tune": Command("benchmarks.tune", 'measure the constants by which the backend "auto" selects'),
    "step": Command("benchmarks.training_step", "time a PyTorch training step, for each way to average gradients"),
    "strategies": Command("benchmarks.strategies", "compare mirrored training with servers and the other strategies"),
    "serving": Command("benchmarks.serving", "measure requests a second of a server, on several numbers of ranks"),
    "compare": Command("benchmarks.compare", "compare two results of bench"),
    "trace": Command("benchmarks.timeline", "say which rank waits for which, from a trace"),
    "predict": Command("benchmarks.scaling", "predict the time of a step on more machines"),
}
EXAMPLES = """\
examples:
  mpirun -n 4 allreduce doctor                  check the machine before the first training
  mpirun -n 4 allreduce train --data digits     allreduce-train is short for it
  mpirun -n 4 allreduce bench                   which backend wins here
  allreduce bench --help                        the options of a command
  allreduce --print-completion bash             completion for a shell: bash, zsh or tcsh (extra "completion")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `allreduce COMMAND ...` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        return _end(_help(), 0)
    if name == "--version":
        return _run("allreduce.__main__", given, "allreduce")
    if name == "--print-completion":
        return _print_completion(given[1:])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return _end(f"allreduce: error: unknown command {name!r}{hint} (allreduce --help lists all)", BAD_ARGUMENTS)
    if name == "doctor":
        return _run(COMMANDS[name].module, given, "allreduce")  # whose own name is the first argument
    return _run(COMMANDS[name].module, given[1:], f"allreduce {name}")


def train(arguments: Sequence[str] | None = None) -> int:
    """Run `allreduce-train ...` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _run(COMMANDS["train"].module, given, "allreduce-train")


def _run(module: str, arguments: list[str], program: str) -> int:
    if hidden := hidden_by(module.partition(".")[0]):
        return _end(f"{program}: error: {hidden}", BAD_ARGUMENTS)
    return int(importlib.import_module(module).main(arguments, program))


def hidden_by(package: str) -> str:
    """Say which folder hides a package of ours; "" if none does."""
    ours = Path(__file__).resolve().parent / package
    found = importlib.util.find_spec(package)
    origin = Path(found.origin).resolve().parent if found and found.origin else None
    if origin == ours:
        return ""
    if found is None:
        return f"the package {package} is not installed; install allreduce again"
    place = origin or next(iter(found.submodule_search_locations or ()), "?")
    return (
        f"{place} hides the package {package!r} of allreduce ({ours}): rename it, or take its folder out of PYTHONPATH"
    )


def _help() -> str:
    commands = "\n".join(f"  {name:<11} {command.about}" for name, command in COMMANDS.items())
    return f"usage: allreduce COMMAND [OPTION...]\n\ncommands:\n{commands}\n\n{EXAMPLES.rstrip()}"


def _print_completion(arguments: list[str]) -> int:
    """Print a script for a shell, which completes commands and options. Needs the extra "completion"."""
    try:
        import shtab
    except ImportError:
        extra = 'the extra "completion" (pip install ".[completion]" in the checkout)'
        return _end(f"allreduce: error: --print-completion needs {extra}", BAD_ARGUMENTS)
    if len(arguments) != 1 or arguments[0] not in shtab.SUPPORTED_SHELLS:
        shells = ", ".join(shtab.SUPPORTED_SHELLS)
        return _end(f"allreduce: error: --print-completion takes one of {shells}", BAD_ARGUMENTS)
    from trainers.cli.parser import Parser

    top = Parser(prog="allreduce")
    commands = top.add_subparsers()
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.about)
        with suppress(ImportError, SystemExit):  # of a command whose extra is not installed: no options
            importlib.import_module(command.options or command.module).add_options(parser)
    return _end(shtab.complete(top, arguments[0]), 0)


def _end(text: str, code: int) -> int:
    """Print the text on one rank, and return the exit code on all ranks, after rank 0 has printed. Collective."""
    if hidden_by("allreduce"):
        print(text, file=sys.stderr if code else sys.stdout)
        return code
    from allreduce import Topology
    from allreduce.errors import LauncherError

    try:
        topology = Topology()
    except LauncherError:
        print(text, file=sys.stderr if code else sys.stdout)
        return code
    with topology:
        if topology.rank == 0:
            print(text, file=sys.stderr if code else sys.stdout, flush=True)
        topology.world.Barrier()  # mpirun ends the job when a rank exits with a code
    return code
