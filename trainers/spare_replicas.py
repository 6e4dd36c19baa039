"""SpareReplicasTrainer: a synchronous step takes the first gradients and does not wait for the slowest ranks."""

from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.spare_replicas import SpareReplicas
from trainers.trainer import Trainer


class SpareReplicasTrainer(Trainer[SpareReplicas]):
    """Synchronous training with spare replicas (J. Chen et al.: Revisiting distributed synchronous SGD, 2016).

    All n + b ranks compute their part of every batch. A step updates by the mean over the rows of the first n gradients
    that arrive. Later gradients are recognized by their step number, dropped and counted; a late rank continues with
    the newest step. With b = 0 this is the training of MirroredTrainer, to float tolerance, and the same bits in every
    run. With b > 0 it is not: which rows a step uses depends on which ranks are fast, and the rows of dropped gradients
    have no effect in that epoch.

    With a Loader of divided rows, a late rank goes on with its own next batch; its late batch is left out. An
    epoch ends when all loaders have ended, or after the `steps` of the Loader. Whole batches are divided as arrays are.

    Rank 0, the chief, receives gradients and updates in a second thread, while its main thread computes with a copy of
    the model. So any rank, also the chief, may be slow without delaying the steps. An epoch ends after the last
    gradients of the late ranks have arrived.

    Rows are fetched when they are needed, because the newest step is not known earlier: `prefetch` has no effect.

    A rank's callbacks are called for the steps that it computes; the metrics of a step are means over the rows used. On
    the chief they may read parameters that are newer than the step, and a learning rate that they set there applies
    from the next update on. The history has `dropped`, the number of gradients in an epoch that were not
    used.
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
