"""Random sequences of public calls on trainers, each checked against one process that did the same calls.

    mpirun -n 3 python -m tests.sequences [WHAT] [--seed 1] [--sequences 100] [--calls 14] [--seconds 600] [--verbose]

WHAT: trainers; loops: of PyTorch, with MirroredOptimizer and DDP; backends; composition: of the features of backends;
found: defects found so far, and trainers.

All ranks draw the same calls from the seed. A sequence creates trainers of all kinds on a few replicas, one after the
other and side by side, and calls them: fits of all sizes that finish, are stopped, or raise an error on one rank or on
all, checkpoints and resumed fits, evaluations, predictions, models saved and loaded, refused calls. After each call all
ranks must have the same outcome and the same model. If the result does not depend on the ranks' speeds, the model must
equal that of a shadow, which trains alone. A failure prints the seed of its sequence and the calls so far.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

from mpi4py import MPI

from tests.sequences.backends import Backends
from tests.sequences.calls import FailureError
from tests.sequences.composition import Composition
from tests.sequences.found import run_found
from tests.sequences.sequence import Sequence


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "what", choices=["trainers", "loops", "backends", "composition", "found"], nargs="?", default="trainers"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence; the next ones count on")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--calls", type=int, default=14, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other sequence begins")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--without", nargs="*", default=[], help="actions that are left out")
    return parser.parse_args()


def run(comm: MPI.Intracomm, seed: int, given: argparse.Namespace, torch: bool) -> tuple[Counter[str], bool]:
    """One sequence: how many calls of each name, and whether all was well."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else "")
    sequence: Any = None
    if given.what == "trainers":
        sequence = Sequence(comm, seed, folder, given.verbose, torch, tuple(given.without))
    elif given.what == "backends":
        sequence = Backends(comm, seed, folder, given.verbose)
    elif given.what == "composition":
        sequence = Composition(comm, seed, folder, given.verbose)
    else:
        from tests.sequences.loops import Loops, begin_group

        begin_group(comm)
        sequence = Loops(comm, seed, folder, given.verbose)
    if given.verbose and comm.rank == 0:
        print(sequence, flush=True)
    failure = None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # SIGTERM is told there
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
    for name in ("trainers", "allreduce"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("ALLREDUCE_TIMEOUT_SECONDS", "30")  # of all topologies
    comm = MPI.COMM_WORLD.Dup()
    torch = not given.no_torch and all(comm.allgather(has_torch()))
    if given.what == "found":
        run_found(torch)
        given.what = "trainers"
    begin, done, failed = time.monotonic(), 0, 0
    calls: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.sequences):
        if comm.bcast(time.monotonic() - begin > given.seconds):
            break
        counted, well = run(comm, seed, given, torch)
        done, failed, calls = done + 1, failed + (not well), calls + counted
    if comm.rank == 0:
        total = {"ranks": comm.size, "sequences": done, "failed": failed, "calls": sum(calls.values())}
        print(json.dumps(total | {"seconds": round(time.monotonic() - begin, 1)} | calls), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
