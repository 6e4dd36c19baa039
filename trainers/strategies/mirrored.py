"""The strategy of MirroredTrainer: average the gradients, then update all replicas, or one slice a rank."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce, Config
from allreduce.elastic.retry import attempt
from allreduce.elastic.standby import JOINED
from allreduce.errors import RankLostError
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.transport.control import all_values, together
from trainers.backends import backend_for, bind_own, compress_error
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.options.average import AUTO, REPLICATED, SHARDED, Average, Exact, Sharded, choice_error, sharded_of
from trainers.options.buckets import Buckets
from trainers.replica import Replica, parameter_slices
from trainers.state import backup
from trainers.state.adopt import ADOPT, RATES, Arrays, Piece, adopt, mirror
from trainers.strategies.interface import Strategy, outlives_ranks, replica_error
from trainers.strategies.rule import FLAGS
from trainers.strategies.sharded import SliceOwners
from trainers.strategies.step import Step, StepOwners

MEASURED = "trainer.measured"  # an entry of a state during a recovery: `measured` of its last step


class Mirrored(Strategy):
    """Synchronous training with one AllReduce a step; see MirroredTrainer for the arguments.

    allreduce: the backend. buffer: see Step.
    """

    def __init__(
        self,
        replica: Replica,
        name: str,
        given: str | AllReduce | Config | None,
        topology: Topology | None,
        update: str | Sharded = REPLICATED,
        compress: Given = None,
        average: Average | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        super().__init__(replica, name)
        self._given, self._topology = given, topology
        sharded = sharded_of(update)
        self._update = SHARDED if sharded == Sharded() else update  # ranks compare it
        self._compress, self.average, self._buckets = compress, average, buckets
        self._update_name = SHARDED if sharded else REPLICATED
        self._copies = sharded.copies if sharded else 1
        self._config = given.config if isinstance(given, AllReduce) else given  # to create the backend again; or None
        self._owns_backend = not isinstance(given, AllReduce)
        self.divides_state = sharded is not None

    # Construction

    def describe(self) -> str:
        given = self._given
        name = given.name if isinstance(given, AllReduce | Config) else given
        options = f"update={self._update!r}, compress={self._compress!r}, average={self.average!r}, "
        options += f"buckets={self._buckets!r}"
        return f"{self.name}({type(self.replica).__name__}, {name!r}, {options})"

    def argument_error(self, ranks: Topology) -> Exception | None:
        given = self._given
        if error := replica_error(self.replica, self):
            return error
        if text := choice_error(self._update, self.average):
            return ArgumentError(text)
        if not isinstance(self._buckets, Buckets | None):
            return ArgumentError(f"buckets must be a Buckets, got {self._buckets!r}")
        if self._buckets is not None and self._buckets.overlap is True and (text := self._no_overlap()):
            return ArgumentError(f"{self._buckets!r}: {text}; leave it out")
        if isinstance(given, AllReduce) and self._topology not in (None, given.topology):
            return ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
        if (sharded := sharded_of(self._update)) and sharded.shard != AUTO:
            return ArgumentError(f"{sharded!r}: shard is of MirroredOptimizer; give it to the replica")
        twice = None if isinstance(given, Config) else compress_error(given, self._compress)
        return twice or backup.copies_error(self._copies)

    def _no_overlap(self) -> str:
        """Return why this training can't sum gradients while others are computed, as text; "" if it can. Local."""
        replica, given = self.replica, self._given
        half = dtypes.is_half(dtypes.parse(replica.gradient_dtype))
        if not replica.early or replica.device != "cpu":
            return f"this {type(replica).__name__} tells no gradients on the CPU before it has all (Replica.early)"
        slices = parameter_slices(replica)
        if not slices or slices[-1].stop != replica.parameter_count:
            return "the shapes of the replica must be those of all its parameters (Replica.shapes)"
        if self._update_name == SHARDED or self.average is not None:
            return 'only gradients of update="replicated", without `average`, are summed during backward'
        if self._compress is not None or half or getattr(given, "lossy", False) or getattr(given, "sums_terms", False):
            return "compressed and exact gradients, and those of 16 bits, are summed in one call"
        return ""

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self._config is not None and self.replica.device == "cpu"

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        replica = self.replica
        self.allreduce = self._make_backend()
        if replica.allocates and replica.device == "cpu":
            malloc.keep_freed_memory()
        self._last = np.zeros(len(replica.metrics) + len(FLAGS), np.float32)  # `measured` of the last finished step
        self._make_buffer()
        # evaluate and predict divide the rows among the ranks, so replicas must be equal before the first fit
        mirror(self)
        self._divide()

    def _make_backend(self) -> AllReduce:
        assert self._given is not None
        exact = isinstance(self.average, Exact)
        given = self._given, self.group.topology, self._update_name, self._compress, self.replica.device
        return backend_for(*given, exact=exact)

    def _make_buffer(self) -> None:
        """Allocate the gradient buffer with the backend, and bind the replica to it. Collective."""
        # set before `bind`, which may raise on one rank: `close` then unbinds every rank
        self.core = self._make_step()
        self.measured = self.core.measured
        together(self.group.comm, self.core.bind)

    def _make_step(self) -> Step:
        return Step(self, self.allreduce, None if self._no_overlap() else self._buckets)

    @property
    def owners(self) -> StepOwners:
        owners: StepOwners = self.core.owners
        return owners

    def _divide(self) -> None:
        """Divide the state among the ranks, which all have the same one, if it is to be divided. Collective."""
        if self._update_name == "sharded" and self.group.size > 1:
            self.core.owners = self._divided(self.core)

    def _divided(self, step: Step) -> StepOwners:
        """Return owners of slices. Collective."""
        return SliceOwners(step, self.steps, self._effective_copies())

    def _effective_copies(self) -> int:
        """Return the number of ranks that keep each slice: 1 instead of 2 if a failure ends the job anyway. Local."""
        return backup.kept_copies(self._copies, self.group.rank, outlives_ranks(self))

    def close(self) -> None:
        if self.core is not None:
            self.owners.close()
        self._drop_buffer()
        if self._owns_backend and self.allreduce is not None:
            self.allreduce.close()

    def abandon(self) -> None:
        if self.core is not None:
            self.owners.abandon()
        self._drop_buffer()
        if self._owns_backend and self.allreduce is not None:
            self.allreduce.abandon()

    def _drop_buffer(self) -> None:
        """Drop the buffer, and bind the replica to memory of its own. Local."""
        if self.core is not None:
            if self.replica.hold.holder is self:
                bind_own(self.replica)
            del self.core.owners  # which hold it: its memory is then free without a garbage collection
        self.core = self.measured = None

    # A step

    def count_step(self) -> None:
        super().count_step()
        if self.recoverable:
            self._last = np.array(self.measured)
        self.owners.set_steps(self.steps)

    # The state

    def edit(self, change: Callable[[], object]) -> None:
        """Call `change()`, which edits the parameters in place, on every rank, or on one rank per node if its ranks
        share them. Collective. After a failure either all remaining ranks have made the change, or none."""
        if not self.recoverable:
            self._edit(change)
            return
        topology = self.group.topology
        outcome = attempt(topology, partial(self._edit, change))
        if not topology.finished(outcome.failure is None):
            raise outcome.failure or RankLostError("a rank failed before all ranks had made the change")
        self.saved = None
        outcome.result()

    def _edit(self, change: Callable[[], object]) -> None:
        self.owners.end_round()
        group, owners, once = self.group, self.owners, self.owners.shares_parameters
        group.enter("edit")
        if self.recoverable:
            self.saved = copy.deepcopy(self.pieces())  # the backups of the changed state overwrite them
        owners.synchronize_state()
        edit = self.replica.edit or (lambda change: change())
        edits = not once or group.topology.node_rank == 0
        together(group.comm, lambda: edit(change) if edits else None)
        owners.synchronize_state()
        together(group.comm, self.replica.refresh)
        if once:  # frozen parameters are in no memory of several ranks
            mirror(self)

    # Recovery after failures

    def pieces(self) -> list[Piece]:
        """Return this rank's pieces of the state; see Owners.pieces. Local."""
        rates, unfinished, pieces = np.array(self.replica.learning_rates), np.array(self.core.measured), []
        for piece in self.owners.pieces():
            own = {RATES: rates, MEASURED: unfinished if piece.first > self.steps else self._last}
            pieces.append(piece._replace(rest=own | piece.rest))
        return pieces

    def rescue(self) -> None:
        # already set if another rank fails during the recovery: the replica may no longer hold the state
        if self.saved is None:
            self.saved = self.pieces()
            self.carried = self.allreduce.state()
        if self.clock.trace is not None:
            self.group.topology.unregister(self.clock.trace)  # the trace continues on the new ranks
        self.abandon()
        self._owns_backend = True  # `rebuild` creates a backend that belongs to this strategy
        self._given = self._config

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        self.part, self.parts = self.group.rank, self.group.size
        self.allreduce = self._make_backend()
        self._make_buffer()
        if self.carried:
            self.allreduce.load_state(self.carried)
        done = self._adopt_newest() or go_back()
        if done:
            self._divide()
        return done

    def _adopt_newest(self) -> bool:
        """Load the newest state that the ranks hold completely. Returns False if there is none. Collective."""
        if self.group.previous[self.group.rank] == JOINED:
            self.saved = []  # a rank that joins has nothing of this training
        done = adopt(self, self.saved or [], len(self.core.buffer)) is not None
        if not done:
            self.steps = max(all_values(self.group.comm, self.steps, ADOPT))
        self.owners.set_steps(self.steps)
        return done

    def load_state(self, step: int, state: Arrays) -> None:
        if MEASURED in state:
            self._go_to(step, state)
        super().load_state(step, state)

    def _go_to(self, step: int, state: Arrays) -> None:
        """Go to the step of a state that the ranks still hold; removes MEASURED from `state`. Local: it must not
        communicate, so that a second failure can't interrupt it halfway."""
        # the array may continue with statistics, and with metrics and flags
        trained = self.replica.state()["parameters"].size
        state["parameters"] = state["parameters"][:trained]
        self.saved = [Piece(step, step, 0, len(self.core.buffer), {}, dict(state))]
        self.steps, self._last = step, state.pop(MEASURED)
        self.core.measured[:] = self._last
