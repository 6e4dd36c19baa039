"""Random sequences of calls on backends with random features, checked against NumPy and an equal plain backend.

    mpirun -n 3 python -m tests.sequences [--seed 1] [--sequences 100] [--calls 14] [--seconds 600] [--verbose]

All ranks draw the same calls from the seed; composition.py says which. A failure prints the seed of its sequence and
the calls so far; of a call that hangs, --verbose shows the calls before it. Fits are drawn by tests.matrix.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter

from mpi4py import MPI

from tests.sequences.calls import FailureError
from tests.sequences.composition import Composition


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence; the next ones count on")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--calls", type=int, default=14, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other sequence begins")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def run(comm: MPI.Intracomm, seed: int, given: argparse.Namespace) -> tuple[Counter[str], bool]:
    """One sequence: how many calls of each name, and whether all was well."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else "")
    sequence = Composition(comm, seed, folder, given.verbose)
    sequence.watched = True
    if comm.rank == 0:
        print(sequence, flush=True)
    failure = None
    try:
        sequence.run(given.calls)
    except FailureError as error:
        failure = error
    if failure is not None and comm.rank == 0:
        traceback.print_exception(failure.__cause__ or failure)
        print(f"FAILED: {sequence}: {failure}", *sequence.log, sep="\n   ", flush=True)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return sequence.calls, failure is None


def main() -> int:
    given = options()
    os.environ.setdefault("ALLREDUCE_TIMEOUT_SECONDS", "30")  # of all topologies
    comm = MPI.COMM_WORLD.Dup()
    begin, done, failed = time.monotonic(), 0, 0
    calls: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.sequences):
        if comm.bcast(time.monotonic() - begin > given.seconds):
            break
        counted, well = run(comm, seed, given)
        done, failed, calls = done + 1, failed + (not well), calls + counted
    if comm.rank == 0:
        total = {"ranks": comm.size, "sequences": done, "failed": failed, "calls": sum(calls.values())}
        print(json.dumps(total | {"seconds": round(time.monotonic() - begin, 1)} | calls), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
