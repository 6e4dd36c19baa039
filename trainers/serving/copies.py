"""Servers that keep each other's slices: how a training goes on without one of them.

Those that are left put the newest state together, from the servers' own slices and from what twins have of the others',
hand it to all ranks, and divide it anew; parts of an epoch that have come into some slices only are computed again, and
come into those that lack them. In steps that all take together all servers go back to the same step. Where servers
apply gradients as they come, a twin may be some updates behind, and these are what is computed again.
"""

import logging
from functools import partial
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.messages import losses
from allreduce.messages.agreement import all_values, together
from trainers.exchange import pieces_sent
from trainers.rescue import Arrays, Piece, choose, joined
from trainers.serving import parts, twin
from trainers.serving.parts import HOW_FAR, NONE, Parts
from trainers.serving.trainer import ServedTrainer
from trainers.serving.twin import RATES, Layout, Numbers, Twin
from trainers.twins import KEEPS, NOT_KEPT, keepers

log = logging.getLogger("trainers")


class KeptTwice(ServedTrainer):
    """A trainer whose servers have twins. `_copies` is set before its base is made."""

    _copies = 1  # of each slice that were asked for
    _twin: Twin | None = None  # on servers, where there are several
    _rescued: list[Piece] | None = None  # what this rank has of the state, maybe nothing, while a loss is repaired
    _epoch: Parts
    _fits = 0  # that were begun
    _since = 0  # the steps after which this server has updated
    _passed = 0  # updates of this server that its twin hears of
    _applied = False  # the step after `steps` has been taken here
    _has_lost = False  # ranks, while it was made

    @property
    def _outlives_servers(self) -> bool:
        return self._copies == 2 and self._survival is not None

    def _share_again(self) -> None:
        """Have each slice kept by another server too, where there are several. Collective."""
        self._twin = None
        if self._copies == 2 and not losses.in_force():
            notices.once(self.rank, NOT_KEPT)
        if not self._outlives_servers:
            return
        if len(self.servers) == 1:
            if self.rank == 0:
                log.warning("trainers: one server is left: nobody else keeps its slice")
            return
        nodes = all_values(self._comm, self.topology.node_index, KEEPS)
        keeper = keepers([nodes[rank] for rank in self.servers])
        if self._shard is not None:
            mine = self.servers.index(self.rank)
            sides = self.servers[keeper[mine]], self.servers[keeper.index(mine)]
            layout = Layout(self.replica, self._parameters)
            self._twin = Twin(self._messages, self._waits, self._unit, *sides, layout)
        self._settle()

    def _settle(self) -> None:
        super()._settle()
        if self._twin is not None:
            self._since = self.steps
            self._twin.settle()
            self._pass_on(marked=True)
            self._twin.meet()

    def _pass_on(self, marked: bool) -> None:
        """Send this server's twin what it has. marked: the twin waits for it."""
        assert self._twin is not None
        assert self._shard is not None
        part, epoch = self._shard.part, self._epoch
        numbers = Numbers(self._since, int(marked), part.start, part.stop, *epoch.outcomes.shape)
        self._twin.send(numbers, self._write)
        self._passed = self._shard.version

    def _write(self, sliced: Arrays, rest: Arrays) -> None:
        """Write down what this server has in arrays of a state."""
        replica, shard = self.replica, self._shard
        assert shard is not None
        names = replica.elementwise
        np.copyto(sliced["parameters"], shard.parameters)
        for name in names:
            np.copyto(sliced[name], replica.elements(name, shard.part))
        own = replica.snapshot({}, without=("parameters", *names))
        for name, array in {**own, RATES: np.array(replica.learning_rates), **twin.told(self._epoch)}.items():
            np.copyto(rest[name], array)

    @property
    def _own_part(self) -> slice:
        """This server's slice; of a worker nothing."""
        return NONE if self._shard is None else self._shard.part

    # When a rank was lost

    def _let_go_of_ranks(self) -> None:
        super()._let_go_of_ranks()
        if self._outlives_servers and self._rescued is None:  # or else it is gone: a loss in the repair begins it again
            self._rescued = self._rescue()
        self._let_go_of_twin()

    def abandon(self) -> None:
        super().abandon()
        self._let_go_of_twin()

    def _let_go_of_twin(self) -> None:
        if self._twin is not None:
            self._twin.abandon()
            self._twin = None

    def _rescue(self) -> list[Piece]:
        """What this rank has of the state. Local."""
        shard = self._shard
        if shard is None:
            return []
        layout = Layout(self.replica, self._parameters)
        numbers = Numbers(self._since, 0, shard.part.start, shard.part.stop, *self._epoch.outcomes.shape)
        sliced, rest = layout.views(np.zeros(layout.size(numbers), np.uint8), numbers)
        self._write(sliced, rest)
        newest = self.steps + self._applied
        live = Piece(self._since, newest, numbers.start, numbers.stop, sliced, rest)
        return [live, *([] if self._twin is None else self._twin.pieces(newest))]

    def _goes_on_serving(self) -> bool:
        if not self._outlives_servers:
            return super()._goes_on_serving()
        if not self.servers or not self.workers:
            return False
        self._lost_servers = 0
        self._divide()
        self._shard = None
        return True

    def _restore(self) -> bool:
        if not (self._outlives_servers and self.servers and self.workers):
            return super()._restore()
        own = self._rescued or []
        sides = all_values(self._comm, [self._fits, [piece[:4] for piece in own]], HOW_FAR)
        chosen = choose([offers for _, offers in sides], self.replica.gradient_length)
        if chosen is None:
            raise self._stopped("a server was lost, and its twin with it")
        self._fits = max(fits for fits, _ in sides)
        come = pieces_sent(self._comm, own, chosen.pieces, HOW_FAR)
        together(self._comm, partial(self._take_on, chosen.step, come))
        return True

    def _take_on(self, steps: int, pieces: list[tuple[Arrays, Arrays]]) -> None:
        """Local, and so done or not when a loss is heard of."""
        whole = parts.joined([twin.heard(rest) for _, rest in pieces])
        state = joined(pieces)
        self._rescued = [Piece(steps, steps, 0, self.replica.gradient_length, {}, {**state, **twin.told(whole)})]
        rates = state.pop(RATES).tolist()
        for name in twin.told(whole):
            del state[name]
        flat = state["parameters"]  # behind what is trained may be statistics
        state["parameters"] = flat[: self.replica.state()["parameters"].size]
        self.replica.load_state(state)
        if rates != self.replica.learning_rates:
            self.replica.learning_rates = rates
        self._parameters[:] = flat
        self.replica.refresh()
        self._epoch = parts.cut(whole, self._own_part)
        self.steps = self._since = steps
        self._applied = False

    def _go_on(self) -> None:
        self._rescued = None

    def _renumber(self, arguments: dict[str, Any], former: tuple[int, ...]) -> None:
        super()._renumber(arguments, former)
        self._has_lost = True
