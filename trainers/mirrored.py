"""MirroredTrainer: averages the gradients; every replica applies the averages, so the replicas stay identical."""

from typing import Any

from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from trainers.arguments import known_only
from trainers.local_sgd.outer import LocalOptions, OuterSGD
from trainers.replica import Replica
from trainers.strategies.exact import ExactMirrored
from trainers.strategies.local_sgd import LocalSGD
from trainers.strategies.mirrored import Mirrored
from trainers.trainer import Trainer


class MirroredTrainer(Trainer[Mirrored]):
    """Synchronous data-parallel training with one AllReduce a step.

    All replicas become copies of rank 0's replica when the trainer is created, and again when a fit begins.

    Attributes: `allreduce`, the backend. `buffer`, the 1-D array that is reduced in every step: the gradients, then the
    metrics and flags, so that the loss needs no message of its own. If gradients are sent as 16-bit floats, metrics and
    flags are in a separate float32 array.

    With update="sharded" the ranks of a node share ONE copy of the parameters, so an edit in place that every rank
    makes (NumpyNetwork.parameters *= 0.5, p.mul_(0.5)) is applied once per rank. Use `edit`, which applies it once.
    Without `edit`, edits of a PyTorch module raise an error on all ranks in the next step; edits of NumPy arrays don't.

        with MirroredTrainer(NumpyNetwork([64, 32, 10]), allreduce="ring") as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    @known_only
    def __init__(
        self,
        replica: Replica,
        allreduce: str | AllReduce = "auto",
        topology: Topology | None = None,
        *,
        update: str = "replicated",
        compress: Given = None,
        copies: int = 1,
        on_failure: str | None = None,
        exact: bool = False,
        micro_batch: int | None = None,
        sync_every: int | None = None,
        outer_optimizer: str | OuterSGD = "average",
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        """Make the replicas equal and bind their gradients to the backend's memory. Collective.

        replica: this rank's copy of the model; its gradients are moved into memory that the backend allocates.
        allreduce: the name of a backend, or a backend, which the caller closes.
        topology: the ranks that train together. By default all ranks, or those of the given backend.
        update: "replicated": every rank updates all parameters. "sharded": every rank updates its own slice,
            which divides the update's time and the optimizer's memory by the number of ranks; on the CPU the ranks of
            a node then share one copy of the parameters. Needs a replica that updates slices, and a backend with
            two phases; "auto" selects one. The result is the same.
        compress: gradients are sent with fewer bits: "bfloat16", "float16", "int8", "float8", "powersgd:4", or an
            object of options (see allreduce.create). Parameters, losses and flags are not compressed. The values that
            a rank has not sent (its error feedback) are added to its next gradients. Checkpoints contain them, and
            after a failure the remaining ranks keep theirs. It is slower where ranks share memory.
        copies: 2, with update="sharded": every slice has a backup on another rank, if possible on another node. After a
            failure the training continues from the last finished step, without a checkpoint, unless a slice's owner and
            the rank with its backup fail together. Each step sends the optimizer's state of a slice (with Adam 8 bytes
            a parameter, divided by the ranks; nothing if the nodes hold the same slices), copies it and the parameters
            twice, and copies the replica's `tables` once. Memory: four more slices, and the tables. If the other ranks
            can't continue after a failure, no backups are kept, and a notice reports it.
        on_failure: what happens after a rank fails (killed, or its node died). The other ranks survive only under Open
            MPI 5, started as mpirun --with-ft ulfm; otherwise a failure ends the job, and "continue" raises an error.
            "continue": the remaining ranks continue the call; `topology`, `allreduce`, `rank` and `size` change. With
            update="sharded" and copies=1, a fit goes back to its last checkpoint, and callbacks get these epochs again.
            Standby ranks (allreduce.standby) replace failed ones. "stop", the default: a fit with checkpoints writes
            one more, and all ranks raise RankLostError.
        exact: True: the bits of the training depend on nothing but the data and the arguments: equal on 1, 2, 3 ...
            ranks, with every backend, on any nodes, for either `update`, after failures, and after a resume on another
            number of ranks. (With equal processors, versions of libraries, and threads of a rank.) Gradients are
            computed for each micro-batch of a batch, on some rank, and summed exactly, as losses are (see
            allreduce.algorithms.compressed.exact). Python's, NumPy's and PyTorch's global generators, for dropout, are
            seeded for each micro-batch; random numbers of a data set (augmentation) follow from the row and the epoch.
            Batch norm normalises over a micro-batch, and its running statistics are averaged. Models with other state
            that a batch changes raise an ArgumentError, as do `compress`, sparse `tables` and GPUs.
            Costs memory: 8 bytes a parameter, and the gradients of all micro-batches of a rank; and time: a step
            computes many small batches.
        micro_batch: with exact=True: rows of a micro-batch, 8 by default. Larger ones are faster, and leave ranks
            without work if a batch has fewer micro-batches than there are ranks. The same in every part of a training.
        sync_every: H: local SGD (Stich 2019), for slow networks. A rank updates its replica with the mean gradient over
            its own rows, in H steps without messages; then the changes of all ranks are averaged, weighted by the
            steps that each has taken. That sends 1/H of the bytes, and is another training: not that of one rank. None:
            gradients are averaged in every step. The round ends early, so that all ranks have the averaged parameters,
            before an evaluation, `predict`, `save`, a checkpoint, the end of a fit, and the epoch events of callbacks
            with `reads_model`. Ranks learn of an error, and of `stop_training`, at the end of a round; callbacks get a
            batch's metrics of this rank's own rows. The inner optimizer's state stays on each rank, as in DiLoCo. A
            resumed training has the bits of one with the same checkpoints. After a failure the remaining ranks go back
            to the last average: at most one round is lost. Needs a replica that updates slices, without `tables`.
        outer_optimizer: how the averaged change is applied. "average": the parameters become the ranks' mean.
            "diloco": Nesterov's momentum 0.9 with learning rate 0.7 (Douillard et al. 2023), for H of 50 to 500. Or an
            OuterSGD. Costs memory for one copy of the parameters, and one for the momentum.
        fragments: cut the parameters into this number of slices, which are averaged one after the other, at equal
            distances in the H steps (Streaming DiLoCo, Douillard et al. 2025): no step sends much. Divides sync_every.
        fragment_sync_delay: the average of a fragment begins this many steps before it is applied, and runs in a thread
            while the steps go on. Less than sync_every / fragments.
        fragment_update_alpha: the share of this rank's own parameters when an average is applied: parameters = alpha *
            own + (1 - alpha) * averaged. 0: averaged ones only, so with a delay the steps meanwhile are lost.

        Raises, on all ranks, ArgumentError, DisagreementError (models that differ), UnknownBackendError,
        UnavailableError or OptionError, and frees what it created.
        """
        given = replica, type(self).__name__, allreduce, topology, update, compress, copies
        local = LocalOptions(sync_every, outer_optimizer, fragments, fragment_sync_delay, fragment_update_alpha)
        strategy: Mirrored
        if exact or micro_batch is not None:
            strategy = ExactMirrored(*given, exact=exact, local=local, micro_batch=micro_batch)
        else:
            strategy = Mirrored(*given) if local == LocalOptions() else LocalSGD(*given, local=local)
        ranks = allreduce.topology if isinstance(allreduce, AllReduce) else topology
        super().__init__(strategy, ranks, on_failure)

    @property
    def allreduce(self) -> AllReduce:
        """The backend that reduces the gradients."""
        assert self.strategy.allreduce is not None
        return self.strategy.allreduce

    @property
    def buffer(self) -> Any:
        """The array that is reduced in every step; None after `close`."""
        return self.strategy.buffer
