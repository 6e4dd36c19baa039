"""MirroredOptimizer(transforms=): the objects of `fit(transforms=)` change averaged gradients in a PyTorch loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from allreduce import errors
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    SMALL_BUCKETS,
    assert_close,
    assert_mirrored,
    both_updates,
    data,
    everything,
    mine,
    mirrored,
    network,
    plain_sgd,
    several,
)
from tests.ranks.together import raised_everywhere
from trainers import EMA, Accumulate, ClipNorm, Schedule
from trainers.arrays.squares import sum_of_squares
from trainers.callbacks import EarlyStopping
from trainers.errors import ArgumentError
from trainers.options.average import LocalSGD, Sharded
from trainers.pytorch import Buckets, GradientError, MirroredOptimizer
from trainers.strategies.transforms.transform import Applied, Transform
from trainers.watching.meter import NormMeter

JOBS = "openmpi 1 2"
NORM = 0.05
UPDATES = {"replicated": "replicated", "sharded": "sharded", "tensors": Sharded(shard="tensors")}
all_updates = pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)


@dataclass(frozen=True)
class Own(Transform):
    """A program's own transform. fails: in this call of `reduced`, on the last rank. squares: whether it needs them."""

    factor: float = 1.0
    fails: int = -1
    squares: bool = True

    def start(self, replica: Any) -> Applied:
        return OwnApplied(self)


class OwnApplied(Applied):
    made: "OwnApplied"
    part: Any = None

    def __init__(self, options: Own) -> None:
        self.options, self.begun, self.calls = options, 0, []
        self.meter, self.needs_squares = NormMeter("largest"), options.squares
        OwnApplied.made = self

    def begin(self) -> None:
        self.begun += 1

    def reduced(self, gradients: Sequence[Any], part: Any, squares: Any) -> None:
        assert all(type(each) is np.ndarray and each.ndim == 1 for each in gradients)
        self.part = part
        if part is not None:
            assert [each.stop - each.start for each in part] == [each.size for each in gradients[: len(part)]]
        self.calls.append((sum(each.size for each in gradients), squares))
        for each in gradients:
            each *= each.dtype.type(self.options.factor)
        self.meter.set(max((float(abs(each).max()) for each in gradients if each.size), default=0.0))
        if len(self.calls) - 1 == self.options.fails and MPI.COMM_WORLD.rank == SIZE - 1:
            raise KeyError("a word")


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (each[number] for each in data())
    return x, y


def gradients(model: nn.Module, optimizer: Any, rows: tuple[torch.Tensor, torch.Tensor], take: Any = mine) -> Any:
    """Compute the gradients of a batch; return the loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(take(rows[0])), take(rows[1]))
    loss.backward()
    return loss


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    gradients(model, optimizer, batch(number))
    optimizer.step()


@all_updates
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clip_norm_is_that_of_one_process(
    world: MPI.Intracomm, flat: allreduce.Topology, update: Any, kind: str
) -> None:
    """And has the bits of `clip_grad_norm_`: the norm of a sharded update is that of all ranks."""
    ends, norms = [], []
    reference = network()
    plain = OPTIMIZERS[kind](reference.parameters())
    for rows in zip(*data(), strict=True):
        gradients(reference, plain, rows, everything)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), NORM)
        plain.step()
    for own in (False, True):
        model = network()
        options = {"topology": flat, "update": update, "buckets": Buckets(False, **SMALL_BUCKETS)}
        transforms = [] if own else [ClipNorm(NORM)]
        with mirrored(OPTIMIZERS[kind](model.parameters()), model, transforms=transforms, **options) as optimizer:
            for rows in zip(*data(), strict=True):
                gradients(model, optimizer, rows)
                before = [each.grad.reshape(-1).numpy().copy() for each in model.parameters()]
                norms.append(optimizer.clip_grad_norm_(NORM) if own else 0.0)
                if own and update == "replicated":  # the bits of the trainers' ClipNorm, which no processor changes
                    assert norms[-1] == sum(map(sum_of_squares, before)) ** 0.5
                optimizer.step()
            if not own:
                assert optimizer.measured["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
                assert len(set(world.allgather(optimizer.measured["grad_norm"]))) == 1
                last = optimizer.measured["grad_norm"]
            else:
                assert optimizer.measured == {}
                assert norms[-1] == last
        assert_mirrored(world, model)
        assert_close(model, reference, 1e-4)
        ends.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(here, there) for here, there in zip(*ends, strict=True))


class Gaps(nn.Module):
    """`one` is used by rank 0 alone, `none` by no rank; `table` has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.none, self.one, self.all = nn.Linear(5, 5), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor, first: bool) -> torch.Tensor:
        found = self.table(words)
        return self.all(found + self.one(found) if first else found)


