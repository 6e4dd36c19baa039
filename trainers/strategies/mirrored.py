"""Tables of which a batch uses a few rows: only the gradients of these go from rank to rank."""

from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce import create, notices
from allreduce.backend import AllReduce, Recipe
from allreduce.elastic.standby import NEWCOMER, Joining, Manned
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, together
from trainers.backends import backend_for
from trainers.group import sent
from trainers.recovery.calls import Survival
from trainers.replica import Replica, Rows, Table
from trainers.state.adopt import pieces_sent
from trainers.state.backup import NOT_KEPT
from trainers.state.pieces import MEASURED, Choice, Piece, choose, joined
from trainers.strategies.interface import Update
from trainers.trainer import Trainer


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
        self.brought = [_nothing(table) for table in self._replica.tables]

    def reduce(self, backend: AllReduce) -> None:
        """Give the replica the sums of all ranks' rows. Collective."""
        if tables := self._replica.tables:
            brought = zip(tables, self.brought, strict=True)
            self._replica.take_sparse([backend.sparse(*rows, table.rows, "sum") for table, rows in brought])


def _nothing(table: Table) -> Rows:
    return np.empty(0, np.int64), np.empty((0, *table.shape), table.dtype)


RATES = "trainer.learning_rates"  # what ranks hand each other besides a replica's state, as MEASURED
NEWEST = "take on the newest state of the ranks that are left"


