"""MirroredOptimizer(transforms=): ClipNorm and SkipNotFinite of `fit(transforms=)` in a PyTorch loop."""

import math
from functools import partial
from typing import Any

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
from trainers import EMA, Accumulate, ClipNorm, Schedule, SkipNotFinite
from trainers.arrays.squares import sum_of_squares
from trainers.callbacks import CheckGradients
from trainers.options.average import LocalSGD, Sharded
from trainers.pytorch import Buckets, GradientError, MirroredOptimizer

NORM = 0.05
UPDATES = {"replicated": "replicated", "sharded": "sharded", "tensors": Sharded(shard="tensors")}
all_updates = pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)


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
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clip_norm_is_that_of_one_process(
    world: MPI.Intracomm, flat: allreduce.Topology, update: Any, kind: str, closure: bool
) -> None:
    """And has the bits of `clip_grad_norm_`: the norm of a sharded update is that of all ranks. Transforms run each
    time that a closure returns."""
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
                if closure and not own:
                    optimizer.step(partial(gradients, model, optimizer, rows))
                    continue
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
    with mirrored(make(), model, topology=flat, update=update, transforms=[ClipNorm(NORM)]) as optimizer:
        optimizer.zero_grad()
        model(words[world.rank], world.rank == 0).square().sum().backward()
        optimizer.step()
        assert optimizer.measured["grad_norm"] > NORM
    loss = sum(reference(words[rank], rank == 0).square().sum() for rank in range(SIZE)) / SIZE
    loss.backward()
    assert reference.table.weight.grad is not None
    reference.table.weight.grad = reference.table.weight.grad.to_dense()
    nn.utils.clip_grad_norm_(reference.parameters(), NORM)
    plain.step()
    assert_close(model, reference)
    assert all(torch.equal(here, before[f"none.{name}"]) for name, here in model.none.named_parameters())
    assert_mirrored(world, model)


def test_lbfgs(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model, x = nn.Linear(3, 1), torch.arange(6.0).reshape(2, 3)
    with mirrored(torch.optim.LBFGS(model.parameters(), max_iter=4), model, transforms=[ClipNorm(NORM)]) as optimizer:

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - world.rank).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.measured["grad_norm"] > 0
    assert_mirrored(world, model)


@both_updates
def test_join(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """The norm is measured on all ranks, also on those that have no batches left."""
    model = network()
    with mirrored(plain_sgd(model), model, topology=flat, update=update, transforms=[ClipNorm(NORM)]) as optimizer:
        with optimizer.join():
            for number in range(1 + world.rank):
                step(model, optimizer, number)
        assert len(set(world.allgather(optimizer.measured["grad_norm"]))) == 1
        assert optimizer.measured["grad_norm"] > 0
    assert_mirrored(world, model)


@both_updates
def test_what_the_program_left_in_grad(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """Also gradients that it has replaced by tensors with gaps in their memory."""
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    with mirrored(plain_sgd(model), model, topology=flat, update=update, transforms=[ClipNorm(NORM)]) as optimizer:
        reference.load_state_dict(model.state_dict())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        for own in (model, reference):
            own.weight.grad = torch.arange(12.0).reshape(6, 2)[::2].T
            own.bias.grad = torch.ones(1).expand(2)
        optimizer.step()
    for each in reference.parameters():
        each.grad = each.grad.contiguous()  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(reference.parameters(), NORM)
    plain_sgd(reference).step()
    assert_close(model, reference)


@several
def test_edits_of_scattered_gradients_are_found_as_before(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    with mirrored(plain_sgd(model), model, topology=flat, update="sharded", transforms=[ClipNorm(NORM)]) as optimizer:
        gradients(model, optimizer, batch())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        raised_everywhere(world, GradientError, optimizer.step)
        step(model, optimizer)


@all_updates
def test_a_norm_counts_the_gradients_that_the_program_has_left(
    world: MPI.Intracomm, flat: allreduce.Topology, update: Any
) -> None:
    model, reference = network(), network()
    with mirrored(plain_sgd(model), model, topology=flat, update=update, transforms=[ClipNorm(NORM)]) as optimizer:
        for own, take in ((model, mine), (reference, everything)):
            gradients(own, own, batch(), take)
            own[0].weight.grad = None
        optimizer.step()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), NORM)
        assert optimizer.measured["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    plain_sgd(reference).step()
    assert_mirrored(world, model)
    assert_close(model, reference, 1e-4)


@both_updates
def test_a_step_that_is_left_out_clips_nothing(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    model = network()
    transforms = [SkipNotFinite(), ClipNorm(NORM)]
    with mirrored(plain_sgd(model), model, topology=flat, update=update, transforms=transforms) as optimizer:
        optimizer.zero_grad()
        (model[2].bias.sum() * float("nan" if world.rank == 0 else 1)).backward()
        optimizer.step()
        assert optimizer.steps_skipped == 1
        assert math.isnan(optimizer.measured["grad_norm"])
        step(model, optimizer)
        assert optimizer.measured["grad_norm"] > 0
    assert_mirrored(world, model)


@pytest.mark.parametrize("closure", [False, True])
def test_local_sgd(world: MPI.Intracomm, flat: allreduce.Topology, closure: bool) -> None:
    """A rank clips its own gradients."""
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


REFUSED: dict[str, Any] = {
    "EMA": [EMA(0.9)],
    "Accumulate": [Accumulate(2)],
    "Schedule": [Schedule()],
    "two": [ClipNorm(1.0), ClipNorm(2.0)],
    "checks": [SkipNotFinite(), CheckGradients()],
    "class": [ClipNorm],
    "no list": ClipNorm(1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_fit_is_refused(flat: allreduce.Topology, name: str) -> None:
    model = network()
    with pytest.raises(errors.OptionError, match="transforms is a list of at most one ClipNorm"):
        MirroredOptimizer(plain_sgd(model), model, topology=flat, transforms=REFUSED[name])
    with mirrored(plain_sgd(model), model, topology=flat, transforms=[ClipNorm(NORM)]) as optimizer:
        step(model, optimizer)
