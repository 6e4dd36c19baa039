"""The strategy of MirroredTrainer: average the gradients, then update all replicas, or one slice a rank."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce import create, notices
from allreduce.arrays import dtypes
from allreduce.arrays.compression import Given
from allreduce.arrays.parts import Part
from allreduce.backend import AllReduce, Config
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.tracing.recorder import Recorder, record
from allreduce.tracing.trace import Trace
from allreduce.transport.control import all_values, together
from trainers.arguments import name_error
from trainers.backends import LOST_RESIDUALS, UPDATES, allocate_own, backend_for, compress_error
from trainers.data import Batch
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica, Rows, Slices, Table
from trainers.replicas import malloc
from trainers.state import backup
from trainers.state.adopt import ADOPT, RATES, Arrays, Piece, adopt, mirror
from trainers.strategies.interface import Strategy, replica_error
from trainers.strategies.rule import FLAGS
from trainers.strategies.sharded import ShardedUpdate, Update


class Mirrored(Strategy):
    """Synchronous training with one AllReduce a step; see MirroredTrainer for the arguments.

    allreduce: the backend. buffer: 1-D array that is reduced in every step: the gradients, then the metrics and FLAGS.
        With 16-bit or compressed gradients, metrics and FLAGS are in a separate float32 array; also where ranks update
        slices by a loss that counts weights, and the end of `buffer` is then unused.
    """

    def __init__(
        self,
        replica: Replica,
        name: str,
        given: str | AllReduce | Config | None,
        topology: Topology | None,
        update: str = "replicated",
        compress: Given = None,
        copies: int = 1,
    ) -> None:
        super().__init__(replica, name)
        self._given, self._topology = given, topology
        self._update_name, self._compress, self._copies = update, compress, copies
        self._config = given.config if isinstance(given, AllReduce) else given  # to create the backend again; or None
        self._owns_backend = not isinstance(given, AllReduce)
        self.divides_state = update == "sharded"
        self.allreduce: AllReduce | None = None
        self.buffer: Any = None
        self._measured: Any = None  # this rank's metrics and flags: a view of the end of `buffer`, or a separate array
        self._separate = False
        self._tables = self.rule.tables = SparseGradients(replica)
        self._update: Update | None = None
        self._carried: dict[str, np.ndarray] = {}  # during a recovery: the backend's state on the old ranks
        self._recorder: Recorder | None = None  # records the backend's calls in the trace

    # Construction

    def describe(self) -> str:
        given = self._given
        name = given.name if isinstance(given, AllReduce | Config) else given
        options = f"update={self._update_name!r}, compress={self._compress!r}, copies={self._copies!r}"
        return f"{self.name}({type(self.replica).__name__}, {name!r}, {options})"

    def argument_error(self, ranks: Topology, goes_on: bool) -> Exception | None:
        given, update = self._given, self._update_name
        if error := replica_error(self.replica, self):
            return error
        if text := name_error("update", update, UPDATES):
            return ArgumentError(text)
        if isinstance(given, AllReduce) and self._topology not in (None, given.topology):
            return ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
        if update != "sharded" and self._copies == 2:
            return ArgumentError(f'copies=2: with update="{update}" all ranks have the whole state; leave out copies')
        twice = None if isinstance(given, Config) else compress_error(given, self._compress)
        return twice or backup.copies_error(self._copies, ranks.size, goes_on)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self._config is not None and self.replica.device == "cpu"

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._given, self._topology = self._config, None

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        replica = self.replica
        self.allreduce = self._make_backend()
        if replica.allocates and replica.device == "cpu":
            malloc.keep_freed_memory()
        self._last = np.zeros(len(replica.metrics) + len(FLAGS), np.float32)  # `measured` of the last finished step
        # during `restore`, for each rank: [steps, `measured` of the last finished step, of the unfinished one, whether
        # it has updated]
        self._ended: list[Any] = []
        self._unfinished = self._last  # during a recovery: `measured` of the unfinished step
        self._make_buffer()
        # evaluate and predict divide the rows among the ranks, so replicas must be equal before the first fit
        mirror(self)
        self.divide()

    def _make_backend(self) -> AllReduce:
        topology, config = self.group.topology, self._given
        if isinstance(config, Config):
            self._owns_backend = True
            return create(config.name, topology, **config.options)
        assert config is not None
        return backend_for(config, topology, self._update_name, self._compress, self.replica.device)

    def _make_buffer(self) -> None:
        """Allocate the gradient buffer with the backend, and bind the replica to it. Collective."""
        replica, length = self.replica, self.replica.gradient_length
        extra = len(replica.metrics) + len(FLAGS)
        apart = self._backend.lossy or self._backend.sums_terms or dtypes.is_half(dtypes.parse(replica.gradient_dtype))
        # a rank that updates a slice needs the weight of all rows before its update
        self._separate = apart or (replica.counts and self._update_name == "sharded")
        # the buffer is as long as with the replicated update, so that a backend cuts it into the same chunks
        buffer = self._allocate(length if apart else length + extra, replica.gradient_dtype)
        self.measured = self._measured = self._allocate(extra, "float32") if self._separate else buffer[length:]
        self.buffer = buffer  # set before `bind`, which may raise on one rank: `close` then unbinds every rank
        together(self.group.comm, lambda: replica.bind(buffer[:length]))
        self._describe(buffer[:length])
        self._update = ReplicatedUpdate(self, *self._reduced, tables=self._tables)

    def _describe(self, array: Any) -> None:
        """Tell the backend which parameters the elements of an allocated array belong to. Local."""
        self._backend.describe(array, _parts(self.replica))

    def _allocate(self, length: int, dtype: str) -> Any:
        return self._backend.allocate(length, dtype, device=self.replica.device)

    @property
    def _backend(self) -> AllReduce:
        assert self.allreduce is not None
        return self.allreduce

    @property
    def update(self) -> Update:
        """The update in use: replicated, sharded or central."""
        assert self._update is not None
        return self._update

    def divide(self) -> None:
        if self._update_name == "sharded" and self.group.size > 1:
            self._update = self._make_sharded_update()

    def _make_sharded_update(self) -> Update:
        """Create the update in which each rank updates the slice that it owns. Collective."""
        return ShardedUpdate(self, *self._reduced, copies=self._effective_copies())

    @property
    def _reduced(self) -> tuple[AllReduce, Any, Any, bool]:
        """The arguments of an Update: the backend, the buffer that it reduces, this rank's metrics and flags, and
        whether these are in a separate array."""
        return self._backend, self.buffer, self._measured, self._separate

    def _effective_copies(self) -> int:
        """Return the number of ranks that keep each slice: 1 instead of 2 if a failure ends the job anyway. Local."""
        if self._copies == 2 and not self.outlives_ranks:
            notices.once(self.group.rank, backup.NO_BACKUP)
            return 1
        return self._copies

    def close(self) -> None:
        if self._update is not None:
            self._update.close()
        self._drop_buffer()
        if self._owns_backend and self.allreduce is not None:
            self.allreduce.close()

    def abandon(self) -> None:
        if self._update is not None:
            self._update.abandon()
        self._drop_buffer()
        if self._owns_backend and self.allreduce is not None:
            self.allreduce.abandon()

    def _drop_buffer(self) -> None:
        """Drop the buffer, and bind the replica to memory of its own. Local."""
        self._update = self.measured = None
        if self.buffer is not None and self.holds_replica:
            self.replica.bind(allocate_own(self.replica))
        self.buffer = self._measured = None

    # A step

    @property
    def errors_in_step(self) -> bool:
        """False on a GPU, where reading the flags would block the host, and for a sharded update, where the flags
        arrive with the updated parameters."""
        return isinstance(self._update, ReplicatedUpdate) and self.replica.device == "cpu"

    def compute(self, batch: Batch | None) -> None:
        measured, metrics = self._measured, len(self.replica.metrics)
        if batch is None:
            self.buffer[:] = 0
            measured[:metrics] = 0
            self._tables.take_none()
            self.rule.take_none()
            return
        self.update.check_edits()
        self.update.begin_batch()
        measured[:metrics] = self.rule.gradients(batch, batch.share, self.local_gradients)
        measured[:metrics] *= batch.share
        self._tables.take(self.rule.sparse)

    def step(self, flags: tuple[float, ...]) -> Any:
        measured = self._measured
        measured[len(self.replica.metrics) :] = flags
        # Each rank has already weighted its gradients and metrics by its share of the batch, so the sum is the mean
        # over samples.
        if self._separate:
            self.update.add_up_measured()
            self.rule.weigh(measured, self._weighed())
        replicated = isinstance(self._update, ReplicatedUpdate)
        if not replicated:
            self._tables.reduce(self._backend)
        if self._separate or not replicated or self.replica.device != "cpu":
            told = self._separate and self.replica.device == "cpu"
            self.rule.hold_unused(self.group.comm, measured if told else None)
        reduced = self.update.step()
        return measured if self._separate else reduced

    def _weighed(self) -> Sequence[Any]:
        """Return this rank's gradients of the parameters, which are not reduced yet. Local."""
        return [self.buffer[: self.replica.parameter_count]]

    @property
    def own_part(self) -> Slices | None:
        return self.update.own_part

    def share_parameters(self) -> None:
        self.update.share_parameters()

    def count_step(self) -> None:
        super().count_step()
        if self.recoverable:
            self._last = np.array(self.measured)
        self.update.set_steps(self.steps)

    @property
    def local_gradients(self) -> Any:
        return self.buffer[: self.replica.gradient_length]

    @property
    def local_rows(self) -> Sequence[Rows]:
        return self._tables.local_rows

    @property
    def local_measured(self) -> Any:
        return self._measured

    @property
    def sent_dtype(self) -> np.dtype:
        return self._backend.sent(super().sent_dtype)

    def selections(self) -> dict[str, str]:
        name = "replicated" if isinstance(self._update, ReplicatedUpdate) else "sharded"
        return {"allreduce": self._backend.chosen(self.buffer), "update": name}

    def record(self, trace: Trace | None) -> None:
        self.trace = trace
        observers = self._backend.observers
        if self._recorder in observers:
            observers.remove(self._recorder)
        self._recorder = None if trace is None else record(self._backend, trace)

    # The state

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.update.gather_state(state)

    def complete(self) -> None:
        if not isinstance(self._update, ReplicatedUpdate):
            super().complete()

    def snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.update.snapshot(memory, self.group.rank == 0)

    def not_replicated(self) -> dict[str, str]:
        return self.update.not_replicated()

    def own_state(self) -> dict[str, np.ndarray]:
        return self._backend.state()

    def load_own_state(self, state: dict[str, np.ndarray]) -> None:
        self._backend.load_state(state)

    def check_edits(self) -> None:
        self.update.check_edits()

    def begin_change(self) -> None:
        self.update.begin_change()

    def synchronize_state(self) -> None:
        self.update.synchronize_state()

    def edit(self, change: Callable[[], object], before: list[Piece] | None = None) -> None:
        group, once = self.group, self.update.shares_parameters
        group.enter("edit")
        if before is not None:
            before += copy.deepcopy(self.pieces())  # the backups of the changed state overwrite them
        self.synchronize_state()
        together(group.comm, lambda: change() if not once or group.topology.node_rank == 0 else None)
        self.synchronize_state()
        if once and self.replica.tables:  # tables are not shared: only one rank of each node has changed its own
            mirror(self)

    # Recovery after failures

    @property
    def any_rank_may_fail(self) -> bool:
        return self.update.any_rank_may_fail

    def pieces(self) -> list[Piece]:
        """Return this rank's pieces of the state; see Update.pieces. Local."""
        rates = {RATES: np.array(self.replica.learning_rates)}
        self._unfinished = np.array(self._measured)
        return [piece._replace(rest={**rates, **piece.rest}) for piece in self.update.pieces()]

    def rescue(self) -> None:
        # already set if another rank fails during the recovery: the replica may no longer hold the state
        if self.saved is None:
            self.saved = self.pieces()
            self._carried = self._backend.state()
        if self.trace is not None:
            self.group.topology.unregister(self.trace)  # the trace continues on the new ranks
        self.abandon()
        self._owns_backend = True  # `rebuild` creates a backend that belongs to this strategy
        self._given = self._config

    def rebuild(self) -> None:
        self.part, self.parts = self.group.rank, self.group.size
        self.allreduce = self._make_backend()
        self._make_buffer()
        if self._carried:
            self._backend.load_state(self._carried)
            notices.once(self.group.rank, LOST_RESIDUALS)

    def restore(self) -> bool:
        if self.group.previous[self.group.rank] == JOINED:
            self.saved = []  # a rank that joins has nothing of this training
        updated = any(piece.first > self.steps for piece in self.saved or [])
        own = [self.steps, self._last.tolist(), self._unfinished.tolist(), updated]
        self._ended = all_values(self.group.comm, own, ADOPT)
        try:
            done = adopt(self, self.saved or [], len(self.buffer))
            if not done:
                self.steps = max(steps for steps, *_ in self._ended)
        finally:
            self._ended = []
        self.update.set_steps(self.steps)
        return done

    def load_state(self, step: int, state: Arrays) -> None:
        if not self._ended:
            super().load_state(step, state)
            return
        # Nothing below communicates, so a second failure can't interrupt it halfway.
        self.steps, self._last = step, self._measured_in(step, state["parameters"])
        # the array may continue with statistics, and with metrics and flags
        trained = self.replica.state()["parameters"].size
        state["parameters"] = state["parameters"][:trained]
        self.saved = [Piece(step, step, 0, len(self.buffer), {}, dict(state))]
        self._measured[:] = self._last
        super().load_state(step, state)

    def _measured_in(self, step: int, parameters: np.ndarray) -> np.ndarray:
        """Return `measured` of step `step`: from a rank that has finished the step, else from the end of `parameters`,
        else from a rank that was in the step. Local."""
        ended = [last for steps, last, *_ in self._ended if steps == step]
        if not ended and not self._separate and parameters.size > self.replica.gradient_length:
            return parameters[self.replica.gradient_length :]
        unfinished = [measured for *_, measured, updated in self._ended if updated] or [self._ended[0][2]]
        return np.array((ended or unfinished)[0], self._measured.dtype)

    def commit(self) -> None:
        self.saved, self._carried = None, {}


