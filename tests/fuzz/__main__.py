"""Gives hostile files and messages to every reader, in a separate process for each reader.

    python -m tests.fuzz --inputs 100000 --seed 1
    python -m tests.fuzz --readers "CSV,npz data set" --inputs 1000

Every input must end in success or in an error that its reader declares: no other exception, no crash, no hang, no
gigabyte of memory. Any other outcome is shown with its input, and the exit code is then 1. The seed and the number of
inputs determine the run, so it can be repeated.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import mpi4py

from .running import Count

COLUMNS = ("inputs", "accepted", "refused", "defects")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="of all readers together")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--readers", metavar="A,B", help="some of them (default: all)")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    mpi4py.rc.initialize = False
    from .readers import READERS, read_alone

    chosen = [each for each in READERS if args.readers is None or each.name in args.readers.split(",")]
    if not chosen:
        parser.error(f"readers: {', '.join(each.name for each in READERS)}")
    share = args.inputs / sum(each.share for each in chosen)
    print(f"# {args.inputs} inputs, seed {args.seed}\n{'# reader':<26}" + "".join(f"{name:>10}" for name in COLUMNS))
    defects, shown = 0, []
    for reader in chosen:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                count = process.submit(read_alone, reader.name, -int(-share * reader.share // 1), args.seed).result()
            except BrokenProcessPool as error:  # stderr has the stack
                count = Count(defects=1, others={"end": str(error)})
        defects += count.defects
        shown += [f"{reader.name}: {text}" for text in count.others.values()]
        print(f"{reader.name:<26}" + "".join(f"{getattr(count, name):>10}" for name in COLUMNS), flush=True)
    print("\n\n".join(shown))
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
