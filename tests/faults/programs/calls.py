"""Runs of a backend: only its calls, every result of which is known."""

from pathlib import Path
from typing import Any

from allreduce import Topology, create
from allreduce.transport import ulfm
from allreduce.transport.control import all_values
from tests.faults.notes import Notes, members
from tests.faults.plans import STEPS, Plan
from tests.faults.points import WrongResultError

LENGTHS = (1, 1000, 70_000)


class Calls:
    """A backend on the remaining ranks. members: their ranks in the job."""

    def __init__(self, plan: Plan, notes: Notes, topology: Topology) -> None:
        self._plan, self._notes = plan, notes
        self.topology, self.step = topology, 0
        self._backend: Any = None

    def attempt(self) -> None:
        """Do the remaining steps, from the earliest position of any rank. Collective; raises the error of a failure."""
        topology = self.topology
        members, self.step = self._meet()
        self._backend = self._backend or create(self._plan.backend, topology)
        arrays = [self._backend.allocate(length, "float64") for length in LENGTHS]
        while self.step < STEPS:
            array = arrays[self.step % len(arrays)]
            array[:] = _value(self._notes.rank, self.step)
            self._backend(array, "sum")
            right = sum(_value(member, self.step) for member in members)
            if not (array == right).all():
                raise WrongResultError(f"step {self.step}: {array[:3]}, right {right}, of {members}")
            self._notes.step(self.step, topology)
            self.step += 1

    def _meet(self) -> tuple[list[int], int]:
        found = all_values(self.topology.world, [self._notes.rank, self.step], "hear who is left, and how far")
        return [rank for rank, _ in found], min(step for _, step in found)

    def again(self) -> None:
        """Continue with the remaining ranks. Collective over them."""
        self.topology, self._backend = self.topology.survivors(), None


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
