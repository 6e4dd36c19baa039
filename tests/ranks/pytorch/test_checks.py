"""MirroredOptimizer: replicas that differ are copied again, and NaN gradients are reported or their step is left
out."""

import copy
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from tests.ranks.pytorch.trained import (
    SIZE,
    SMALL_BUCKETS,
    assert_mirrored,
    both_overlaps,
    both_updates,
    mine,
    mirrored,
    network,
    sgd,
    train,
)
from tests.ranks.together import raised_everywhere
from trainers import SkipNotFinite
from trainers.callbacks import CheckGradients
from trainers.errors import NotFiniteError
from trainers.pytorch import Buckets

pytestmark = pytest.mark.skipif(SIZE != 3, reason="a majority needs three ranks, and once is enough")


@pytest.mark.every_pair
@both_updates
@both_overlaps
def test_who_brings_nan(world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool, update: str) -> None:
    """All ranks raise the error in the same backward, and can continue."""
    ends = []
    options: dict[str, Any] = {"topology": flat, "update": update, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
    for bad in (float("nan") if world.rank == 2 else 1.0, None):
        model = network()
        with mirrored(sgd(model), model, transforms=[CheckGradients()], **options) as optimizer:
            train(model, optimizer, mine, steps=2)
            if bad is not None:
                optimizer.zero_grad()
                backward = (model[2].bias[3] * bad + model[4].weight.sum()).backward
                text = raised_everywhere(world, NotFiniteError, backward)
                assert "gradients are not finite: rank 2 has 1 NaN gradient, the first in 2.bias" in text
            train(model, optimizer, mine, steps=2)
            assert_mirrored(world, model)
            ends.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_step_that_is_left_out_leaves_no_statistics(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """The statistics of all its forward passes are undone; those of evaluation, and of copies of the model, are not
    counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    with mirrored(sgd(model), model, topology=flat, transforms=[SkipNotFinite()]) as optimizer:

        def step(*batches: Any) -> dict[str, Any]:
            optimizer.zero_grad()
            for batch in batches[1:]:
                with optimizer.no_sync():
                    model(batch).sum().backward()
            model(batches[0]).sum().backward()
            optimizer.step()
            return {name: each.clone() for name, each in model.named_buffers()}

        good, bad = torch.arange(12.0).reshape(4, 3), torch.full((4, 3), float("nan"))
        before = step(good)
        model.eval()(bad)
        model.train()
        after = step(good + world.rank, bad, good)
        assert optimizer.steps_skipped == 1
        assert all(torch.equal(before[name], after[name]) for name in before)
        copied = copy.deepcopy(model)
        copied(good)
        assert step(good)["0.num_batches_tracked"] == copied[0].num_batches_tracked == 2
    assert not model._forward_pre_hooks


@both_updates
def test_averages_that_overflow(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    model = network()
    with mirrored(sgd(model), model, topology=flat, update=update, transforms=[CheckGradients()]) as optimizer:
        backward = lambda: (model[4].bias[1] * 2e38).backward()  # noqa: E731
        text = raised_everywhere(world, NotFiniteError, backward)
        assert "the sum of gradients overflows in 4.bias (element 1), although each rank's gradients are finite" in text
        optimizer.zero_grad()
        (model[4].bias[1] * 1e37).backward()
        optimizer.step()
        assert torch.isfinite(model[4].bias).all()


SENT = {"float16": 65504, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7e308}  # the largest of a dtype


@pytest.mark.every_pair
@both_updates
@pytest.mark.parametrize("compress", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_too_large_to_be_sent(
    world: MPI.Intracomm, flat: allreduce.Topology, dtype: torch.dtype, compress: str | None, update: str
) -> None:
    """They are finite on the rank that computed them, and would be infinite on the others: an error, or no step."""
    own = str(dtype).removeprefix("torch.")
    sent = own if compress is None or dtype.itemsize == 2 else compress
    options: dict[str, Any] = {"topology": flat, "update": update, "compress": compress}
    for large, check in itertools.product((1e5, 1e30, 1e200), (CheckGradients(), SkipNotFinite())):
        model = nn.Linear(40, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=1e-35)
        # a program's own setting must not raise on one rank, in the middle of a step
        with np.errstate(all="raise"), mirrored(plain, model, transforms=[check], **options) as optimizer:

            def step(factor: float) -> None:
                optimizer.zero_grad()
                (model.weight[0, 7] * factor + model.weight.sum()).backward()  # noqa: B023
                optimizer.step()

            step(1.0)
            factor = large if world.rank == 1 else 1.0
            if large < SENT[sent]:
                step(factor)
                assert optimizer.steps_skipped == 0
            elif isinstance(check, SkipNotFinite):
                step(factor)
                assert optimizer.steps_skipped == 1
            else:
                text = raised_everywhere(world, NotFiniteError, partial(step, factor))
                count = "1 infinite gradient" if large > SENT[own] else f"1 gradient too large for {sent}"
                assert f"rank 1 has {count}, the first in weight (element 7)" in text
                assert "rank 0" not in text
                assert ("compress" in text) == (large < SENT[own])
            step(1.0)
            assert torch.isfinite(model.weight).all()
            assert_mirrored(world, model)


@pytest.mark.every_pair
@both_updates
@both_overlaps
@pytest.mark.parametrize("check", ["raise", "skip"])
def test_a_closure_can_not_be_left_out(
    world: MPI.Intracomm, flat: allreduce.Topology, check: str, overlap: bool, update: str
) -> None:
    model = network()
    options: dict[str, Any] = {"topology": flat, "update": update, "buckets": Buckets(overlap)}
    with mirrored(sgd(model), model, transforms=[CheckGradients(check)] * (check is not None), **options) as optimizer:

        def closure(factor: float = 1.0) -> Any:
            optimizer.zero_grad()
            loss = model[4].bias.sum() * factor
            loss.backward()
            return loss

        bad = partial(closure, float("inf") if world.rank == 0 else 1.0)
        for _ in range(2):
            text = raised_everywhere(world, NotFiniteError, lambda: optimizer.step(bad))
            assert "rank 0 has 3 inf" in text
            assert torch.isfinite(optimizer.step(closure))
        assert (optimizer.steps, optimizer.steps_skipped) == (2, 0)
        assert_mirrored(world, model)
