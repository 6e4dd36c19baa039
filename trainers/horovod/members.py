"""The ranks of one process set: their negotiation by name, and what moves and reduces their tensors."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from allreduce.errors import AllReduceError, OptionError
from allreduce.messages.lanes import Pending
from allreduce.messages.named import Side, Sides
from allreduce.topology import Topology
from allreduce.torch_backend.moving import Mover
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.reducing import Reducer
from trainers.horovod import arguments, working
from trainers.horovod.errors import DuplicateNameError, internal


class Members:
    """On a topology of their own. Creating it and `close` are collective over them.

    ranks: theirs in the world, in the order of the topology.
    """

    def __init__(self, topology: Topology, ranks: Sequence[int]) -> None:
        fuse_bytes = arguments.fusion_bytes()
        self.topology, self.ranks = topology, list(ranks)
        self.rank, self.size = topology.rank, topology.size
        made = topology.duplicate()  # what the worker's thread makes and calls while this one may make others
        self._comm = made.private()
        self.reducer, self.mover = Reducer(made, self._comm, Options()), Mover(self._comm)
        names = topology.private()
        self.lane = topology.worker.named("the calls of Horovod's API", names, self._stand_in, fuse_bytes)
        self._counts: Counter[str] = Counter()

    def name(self, kind: str, given: str | None) -> str:
        """A call's name; the n-th call of a kind without one has the same on all ranks."""
        if given is not None:
            return f"{kind}.{given}"
        self._counts[kind] += 1
        return f"{kind}.noname.{self._counts[kind]}"

    def begin_numbers(self) -> None:
        """Count calls without a name anew, on all ranks: those that had joined have made fewer. Local."""
        self._counts.clear()

    def submit(self, name: str, side: Side, work: Callable[[Sides], object]) -> Pending:
        """Have `work` called when all members have come to this name. Raises DuplicateNameError."""
        try:
            return self.lane.call(name, side, work)
        except OptionError as error:
            raise DuplicateNameError(str(error)) from None

    def _stand_in(self, same: Any) -> Callable[[Sides], object]:
        return working.stand_in(self, same)

    def close(self) -> None:
        """Close the topology and all that was made on it, when the calls have ended. Local when one has stalled."""
        if self.lane.broken is not None:
            self.topology.abandon()
            return
        try:
            self.submit(self.name("close", None), Side("close", what="hvd.shutdown"), lambda _: None).wait()
        except AllReduceError as error:
            self.topology.abandon()
            raise internal(error) from error
        self.lane.abandon()
        self.reducer.close()
        self.topology.close()