class Outliving(Trainer):
    """A trainer with a backend that outlives some of its ranks.

    asked: the name of its backend, or the recipe of the one that was given.
    """

    remakes = False  # whether it knows how to make its backend, which has no recipe
    allreduce: AllReduce
    _asked: str | Recipe | None
    _update: str
    _compress: str | None
    _copies: int  # of each slice that were asked for
    _measured: Any
    _last: np.ndarray  # what the last step has measured
    _fresh: np.ndarray
    _beside: bool  # what is measured is an array of its own
    _sharded: Update | None = None
    _rescued: list[Piece] | None  # what this rank has of the state, maybe nothing, while a loss is repaired

    def _make_buffer(self) -> None:
        """Have the backend allocate what is reduced in every step, and bind the replica to it. Collective."""
        raise NotImplementedError

    def _share_update(self) -> None:
        """From now on each rank updates what it owns. Collective."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Let go of the backend, without the other ranks. Local."""
        raise NotImplementedError

    @property
    def goes_back(self) -> bool:
        return self.goes_on and self._sharded is not None and not self._sharded.all_twice

    @property
    def _outlives(self) -> bool:
        """Whether lost ranks leave the others alive, and this is made again on those."""
        remade = (self._asked is not None or self.remakes) and self.replica.device == "cpu"
        return remade and ulfm.in_force()

    def _survive(self, on_failure: str | None) -> None:
        """Outlive lost ranks from now on, where that can be. Local, on all ranks."""
        if not self._outlives or (self.size == 1 and not isinstance(self.topology, Joining | Manned)):
            return
        self._survival = Survival(self, goes_on=on_failure == "continue")

    def _copies_kept(self) -> int:
        """How many ranks have each slice. Local."""
        if self._copies == 2 and not self._outlives:
            notices.once(self.rank, NOT_KEPT)
            return 1
        return self._copies

    def note_step(self) -> None:
        super().note_step()
        if self._survival is not None:
            self._last = np.array(self.measured)
        if self._sharded is not None:
            self._sharded.note_step(self.steps)

    def _edit(self, change: Callable[[], object]) -> None:
        """Change the parameters on all ranks that are left, or on none. Collective."""
        if self._survival is None:
            self._change(change)
            return
        before: list[Piece] = []
        try:
            self._survival.by_all(lambda: self._change(change, before))
        except Exception as error:
            if ulfm.lost(error) is not None:
                self._rescued = before or None
            raise

    def _change(self, change: Callable[[], object], before: list[Piece] | None = None) -> None:
        """Collective. before: takes what this rank has of the state before any rank changes it."""
        self._enter("edit")
        if before is not None:
            before += self._rescue()
        once = self._sharded is not None and self._sharded.in_common
        self._settle()
        together(self._comm, lambda: change() if not once or self.topology.node_rank == 0 else None)
        self._settle()
        if once and self.replica.tables:  # which every rank has for itself
            self._mirror()

    def _let_go_of_ranks(self) -> None:
        super()._let_go_of_ranks()
        if self._rescued is None:  # or else it is gone: a loss in the repair begins that again
            self._rescued = self._rescue()
        if self.trace is not None:
            self.topology.let_go(self.trace)  # which goes on
        self._drop()
        self._owns_backend = self._owns_topology = True  # those that are made now

    def _rescue(self) -> list[Piece]:
        """A copy of what this rank has of the state. Local."""
        rates = {RATES: np.array(self.replica.learning_rates)}
        if self._sharded is None:
            return [self._whole_piece({**self.replica.snapshot({}), **rates})]
        self._fresh = np.array(self._measured)  # of a step that this rank has not ended
        return [piece._replace(rest={**rates, **piece.rest}) for piece in self._sharded.rescue()]

    def _whole_piece(self, state: dict[str, np.ndarray]) -> Piece:
        return Piece(self.steps, self.steps, 0, self._length, {}, state)

    @property
    def _length(self) -> int:
        """Of what pieces are cut from: the parameters, and what is measured, where that lies behind them."""
        return self.replica.gradient_length + (0 if self._beside else self._last.size)

    def _reconnect(self, topology: Topology) -> None:
        self.allreduce = self._make_backend(topology)
        super()._reconnect(topology)
        self._make_buffer()

    def _make_backend(self, topology: Topology) -> AllReduce:
        if isinstance(self._asked, str):
            return backend_for(self._asked, topology, self._update, self._compress)
        assert self._asked is not None  # or it was refused
        return create(self._asked.name, topology, **self._asked.options)

    def _restore(self) -> bool:
        comm = self._comm
        if self.topology.former[self.rank] == NEWCOMER:
            self._rescued = []  # a rank that joins has nothing of this training
        own = self._rescued or []
        sides = all_values(comm, [self.steps, [piece[:4] for piece in own]], NEWEST)
        chosen = choose([offers for _, offers in sides], self._length)
        if chosen is None:
            self.steps = max(steps for steps, _ in sides)
            return False
        state = joined(pieces_sent(comm, own, chosen.pieces, NEWEST))
        measured = self._measured_of(chosen, [steps for steps, _ in sides], state["parameters"])
        together(comm, lambda: self._take_on(chosen.step, state, measured))
        return True

    def _measured_of(self, chosen: Choice, taken: list[int], parameters: np.ndarray) -> np.ndarray:
        """What the last step before a state has measured: from a rank that has ended it, or as it came. Collective.

        taken: the steps that every rank has ended.
        """
        if chosen.step in taken:
            rank, own = taken.index(chosen.step), self._last
        elif parameters.size <= self.replica.gradient_length:
            rank, own = chosen.pieces[0][0], self._fresh
        else:
            return parameters[self.replica.gradient_length :]
        return sent(self._comm, {MEASURED: own}, rank, NEWEST)[MEASURED]

    def _take_on(self, steps: int, state: dict[str, np.ndarray], measured: np.ndarray) -> None:
        """Local, and so done or not when a loss is heard of."""
        self.steps, self._last = steps, measured
        trained = self.replica.state()["parameters"].size  # behind them may be statistics, and what was measured
        state["parameters"] = state["parameters"][:trained]
        self._rescued = [self._whole_piece(dict(state))]
        self._measured[:] = measured
        rates = state.pop(RATES).tolist()
        self.replica.load_state(state)
        if rates != self.replica.learning_rates:
            self.replica.learning_rates = rates

    def _share_again(self) -> None:
        if self._update == "sharded":
            self._share_update()

    def _go_on(self) -> None:
        self._rescued = None
