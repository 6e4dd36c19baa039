"""Runs of backends: only their calls, every result of which is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology, create
from allreduce.errors import DisagreementError
from allreduce.transport import ulfm
from allreduce.transport.control import all_values
from tests.backends import ON_CPU
from tests.faults.notes import Notes, members
from tests.faults.plans import IN_TURN, STEPS, Plan
from tests.faults.points import WrongResultError

LENGTHS = (1, 1000, 70_000)


class Calls:
    """The backends of the remaining ranks, and their steps."""

    def __init__(self, plan: Plan, notes: Notes, topology: Topology) -> None:
        self._plan, self._notes = plan, notes
        self.topology, self.step = topology, 0
        self._losses = 0
        self._backend: Any = None

    def attempt(self) -> None:
        """Do the remaining steps, from the earliest position of any rank. Collective; raises the error of a failure."""
        topology = self.topology
        self._members, self.step = self._meet()
        self._backend = self._backend or create(self._name(), topology)
        self._arrays = [self._backend.allocate(length, "float64") for length in LENGTHS]
        while self.step < STEPS:
            KINDS[self.step % len(KINDS)](self)
            self._notes.step(self.step, topology)
            self.step += 1

    def _name(self) -> str:
        if self._plan.backend != IN_TURN:
            return self._plan.backend
        usable = [name for name in ON_CPU if name != "shared" or self.topology.nodes == 1]
        return usable[self._losses % len(usable)]

    def _meet(self) -> tuple[list[int], int]:
        found = all_values(self.topology.world, [self._notes.rank, self.step], "hear who is left, and how far")
        return [rank for rank, _ in found], min(step for _, step in found)

    def again(self) -> None:
        """Continue with the remaining ranks. Collective over them."""
        self.topology, self._backend = self.topology.survivors(), None
        self._losses += 1

    # The kinds of steps

    def filled(self, array: np.ndarray) -> np.ndarray:
        array[:] = _value(self._notes.rank, self.step)
        return array

    def check(self, found: np.ndarray, op: str = "sum", ranks: list[int] | None = None) -> None:
        """Check a reduction of the values of all ranks, or of these."""
        values = [_value(rank, self.step) for rank in ranks or self._members]
        right = sum(values) if op == "sum" else max(values)
        if not (found == right).all():
            raise WrongResultError(f"step {self.step}: {found[:3]}, right {right}, of {self._members}")

    def arrays(self) -> None:
        """Of the backend, and ordinary ones; with an operation whose first call prepares its work."""
        for array in (self._arrays[self.step % len(LENGTHS)], np.empty(1000)):
            for op in ("sum", "max"):
                self._backend(self.filled(array), op)
                self.check(array, op)

    def phases(self) -> None:
        if self._backend.two_phase:
            array = self.filled(self._arrays[-1])
            self._backend.reduce_scatter(array, "sum")
            self._backend.all_gather(array)
            self.check(array)

    def gather(self) -> None:
        """The others wait in MPI_Allgatherv for a failed rank's values. Open MPI's returns as if it had them."""
        found = self._backend.stack(self._notes.rank)
        if found.tolist() != self._members:
            raise WrongResultError(f"step {self.step}: gathered {found}, right {self._members}")

    def submitted(self) -> None:
        """The threads of the other ranks are inside of MPI, or wait for the rank's announcement."""
        pending = [(array, self._backend.submit(self.filled(array), "sum")) for array in self._arrays]
        for array, call in pending:
            call.wait()
            self.check(array)

    def differing(self) -> None:
        """The ranks tell each other how their calls differ."""
        if len(self._members) > 1:
            odd = self._notes.rank == self._members[0]
            try:
                self._backend(np.ones(1000 + self.step + odd), "sum")
            except DisagreementError:
                return
            raise WrongResultError(f"step {self.step}: calls that differ were made")

    def another(self) -> None:
        """A second backend is created, used and closed."""
        with create("auto", self.topology) as backend:
            array = self.filled(np.empty(3))
            backend(array, "sum")
            self.check(array)

    def part(self) -> None:
        """Parts of the topology without a failed rank end too, because the whole topology does."""
        ranks = [rank for rank in self._members if rank % 2 == self._notes.rank % 2]
        with self.topology.split(self._notes.rank % 2) as part, create("ring", part) as backend:
            array = self.filled(np.empty(1000))
            backend(array, "sum")
            self.check(array, ranks=ranks)


KINDS: list[Callable[[Calls], None]] = [
    Calls.arrays, Calls.phases, Calls.gather, Calls.submitted, Calls.differing, Calls.another, Calls.part,
]  # fmt: skip


def _value(rank: int, step: int) -> int:
    return (rank + 1) * (step + 1)


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    calls = Calls(plan, notes, topology)
    while True:
        try:
            calls.attempt()
            done = True
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            calls.topology.revoke()
            done = False
        if calls.topology.finished(done):
            break
        calls.again()
    notes.add("end", ranks=members(calls.topology))
    calls.topology.close()
