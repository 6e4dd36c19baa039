"""Two MirroredOptimizers in one program, as in a GAN or an encoder and its decoder."""

import contextlib
import functools
import gc
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from allreduce import errors
from allreduce.health.status import LEFT
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    SMALL_BUCKETS,
    assert_close,
    assert_mirrored,
    both_overlaps,
    both_updates,
    data,
    mine,
    network,
)
from trainers.pytorch import Buckets, MirroredOptimizer

JOBS = "openmpi 1 2"

STEPS = 12  # every rank has left out each of the models by then


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def wrapped(
    stack: contextlib.ExitStack, models: list[nn.Module], sharing: str, flat: allreduce.Topology, **options: Any
) -> list[MirroredOptimizer]:
    """Wrap each model with an optimizer; the stack closes both, and then the objects that they share."""
    if sharing == "one backend":
        options["allreduce"] = stack.enter_context(allreduce.create("ring", flat))
    made = []
    for model in models:
        topology = stack.enter_context(allreduce.Topology()) if sharing == "own" else flat
        where = {} if sharing == "one backend" else {"topology": topology}
        made.append(stack.enter_context(MirroredOptimizer(adamw(model), model, **where, **options)))
    return made


def train(models: list[nn.Module], optimizers: list[MirroredOptimizer]) -> None:
    """Train, with the optimizers in a different order on every second rank, and a model left out on a rank in each
    step."""
    rank = MPI.COMM_WORLD.rank
    for step, (x, y) in enumerate(zip(*data(STEPS), strict=True)):
        order = (0, 1) if (rank + step) % 2 else (1, 0)
        left_out = step // 2 % 2 if SIZE > 1 and rank == step % SIZE else None
        for optimizer in optimizers:
            optimizer.zero_grad()
        chosen = [models[number] for number in order if number != left_out]
        losses = [functional.cross_entropy(model(mine(x)), mine(y)) for model in chosen]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@functools.cache
def trained_as_one(flat: allreduce.Topology) -> list[nn.Module]:
    """Return the result of one optimizer for both models."""
    models = [network(1), network(2)]
    both = nn.ModuleList(models)
    with MirroredOptimizer(adamw(both), both, topology=flat, buckets=Buckets(False)) as one:
        train(models, [one])
    return models


@both_updates
@both_overlaps
@pytest.mark.parametrize("sharing", ["one backend", "one topology", "own"])
def test_two_optimizers_are_as_one(
    world: MPI.Intracomm, flat: allreduce.Topology, sharing: str, overlap: bool, update: str
) -> None:
    models = [network(1), network(2)]
    with contextlib.ExitStack() as stack:
        two = wrapped(stack, models, sharing, flat, update=update, buckets=Buckets(overlap, **SMALL_BUCKETS))
        train(models, two)
        for model, reference in zip(models, trained_as_one(flat), strict=True):
            assert_mirrored(world, model)
            assert_close(model, reference, 1e-6 if SIZE < 3 else 1e-3)


