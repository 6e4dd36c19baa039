"""ParameterServerTrainer: servers hold the parameters and update them, workers compute."""

from collections.abc import Sequence

from allreduce.keywords import known_only
from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.servers.strategy import AsynchronousServers, Options, ParameterServers, SynchronousServers
from trainers.trainer import Trainer


class ParameterServerTrainer(Trainer[ParameterServers]):
    """Parameters sharded over servers, gradients from workers; servers and workers are ranks of their own.

    The flat parameters are cut into one slice of equal bytes a server, so large arrays are split. Each server holds
    the optimizer's state of its slice.

    updates="sync": a step waits for all workers, and the workers divide the batch: the training of MirroredTrainer,
    to float tolerance, and the same bits in every run.

    updates="async": a server applies each gradient as it comes (J. Dean et al.: Large scale distributed deep networks,
    2012). The batches are those of MirroredTrainer, each divided into one part a worker; the parts are dealt one by
    one, and each is an update of its own by the mean over its rows, so an epoch has batches * workers updates, and a
    fast worker does more of them. A worker gets its next part, and the parameters for it, while it computes. Every
    row is visited once an epoch (gradients that were dropped included), but the order of updates, and so the result,
    differs from run to run. Between epochs all ranks have the same parameters. Callbacks are told of the parts that
    their rank computes, those of a server of the gradients that it applies, by the number of the batch and with the
    loss of that part. The first server keeps the bound on staleness exactly, others within the number of gradients
    under way.

    The history has `staleness`, how many gradients were 0, 1, 2, ... updates behind at the first server, and `dropped`.
    Callbacks that change the optimizer (its learning rate) must be given to the servers too. Buffers that nobody
    averages (batch norm's are) are saved as rank 0 has them, so rank 0 should be a worker where there are any.
    """

    @known_only
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
        learning_rate: str = "keep",
        fetch_ahead: bool = True,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, with `bind_parameters`, on the CPU; servers need one too.
        topology: of the ranks that train together; all ranks by default.
        servers: how many ranks, the last ones, are servers, or which ranks. All others are workers.
        stale: what becomes of a gradient whose parameters others have updated meanwhile: "keep" applies it, "scale"
            divides the learning rate by 1 + the number of those updates, "drop" discards it beyond `max_staleness`.
        max_staleness: with "keep" and "scale" a bound on that number, for which fast workers wait.
        warm_up: the first epochs are computed by the first worker alone.
        learning_rate: "keep", or "divide": every update uses the learning rate divided by the number of workers, so
            that the updates of one batch go as far as one update by its mean would.
        fetch_ahead: false: a worker gets parameters only after its last gradients were applied. It waits more, and
            its gradients are less stale.
        on_failure: as of MirroredTrainer: with "continue" a worker that is lost is simply missing, and its rows go to
            the others at once. The loss of a server ends the training, which goes on from its last checkpoint.

        Raises ArgumentError or DisagreementError on all ranks, and leaves nothing behind.
        """
        options = Options(servers, updates, stale, max_staleness, warm_up, learning_rate, bool(fetch_ahead))
        kind = SynchronousServers if updates == "sync" else AsynchronousServers
        super().__init__(kind(replica, type(self).__name__, options), topology, on_failure)

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that are servers now."""
        return self.strategy.servers

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that are workers now."""
        return self.strategy.workers
