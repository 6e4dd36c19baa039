"""ParameterServerTrainer: servers hold the parameters and update them, workers compute."""

from collections.abc import Sequence

from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.few_owners import FewOwners
from trainers.strategies.servers.asynchronous import AsynchronousServers
from trainers.strategies.servers.options import Options
from trainers.trainer import Trainer


class ParameterServerTrainer(Trainer[FewOwners | AsynchronousServers]):
    """Training with the parameters sharded over servers, and gradients from workers. A rank is a server, or belongs to
    a worker. Each server holds a slice of the flat parameters, and the optimizer's state of it.

    updates="sync": a step waits for all workers, which divide the batch: the training of MirroredTrainer, to float
    tolerance, and the same bits in every run.

    updates="async": a server applies each gradient as it comes (J. Dean et al.: Large scale distributed deep networks,
    2012). Each batch is divided into as many parts as there are workers, and each part gives one update, by the mean
    over its rows. Fast workers compute more parts. Every row is visited once an epoch, but the order of updates differs
    from run to run. Between epochs all ranks have the same parameters. With a Loader of divided rows, each batch of a
    worker's loader is a part. The first server enforces the bound on staleness exactly; others may exceed it by the
    number of gradients in flight. The history has `staleness` (how many gradients were 0, 1, 2, ... updates stale) and
    `dropped`.

    Callbacks get the number of the batch and the loss of the part, on workers and servers; those that change the
    learning rate must be given to the servers too. Statistics of batch norm are saved from rank 0: make it a worker.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology | None = None,
        *,
        servers: int | Sequence[int] = 1,
        updates: str = "async",
        stale: str = "keep",
        max_staleness: int | None = None,
        warm_up: int = 0,
        ranks_per_worker: int = 1,
        allreduce: str = "auto",
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, on the CPU; servers need one too. For "async" it updates slices.
        topology: the ranks that train together; all ranks by default.
        servers: the number of servers, which are the last ranks; or their ranks. All other ranks are workers.
        stale: how servers treat a gradient that is `staleness` updates late. "keep": apply it. "scale": divide the
            learning rate by 1 + staleness. "drop": discard it if its staleness exceeds `max_staleness`.
        max_staleness: with "keep" and "scale", the largest staleness; fast workers wait so that it is not exceeded.
        warm_up: the number of epochs at the beginning in which one worker computes at a time, all in turn.
        ranks_per_worker: with "async", the number of consecutive ranks that divide a worker's rows and sum their
            gradients; the first one speaks with the servers. If it does not divide the number of ranks, the last worker
            is smaller.
        allreduce: the name of the backend that sums the gradients of a worker's ranks.
        on_failure: as in MirroredTrainer. With "continue", other workers take over the rows of a failed one; the
            failure of a server ends the training, unless there are several with updates="sync", which have backups.

        Raises ArgumentError or DisagreementError on all ranks, and frees what it created.
        """
        options = Options(servers, updates, stale, max_staleness, warm_up, ranks_per_worker, allreduce)
        kind = FewOwners if updates == "sync" else AsynchronousServers
        super().__init__(kind(replica, type(self).__name__, options), topology, on_failure)
        self.updates = updates

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that are servers now."""
        return self.strategy.servers

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that compute now: those of all workers."""
        return tuple(sorted(self.strategy.computing))
