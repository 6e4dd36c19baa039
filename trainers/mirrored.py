"""MirroredTrainer: averages the gradients; every replica applies the averages, so the replicas stay identical."""

from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from trainers.options.average import Average, Exact, LocalSGD, Sharded
from trainers.options.buckets import AFTER_BACKWARD, Buckets
from trainers.replica import Replica
from trainers.strategies.exact import ExactMirrored
from trainers.strategies.local_sgd import LocalMirrored
from trainers.strategies.mirrored import Mirrored
from trainers.trainer import Trainer


class MirroredTrainer(Trainer[Mirrored]):
    """Synchronous data-parallel training with one AllReduce a step.

    All replicas become copies of rank 0's replica when the trainer is created, and again when a fit begins.

    Attributes: `allreduce`, the backend. `buffer`, the 1-D array that is reduced in every step: the gradients, then the
    metrics and flags. Beside gradients of 16 bits these are a float32 array of their own, beside buckets a message.

    With update="sharded" the ranks of a node share ONE copy of the parameters: change them in place by `edit`, once. An
    edit of a PyTorch module without it raises an error in the next step; of `p.data` or NumPy arrays it does not.

        with MirroredTrainer(NumpyNetwork([64, 32, 10]), allreduce="ring") as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    def __init__(
        self,
        replica: Replica,
        allreduce: str | AllReduce = "auto",
        topology: Topology | None = None,
        *,
        update: str | Sharded = "replicated",
        average: Average | None = None,
        compress: Given = None,
        buckets: Buckets = AFTER_BACKWARD,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal and bind their gradients to the backend's memory. Collective.

        replica: this rank's copy of the model; its gradients are moved into memory that the backend allocates.
        allreduce: the name of a backend, or a backend, which the caller closes.
        topology: the ranks that train together. By default all ranks, or those of the given backend.
        update: "replicated": every rank updates all parameters. "sharded", or a Sharded: every rank updates its own
            slice, with the same result. Needs a replica that updates slices, and a backend with two phases.
        average: None: the gradients of all ranks in every step. Exact() or LocalSGD(100): see there.
        compress: gradients are sent with fewer bits: "bfloat16", "float16", "int8", "powersgd:4", or an object of
            options (see allreduce.create). Parameters, losses and flags are not compressed. Checkpoints contain the
            error feedback; on other ranks or nodes, and after a failure, it begins at zero.
        buckets: whether a thread sums buckets of gradients during backward, and their size; see Buckets. By default all
            gradients are summed in one call. Buckets(True) and "auto" are for replicas that are `early`, with
            update="replicated", without `average` and `compress`; with three or more ranks, last bits may depend on
            them.
        on_failure: after a rank fails, which the others survive only under Open MPI 5 (mpirun --with-ft ulfm).
            "continue": they continue the call; `topology`, `allreduce`, `rank` and `size` change. With update="sharded"
            and no copies, a fit goes back to its last checkpoint. "stop", the default: a fit with checkpoints writes
            one more, and all ranks raise RankLostError.

        With Exact, the global generators are seeded for each micro-batch, batch norm normalises over one, and models
        with other state that a batch changes raise an ArgumentError, as do `compress` and GPUs.

        With LocalSGD a round ends before an evaluation, `predict`, `save`, the end of a fit, and the epoch events of
        callbacks with `reads_model`. Ranks learn of an error, and of `stop_training`, at the end of a round; callbacks
        get the metrics of this rank's own rows. After a failure the ranks go back to the last average.

        Raises, on all ranks, ArgumentError, DisagreementError (models that differ), UnknownBackendError,
        UnavailableError or OptionError, and frees what it created.
        """
        given = replica, type(self).__name__, allreduce, topology, update, compress, average, buckets
        strategy: Mirrored
        if isinstance(average, Exact):
            strategy = ExactMirrored(*given)
        elif isinstance(average, LocalSGD):
            strategy = LocalMirrored(*given)
        else:
            strategy = Mirrored(*given)
        ranks = allreduce.topology if isinstance(allreduce, AllReduce) else topology
        super().__init__(strategy, ranks, on_failure)
