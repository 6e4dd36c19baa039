"""The strategy of MirroredTrainer: average the gradients, then update all replicas, or one slice a rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce import create, notices
from allreduce.arrays import dtypes
from allreduce.backend import AllReduce, Recipe
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport.control import all_values, together
from allreduce.wrappers.traced import Traced
from trainers import malloc
from trainers.backends import UPDATES, backend_for, compression_twice, own_memory, used_by
from trainers.data import Batch
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica, Rows, Table
from trainers.state import backup
from trainers.state.adopt import ADOPT, RATES, Arrays, Piece, adopt, mirror
from trainers.strategies.interface import FLAGS, Strategy, replica_refusal
from trainers.strategies.sharded import Parts, ShardedUpdate, Update


class Mirrored(Strategy):
    """Synchronous training with one AllReduce a step; see MirroredTrainer for the arguments.

    allreduce: the backend. buffer: what is reduced in every step: the gradients, and behind them the replica's metrics
    and FLAGS; gradients that travel with fewer bits than these need have an array for them beside.
    """

    def __init__(
        self,
        replica: Replica,
        name: str,
        given: str | AllReduce | Recipe | None,
        topology: Topology | None,
        update: str = "replicated",
        compress: str | None = None,
        copies: int = 1,
    ) -> None:
        super().__init__(replica, name)
        self._given, self._topology = given, topology
        self._update_name, self._compress, self._copies = update, compress, copies
        self._recipe = given.recipe if isinstance(given, AllReduce) else given  # for other ranks; None for none
        self._owns_backend = not isinstance(given, AllReduce)
        self.divides_state = update == "sharded"
        self.allreduce: AllReduce | None = None
        self.buffer: Any = None
        self._measured: Any = None  # this rank's metrics and flags, a part of `buffer` or beside it
        self._beside = False
        self._tables = Tables(replica)
        self._update: Update | None = None
        self._untraced: AllReduce | None = None  # the backend, while another around it records its calls

    # Its making

    def describe(self) -> str:
        given = self._given
        name = given.name if isinstance(given, AllReduce | Recipe) else given
        options = f"update={self._update_name!r}, compress={self._compress!r}, copies={self._copies!r}"
        return f"{self.name}({type(self.replica).__name__}, {name!r}, {options})"

    def refusal(self, ranks: Topology, goes_on: bool) -> Exception | None:
        given, update = self._given, self._update_name
        if error := replica_refusal(self.replica, self):
            return error
        if update not in UPDATES:
            return ArgumentError(f"update={update!r} is unknown; use one of {', '.join(UPDATES)}")
        if isinstance(given, AllReduce) and self._topology not in (None, given.topology):
            return ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
        if update != "sharded" and self._copies == 2:
            return ArgumentError(f'copies=2: with update="{update}" all ranks have everything; leave it out')
        twice = None if isinstance(given, Recipe) else compression_twice(given, self._compress)
        return twice or backup.refusal(self._copies, ranks.size, goes_on)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self._recipe is not None and self.replica.device == "cpu"

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._given, self._topology = self._recipe, None

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        replica = self.replica
        self.allreduce = self._make_backend()
        if replica.allocates and replica.device == "cpu":
            malloc.keep_freed_memory()
        self._last = np.zeros(len(replica.metrics) + len(FLAGS), np.float32)  # what the last step has measured
        self._ended: list[Any] = []  # while ranks restore a state: what each has ended and measured
        self._fresh = self._last  # what the step has measured that is not ended, while a failure is repaired
        self._make_buffer()
        mirror(self)  # evaluate and predict share their work, so they need equal replicas before any fit
        self.divide()

    def _make_backend(self) -> AllReduce:
        topology, recipe = self.group.topology, self._given
        if isinstance(recipe, Recipe):
            self._owns_backend = True
            return create(recipe.name, topology, **recipe.options)
        assert recipe is not None
        return backend_for(recipe, topology, self._update_name, self._compress, self.replica.device)

    def _make_buffer(self) -> None:
        """Have the backend allocate what is reduced in every step, and bind the replica to it. Collective."""
        replica, length = self.replica, self.replica.gradient_length
        extra = len(replica.metrics) + len(FLAGS)
        lossy = self._backend.exact is not self._backend
        self._beside = lossy or dtypes.is_half(dtypes.parse(replica.gradient_dtype))
        buffer = self._allocate(length if self._beside else length + extra, replica.gradient_dtype)
        self.measured = self._measured = self._allocate(extra, "float32") if self._beside else buffer[length:]
        self.buffer = buffer  # before ranks are bound to it, of which one may fail: closing unbinds all
        together(self.group.comm, lambda: replica.bind(buffer[:length]))
        self._update = ReplicatedUpdate(self._parts, self._tables)

    def _allocate(self, length: int, dtype: str) -> Any:
        return self._backend.allocate(length, dtype, device=self.replica.device)

    @property
    def _backend(self) -> AllReduce:
        assert self.allreduce is not None
        return self.allreduce

    @property
    def update(self) -> Update:
        """How the parameters are updated."""
        assert self._update is not None
        return self._update

    def divide(self) -> None:
        if self._update_name == "sharded" and self.group.size > 1:
            self._update = self._divided()

    def _divided(self) -> Update:
        """An update that each rank does for what it owns. Collective."""
        return ShardedUpdate(self._parts, self._copies_kept())

    @property
    def _parts(self) -> Parts:
        return Parts(self.replica, self._backend, self.buffer, self._measured, self.group.comm, self.clock, self.steps)

    def _copies_kept(self) -> int:
        """How many ranks have each slice. Local."""
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
        backend, self._untraced = self._untraced or self.allreduce, None
        if self._owns_backend and backend is not None:
            backend.abandon()

    def _drop_buffer(self) -> None:
        """Keep no memory of the backend, in the replica neither. Local."""
        self._update = self.measured = None
        if self.buffer is not None and self.holds_replica:
            self.replica.bind(own_memory(self.replica))
        self.buffer = self._measured = None

    # A step

    @property
    def errors_in_step(self) -> bool:
        """Looking at a GPU's flags makes the host wait; of a divided update they come back with the parameters."""
        return isinstance(self._update, ReplicatedUpdate) and self.replica.device == "cpu"

    def compute(self, batch: Batch | None) -> None:
        measured, metrics = self._measured, len(self.replica.metrics)
        if batch is None:
            self.buffer[:] = 0
            measured[:metrics] = 0
            self._tables.leave_out()
            return
        self.update.check_edits()
        self.update.begin_batch()
        measured[:metrics] = self.replica.gradients(batch.x, batch.y, batch.share)
        measured[:metrics] *= batch.share
        self._tables.take()

    def step(self, flags: tuple[float, ...]) -> Any:
        measured = self._measured
        measured[len(self.replica.metrics) :] = flags
        # Every rank's part is weighted by its share of the batch already, so the sum is the mean over samples.
        if self._beside:
            self.clock.start()
            self._backend.exact(measured, "sum")
            self.clock.stop()
        if not isinstance(self._update, ReplicatedUpdate):
            self._tables.reduce(self._backend)
        reduced = self.update.step()
        return measured if self._beside else reduced

    def count_step(self) -> None:
        super().count_step()
        if self.recoverable:
            self._last = np.array(self.measured)
        self.update.count_steps(self.steps)

    @property
    def fresh_gradients(self) -> Any:
        return self.buffer[: self.replica.gradient_length]

    @property
    def fresh_rows(self) -> Sequence[Rows]:
        return self._tables.brought

    @property
    def fresh_measured(self) -> Any:
        return self._measured

    @property
    def sent_dtype(self) -> np.dtype:
        return self._backend.sent(super().sent_dtype)

    def choices(self) -> dict[str, str]:
        backend = self._untraced or self._backend
        name = "replicated" if isinstance(self._update, ReplicatedUpdate) else "sharded"
        return {"allreduce": used_by(backend, self.buffer, self.replica.device), "update": name}

    def record(self, trace: Trace | None) -> None:
        self.trace = trace
        plain, self._untraced = self._untraced or self._backend, None
        if trace is not None:
            self._untraced = plain
        self.allreduce = plain if trace is None else Traced(self.group.topology, inner=plain, trace=trace)
        self.update.record(self.allreduce, trace)

    # The state

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.update.whole(state)

    def complete(self) -> None:
        if not isinstance(self._update, ReplicatedUpdate):
            super().complete()

    def snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.update.snapshot(memory, self.group.rank == 0)

    def apart(self) -> dict[str, str]:
        return self.update.apart()

    def check_edits(self) -> None:
        self.update.check_edits()

    def share(self) -> None:
        self.update.share()

    def edit(self, change: Callable[[], object], before: list[Piece] | None = None) -> None:
        group, once = self.group, self.update.in_common
        group.enter("edit")
        if before is not None:
            before += self.pieces()
        self.share()
        together(group.comm, lambda: change() if not once or group.topology.node_rank == 0 else None)
        self.share()
        if once and self.replica.tables:  # which every rank has for itself
            mirror(self)

    # When ranks have failed

    @property
    def any_rank_may_fail(self) -> bool:
        return self.update.any_rank_may_fail

    def pieces(self) -> list[Piece]:
        """A copy of what this rank has of the state. Local."""
        rates = {RATES: np.array(self.replica.learning_rates)}
        self._fresh = np.array(self._measured)
        return [piece._replace(rest={**rates, **piece.rest}) for piece in self.update.pieces()]

    def rescue(self) -> None:
        if self.saved is None:  # or else the state is gone: a failure in the repair begins that again
            self.saved = self.pieces()
        if self.trace is not None:
            self.group.topology.let_go(self.trace)  # which goes on
        self.abandon()
        self._owns_backend = True  # the one that is made now
        self._given = self._recipe

    def rebuild(self) -> None:
        self.part, self.parts = self.group.rank, self.group.size
        self.allreduce = self._make_backend()
        self._make_buffer()

    @property
    def _length(self) -> int:
        """Of what pieces are cut from: the parameters, and what is measured, where that lies behind them."""
        return self.replica.gradient_length + (0 if self._beside else self._last.size)

    def restore(self) -> bool:
        if self.group.previous[self.group.rank] == JOINED:
            self.saved = []  # a rank that joins has nothing of this training
        updated = any(piece.first > self.steps for piece in self.saved or [])
        own = [self.steps, self._last.tolist(), self._fresh.tolist(), updated]
        self._ended = all_values(self.group.comm, own, ADOPT)
        try:
            done = adopt(self, self.saved or [], self._length)
            if not done:
                self.steps = max(steps for steps, *_ in self._ended)
        finally:
            self._ended = []
        self.update.count_steps(self.steps)
        return done

    def take_on(self, step: int, state: Arrays) -> None:
        if not self._ended:
            super().take_on(step, state)
            return
        # All of this is local: it is done, or not, when this rank hears of the next failure.
        self.steps, self._last = step, self._measured_in(step, state["parameters"])
        trained = self.replica.state()["parameters"].size  # behind them may be statistics, and what was measured
        state["parameters"] = state["parameters"][:trained]
        self.saved = [Piece(step, step, 0, self._length, {}, dict(state))]
        self._measured[:] = self._last
        super().take_on(step, state)

    def _measured_in(self, step: int, parameters: np.ndarray) -> np.ndarray:
        """What the last step before a state has measured: as a rank that has ended it says, or as it came. Local."""
        ended = [last for steps, last, *_ in self._ended if steps == step]
        if not ended and parameters.size > self.replica.gradient_length:
            return parameters[self.replica.gradient_length :]
        fresh = [fresh for *_, fresh, updated in self._ended if updated] or [self._ended[0][2]]
        return np.array((ended or fresh)[0], self._measured.dtype)

    def commit(self) -> None:
        self.saved = None


