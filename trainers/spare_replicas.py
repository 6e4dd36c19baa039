"""SpareReplicasTrainer: a synchronous step takes the first gradients and does not wait for the slowest ranks."""

from allreduce.keywords import known_only
from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.spare_replicas import SpareReplicas
from trainers.trainer import Trainer


class SpareReplicasTrainer(Trainer[SpareReplicas]):
    """Synchronous training with spare replicas (J. Chen et al.: Revisiting distributed synchronous SGD, 2016).

    All n + b ranks compute their part of every batch. A step is the mean over the rows of the first n gradients that
    come; later ones are dropped, by their step's number, and counted, and a rank that is late goes on with the newest
    step. With b = 0 this is the training of MirroredTrainer, to float tolerance, and the same bits in every run. With
    spare replicas it is not: which rows a step uses depends on who is fast, and those of the dropped gradients have
    no effect in that epoch.

    Rank 0, the chief, collects and updates in the thread of the topology's worker, while it computes with a copy of
    the model. So any rank may be slow, or sleep, also the chief, without slowing the steps. An epoch ends when the late
    ranks have come in.

    Rows are fetched when they are needed, since only then it is known which step is the newest: `prefetch` has no use.

    Callbacks are called for the steps to which their rank has come; the metrics of a step are of the rows used. On the
    chief, what they read of the model's parameters may be newer than the step, and a learning rate that they set there
    counts from the next update on.
    The history has `dropped`, the number of gradients in an epoch that were not used.
    """

    @known_only
    def __init__(
        self, replica: Replica, topology: Topology | None = None, *, spare: int = 1, on_failure: str | None = None
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, with `bind_parameters`, on the CPU; the chief's can be copied.
        topology: of the ranks that train together; all ranks by default.
        spare: for how many ranks a step does not wait, fewer than there are.
        on_failure: as of MirroredTrainer: with "continue" a rank that is lost is simply missing, and is one of those
            for which no step waits. The chief's loss ends the training: nobody else has the optimizer's state.

        Raises ArgumentError, DisagreementError, or UnavailableError (an MPI without threads) on all ranks, and leaves
        nothing behind.
        """
        super().__init__(SpareReplicas(replica, type(self).__name__, spare), topology, on_failure)

    @property
    def spare(self) -> int:
        """For how many ranks a step does not wait now."""
        return self.strategy.spare
