"""One rank of a job that runs random programs, one after the other.

    mpirun -n 3 python -m tests.faults.random_programs.rank FOLDER LIMIT KINDS CHECKS SEED...

Each rank notes in FOLDER the outcome of each program. If a program finishes, or ends in an error that all ranks have,
the next one follows; any other program ends the job, as it would end a job of its own.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import allreduce
from allreduce.errors import AllReduceError

# isort: split
from mpi4py import MPI

from tests.faults.notes import Notes
from tests.faults.points import InjectedError, WrongResultError, die
from tests.faults.random_programs import making
from tests.faults.random_programs.making import ENDINGS, Call, Program
from tests.ranks.hosts import Hosts

HUNG = 86  # the exit code of a rank that has waited longer than the limit


class Run:
    """One program on this rank."""

    def __init__(self, program: Program, comm: MPI.Intracomm) -> None:
        self.program, self.rank = program, comm.rank
        if program.hosts:
            Hosts.sizes = program.nodes or ()
            comm = Hosts(comm)
        self.topology = allreduce.Topology(comm, ranks_per_node=None if program.hosts else program.nodes)
        self.backends: dict[int, Any] = {}
        self.arrays: dict[tuple[int, int | None], np.ndarray] = {}
        self.turns: dict[int, int] = {}
        self.at = -1

    def run(self) -> None:
        for call in self.program.of_rank(self.rank):
            self.at += 1
            if call.what in ENDINGS:
                end(call.what)
            getattr(self, call.what)(call)
        self.at += 1
        self.topology.close()

    def create(self, call: Call) -> None:
        self.backends[call.backend] = allreduce.create(call.name, self.topology, check=self.program.check == "on")

    def allocate(self, call: Call) -> None:
        self.arrays[call.backend, call.array] = self.backends[call.backend].allocate(call.length, call.dtype)

    def reduce(self, call: Call) -> None:
        array, turn = self.filled(call)
        self.backends[call.backend](array, call.op)
        self.compare(call, turn, array)

    def broadcast(self, call: Call) -> None:
        array, turn = self.filled(call)
        self.backends[call.backend].broadcast(array, int(call.op))
        if self.rank != int(call.op):  # the root need not wait for anybody
            self.compare(call, turn, array)

    def collect(self, call: Call) -> None:
        array, turn = self.filled(call)
        self.compare(call, turn, self.backends[call.backend].stack(array))

    def filled(self, call: Call) -> tuple[np.ndarray, int]:
        """The array of a call with this rank's values, and the call's number on its backend."""
        turn = self.turns[call.backend] = self.turns.get(call.backend, -1) + 1
        array = self.memory(call)
        array[:] = making.values(call, self.rank, turn)
        return array, turn

    def compare(self, call: Call, turn: int, found: np.ndarray) -> None:
        """Raise WrongResultError if the result differs from NumPy's."""
        if call.length == 0:
            return  # nothing can be wrong, and nobody is waited for
        right = making.expected(self.program, call, turn)
        name = self.backends[call.backend].name
        if right is None:
            raise WrongResultError(f"{call} on {name} came back")
        if found.shape != right.shape or not np.allclose(found, right, rtol=1e-5):
            raise WrongResultError(f"{call} on {name}: {found[:5]}, right {right[:5]}")

    def close(self, call: Call) -> None:
        self.backends[call.backend].close()

    def memory(self, call: Call) -> np.ndarray:
        if call.array is not None:
            whole = self.arrays[call.backend, call.array]
            begin, stop = making.ends(call.part, whole.size)
            if (stop - begin, whole.dtype) == (call.length, call.dtype):  # not so when its allocation was changed
                return whole[begin:stop]
        return np.empty(call.length, call.dtype)


def end(how: str) -> None:
    """End this rank on purpose, or block it for ever, in one of the ways in which a program can."""
    if how == "exception":
        raise InjectedError("injected")
    if how == "killed":
        die()
    if how == "asleep":
        time.sleep(3600)
    if how == "exit":
        sys.exit(3)
    raise EndOfProgram


class EndOfProgram(BaseException):
    """Raised when a rank has nothing more to do."""


def main(folder: Path, limit: float, programs: list[Program]) -> None:
    control = MPI.COMM_WORLD.Dup()
    notes = Notes(folder, control.rank)

    def note(seed: int, outcome: str, text: str = "") -> None:
        notes.add("outcome", seed=seed, rank=control.rank, outcome=outcome, text=text[:300])

    def hung() -> None:
        note(program.seed, "hang", f"rank {control.rank} in call {run.at if run else -1}")
        os._exit(HUNG)

    run: Run | None = None
    for program in programs:
        seed = program.seed
        timer = threading.Timer(limit, hung)
        timer.daemon = True
        timer.start()
        outcome, text, run = "right", "", None
        try:
            run = Run(program, control.Dup())
            run.run()
        except EndOfProgram:
            return
        except WrongResultError as error:
            outcome, text = "wrong", str(error)
        except AllReduceError as error:
            outcome, text = "named", f"{type(error).__name__}: {error}"
            if control.size > 1 and error.ranks is None:
                note(seed, "alone", text)  # and end the job, as the program would
                raise
        except (InjectedError, KeyboardInterrupt):
            raise
        except Exception as error:
            note(seed, "raw", f"{type(error).__name__}: {error}")
            raise
        note(seed, outcome, text)
        if outcome == "wrong":
            os._exit(HUNG)  # the others may be anywhere now
        if outcome == "named" and run is not None:
            run.topology.close()  # what a program does that has caught the error
        control.Barrier()
        timer.cancel()
        note(seed, "done")


if __name__ == "__main__":
    folder, limit, kinds, checks, *seeds = sys.argv[1:]
    drawn = [making.make(int(seed), kinds.split(","), checks.split(",")) for seed in seeds]
    main(Path(folder), float(limit), drawn)
