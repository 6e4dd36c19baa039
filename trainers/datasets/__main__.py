"""Data sets to try things with.

    python -m trainers.datasets make mnist/                    a folder of MNIST-format files
    mpirun -n 4 python -m trainers --data mnist/ --epochs 5    trains on them

make writes 1,437 images to train and 360 to test: the digits that come along, enlarged to 28x28 bytes. It downloads
nothing and overwrites nothing. Exit code: 0, or 2 when the folder can't be made.
"""

import sys
from collections.abc import Sequence

from trainers.datasets import making
from trainers.datasets.parser import Parser
from trainers.errors import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what the command line says; the exit code."""
    parser = Parser(prog="python -m trainers.datasets", description=__doc__)
    parser.add_argument("command", choices=["make"], help="what to do")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to make: one that is not there, or is empty")
    options = parser.parse_args(arguments)
    try:
        print(f"made {making.make(options.folder)}")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
