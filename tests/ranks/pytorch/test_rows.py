"""MirroredOptimizer: ranks whose batches differ in size (rows) or in number (join)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from allreduce import errors
from tests.ranks.pytorch.trained import (
    SIZE,
    assert_close,
    assert_mirrored,
    both_updates,
    data,
    everything,
    mine,
    mirrored,
    network,
    several,
    sgd,
)
from tests.ranks.together import raised, raised_everywhere
from trainers.callbacks import CheckDivergence

JOBS = "openmpi 1 2"


# Rows

BAD: list[Any] = [-1, float("nan"), "3", True, None]


def uneven(rows: torch.Tensor, ranks: int = SIZE) -> torch.Tensor:
    """Return this rank's rows: rank 0 has 1 row, rank 1 has 2, and so on; the last rank has the rest."""
    rank = MPI.COMM_WORLD.rank
    start = rank * (rank + 1) // 2
    return rows[start : len(rows) if rank == ranks - 1 else start + rank + 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_halves(flat: allreduce.Topology, dtype: torch.dtype) -> None:
    """Weights and flags are exact, whatever the gradients' dtype."""
    model = nn.Linear(2, 2, bias=False).to(dtype)
    with mirrored(torch.optim.SGD(model.parameters(), lr=1.0), model, topology=flat) as optimizer:
        rank = MPI.COMM_WORLD.rank
        optimizer.rows(2 + rank)
        optimizer.rows(1001 if rank == 0 else 1)  # the last one counts
        (model.weight.sum() * (0 if rank == 0 else 4)).backward()
        expected = 4 * (SIZE - 1) / (1001 + SIZE - 1)
        assert model.weight.grad.flatten().tolist() == pytest.approx([expected] * 4, rel=1e-2)


def test_rows_of_equal_size_change_no_bit(flat: allreduce.Topology) -> None:
    model, reference = network(), network()
    with (
        mirrored(sgd(model), model, topology=flat) as optimizer,
        mirrored(sgd(reference), reference, topology=flat) as plain,
    ):
        for x, y in zip(*data(), strict=True):
            optimizer.rows(3)  # by which a division is not exact
            for net, each in ((model, optimizer), (reference, plain)):
                each.zero_grad()
                functional.cross_entropy(net(mine(x)), mine(y)).backward()
                each.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.parametrize("told", [False, True])
def test_a_closure_decides_alike(world: MPI.Intracomm, flat: allreduce.Topology, told: bool) -> None:
    """LBFGS with a line search branches on the loss: all ranks get the mean, which is weighted as the gradients are."""
    model, reference = network(), network()
    make = lambda net: torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn="strong_wolfe")  # noqa: E731
    plain, (x, y), own = make(reference), data(1), uneven if told else mine
    with mirrored(make(model), model, topology=flat) as optimizer:

        def closure(net: nn.Module, opt: torch.optim.Optimizer, take: Callable) -> torch.Tensor:
            opt.zero_grad()
            loss = functional.cross_entropy(net(take(x[0])), take(y[0]))
            loss.backward()
            return loss

        for _ in range(2):
            if told:
                optimizer.rows(len(uneven(x[0])))
            here = optimizer.step(lambda: closure(model, optimizer, own))
            there = plain.step(lambda: closure(reference, plain, everything))
            torch.testing.assert_close(here, there.detach(), rtol=1e-3, atol=1e-4)
        assert_mirrored(world, model)
    assert_close(model, reference, 1e-2)


