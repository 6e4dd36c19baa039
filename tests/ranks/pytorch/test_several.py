"""Two MirroredOptimizers in one program, as in a GAN or an encoder and its decoder."""

import contextlib
import gc
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from allreduce import errors
from allreduce.health.status import LEFT
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    SMALL_BUCKETS,
    assert_mirrored,
    both_overlaps,
    both_updates,
    data,
    network,
)
from trainers.pytorch import Buckets, MirroredOptimizer

JOBS = "openmpi 1 2"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


@both_overlaps
def test_gan(world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool) -> None:
    """The optimizers take turns; gradients that the other optimizer's backward leaves are dropped."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))
    judge = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    torch.manual_seed(world.rank)
    with contextlib.ExitStack() as stack:
        of_generator, of_judge = (
            stack.enter_context(MirroredOptimizer(adamw(each), each, topology=flat, buckets=Buckets(overlap)))
            for each in (generator, judge)
        )
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


@both_updates
@both_overlaps
@pytest.mark.parametrize("own", [False, True], ids=["one topology", "own topologies"])
def test_ranks_whose_backward_has_other_models(
    world: MPI.Intracomm, flat: allreduce.Topology, own: bool, overlap: bool, update: str
) -> None:
    """Two in another order, or only one of them, which this rank then steps first: no rank waits for its step."""
    models, x = [network(1), network(2)], data()[0][0]
    options: dict[str, Any] = {"update": update, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
    with contextlib.ExitStack() as stack:
        topologies = flat, stack.enter_context(allreduce.Topology()) if own else flat
        optimizers = [
            stack.enter_context(MirroredOptimizer(adamw(model), model, topology=topology, **options))
            for model, topology in zip(models, topologies, strict=True)
        ]
        for step in range(8):
            lacking, missed = step % SIZE, step // 2 % 2  # a rank, and the model that it leaves out
            used = [each for each in models if SIZE == 1 or world.rank != lacking or each is not models[missed]]
            order = used if (world.rank + step) % 2 else used[::-1]
            sum(model(x).sum(1).mean() for model in order).backward()
            for number, optimizer in enumerate(optimizers):
                optimizer.synchronize()
                share = (SIZE - 1) / SIZE if SIZE > 1 and number == missed else 1
                assert models[number][4].bias.grad.tolist() == pytest.approx([share] * 3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model in models:
            assert_mirrored(world, model)


def test_sharded_optimizers_of_one_module(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """Making the second one, and editing(), write to the first one's parameters, in a layout of their own too."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(4, 2))
    with contextlib.ExitStack() as stack:
        optimizers = [
            stack.enter_context(MirroredOptimizer(adamw(part), model, topology=flat, update="sharded"))
            for part in (model[0], model[2])
        ]
        for _ in range(2):
            model(torch.ones(1, 3, 2, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with optimizers[1].editing(), torch.no_grad():
                model[2].weight.mul_(0.5)
        assert_mirrored(world, model)


@pytest.mark.parametrize("loop", ["in one backward", "one of them alone"])
def test_join_with_two_optimizers_is_refused(world: MPI.Intracomm, flat: allreduce.Topology, loop: str) -> None:
    """A rank without batches would not know whose average comes next, so it would be a batch of zeros."""
    models = [network(1), network(2)]
    batches = 1 if world.rank == SIZE - 1 else 3
    with contextlib.ExitStack() as stack:
        optimizers = [stack.enter_context(MirroredOptimizer(adamw(each), each, topology=flat)) for each in models]

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


@pytest.mark.parametrize("end", ["dropped", "broken"])
def test_join_beside_an_optimizer_that_is_not_used_any_more(flat: allreduce.Topology, end: str) -> None:
    """A reference cycle, such as an error's traceback, holds it until Python collects garbage, or longer."""
    models = [network(1), network(2)]
    held: list[Any] = [MirroredOptimizer(adamw(model), model, topology=flat) for model in models]
    optimizer = held.pop()
    if end == "broken":
        held[0]._parts.reducer._queue.broken = errors.BrokenError("on purpose")
    else:  # as in a loop over models that closes none
        held.append(held)
        del held
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
