"""The life of a MirroredOptimizer: made, made again when a rank is lost, closed or dropped."""

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from allreduce.base import AllReduce
from allreduce.errors import ClosedError, OptionError
from allreduce.messages import losses
from allreduce.topology import Topology
from trainers import divergence
from trainers.pytorch.checks import Options, still_fit
from trainers.pytorch.family import Family, family_of
from trainers.pytorch.making import drop, make
from trainers.pytorch.recovering import recover, said, surviving
from trainers.pytorch.report import Report, report_of
from trainers.pytorch.stepping import Stepper
from trainers.pytorch.twins import Whole


class Life:
    """What a MirroredOptimizer is made of. optimizer: the plain one."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module, options: Options) -> None:
        self.closed = False
        self.whole: Whole | None = None  # the state of all slices, while a loss is repaired
        self.kept_twice = False  # whether that was found when a rank was lost
        self.optimizer, self.model, self.update = optimizer, model, options.update
        self._options = options
        given = options.allreduce.topology if isinstance(options.allreduce, AllReduce) else options.topology
        family = family_of(given)
        self._make(given or family.topology, family)
        self._source = divergence.Source(options.source, self.topology.world)
        said(self.topology)

    def _make(self, topology: Topology, family: Family) -> None:
        """Make all parts. Collective."""
        self.topology = topology
        self._parts = make(self.optimizer, self.model, self._options, topology, family)
        self.backend, self._averager, self._kernels, self._sharded, self._trained, self._frozen, *_ = self._parts
        own = self._averager, self._kernels, self._sharded, self._trained
        self._stepper = Stepper(self.optimizer, *own, self._options)
        self._averager.take_over(self)
        self._dropped = weakref.finalize(self, drop, family, self._averager, self._parts.made)
        self._dropped.atexit = False
        family.owners[self._averager.number] = self

    @property
    def steps(self) -> int:
        """How many steps this optimizer has done, the same on all ranks: the number of the next batch."""
        return self._averager.steps

    @property
    def steps_skipped(self) -> int:
        """How many steps all ranks have left out, with check_gradients="skip"."""
        return self._stepper.skipped

    def report(self) -> Report:
        """What averaging has cost this rank so far. Print it."""
        return report_of(self._averager, self.backend.name, self.update)

    def close(self) -> None:
        """Give memory and communicators back. Collective; closing twice does nothing.

        The model stays as it is, on every rank, without `.grad`; a backward through it raises ClosedError from
        now on. The state of a sharded update is dropped: take `state_dict()` before, to go on elsewhere.
        """
        while not self.closed:
            family = self._averager.family
            ok = True
            try:
                self._averager.together("closes the optimizer", lambda: None)
            except Exception as error:
                if losses.lost(error) is None:
                    raise
                ok = False
            if losses.in_force() and not family.topology.finished(ok):
                lost = recover(family)  # others have not done their last step; they do it, or it is done already
                if self.update == "sharded" and not self.kept_twice:
                    raise lost
                continue
            self.closed = True
            self._dropped.detach()
            self._parts.made.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this MirroredOptimizer is closed; make it again to go on")
        still_fit(self.optimizer, self._trained, self._frozen)

    def _surviving(self) -> Any:
        """Inside, a lost rank has this optimizer made again, and is raised."""
        return surviving(self._averager.family)

    # What `recovering` calls

    def _reconnect(self, family: Family) -> None:
        """Make all parts again on the ranks of a new family. Collective."""
        old, skipped = self._averager, self._stepper.skipped
        self._let_go()
        self._source.move(family.topology.world)
        self._options = _again(self._options, family.topology.size, self._source.rank)
        self.closed = True  # while its parameters are nobody's
        try:
            self._make(family.topology, family)
        except Exception as error:
            self.closed = losses.lost(error) is None  # or else it is made once more, by those that are left then
            raise
        self.closed = False
        new = self._averager
        new.steps, new.averages, new.joining, new.enabled = old.steps, old.averages, old.joining, old.enabled
        self._stepper.skipped = skipped
        if self._sharded is not None and self._sharded.twins is not None:
            self._sharded.twins.count_from(new.steps)

    @torch.no_grad()
    def _take_whole(self, whole: Whole) -> None:
        """Take on what all slices were. Local."""
        self.whole, self._averager.steps = whole, whole.steps
        for here, there in zip(self._averager.parameters, whole.parameters, strict=True):
            here.copy_(there)
        assert self._sharded is not None
        self.optimizer.load_state_dict(self._sharded.as_plain(whole.state))

    def _let_go(self) -> None:
        """Hold on to nothing that the lost ranks have shared. Local."""
        self._dropped.detach()
        self._parts.local.close()

    def _drop(self) -> None:
        """Another rank has dropped this optimizer. Local."""
        self._let_go()
        self.closed = True


def _again(options: Options, ranks: int, source: str | int) -> Options:
    """The options of an optimizer that is made again on the ranks that are left, so many."""
    given = options.allreduce
    if isinstance(given, AllReduce):
        if given.recipe is None:
            raise OptionError(
                f"{given!r} was not made by allreduce.create(), so it can't be made again without the lost rank"
            )
        given = given.recipe
    copies = options.copies if ranks > 1 else 1
    return options._replace(allreduce=given, topology=None, trace=None, source=source, copies=copies)