@pytest.mark.parametrize(
    ("rows", "words"),
    [*((bad, f"a number >= 0, got {bad!r}") for bad in BAD), (0, "no rank has rows")],
    ids=[*map(str, BAD), "0 everywhere"],
)
def test_bad_rows(world: MPI.Intracomm, flat: allreduce.Topology, rows: Any, words: str) -> None:
    """Of one rank; the other ranks get the error when they average. The next average is the plain mean again."""
    model = network()
    with mirrored(sgd(model), model, topology=flat) as optimizer:

        def step() -> None:
            optimizer.rows(rows if rows == 0 or world.rank == SIZE - 1 else 2)
            model[4].bias.sum().backward()

        assert words in raised_everywhere(world, errors.OptionError, step)
        optimizer.zero_grad()
        ((1.0 + world.rank) * model[4].bias.sum()).backward()
        assert model[4].bias.grad.tolist() == pytest.approx([(SIZE + 1) / 2] * 3)


# Join


def test_join_keeps_what_the_loop_does_besides(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """Clipping and a scheduler in the loop: ranks that left early get the others' parameters and learning rate. They
    differ until then, which is not a divergence."""
    model = network()
    with mirrored(sgd(model), model, topology=flat, transforms=[CheckDivergence(1)]) as optimizer:
        with optimizer.join():
            for step in range(2 + world.rank):
                optimizer.zero_grad()
                model(mine(data()[0][0])).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + SIZE)
        assert_mirrored(world, model)


@several
@pytest.mark.parametrize("rates", [([0.3, 0.1], [0.1, 0.2]), ([0.1, 1e-7], [0.1, 5e-7])])
def test_rates_that_differ_beside_rows(
    rates: tuple[list[float], list[float]], world: MPI.Intracomm, flat: allreduce.Topology
) -> None:
    model = network()
    first, *others = model.parameters()
    with mirrored(torch.optim.SGD([{"params": [first]}, {"params": others}], 0.1), model, topology=flat) as optimizer:
        for group, rate in zip(optimizer.param_groups, rates[world.rank == SIZE - 1], strict=True):
            group["lr"] = rate

        def step() -> None:
            optimizer.rows(1)
            model(mine(data()[0][0])).sum().backward()
            optimizer.step()

        assert "learning rates of the ranks differ" in raised_everywhere(world, errors.OptionError, step)


@several
@both_updates
@pytest.mark.parametrize("repaired", [True, False])
def test_a_scheduler_after_join(repaired: bool, update: str, world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """A rank that had fewer batches has a scheduler that is behind: other rates in the next epoch are an error."""
    model = network()
    with mirrored(sgd(model), model, topology=flat, update=update) as optimizer:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)

        def epoch(batches: int) -> None:
            with optimizer.join():
                for _ in range(batches):
                    optimizer.zero_grad()
                    model(mine(data()[0][0])).sum().backward()
                    optimizer.step()
                    scheduler.step()

        epoch(2 + (world.rank > 0))
        if repaired:
            scheduler.load_state_dict(world.bcast(scheduler.state_dict(), SIZE - 1))
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            epoch(3)
            assert len(set(world.allgather(optimizer.param_groups[0]["lr"]))) == 1
            assert_mirrored(world, model)
        else:
            assert "learning rates of the ranks differ" in raised_everywhere(
                world, errors.OptionError, lambda: epoch(3)
            )


@both_updates
def test_an_optimizer_without_a_learning_rate(update: str, world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """As Adafactor of Transformers, whose rate is None."""

    class Sign(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["lr"] = 0.1
            super().step(closure)
            for group in self.param_groups:
                group["lr"] = None

    model = network()
    plain = Sign(model.parameters(), lr=0.1)
    plain.param_groups[0]["lr"] = None
    with mirrored(plain, model, topology=flat, update=update) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.rows(1 + world.rank)
            model(mine(data()[0][0])).sum().backward()
            optimizer.step()
    assert_mirrored(world, model)


@several
@both_updates
def test_a_closure_in_join_is_refused(update: str, flat: allreduce.Topology) -> None:
    model = network()
    with mirrored(sgd(model), model, topology=flat, update=update) as optimizer, optimizer.join():
        assert "not for join" in raised(errors.OptionError, lambda: optimizer.step(lambda: 0.0))