def _parts(replica: Replica) -> list[Part]:
    """Return the parameters of a replica by their positions in the gradients; [] if the replica does not tell."""
    shapes = list(replica.shapes().items())
    ends = list(itertools.accumulate((math.prod(shape) for _, shape in shapes), initial=0))
    fits = ends[-1] == replica.gradient_length
    return [Part(name, start, shape) for start, (name, shape) in zip(ends, shapes, strict=False)] if fits else []


class ReplicatedUpdate(Update):
    """Update in which all ranks reduce all gradients and each rank updates all parameters. tables: the sparse
    gradients."""

    def __init__(self, strategy: Strategy, *reduced: Any, tables: "SparseGradients") -> None:
        super().__init__(strategy, *reduced)
        self._tables, self._errors_in_step = tables, self._replica.device == "cpu"

    def step(self) -> Any:
        self._run("all_reduce", self._buffer)
        if not (self._errors_in_step and self._measured[-1]):
            self._tables.reduce(self._backend)
            if not self._separate:
                self._rule.weigh(self._measured, self._trained(None))
                if self._errors_in_step:
                    self._rule.hold_unused(self._comm, self._measured)
            with self._strategy.span("update"):
                self._apply()
        return self._measured

    def set_steps(self, steps: int) -> None:
        self._steps = self._since = steps


