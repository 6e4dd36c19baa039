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
    metrics and flags, so that the loss needs no message of its own. If gradients are sent as 16-bit floats, metrics and
    flags are in a separate float32 array. With buckets they are a small message.

    With update="sharded" the ranks of a node share ONE copy of the parameters, so an edit in place that every rank
    makes (NumpyNetwork.parameters *= 0.5, p.mul_(0.5)) is applied once per rank. Use `edit`, which applies it once.
    Without `edit`, edits of a PyTorch module raise an error in the next step; edits of `p.data` or NumPy arrays do not.

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
            slice, which divides the update's time and the optimizer's memory by the number of ranks; on the CPU the
            ranks of a node then share one copy of the parameters. Needs a replica that updates slices, and a backend
            with two phases; "auto" selects one. The result is the same.
        average: None: the gradients of all ranks in every step. Exact(): with bits that depend on nothing but the data
            and the arguments. LocalSGD(100): of the parameters, after 100 steps of each rank on its own.
        compress: gradients are sent with fewer bits: "bfloat16", "float16", "int8", "powersgd:4", or an
            object of options (see allreduce.create). Parameters, losses and flags are not compressed. The values that
            a rank has not sent (its error feedback) are added to its next gradients. Checkpoints contain them; on
            other ranks or nodes, and after a failure, they begin at zero. It is slower where ranks share memory.
        buckets: whether a thread sums buckets of gradients during backward, and their size; see Buckets. By default all
            gradients are summed in one call after backward. Buckets(True) and Buckets("auto") are for replicas
            that are `early` (TorchReplica on the CPU), with update="replicated", without `average` and `compress`. In a
            fit with callbacks that look at gradients (CheckGradients, SkipNotFinite), the buckets are summed after
            backward. With three or more ranks, the last bits of a sum may depend on the buckets.
        on_failure: what happens after a rank fails (killed, or its node died). The other ranks survive only under Open
            MPI 5, started as mpirun --with-ft ulfm; otherwise a failure ends the job, and "continue" raises an error.
            "continue": the remaining ranks continue the call; `topology`, `allreduce`, `rank` and `size` change. With
            update="sharded" and no copies, a fit goes back to its last checkpoint, and callbacks get its epochs again.
            Standby ranks (allreduce.standby) replace failed ones. "stop", the default: a fit with checkpoints writes
            one more, and all ranks raise RankLostError.

        With Exact, Python's, NumPy's and PyTorch's global generators, for dropout, are seeded for each micro-batch;
        random numbers of a data set (augmentation) follow from the row and the epoch. Batch norm normalises over a
        micro-batch, and its running statistics are averaged. Models with other state that a batch changes raise an
        ArgumentError, as do `compress` and GPUs.

        With LocalSGD a round ends early, so that all ranks have the averaged parameters, before an evaluation,
        `predict`, `save`, the end of a fit, and the epoch events of callbacks with `reads_model`, but not before a
        checkpoint. Ranks learn of an error, and of `stop_training`, at the end of a round; callbacks get a batch's
        metrics of this rank's own rows. After a failure the remaining ranks go back to the last average: at most one
        round is lost. Needs update="replicated", and a replica that updates slices.

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
