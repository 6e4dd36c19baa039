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
    a worker; usually a worker has one rank.

    The flat parameters are cut into one slice per server, of equal bytes, so large arrays are split. Each server holds
    the optimizer's state of its slice.

    updates="sync": a step waits for all workers, which divide the batch: the training of MirroredTrainer, to float
    tolerance, and the same bits in every run.

    updates="async": a server applies each gradient as it comes (J. Dean et al.: Large scale distributed deep networks,
    2012). The batches are those of MirroredTrainer, each divided into as many parts as there are workers. Each part
    gives one update, by the mean over its rows, so an epoch has batches * workers updates. Fast workers compute more.
    A worker gets its next part, and the parameters for it, while it computes. Every row is visited once an epoch
    (gradients that were dropped included), but the order of updates, and so the result, differs from run to run.
    Between epochs all ranks have the same parameters. A worker's batch callbacks are called for each part that it
    computes, a server's for each gradient that it applies; they get the number of the batch and the loss of the part.
    With a Loader of divided rows, each batch of a worker's loader is a part: no worker computes another's
    rows. With whole rows each worker reads all batches, and any worker computes any part.
    The first server enforces the bound on staleness exactly; other servers may exceed it by the number of gradients in
    flight.

    ranks_per_worker=2, with updates="async": the ranks of a worker divide the worker's rows, sum their gradients by an
    AllReduce, and have equal parameters; the first of them speaks with the servers. So servers have half as many
    gradients to receive, and a part of a batch is as large as that of two ranks. Each rank of a worker calls its batch
    callbacks.

    With updates="async" the history has `staleness` (how many gradients were 0, 1, 2, ... updates stale at the first
    server) and `dropped`.
    Callbacks that change the optimizer (its learning rate) must be given to the servers too. Buffers that are not
    averaged (batch norm's statistics) are saved from rank 0, so make rank 0 a worker if the model has any.
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
        stale: how servers treat a gradient whose parameters have been updated since it was computed. The staleness is
            the number of those updates. "keep": apply it. "scale": divide the learning rate by 1 + staleness. "drop":
            discard it if its staleness exceeds `max_staleness`.
        max_staleness: with "keep" and "scale", the largest staleness; fast workers wait so that it is not exceeded.
        warm_up: the number of epochs at the beginning in which one worker computes at a time, all in turn.
        ranks_per_worker: the number of ranks of a worker, which follow one another. If the number of ranks can't be
            divided by it, the last worker is smaller.
        allreduce: the name of the backend that sums the gradients of a worker's ranks.
        on_failure: as in MirroredTrainer: with "continue", a worker continues without one of its ranks, and the other
            workers take over the rows of a worker without ranks. The failure of a server ends the training; resume it
            from its last checkpoint. With updates="sync" and several servers another rank has a backup of each slice,
            and the other servers continue.

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

    @property
    def ranks_of_workers(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each worker now. Its first rank speaks with the servers."""
        return self.strategy.workers
