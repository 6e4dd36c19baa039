"""SpareReplicasTrainer: a synchronous step takes the first gradients and does not wait for the slowest ranks."""

from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.spare_replicas import SpareReplicas
from trainers.trainer import Trainer


class SpareReplicasTrainer(Trainer[SpareReplicas]):
    """Synchronous training with spare replicas (J. Chen et al.: Revisiting distributed synchronous SGD, 2016).

    All n + b ranks compute their part of every batch. A step updates by the mean over the rows of the first n gradients
    that arrive; later ones are dropped and counted (`dropped` in the history), and a late rank continues with the
    newest step. With b = 0 this is the training of MirroredTrainer, to float tolerance. With b > 0 the rows that a step
    uses depend on which ranks are fast. With a Loader of divided rows, a late rank goes on with its own next batch.

    Rank 0, the chief, receives gradients and updates in a second thread, while its main thread computes with a copy of
    the model. Its callbacks may read parameters that are newer than the step. `prefetch` has no effect, because the
    newest step is not known earlier.
    """

    def __init__(
        self, replica: Replica, topology: Topology | None = None, *, spare: int = 1, on_failure: str | None = None
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, that updates slices, on the CPU; the chief's must support `copy`.
        topology: the ranks that train together; all ranks by default.
        spare: the number of ranks for which a step does not wait; less than the number of ranks.
        on_failure: as in MirroredTrainer: with "continue" a failed rank counts as one of the spare ones. If the chief
            fails, the training ends: only it has the optimizer's state.

        Raises ArgumentError, DisagreementError, or UnavailableError (an MPI without threads) on all ranks, and frees
        what it created.
        """
        super().__init__(SpareReplicas(replica, type(self).__name__, spare), topology, on_failure)

    @property
    def spare(self) -> int:
        """The number of ranks for which a step does not wait now."""
        return self.strategy.spare
