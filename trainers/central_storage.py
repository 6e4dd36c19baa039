"""CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute."""

from allreduce.elastic.standby import JoiningRank
from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.few_owners import FewOwners, Storage
from trainers.trainer import Trainer


class CentralStorageTrainer(Trainer[FewOwners]):
    """Synchronous training with the parameters and the optimizer on one rank, with the results of MirroredTrainer.

    Optimizer state takes memory on the storage rank alone; on one node the parameters do too, so use `edit` to change
    them in place. The replica updates slices, or whole tensors, as for update="sharded".

        with CentralStorageTrainer(NumpyNetwork([64, 32, 10]), storage=0) as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology | None = None,
        *,
        storage: int = 0,
        copies: int = 1,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal and move their parameters to the storage rank. Collective.

        replica: this rank's copy of the model.
        topology: the ranks that train together; all ranks by default.
        storage: the rank that holds the parameters and updates them. It computes too.
        copies: 2: another rank has a backup of the storage rank's state, and replaces that rank if it fails.
        on_failure: as in MirroredTrainer. If the storage rank fails and copies=1, rank 0 becomes the storage rank, and
            a fit goes back to its last checkpoint.

        Raises ArgumentError, or DisagreementError (models that differ), on all ranks, and frees what it created.
        """
        if isinstance(topology, JoiningRank):  # the other ranks know the storage rank
            storage = 0
        strategy = FewOwners(replica, type(self).__name__, Storage(storage, copies), copies)
        super().__init__(strategy, topology, on_failure)

    @property
    def storage(self) -> int:
        """The rank that holds the parameters now."""
        return self.strategy.servers[0]
