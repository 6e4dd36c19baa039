"""What is left when a rank dies: how the others agree what they have done, and the topology they go on with."""

from collections.abc import Sequence
from typing import TypeVar

from mpi4py import MPI

from allreduce.errors import UnavailableError
from allreduce.nodes import nodes_left
from allreduce.ownership import Owner
from allreduce.process import children
from allreduce.transport import deferred_free, ulfm
from allreduce.transport.control import waiting
from allreduce.transport.wait import Said, Wait

TopologyT = TypeVar("TopologyT", bound="Survival")


class Survival(Owner):
    """The part of a topology that outlives ranks, where MPI offers it (messages/losses.py)."""

    former: tuple[int, ...]  # the rank that each rank had in the topology before, for one of survivors
    timeout: float
    _finish: Wait
    _ranks_per_node: int | Sequence[int] | None

    def __init__(
        self, comm: MPI.Intracomm | None, ranks_per_node: int | Sequence[int] | None, timeout: float | None
    ) -> None:
        raise NotImplementedError

    @staticmethod
    def _given(comm: MPI.Intracomm | None) -> MPI.Intracomm:
        """The communicator, or the default."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Let go of everything without the other ranks."""
        raise NotImplementedError

    def _stand_apart(self) -> None:
        raise NotImplementedError

    def finished(self, ok: bool = True) -> bool:
        """Whether all ranks that are left come here with `ok`: the same answer on all of them. Collective over those.

        The end of what a loss may interrupt: ranks that have heard of it come with ok=False, others, whose calls have
        all returned, with True. On False all of them call `survivors` and do it again; on True it is done, whoever
        has died meanwhile, and a loss is met in the next call. Nobody must wait for others on the way here but
        in calls of this topology, its children and its backends. Without ULFM the answer is `ok`, and nobody waits.

        Raises RankLeftError when a rank comes no more without being lost: it has ended its program, or closed this.
        """
        self.check_open()
        if not ulfm.in_force():
            return ok
        call = Said("finished: the end of what a lost rank may interrupt")
        self._finish.begin(call)
        try:
            return ulfm.agree(self.world, ok, lambda: self.watch.notes.look_at_end(call))
        finally:
            self._finish.end()

    def _place_to_finish(self) -> Wait:
        """Where `finished` waits, and what ranks that leave say so on, whoever is lost. Collective."""
        place = self.watch.place(self._number(), raises=True)
        if ulfm.in_force():
            with waiting(self.world, "make a communicator"):
                self._unrevoked = self._own(self.world.Dup())
            self.watch.notes.part_on(self._unrevoked, place)
        return place

    def survivors(self: TopologyT) -> TopologyT:
        """The topology of the ranks that are left, in their order, on the nodes they were on. Collective over those.

        When another rank dies meanwhile, it is made again. This topology and all that uses it are revoked and
        abandoned; arrays from `allocate` stay readable. Simulated nodes keep those of their ranks that are left. The
        new topology's `former` are the ranks that its ranks had here.

        Raises UnavailableError where ULFM is not in force.
        """
        self.check_open()
        if not ulfm.in_force():
            raise UnavailableError(
                "ranks can't be outlived in this job: start it with Open MPI's mpirun --with-ft ulfm"
            )
        self.revoke()
        made = type(self).of_survivors(self.world, self._ranks_per_node, self.timeout)
        if self.apart:
            made._stand_apart()
        self.abandon()
        return made

    @classmethod
    def of_survivors(
        cls: type[TopologyT],
        comm: MPI.Intracomm | None = None,
        ranks_per_node: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> TopologyT:
        """`Topology(...)` of those ranks of `comm` that are alive, whoever dies meanwhile. Collective over those.

        For the start of a program that goes on without lost ranks. Without ULFM it is `Topology(...)`.
        """
        children.check()
        comm = cls._given(comm)
        while ulfm.in_force():
            with waiting(comm, "make a topology of the ranks that are left"):
                left = ulfm.shrink(comm)
            former, made = ulfm.places(left, comm), None
            try:
                made = cls(left, nodes_left(ranks_per_node, former, comm.size), timeout)
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
            done = ulfm.agree(left, made is not None)
            left.Free()
            if made is not None and done:
                made.former = former
                deferred_free.repaired()
                return made
            if made is not None:
                made.revoke()
                made.abandon()
        return cls(comm, ranks_per_node, timeout)
