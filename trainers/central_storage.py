"""CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute."""

from typing import Any

from allreduce.backend import AllReduce
from allreduce.elastic.standby import JoiningRank
from allreduce.keywords import known_only
from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.central_storage import CentralStorage
from trainers.trainer import Trainer


class CentralStorageTrainer(Trainer[CentralStorage]):
    """Synchronous training with the parameters and the optimizer on one rank.

    It keeps MirroredTrainer's promises: the results are the same to float tolerance, and all replicas hold the same
    bits. Optimizer state takes memory on the storage rank alone; on one node the parameters do too. Edits of
    parameters in place are for `edit`, as with update="sharded".

    A replica without `bind_parameters`, or on a GPU, gets its whole state after each step instead, by a copy.

        with CentralStorageTrainer(NumpyNetwork([64, 32, 10]), storage=0) as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)

    Also attributes: `storage`, the rank that holds the parameters, and `allreduce` and `buffer`, as of MirroredTrainer.
    """

    @known_only
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
        if isinstance(topology, JoiningRank):  # the others know where the storage is
            storage = 0
        strategy = CentralStorage(replica, type(self).__name__, storage, device, copies)
        super().__init__(strategy, topology, on_failure)

    @property
    def storage(self) -> int:
        """The rank that holds the parameters now."""
        return self.strategy.storage

    @property
    def allreduce(self) -> AllReduce:
        """The backend that adds up the gradients."""
        assert self.strategy.allreduce is not None
        return self.strategy.allreduce

    @property
    def buffer(self) -> Any:
        """What is reduced in every step; None when the trainer is closed."""
        return self.strategy.buffer
