"""What a trainer does with the other ranks besides training: agree, and hand each other a state."""

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.errors import ClosedError, DisagreementError, RankLeftError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import agree, everywhere, together, waiting
from trainers.admission import look_at, tell_collective, tell_who_divides
from trainers.mirroring import mirror
from trainers.replica import Replica
from trainers.samples import Collate


class Ranks:
    """The part of a trainer that knows who the ranks are. `_connect` is called again when a rank was lost."""

    replica: Replica
    topology: Topology
    rank: int
    size: int
    part: int | None  # which part of every batch this rank takes; None for none
    parts: int
    closed: bool
    being_made = False  # whether its constructor may have to be called again, since a rank was lost
    _comm: MPI.Intracomm
    _owns_backend = _owns_topology = False

    def _connect(self, topology: Topology) -> None:
        """Make what depends on the ranks. Collective; what was made on other ranks is dropped before."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self.part, self.parts = topology.rank, topology.size
        self._comm = topology.private(self)  # type: ignore[arg-type]

    def _unmake(self) -> None:
        """The constructor was interrupted by a loss, and is called again: let go of what others share. Local."""

    def _renumber(self, arguments: dict[str, Any], former: tuple[int, ...]) -> None:
        """Change the constructor's arguments that name ranks, for others. former: those that these had. Local."""

    def _reconnect(self, topology: Topology) -> None:
        """Make anew what depends on the ranks, after `_let_go_of_ranks`. Collective."""
        self._connect(topology)

    def _let_go_of_ranks(self) -> None:
        """Drop what was made on ranks of which some are lost, and keep what this rank has of the state. Local.

        May be called again when another rank is lost before `_restore` has ended.
        """
        self.topology.let_go(self)  # type: ignore[arg-type]
        self.replica.undo()  # a batch of a step that was not taken

    def _restore(self) -> bool:
        """All ranks take on the newest state and its `steps`; false when nobody has it whole. Collective."""
        raise NotImplementedError

    def _share_again(self) -> None:
        """All ranks have the same state: divide what they divide. Collective."""

    def _go_on(self) -> None:
        """All ranks have everything that they need to go on. Local."""

    # A state that ranks hold together

    def _whole(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A state of the replica with what other ranks have of it. Collective."""
        return state

    def _complete(self) -> None:
        """Have rank 0's replica hold its whole state. Collective."""

    def _snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A copy of the whole state on rank 0, in `memory` as of Replica.snapshot; of nothing elsewhere. Collective."""
        self._complete()
        return together(self._comm, lambda: self.replica.snapshot(memory) if self.rank == 0 else {})

    def _check_edits(self) -> None:
        """Raise, on this rank, when the replica was edited in a way that several ranks may have done."""

    def _settle(self) -> None:
        """The ranks have written the same parameters: go on when all have done so. Collective."""

    # Agreement

    def _admit(
        self, call: str, x: Any, y: Any, settings: dict[str, Any] | None = None, collate: Collate | None = None
    ) -> tuple[Any, Any]:
        """Arrays x and y, or Samples and None, when all ranks bring the same and it makes sense; or all raise."""
        self._check_open()
        data, row, error = look_at(self.replica, call, (x, y), settings or {}, collate)
        try:
            self._begin(row, error)
        except DisagreementError as differ:
            tell_who_divides(differ, row, settings or {})
            raise
        return data

    def _admit_validation(self, given: Any, collate: Collate | None) -> tuple[Any, Any]:
        pair = isinstance(given, tuple | list)
        x, y = given if pair and len(given) == 2 else (given, None)
        return self._admit("validation_data of fit", x, y, collate=None if pair else collate)

    def _enter(self, call: str) -> None:
        """Begin a method without data; a rank that came to another one is told instead of waited for."""
        self._check_open()
        self._begin(call)

    def _begin(self, row: str, error: Exception | None = None) -> None:
        """As `_agree`, at the begin of a method, to which some ranks may never come."""
        try:
            self._agree(row, error)
        except RankLeftError as left:
            tell_collective(left, row)
            raise

    def _agree(self, row: str, error: Exception | None = None) -> None:
        """Raise on all ranks an error of any, or that they differ. row: this rank's side in words. Collective."""
        try:
            agree(self._comm, [zlib.crc32(row.encode())], row, error)
        except DisagreementError as differ:
            tell_collective(differ, row)
            raise

    def _on_one(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; its error, whatever it is, is raised on all ranks."""
        together(self._comm, lambda: action() if self.rank == 0 else None)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed; make another to go on")
        if not self._has_replica:
            newer = type(self.replica.hold.trainer).__name__
            raise ClosedError(
                f"this {type(self).__name__} trains no more, since a {newer} was made on its replica; use that one"
            )

    @property
    def _has_replica(self) -> bool:
        """Whether no trainer was made on the replica since this one. Local."""
        return self.replica.hold.trainer is self

    def _in_step(self, error: BaseException) -> bool:
        """Whether all ranks leave a block by this error, so that they can go on together. Local."""
        return isinstance(error, Exception) and everywhere(error, self._comm) and ulfm.lost(error) is None

    def _parameters_sha256(self) -> list[str]:
        self._enter("parameters_sha256")
        parameters = np.ascontiguousarray(together(self._comm, self.replica.state)["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((self.size, mine.size), np.uint8)
        with waiting(self._comm, "parameters_sha256"):
            self._comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def _mirror(self, whole: bool = True) -> None:
        """Give all replicas the state of rank 0's, as `mirroring.mirror` does."""
        mirror(self, whole)  # type: ignore[arg-type]
