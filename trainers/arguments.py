"""What a MirroredTrainer was asked for, and what is wrong with it."""

from typing import NamedTuple

from allreduce.base import AllReduce
from allreduce.topology import Topology
from trainers import holding, twins
from trainers.backends import UPDATES, compression_twice
from trainers.errors import ArgumentError
from trainers.on_failure import refusal
from trainers.replica import Replica


class Arguments(NamedTuple):
    """The arguments of a MirroredTrainer; see there."""

    allreduce: str | AllReduce
    topology: Topology | None
    update: str
    compress: str | None
    copies: int
    on_failure: str | None

    def described(self, replica: Replica) -> str:
        """What must be alike on the ranks."""
        name = self.allreduce.name if isinstance(self.allreduce, AllReduce) else self.allreduce
        options = ", ".join(f"{field}={getattr(self, field)!r}" for field in self._fields[2:])
        return f"MirroredTrainer({type(replica).__name__}, {name!r}, {options})"

    def refused(self, ranks: Topology, replica: Replica, remakes: bool) -> Exception | None:
        """What makes no sense on this rank. Local.

        ranks: that train. remakes: whether the trainer makes its backend itself, whatever was given.
        """
        given, update = self.allreduce, self.update
        if error := holding.refusal(replica):
            return error
        if update not in UPDATES:
            return ArgumentError(f"update={update!r} is unknown; use one of {', '.join(UPDATES)}")
        if isinstance(given, AllReduce) and self.topology not in (None, given.topology):
            return ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
        if update != "sharded" and self.copies == 2:
            return ArgumentError(f'copies=2: with update="{update}" all ranks have everything; leave it out')
        return (
            compression_twice(given, self.compress)
            or twins.refusal(self.copies, ranks.size, self.on_failure == "continue")
            or refusal(self.on_failure, ranks, replica, None if remakes else given)
        )
