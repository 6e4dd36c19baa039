"""MirroredOptimizer between two steps: gradients that are accumulated, clipped, forgotten or missing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.nn import functional

import allreduce
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    SMALL_BUCKETS,
    Raises,
    assert_close,
    assert_mirrored,
    both_overlaps,
    both_updates,
    data,
    everything,
    mine,
    mirrored,
    network,
    train,
)
from tests.ranks.together import raised_everywhere
from trainers.pytorch import Buckets, GradientError


@both_updates
@pytest.mark.parametrize("way", ["none", "zeros", "model, none", "twice"])
def test_zero_grad(flat: allreduce.Topology, way: str, update: str) -> None:
    model, reference = network(), network()
    train(reference, OPTIMIZERS["momentum"](reference.parameters()), everything)
    plain = OPTIMIZERS["momentum"](model.parameters())
    with mirrored(plain, model, topology=flat, update=update, buckets=Buckets(True, **SMALL_BUCKETS)) as optimizer:
        for x, y in zip(*data(), strict=True):
            if way == "twice":
                functional.cross_entropy(model(mine(x)), mine(y)).backward()  # thrown away
            model.zero_grad() if way.startswith("model") else optimizer.zero_grad(set_to_none=way != "zeros")
            functional.cross_entropy(model(mine(x)), mine(y)).backward()
            optimizer.step()
    assert_close(model, reference)


@both_overlaps
def test_accumulation_without_no_sync(flat: allreduce.Topology, overlap: bool) -> None:
    """Averaging averaged gradients again changes nothing; as with DDP it only takes longer."""
    model, reference = network(), network()
    plain, given = OPTIMIZERS["sgd"](reference.parameters()), OPTIMIZERS["sgd"](model.parameters())
    with mirrored(given, model, topology=flat, buckets=Buckets(overlap, **SMALL_BUCKETS)) as optimizer:
        for x, y in zip(*data(), strict=True):
            plain.zero_grad()
            functional.cross_entropy(reference(x), y).mul(2).backward()
            plain.step()
            optimizer.zero_grad()
            for _ in range(2):
                functional.cross_entropy(model(mine(x)), mine(y)).backward()
            optimizer.step()
    assert_close(model, reference, 1e-4)


EDITS: dict[str, Callable[[Any], object]] = {
    "assign": lambda parameter: setattr(parameter, "grad", parameter.grad / 4),
    "assign_data": lambda parameter: setattr(parameter.grad, "data", parameter.grad.data / 4),
    "scale": lambda parameter: parameter.grad.mul_(0.25),
    "scale_data": lambda parameter: parameter.grad.data.mul_(0.25),
    "scale_array": lambda parameter: np.multiply(array := parameter.grad.numpy(), 0.25, out=array),
}
UNSEEN = ("scale_data", "scale_array")  # on one rank, where they are right


@both_updates
@pytest.mark.parametrize("early", [False, True], ids=["synchronized", "early"])
@pytest.mark.parametrize("how", EDITS)
def test_gradients_that_are_edited(
    world: MPI.Intracomm, flat: allreduce.Topology, how: str, early: bool, update: str
) -> None:
    """All edits of averages count. Edits of partial averages, before synchronize(), raise an error on all ranks."""
    model, reference = network(), network()
    plain = OPTIMIZERS["momentum"](reference.parameters())
    with mirrored(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, update=update) as optimizer:
        for number, (x, y) in enumerate(zip(*data(), strict=True)):
            plain.zero_grad()
            functional.cross_entropy(reference(x), y).backward()
            optimizer.zero_grad()
            functional.cross_entropy(model(mine(x)), mine(y)).backward()
            if update == "sharded" and not early:
                optimizer.synchronize()
            for net in (model, reference):
                for parameter in [*net.parameters()][number % 3 :]:
                    EDITS[how](parameter)
            if update == "sharded" and early and (SIZE > 1 or how not in UNSEEN):
                go_on = optimizer.step if number % 2 else optimizer.synchronize
                text = raised_everywhere(world, GradientError, go_on)
                assert "optimizer.synchronize() first" in text
                return
            plain.step()
            optimizer.step()
        assert_close(model, reference, 1e-4)
        assert_mirrored(world, model)


@both_updates
def test_gradients_that_are_given(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """Also for a parameter that had no gradient; a gradient of another shape on one rank raises an error on all."""
    model = network()
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, topology=flat, update=update) as optimizer:
        before = [each.detach().clone() for each in model.parameters()]
        model[4].weight.sum().backward()
        optimizer.synchronize()
        model[0].bias.grad = torch.ones(40)
        optimizer.step()
        torch.testing.assert_close(model[0].bias.data, before[1] - 0.1)
        assert torch.equal(model[0].weight, before[0])
        optimizer.zero_grad()
        model[4].weight.sum().backward()
        optimizer.synchronize()
        if update == "sharded":
            if world.rank == 0:
                model[4].weight.grad.data = torch.ones(7)
            text = raised_everywhere(world, GradientError, optimizer.step)
            assert "4.weight has become (7,) torch.float32" in text


@both_overlaps
def test_memory_that_a_gradient_was_given(world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool) -> None:
    """The parameter is used on some ranks in the next step: the others contribute zeros, not the old gradient."""
    model = network()
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, topology=flat, buckets=Buckets(overlap)) as optimizer:
        (model[4].bias.sum() * 8).backward()
        model[4].bias.grad.data = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        (model[4].bias if world.rank == 0 else model[2].bias).sum().backward()
        assert model[4].bias.grad.tolist() == pytest.approx([1 / SIZE] * 3)


@both_updates
@both_overlaps
@pytest.mark.parametrize("moved", [False, True])
def test_synchronize_early(
    world: MPI.Intracomm, flat: allreduce.Topology, moved: bool, overlap: bool, update: str
) -> None:
    """Gradients computed inside no_sync() are averaged by synchronize(), once; in their new memory if the model, and
    they, have moved."""
    model = network()
    plain = OPTIMIZERS["sgd"](model.parameters())
    with mirrored(plain, model, topology=flat, update=update, buckets=Buckets(overlap)) as optimizer:
        with optimizer.no_sync():
            (model[4].bias.sum() * (world.rank + 1)).backward()
        assert model[4].bias.grad.tolist() == [world.rank + 1] * 3
        if moved:
            model.double().float()
        optimizer.synchronize()
        optimizer.synchronize()
        assert model[4].bias.grad.tolist() == pytest.approx([(SIZE + 1) / 2] * 3)
        assert update == "sharded" or model[0].weight.grad is None
        optimizer.step()
        assert optimizer._parts.reducer._begun == 1


@pytest.mark.parametrize("kind", ["adamw", "momentum"])  # both are fused, but not while a parameter has no state yet
def test_unused_parameters_sharded(flat: allreduce.Topology, kind: str) -> None:
    """A parameter that no rank uses in a step gets no decay, no momentum and no state; each parameter counts its own
    steps."""
    model, reference = network(), network()
    plain, given = OPTIMIZERS[kind](reference.parameters()), OPTIMIZERS[kind](model.parameters())
    x, y = data(4)
    with mirrored(given, model, topology=flat, update="sharded") as optimizer:
        for number, rows in enumerate(x):
            for net, opt, take in ((model, optimizer, mine), (reference, plain, everything)):
                opt.zero_grad()
                hidden = net[:2](take(rows)).detach() if number % 2 else net[:2](take(rows))
                functional.cross_entropy(net[4](net[2:4](hidden)), take(y[number])).backward()
                opt.step()
            for net in (model, reference):
                net[4].bias.requires_grad_(number > 0)  # frozen for one step
                net[2].bias.requires_grad_(number < 2)  # and from here to the end
        here, there = optimizer.state_dict()["state"], plain.state_dict()["state"]
        if kind == "momentum":
            assert here.keys() == there.keys()
        else:
            counts = [{at: float(each["step"]) for at, each in state.items()} for state in (here, there)]
            assert counts == [{0: 2, 1: 2, 2: 4, 3: 3, 4: 4, 5: 3}] * 2
    assert_close(model, reference, 1e-4)


@both_updates
def test_rank_without_backward(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """A rank without rows still calls step(); its gradients are zeros."""
    model = network()
    before = model[4].bias.detach().clone()
    with mirrored(torch.optim.SGD(model.parameters(), lr=1.0), model, topology=flat, update=update) as optimizer:
        if world.rank == SIZE - 1:
            model[4].bias.sum().backward()
        optimizer.step()
        torch.testing.assert_close(model[4].bias.data, before - 1 / SIZE)
        assert_mirrored(world, model)


@both_updates
@both_overlaps
@pytest.mark.parametrize("forget", [True, False], ids=["zero_grad", "model.zero_grad"])
def test_backward_that_raises_is_tried_again(
    world: MPI.Intracomm, flat: allreduce.Topology, forget: bool, overlap: bool, update: str
) -> None:
    """All ranks catch an error of backward, with some buckets submitted, and may save a checkpoint: the next backward
    averages as usual."""
    model = network()
    options = {"topology": flat, "update": update, "buckets": Buckets(overlap, first_mb=1e-6, mb=1e-6)}
    with mirrored(OPTIMIZERS["momentum"](model.parameters()), model, **options) as optimizer:
        for number in range(2):
            with pytest.raises(ZeroDivisionError):
                model[3:](Raises.apply(model[:3](mine(data()[0][0])))).sum().backward()
            assert bool(optimizer.state_dict()["state"]) == (number > 0)
            optimizer.zero_grad() if forget else model.zero_grad()
            (model[4].bias.sum() * (world.rank + 1)).backward()
            if update == "sharded":
                optimizer.synchronize()
            assert model[4].bias.grad.tolist() == pytest.approx([(SIZE + 1) / 2] * 3)
            assert update == "sharded" or model[4].weight.grad is None
            optimizer.step()
        assert optimizer.steps == 2
        assert_mirrored(world, model)
