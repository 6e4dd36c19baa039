"""MirroredTrainer: average the gradients, then every replica applies them, so that replicas stay identical."""

from typing import Any

from allreduce.backend import AllReduce
from allreduce.keywords import known_only
from allreduce.topology import Topology
from trainers.replica import Replica
from trainers.strategies.mirrored import Mirrored
from trainers.trainer import Trainer


class MirroredTrainer(Trainer[Mirrored]):
    """Synchronous data-parallel training with one AllReduce a step.

    All replicas become copies of rank 0's at once, and again when a fit begins.

    Also attributes: `allreduce`, the backend, and `buffer`, the array that is reduced in every step: the gradients, and
    behind them the replica's metrics and the trainer's flags, so that the loss costs no message of its own. Behind
    gradients that travel as 16-bit floats there is nothing: what must be exact travels in an array of float32.

    With update="sharded" the ranks of a node have ONE copy of the parameters: what each of them edits in place
    (NumpyNetwork.parameters *= 0.5, p.mul_(0.5)) is applied once a rank. Use `edit`, which does it once. Edits of
    a PyTorch module are seen in the next step and refused on all ranks; those of NumPy arrays can't be seen.

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
        compress: str | None = None,
        copies: int = 1,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal and bind their gradients to the backend's memory. Collective.

        replica: this rank's copy of the model; its gradients are moved into memory that the backend allocates.
        allreduce: the name of a backend, or a backend. A backend that was passed in is not closed here.
        topology: of the ranks that train together; all ranks by default, or the given backend's.
        update: "replicated": every rank updates all parameters. "sharded": every rank updates its own slice,
            which divides the update's time and the optimizer's memory by the ranks; on the CPU the ranks of a node
            then have one copy of the parameters in common. For replicas with `bind_parameters`, and backends with
            two phases; "auto" names one. The result is the same.
        compress: "bfloat16" or "float16": gradients go to the other ranks with 16 bits and are added up in float32,
            which rounds them twice (allreduce.wrappers.compressed). Parameters, losses and flags lose nothing. For
            networks between nodes; where ranks share memory it takes longer.
        copies: 2, with update="sharded": another rank, on another node as far as there are such, keeps each slice too.
            After a loss all goes on from the last finished step, without a checkpoint, unless who kept a slice was lost
            with its owner. A step then sends what the optimizer keeps of a slice (with Adam 8 bytes a parameter,
            divided by the ranks; nothing where nodes have the same slices) and copies that, with the parameters, twice,
            and a replica's whole `tables` once; four slices more are held, and the tables. Where a lost rank ends the
            job nothing is kept, and a line says so.
        on_failure: what happens when a rank is lost (it was killed, its node has died), where MPI lets the others live:
            Open MPI 5, started as mpirun --with-ft ulfm. "continue": the call goes on with the ranks that are left, and
            `topology`, `allreduce`, `rank` and `size` of this trainer are new; with update="sharded" and one copy a fit
            goes back to its last checkpoint, and callbacks are told those epochs again. Where
            standby ranks wait (allreduce.spares.man), they take the places of lost ones. "stop", the default:
            where a fit writes checkpoints it writes one more, and all ranks raise RankLostError. Without such an MPI,
            the job ends, and "continue" is refused.

        Raises on all ranks, and leaves nothing behind: ArgumentError, DisagreementError (models that differ),
        UnknownBackendError, UnavailableError, OptionError.
        """
        strategy = Mirrored(replica, type(self).__name__, allreduce, topology, update, compress, copies)
        ranks = allreduce.topology if isinstance(allreduce, AllReduce) else topology
        super().__init__(strategy, ranks, on_failure)

    @property
    def allreduce(self) -> AllReduce:
        """The backend that reduces the gradients."""
        assert self.strategy.allreduce is not None
        return self.strategy.allreduce

    @property
    def buffer(self) -> Any:
        """What is reduced in every step; None when the trainer is closed."""
        return self.strategy.buffer
