"""The making of a trainer outlives lost ranks, as its calls do."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from allreduce import create, ending, keywords
from allreduce.base import AllReduce
from allreduce.messages import losses
from allreduce.messages.agreement import everywhere
from allreduce.spares import Joining
from allreduce.topology import Topology
from trainers import surviving

if TYPE_CHECKING:
    from trainers.base import Trainer

P = ParamSpec("P")
MAKING = "the making of the trainer"


def outlives_losses(init: Callable[P, None]) -> Callable[P, None]:
    """A trainer's constructor, called again by the ranks that are left when one is lost in it. Collective.

    With on_failure="continue", where MPI lets the others live; otherwise the constructor as it is.
    """
    signature = inspect.signature(init)

    @keywords.known_only
    @functools.wraps(init)
    def make(*args: P.args, **options: P.kwargs) -> None:
        try:
            given = signature.bind(*args, **options)
        except TypeError:
            init(*args, **options)  # raises Python's own error, which names the class
            raise
        trainer = given.arguments["self"]
        inside = trainer.being_made  # the constructor of a kind of trainer has called that of its base
        if inside or given.arguments.get("on_failure") != "continue" or not losses.in_force():
            init(*args, **options)
            return
        trainer.being_made = True
        try:
            _make(init, trainer, given)
        finally:
            trainer.being_made = False

    return make


def _make(init: Callable[..., None], trainer: "Trainer", given: inspect.BoundArguments) -> None:
    arguments, begin = given.arguments, time.monotonic()
    backend = arguments.get("allreduce")
    recipe = None
    if isinstance(backend, AllReduce):
        ranks, owned, recipe = backend.topology, False, backend.recipe
    else:
        owned = arguments.get("topology") is None
        ranks = arguments["topology"] = Topology.of_survivors() if owned else arguments["topology"]
    before, first = ending.world_ranks(ranks.world), ranks
    if isinstance(ranks, Joining):  # the others are in the middle of a fit
        init(*given.args, **given.kwargs)
        trainer._owns_topology |= owned
        trainer._owns_backend |= owned
        return
    while True:
        error, lost = None, None
        try:
            if recipe is not None and ranks is not first:
                arguments["allreduce"] = create(recipe.name, ranks, **recipe.options)
            init(*given.args, **given.kwargs)
        except Exception as met:
            error, lost = met, losses.lost(met)
            if lost is not None:
                ranks.revoke()
            elif not everywhere(met, ranks.world):
                raise  # the others don't know of it: it ends the job
        if ranks.finished(lost is None):
            break
        trainer._unmake()
        ranks = surviving.next_topology(ranks, takes_newcomers=False)
        if recipe is None:
            arguments["topology"] = ranks
        trainer._renumber(arguments, ranks.former)
    remade = ranks is not first
    if error is not None:
        if owned or remade:
            ranks.close()
        raise error
    trainer._owns_topology = owned or remade
    if remade:
        trainer._owns_backend |= recipe is not None
        surviving.note(trainer, before, MAKING, time.monotonic() - begin)
