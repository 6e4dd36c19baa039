"""CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute.

The gradients are added up on that rank, it updates, and the parameters go back into the memory of all replicas. On one
node that memory is one, so nothing goes back: who computes reads where the storage rank has written.
"""

import zlib
from typing import Any

from allreduce import notices
from allreduce.backends.central import Central
from allreduce.elastic.standby import NEWCOMER, Joining
from allreduce.topology import Topology
from allreduce.transport.control import everywhere, root_value
from trainers import trainer
from trainers.errors import ArgumentError
from trainers.mirrored import MirroredTrainer
from trainers.recovery.calls import outlives_losses
from trainers.replica import Replica
from trainers.strategies.central_storage import CentralUpdate, CopiedUpdate, _moved

DEVICES = ("cpu", "cuda")


class CentralStorageTrainer(MirroredTrainer):
    """Synchronous training with the parameters and the optimizer on one rank.

    It keeps MirroredTrainer's promises: the results are the same to float tolerance, and all replicas hold the same
    bits. Optimizer state takes memory on the storage rank alone; on one node the parameters do too. Edits of
    parameters in place are for `edit`, as with update="sharded".

    A replica without `bind_parameters`, or on a GPU, gets its whole state after each step instead, by a copy.

        with CentralStorageTrainer(NumpyNetwork([64, 32, 10]), storage=0) as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    remakes = True

    @outlives_losses
    def __init__(
        self,
        replica: Replica,
        topology: Topology | None = None,
        *,
        storage: int = 0,
        device: str | None = None,
        copies: int = 1,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal and move their parameters to the storage rank. Collective.

        replica: this rank's copy of the model.
        topology: of the ranks that train together; all ranks by default.
        storage: the rank that holds the parameters and updates them. It computes too.
        device: where they are: "cpu" or "cuda", that of the replicas, which None stands for.
        copies: as of MirroredTrainer: 2: another rank keeps what the storage rank has, and takes its place.
        on_failure: as of MirroredTrainer. Without the storage rank a fit goes back to its last checkpoint, on rank 0.

        Raises on all ranks, and leaves nothing behind: ArgumentError, DisagreementError (models that differ).
        """
        ranks = topology or Topology()
        if isinstance(ranks, Joining):  # the others know where the storage is
            storage = 0
        self.storage = storage
        backend: Central | None = None
        try:
            _agree_on_arguments(ranks, replica, storage, device)
            with ranks.trial():
                backend = Central(ranks, root=storage)
            super().__init__(replica, backend, update="sharded", copies=copies, on_failure=on_failure)
        except Exception as error:
            if everywhere(error, ranks.world):  # so all ranks come to the close
                if backend is not None:
                    backend.close()
                if topology is None:
                    ranks.close()
            raise
        self._owns_backend, self._owns_topology = True, topology is None

    def _share_update(self) -> None:
        assert isinstance(self.allreduce, Central)
        parts = self.replica, self.allreduce, self.buffer, self._comm, self._communication
        steps = self.steps
        if self.size == 1:
            return
        if self.replica.device == "cpu":
            try:
                self._sharded = CentralUpdate(*parts, self._measured, steps, self._copies_kept())
                return
            except ArgumentError as refusal:  # on all ranks
                notices.once(self.rank, f"central storage copies the model's whole state in every step: {refusal}")
        self._sharded = CopiedUpdate(*parts, self._measured, steps)

    def _make_backend(self, topology: Topology) -> Central:
        """The storage rank stays, where it is left; rank 0 takes its place."""
        storage, former = _moved(self.storage, topology.former), topology.former
        if NEWCOMER in former:
            old = next(rank for rank, before in enumerate(former) if before != NEWCOMER)
            storage = root_value(topology.world, storage, "hear where the storage is", old)
        self.storage = storage
        return Central(topology, root=self.storage)

    def _renumber(self, arguments: dict[str, Any], former: tuple[int, ...]) -> None:
        arguments["storage"] = _moved(arguments.get("storage", 0), former)

    @property
    def tells_errors(self) -> bool:  # type: ignore[override]
        """The storage rank sees the flags of all before it updates."""
        return self.replica.device == "cpu"


def _agree_on_arguments(ranks: Topology, replica: Replica, storage: Any, device: str | None) -> None:
    """Raise on all ranks what is wrong with the arguments of any, before anything is made. Collective."""
    error = trainer.replica_refusal(replica)
    if isinstance(storage, bool) or not isinstance(storage, int) or not 0 <= storage < ranks.size:
        error = ArgumentError(f"storage must be a rank of this training, 0 to {ranks.size - 1}, got {storage!r}")
    elif device not in (None, *DEVICES):
        error = ArgumentError(f"device={device!r} is unknown; use one of {', '.join(DEVICES)}, or None")
    elif error is None and device not in (None, replica.device):
        error = ArgumentError(
            f'device="{device}": this {type(replica).__name__} is on {replica.device}, and a replica updates where it '
            f"is; make all replicas on {device}, or leave out device"
        )
    row = f"CentralStorageTrainer({type(replica).__name__}, storage={storage!r}, device={device!r})"
    ranks.agree([zlib.crc32(row.encode())], row, error)
