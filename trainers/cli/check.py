"""Checks a command line of `python -m trainers` in one process, before a launcher starts the ranks, or prints its help.

scripts/train.sh runs it: a launcher adds its own text to the error of a rank, and the ranks take longer to start.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from allreduce.algorithms import class_of
from allreduce.errors import AllReduceError
from trainers import datasets
from trainers.cli import results
from trainers.cli.main import BAD_ARGUMENTS, COMMANDS
from trainers.cli.options import parse
from trainers.errors import TrainerError

PROGRAM = "python -m trainers"


def main(arguments: Sequence[str]) -> int:
    """Check the options that need neither ranks nor data. Prints one line for an error; returns the exit code."""
    try:
        if arguments[:1] and arguments[0] in COMMANDS:
            name = arguments[0]
            import_module(COMMANDS[name]).COMMAND.parse(arguments[1:], True, f"{PROGRAM} {name}")
        else:
            options = parse(arguments, True, PROGRAM)
            if options.allreduce is not None:
                class_of(options.allreduce)
            datasets.check_source(options.data)
            results.check_targets(options)
    except (AllReduceError, TrainerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