@both_updates
@both_overlaps
def test_a_model_that_is_left_out_gets_its_average_in_the_same_backward(
    world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool, update: str
) -> None:
    """Rank 0 does not use the second model, and steps the first one earlier: no rank waits for its step."""
    models = [network(1), network(2)]
    with contextlib.ExitStack() as stack:
        optimizers = wrapped(stack, models, "one topology", flat, update=update, buckets=Buckets(overlap))
        for _ in range(3):
            used = models[:1] if world.rank == 0 and SIZE > 1 else models
            sum(model[4].bias.sum() for model in used).backward()
            for optimizer, share in zip(optimizers, (1, (SIZE - 1) / SIZE if SIZE > 1 else 1), strict=True):
                optimizer.synchronize()
                assert optimizer.model[4].bias.grad.tolist() == pytest.approx([share] * 3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model in models:
            assert_mirrored(world, model)


@both_overlaps
def test_gan(world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool) -> None:
    """The optimizers take turns; gradients that the other optimizer's backward leaves are dropped."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))
    judge = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    torch.manual_seed(world.rank)
    with contextlib.ExitStack() as stack:
        of_generator, of_judge = wrapped(stack, [generator, judge], "own", flat, buckets=Buckets(overlap))
        for _ in range(10):
            of_judge.zero_grad()
            fake = generator(torch.randn(5, 4))
            (judge(fake.detach()).mean() - judge(torch.randn(5, 12)).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            (-judge(fake).mean()).backward()
            of_generator.step()
        assert_mirrored(world, generator)
        assert_mirrored(world, judge)
        assert of_generator.steps == of_judge.steps == 10


@pytest.mark.parametrize("loop", ["in one backward", "one of them alone"])
def test_join_with_two_optimizers_is_refused(world: MPI.Intracomm, flat: allreduce.Topology, loop: str) -> None:
    """A rank without batches would not know whose average comes next, so it would be a batch of zeros."""
    models = [network(1), network(2)]
    batches = 1 if world.rank == SIZE - 1 else 3
    with contextlib.ExitStack() as stack:
        optimizers = wrapped(stack, models, "one topology", flat)

        def train() -> None:
            with contextlib.ExitStack() as joins:
                for optimizer in optimizers if loop == "in one backward" else optimizers[:1]:
                    joins.enter_context(optimizer.join())
                for _ in range(batches):
                    sum(model[4].bias.sum() for model in models).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()

        with pytest.raises(errors.OptionError, match="join") as caught:
            train()
        assert "2 MirroredOptimizers" in str(caught.value)
        assert caught.value.ranks == tuple(range(SIZE))
        optimizers[1].close()
        with optimizers[0].join():  # alone it may
            for _ in range(batches):
                models[0][4].bias.sum().backward()
                optimizers[0].step()
        assert_mirrored(world, models[0])


def test_join_beside_a_dropped_optimizer(flat: allreduce.Topology) -> None:
    """As in a loop over models that closes none: the previous optimizer is dropped after the next one is created.

    A reference cycle, such as an error's traceback, holds it until Python collects garbage.
    """
    for model in (network(1), network(2)):
        optimizer = MirroredOptimizer(adamw(model), model, topology=flat)
        held: list[object] = [optimizer]
        held.append(held)
    held = []
    with optimizer.join():
        model[4].bias.sum().backward()
        optimizer.step()
    optimizer.close()


def test_join_beside_a_broken_optimizer(flat: allreduce.Topology) -> None:
    """The traceback of its error holds it, so it is never dropped; it can't be used any more either."""
    models = [network(1), network(2)]
    broken, optimizer = (MirroredOptimizer(adamw(model), model, topology=flat) for model in models)
    broken._parts.reducer._queue.broken = errors.BrokenError("on purpose")
    with optimizer.join():
        models[1][4].bias.sum().backward()
        optimizer.step()
    optimizer.close()


@both_updates
def test_a_dropped_optimizer_whose_topology_was_closed(flat: allreduce.Topology, update: str) -> None:
    """The next optimizer frees the resources of the dropped one; closing the topology has freed a part of them."""
    model = network(1)
    for _ in range(3):
        with flat.split(0) as topology:
            optimizer = MirroredOptimizer(adamw(model), model, topology=topology, update=update)
            model[4].bias.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del optimizer
            gc.collect()
    with MirroredOptimizer(adamw(model), model, topology=flat, update=update) as last:
        model[4].bias.sum().backward()
        last.step()
        assert_mirrored(flat.world, model)


def test_closed_optimizers_leave_nothing_to_report(flat: allreduce.Topology) -> None:
    """All ranks close them, so no rank needs to tell the others that it has left a queue."""
    with MirroredOptimizer(adamw(first := network(1)), first, topology=flat) as optimizer:
        messages = optimizer._parts.reducer.group.topology.detector.messages
        for _ in range(3):
            with MirroredOptimizer(adamw(model := network(1)), model, topology=flat):
                pass
        assert not [fact for fact in messages.state if fact.kind == LEFT]