@both_updates
def test_gaps_and_sparse_gradients(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    model, reference = Gaps(), Gaps()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    words = torch.tensor([[1, 2, 2], [3, 2, 1], [5, 6, 7], [8, 0, 8], [4, 4, 4]])
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    make = partial(torch.optim.SGD, model.parameters(), lr=0.5)
    with mirrored(make(), model, topology=flat, update=update, transforms=[ClipNorm(NORM), Own(0.5)]) as optimizer:
        optimizer.zero_grad()
        model(words[world.rank], world.rank == 0).square().sum().backward()
        optimizer.step()
        assert optimizer.measured["grad_norm"] > NORM
        found, squares = OwnApplied.made.calls[0]
        assert squares == pytest.approx(NORM**2, rel=1e-3)  # the second one in the list has the result of the first
        if update == "replicated":
            used = sum(each.numel() for part in (model.one, model.all) for each in part.parameters())
            rows = len(words[:SIZE].unique())
            assert found == used + 4 * rows
    loss = sum(reference(words[rank], rank == 0).square().sum() for rank in range(SIZE)) / SIZE
    loss.backward()
    assert reference.table.weight.grad is not None
    reference.table.weight.grad = reference.table.weight.grad.to_dense()
    nn.utils.clip_grad_norm_(reference.parameters(), NORM)
    for each in reference.parameters():
        each.grad = None if each.grad is None else each.grad / 2
    plain.step()
    assert_close(model, reference)
    assert all(torch.equal(here, before[f"none.{name}"]) for name, here in model.none.named_parameters())
    assert_mirrored(world, model)


def test_transforms_run_each_time_that_a_closure_returns(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model, x = nn.Linear(3, 1), torch.arange(6.0).reshape(2, 3)
    with mirrored(torch.optim.LBFGS(model.parameters(), max_iter=4), model, transforms=[Own()]) as optimizer:

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - world.rank).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(OwnApplied.made.calls) > 2
    assert_mirrored(world, model)


@both_updates
@pytest.mark.parametrize("way", ["step", "closure", "join"])
def test_an_error_on_one_rank_ends_the_step_on_all(
    world: MPI.Intracomm, flat: allreduce.Topology, update: str, way: str
) -> None:
    """No rank updates, and a program that catches the error may go on."""
    model = network()
    with mirrored(plain_sgd(model), model, topology=flat, update=update, transforms=[Own(fails=1)]) as optimizer:

        def run() -> None:
            if way == "closure":
                optimizer.step(partial(gradients, model, optimizer, batch()))
            elif way == "step":
                step(model, optimizer)
            else:
                with optimizer.join():
                    for _ in range(world.rank == 0):
                        step(model, optimizer)

        run()
        before = [each.detach().clone() for each in model.parameters()]
        text = raised_everywhere(world, KeyError, run)
        assert "a word" in text
        assert SIZE == 1 or f"rank {SIZE - 1}: " in text
        optimizer.step()  # of nothing: some ranks have transformed their gradients, so all have dropped them
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        run()
        assert optimizer.steps == 3
    assert_mirrored(world, model)


@several
def test_edits_of_scattered_gradients_are_found_as_before(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    for transforms in ([ClipNorm(NORM)], [Own(fails=0, squares=False), ClipNorm(NORM)]):
        with mirrored(plain_sgd(model), model, topology=flat, update="sharded", transforms=transforms) as optimizer:
            gradients(model, optimizer, batch())
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            raised_everywhere(world, GradientError, optimizer.step)
            step(model, optimizer)  # the error of a transform in the step before is no error of this one


@several
def test_the_parts_of_all_ranks_are_all_elements_once(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = nn.ModuleList([nn.Linear(3, 33), nn.Linear(33, 2).double()])  # buckets of two dtypes
    options = {"topology": flat, "update": "sharded", "buckets": Buckets(False, **SMALL_BUCKETS)}
    with mirrored(plain_sgd(model), model, transforms=[Own()], **options) as optimizer:
        model[1](model[0](torch.ones(1, 3)).double()).sum().backward()
        optimizer.step()
        own = [(each.start, each.stop) for each in OwnApplied.made.part if each.start < each.stop]
    parts = sorted(part for rank in world.allgather(own) for part in rank)
    total = sum(each.numel() for each in model.parameters())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(parts))  # between them are gaps of buckets
    assert sum(stop - start for start, stop in parts) == total


@pytest.mark.parametrize("closure", [False, True])
def test_local_sgd(world: MPI.Intracomm, flat: allreduce.Topology, closure: bool) -> None:
    """A rank clips its own gradients; the error of a transform comes to all ranks at the end of the round."""
    ends = []
    for own in (False, True):
        model = network()
        options = {"topology": flat, "average": LocalSGD(2), "transforms": [] if own else [ClipNorm(NORM)]}
        with mirrored(plain_sgd(model), model, **options) as optimizer:

            def compute() -> None:
                gradients(model, optimizer, batch())  # noqa: B023
                if own:  # noqa: B023
                    optimizer.clip_grad_norm_(NORM)

            for _ in range(2):
                if closure:
                    optimizer.step(compute)
                else:
                    compute()
                    optimizer.step()
        ends.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(here, there) for here, there in zip(*ends, strict=True))
    model = network()
    with mirrored(plain_sgd(model), model, topology=flat, average=LocalSGD(3), transforms=[Own(fails=1)]) as optimizer:
        step(model, optimizer)
        step(model, optimizer)
        assert optimizer.steps == 2 - (world.rank == SIZE - 1)
        assert "a word" in raised_everywhere(world, KeyError, partial(step, model, optimizer))
    assert_mirrored(world, model)


@dataclass(frozen=True)
class Needs(Transform):
    """What needs a fit. begun: makes the Applied."""

    begun: Callable[[Any], Any] = field(repr=False)

    def start(self, replica: Any) -> Applied:
        return self.begun(replica)


class Unlucky(ClipNorm):
    def error(self, replica: Any, average: Any) -> str:
        return "no luck"


def work(**members: Any) -> Applied:
    return type("Work", (Applied,), members)()


@dataclass(frozen=True)
class Twice(Own):
    """Has the meter of Own."""


REFUSED: dict[str, tuple[list[Any], type[Exception], str]] = {
    "EMA": ([EMA(0.9)], errors.OptionError, "EMA.*use torch.optim.swa_utils.AveragedModel"),
    "Accumulate": ([Accumulate(2)], errors.OptionError, r"Accumulate.*use backward inside of optimizer.no_sync\(\)"),
    "Schedule": ([Schedule()], errors.OptionError, "Schedule.*use a scheduler of torch.optim.lr_scheduler"),
    "compute": (
        [Needs(lambda replica: work(compute=lambda self, inner, rows: inner(rows)))],
        errors.OptionError,
        "Needs.*: nothing calls Work.compute in a PyTorch",
    ),
    "updated": (
        [Needs(lambda replica: work(updated=lambda self, spans: None))],
        errors.OptionError,
        "nothing calls Work.updated",
    ),
    "replica": (
        [Needs(lambda replica: setattr(replica, "learning_rates", [0.0]))],
        errors.OptionError,
        "has no replica, can't use Needs.*'learning_rates'",
    ),
    "begin": (
        [Needs(lambda replica: work(begin=lambda self: replica.metrics))],
        errors.OptionError,
        "has no replica, can't use Needs.*'metrics'",
    ),
    "nothing": ([Needs(lambda replica: None)], errors.OptionError, "start must return an Applied, got None"),
    "error": ([Unlucky(1.0)], errors.OptionError, "no luck"),
    "watchers": ([Needs(lambda replica: work(watchers=[EarlyStopping()]))], errors.OptionError, "callbacks of a fit"),
    "rank": ([Needs(lambda replica: work(number=1 / (SIZE - 1 - MPI.COMM_WORLD.rank)))], ZeroDivisionError, "by zero"),
    "two": ([ClipNorm(1.0), ClipNorm(2.0)], errors.OptionError, "transforms is a list of Transforms of different"),
    "class": ([ClipNorm], errors.OptionError, "transforms is a list of Transforms"),
    "meters": ([Own(), Twice()], ArgumentError, 'two numbers of a step are named "largest"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_fit_is_refused(world: MPI.Intracomm, flat: allreduce.Topology, name: str) -> None:
    transforms, kind, words = REFUSED[name]
    model = network()
    with pytest.raises(kind, match=words):
        MirroredOptimizer(plain_sgd(model), model, topology=flat, transforms=transforms)
    if name == "rank":
        return
    with mirrored(plain_sgd(model), model, topology=flat, transforms=[Own()]) as optimizer:
        step(model, optimizer)
