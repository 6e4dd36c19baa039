"""MirroredTrainer: average the gradients, then every replica applies them, so that replicas stay identical."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.arrays import dtypes
from allreduce.backend import AllReduce, TwoPhase
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport.control import everywhere, together
from allreduce.wrappers.traced import Traced
from trainers import malloc
from trainers.backends import backend_for, own_memory, used_by
from trainers.data import Batch
from trainers.recovery.calls import Call, outlives_losses
from trainers.replica import Replica, Rows
from trainers.strategies.interface import FLAGS, Update
from trainers.strategies.mirrored import Outliving, Tables
from trainers.strategies.sharded import ShardedUpdate
from trainers.trainer import Arguments


class MirroredTrainer(Outliving):
    """Synchronous data-parallel training with one AllReduce a step.

    All replicas become copies of rank 0's at once, and again when a fit begins.

    Also an attribute: `buffer`, the array that is reduced in every step: the gradients, and behind them the
    replica's metrics and the trainer's flags, so that the loss costs no message of its own. Behind gradients that
    travel as 16-bit floats there is nothing: what must be exact travels in an array of float32.

    With update="sharded" the ranks of a node have ONE copy of the parameters: what each of them edits in place
    (NumpyNetwork.parameters *= 0.5, p.mul_(0.5)) is applied once a rank. Use `edit`, which does it once. Edits of
    a PyTorch module are seen in the next step and refused on all ranks; those of NumPy arrays can't be seen.

        with MirroredTrainer(NumpyNetwork([64, 32, 10]), allreduce="ring") as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    @outlives_losses
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
            and a replica's whole `tables` once; three slices more are held, and the tables. Where a lost rank ends the
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
        given = isinstance(allreduce, AllReduce)
        self._owns_backend, self._owns_topology = not given, not given and topology is None
        ranks = allreduce.topology if isinstance(allreduce, AllReduce) else topology or Topology()
        try:
            self._agree_on_arguments(
                ranks, replica, Arguments(allreduce, topology, update, compress, copies, on_failure)
            )
            self.allreduce = backend_for(allreduce, ranks, update, compress, replica.device)
        except Exception as error:
            if self._owns_topology and everywhere(error, ranks.world):  # so all ranks come to the close
                ranks.close()
            raise
        self.buffer: Any = None
        self._tables = Tables(replica)
        self._untraced: AllReduce | None = None  # the backend, while another around it records its calls
        self._sharded: Update | None = None
        super().__init__(replica, ranks)  # from here on a loss abandons this trainer, whatever of it there is
        if replica.allocates and replica.device == "cpu":
            malloc.keep_freed_memory()
        self._update, self._compress, self._copies = update, compress, copies
        self.divides_state = update == "sharded"
        self._asked = self.allreduce.recipe if isinstance(allreduce, AllReduce) else allreduce  # for other ranks
        self._last = np.zeros(len(replica.metrics) + len(FLAGS), np.float32)
        self._fresh, self._rescued = self._last, None
        try:
            self._bind()
        except Exception as error:
            if everywhere(error, self._comm):
                self.close()
            raise
        self._survive(on_failure)

    def _agree_on_arguments(self, ranks: Topology, replica: Replica, given: Arguments) -> None:
        """Raise on all ranks what is wrong with the arguments of any, before anything is made. Collective."""
        row = given.described(replica)
        error = given.refused(ranks, replica, self.remakes)
        ranks.agree([zlib.crc32(row.encode())], row, error)

    def _unmake(self) -> None:
        if self._sharded is not None:
            self._sharded.abandon()

    def _bind(self) -> None:
        self._make_buffer()
        self._mirror()  # evaluate and predict share their work, so they need equal replicas before any fit
        if self._update == "sharded":
            self._share_update()

    def _make_buffer(self) -> None:
        replica, length = self.replica, self.replica.gradient_length
        extra = len(replica.metrics) + len(FLAGS)
        lossy = self.allreduce.exact is not self.allreduce
        beside = lossy or dtypes.is_half(dtypes.parse(replica.gradient_dtype))
        buffer = self._allocate(length if beside else length + extra, replica.gradient_dtype)
        self._measured = self._allocate(extra, "float32") if beside else buffer[length:]
        self._beside = beside
        self.measured = self._measured
        self.buffer = buffer  # before ranks are bound to it, of which one may fail: closing unbinds all
        together(self._comm, lambda: replica.bind(buffer[:length]))

    def _share_update(self) -> None:
        """From now on each rank updates what it owns, and the ranks hand each other the parameters. Collective."""
        if self.size > 1:
            assert isinstance(self.allreduce, TwoPhase)
            parts = self.replica, self.allreduce, self.buffer, self._comm, self._communication
            self._sharded = ShardedUpdate(*parts, self.steps, self._copies_kept())

    def _allocate(self, length: int, dtype: str) -> Any:
        return self.allreduce.allocate(length, dtype, device=self.replica.device)

    @property
    def tells_errors(self) -> bool:  # type: ignore[override]
        """Looking at a GPU's flags makes the host wait; of a sharded update they come back with the parameters."""
        return self._sharded is None and self.replica.device == "cpu"

    def _compute(self, batch: Batch | None) -> None:
        measured, metrics = self._measured, len(self.replica.metrics)
        if batch is None:
            self.buffer[:] = 0
            measured[:metrics] = 0
            self._tables.leave_out()
        else:
            self._check_edits()
            if self._sharded is not None:
                self._sharded.begin_batch()
            measured[:metrics] = self.replica.gradients(batch.x, batch.y, batch.share)
            measured[:metrics] *= batch.share
            self._tables.take()

    def _step(self, flags: tuple[float, ...]) -> Any:
        measured = self._measured
        measured[len(self.replica.metrics) :] = flags
        # Every rank's part is weighted by its share of the batch already, so the sum is the mean over samples.
        if self._beside:
            self._reduce(self.allreduce.exact, measured)
        if self._sharded is None:
            self._reduce(self.allreduce, self.buffer)
            if not (self.tells_errors and measured[-1]):
                self._tables.reduce(self.allreduce)
                with self.span("update"):
                    self.replica.update()
            return measured
        self._tables.reduce(self.allreduce)
        reduced = self._sharded.step()
        return measured if self._beside else reduced

    def _reduce(self, backend: AllReduce, array: Any) -> None:
        self._communication.start()
        backend(array, "sum")
        self._communication.stop()

    def record(self, trace: Trace | None) -> None:
        self.trace = trace
        plain, self._untraced = self._untraced or self.allreduce, None
        if trace is not None:
            self._untraced = plain
        self.allreduce = plain if trace is None else Traced(self.topology, inner=plain, trace=trace)
        if self._sharded is not None:
            self._sharded.record(self.allreduce, trace)

    def edit(self, change: Callable[[], object]) -> None:
        """Change the model's parameters in place by `change()`, the same on all ranks. Collective.

        It is called on every rank, or, where the ranks of a node have one copy of the parameters, on one rank of
        each node, while the others wait. An error of it is raised on all ranks. When a rank is lost meanwhile, those
        that are left do it anew, on the parameters as they were.
        """
        self._call(Call("edit", lambda: self._edit(change)))

    def _check_edits(self) -> None:
        if self._sharded is not None:
            self._sharded.check_edits()

    def _whole(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state if self._sharded is None else self._sharded.whole(state)

    def _complete(self) -> None:
        if self._sharded is not None:
            state = self._sharded.whole(self.replica.state())
            self._on_one(lambda: self.replica.load_state(state))

    def _snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._sharded is None:
            return super()._snapshot(memory)
        return self._sharded.snapshot(memory, self.rank == 0)

    def _choices(self) -> dict[str, str]:
        update = "replicated" if self._sharded is None else "sharded"
        return {
            "allreduce": used_by(self._untraced or self.allreduce, self.buffer, self.replica.device),
            "update": update,
        }

    def _apart(self) -> dict[str, str]:
        return {} if self._sharded is None else self._sharded.apart()

    @property
    def _fresh_gradients(self) -> Any:
        return self.buffer[: self.replica.gradient_length]

    @property
    def _fresh_rows(self) -> Sequence[Rows]:
        return self._tables.brought

    @property
    def _sent(self) -> np.dtype:
        return self.allreduce.sent(super()._sent)

    @property
    def _fresh_measured(self) -> Any:
        return self._measured

    def _settle(self) -> None:
        if self._sharded is not None:
            self._sharded.settle()

    def abandon(self) -> None:
        super().abandon()
        self._drop()

    def _drop(self) -> None:
        """Let go of the backend, without the other ranks. Local."""
        if self._sharded is not None:
            self._sharded.abandon()
        self._let_go()
        if self._owns_backend:
            (self._untraced or self.allreduce).abandon()
            self._untraced = None

    def _let_go(self) -> None:
        """Keep no memory of the backend, in the replica neither. Local."""
        self._sharded = self.measured = None
        if self.buffer is not None and self._has_replica:
            self.replica.bind(own_memory(self.replica))
        self.buffer = self._measured = None

    def _close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
        self._let_go()
        if self._owns_backend:
            self.allreduce.close()
        if self._owns_topology:
            self.topology.close()