class SparseGradients:
    """The sparse gradients of a replica. In each step: `take` or `take_none`, then `reduce`.

    local_rows: for each table, this rank's rows of the current step, before they are summed. sums: their sums.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.local_rows: list[Rows] = []
        self.sums: list[Rows] = []

    def take(self, rows: list[Rows] | None) -> None:
        """Take the sparse gradients of this step: `rows`, or those that the replica has just computed. Local."""
        self.local_rows = self._replica.sparse_gradients() if rows is None else rows

    def take_none(self) -> None:
        """Use empty gradients, because this rank has no batch in this step. Local."""
        self.local_rows = [_no_rows(table) for table in self._replica.tables]

    def reduce(self, backend: AllReduce) -> None:
        """Sum the rows over all ranks, and pass the sums to the replica. Collective."""
        if tables := self._replica.tables:
            local = zip(tables, self.local_rows, strict=True)
            self.sums = [backend.sparse(*rows, table.rows, "sum") for table, rows in local]
            self._replica.take_sparse(self.sums)

    def scale(self, factor: float) -> None:
        """Multiply the sums of this step. Local."""
        if self._replica.tables:
            self._replica.take_sparse([(rows, values * values.dtype.type(factor)) for rows, values in self.sums])


def _no_rows(table: Table) -> Rows:
    return np.empty(0, np.int64), np.empty((0, *table.shape), table.dtype)