class ReplicatedUpdate(Update):
    """Every rank updates all parameters by the sum of all ranks' gradients. tables: of the replica."""

    def __init__(self, parts: Parts, tables: "Tables") -> None:
        super().__init__(parts)
        self._tables, self._errors_in_step = tables, self._replica.device == "cpu"

    def step(self) -> Any:
        self._clock.start()
        self._backend(self._buffer, "sum")
        self._clock.stop()
        if not (self._errors_in_step and self._measured[-1]):
            self._tables.reduce(self._backend)
            with self.span("update"):
                self._replica.update()
        return self._measured

    def count_steps(self, steps: int) -> None:
        self._steps = self._since = steps


class Tables:
    """The sparse gradients of a replica: `take` or `leave_out` in every step, then `reduce`.

    brought: of each table the rows that this rank has computed in this step, while they are not added up.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.brought: list[Rows] = []

    def take(self) -> None:
        """The replica has computed the gradients of a batch. Local."""
        self.brought = self._replica.sparse_gradients()

    def leave_out(self) -> None:
        """This rank has no batch in this step. Local."""
        self.brought = [_no_rows(table) for table in self._replica.tables]

    def reduce(self, backend: AllReduce) -> None:
        """Give the replica the sums of all ranks' rows. Collective."""
        if tables := self._replica.tables:
            brought = zip(tables, self.brought, strict=True)
            self._replica.take_sparse([backend.sparse(*rows, table.rows, "sum") for table, rows in brought])


def _no_rows(table: Table) -> Rows:
    return np.empty(0, np.int64), np.empty((0, *table.shape), table.dtype)
