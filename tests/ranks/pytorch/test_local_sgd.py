"""MirroredOptimizer(average=LocalSGD(H)): local SGD, DiLoCo and fragments, compared with a reference of all ranks."""

import contextlib
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from allreduce.arrays.chunks import chunk
from allreduce.errors import DivergenceError, OptionError
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    ROWS,
    SIZE,
    assert_close,
    assert_mirrored,
    mirrored,
    network,
    plain_sgd,
    several,
)
from tests.ranks.together import raised_everywhere
from trainers import LocalSGD, SkipNotFinite
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.errors import NotFiniteError
from trainers.pytorch import GradientError, MirroredOptimizer, OuterSGD

RANK, PART = MPI.COMM_WORLD.rank, ROWS // SIZE
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(PART, 12, generator=generator), torch.randint(0, 3, (PART,), generator=generator)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = RANK) -> None:
    x, y = batch(step, rank)
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def flat_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def put(model: nn.Module, flat: torch.Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())


class Reference:
    """The papers' algorithms with a torch.optim.SGD as the outer optimizer. steps: of each rank in a round."""

    def __init__(self, kind: str, steps: list[int], fragments: int = 1, **outer: Any) -> None:
        self.models = [network() for _ in steps]
        self.optimizers = [OPTIMIZERS[kind](model.parameters()) for model in self.models]
        self.steps, self.fragments = steps, fragments
        whole = flat_of(self.models[0])
        self.spans = [chunk(len(whole), fragments, at) for at in range(fragments)]
        self.start = [nn.Parameter(whole[span].clone()) for span in self.spans]
        self.outer = [torch.optim.SGD([each], **{"lr": 1.0, **outer}) for each in self.start]
        self.done = [0] * len(steps)
        self.since = np.zeros((fragments, len(steps)))  # inner steps since a fragment was sent

    def train(self, turns: int) -> None:
        """Run this number of outer steps."""
        for turn in range(turns):
            for rank, steps in enumerate(self.steps):
                for _ in range(steps // self.fragments):
                    inner_step(self.models[rank], self.optimizers[rank], self.done[rank], rank)
                    self.done[rank] += 1
                    self.since[:, rank] += 1
            self.meet(turn % self.fragments)

    def meet(self, at: int) -> None:
        """The outer step of a fragment."""
        span, start = self.spans[at], self.start[at]
        weights = self.since[at] / self.since[at].sum()
        self.since[at] = 0
        changes = torch.stack([start.detach() - flat_of(model)[span] for model in self.models])
        start.grad = (changes * torch.from_numpy(weights).float()[:, None]).sum(0)
        self.outer[at].step()
        for model in self.models:
            flat = flat_of(model)
            flat[span] = start.detach()
            put(model, flat)

    def end(self) -> None:
        for at in range(self.fragments):
            if self.since[at].any():
                self.meet(at)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "average": ("sgd", {"average": LocalSGD(3)}, {}),
    "every step": ("sgd", {"average": LocalSGD(1)}, {}),
    "diloco": ("adamw", {"average": LocalSGD(3, outer="diloco")}, DILOCO),
    "momentum": (
        "momentum",
        {"average": LocalSGD(2, outer=OuterSGD(0.5, 0.8, False))},
        {"lr": 0.5, "momentum": 0.8},
    ),
    "fragments": ("adamw", {"average": LocalSGD(4, outer="diloco", fragments=2)}, {"fragments": 2, **DILOCO}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_as_the_reference(world: MPI.Intracomm, flat: allreduce.Topology, case: str, unequal: bool) -> None:
    """unequal: rank 0 is slow, and takes half of the others' steps in a round."""
    kind, options, given = CASES[case]
    steps = [options["average"].every * (2 if unequal and rank else 1) for rank in range(SIZE)]
    reference = Reference(kind, steps, **given)
    reference.train(5)
    model = network(seed=RANK)
    own: dict[str, Any] = {
        "average": replace(options["average"], every=steps[RANK]),
        "transforms": [CheckDivergence(1)],
    }
    with mirrored(OPTIMIZERS[kind](model.parameters()), model, "ring", topology=flat, **own) as optimizer:
        for step in range(reference.done[RANK]):
            inner_step(model, optimizer, step)
        assert_close(model, reference.models[RANK], 2e-4)
        optimizer.synchronize()
        reference.end()
        assert_close(model, reference.models[RANK], 2e-4)
        assert_mirrored(world, model)
        assert optimizer.steps == reference.done[RANK]
        assert optimizer._parts.owners.rounds.done >= 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("compress", [None, "bfloat16"])
def test_dtypes_and_compression(
    world: MPI.Intracomm, flat: allreduce.Topology, dtype: torch.dtype, compress: str | None
) -> None:
    model = network().to(dtype)
    model.append(nn.Conv2d(1, 2, 3).to(dtype).to(memory_format=torch.channels_last))
    plain = plain_sgd(model)
    before = flat_of(model)
    with mirrored(plain, model, topology=flat, average=LocalSGD(2, outer="diloco"), compress=compress) as optimizer:
        for _ in range(4):
            with torch.no_grad():
                for number, each in enumerate(model.parameters()):
                    each.grad = torch.full_like(each, (RANK + 1) * (number + 1) / 8)
            optimizer.step()
        assert_mirrored(world, model)
        moved = (before - flat_of(model)).float()
        mean = 0.1 * 2 * (SIZE + 1) / 2 / 8  # of one round, for the first parameter
        expected = 0.7 * (1.9 * mean + (1 + 0.9 * 1.9) * mean)
        assert moved[0].item() == pytest.approx(expected, rel=0.1)


@several
@pytest.mark.parametrize(
    "options",
    [
        {"average": LocalSGD(4)},
        {"average": LocalSGD(4, fragments=2)},
        {"average": LocalSGD(4), "transforms": [CheckDivergence(1)]},
    ],
    ids=["whole", "fragments", "compared"],
)
def test_ranks_with_different_numbers_of_batches(
    world: MPI.Intracomm, flat: allreduce.Topology, options: dict[str, Any]
) -> None:
    model = network()
    plain = plain_sgd(model)
    with mirrored(plain, model, topology=flat, **options) as optimizer:
        for _ in range(2):
            with optimizer.join():
                for step in range(3 + 5 * RANK):
                    inner_step(model, optimizer, step)
            assert_mirrored(world, model)


def test_rows_weigh_a_round(flat: allreduce.Topology) -> None:
    """A rank without rows counts nothing, and wrong numbers are raised by all ranks."""
    model = network()
    before = flat_of(model)
    with mirrored(torch.optim.SGD(model.parameters(), lr=1.0), model, topology=flat, average=LocalSGD(1)) as optimizer:
        for each in model.parameters():
            each.grad = torch.full_like(each, RANK + 1.0)
        optimizer.rows(3 if RANK == SIZE - 1 else 0)
        optimizer.step()
        torch.testing.assert_close(flat_of(model), before - SIZE)
        optimizer.rows(-1 if RANK == 0 else 1)
        with pytest.raises(OptionError, match="a number >= 0, got -1"):
            optimizer.step()


def test_a_resumed_training_has_the_same_bits(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """Each rank keeps its own state_dict; the plain optimizer loads it too."""
    options: dict[str, Any] = {"average": LocalSGD(3, outer="diloco"), "topology": flat}
    model = network()
    with mirrored(OPTIMIZERS["adamw"](model.parameters()), model, **options) as optimizer:
        for step in range(7):
            inner_step(model, optimizer, step)
        saved, parameters = optimizer.state_dict(), flat_of(model)
        assert_mirrored(world, model)
        saved = copy.deepcopy(saved)
        for step in range(7, 14):
            inner_step(model, optimizer, step)
        optimizer.synchronize()
        whole = flat_of(model)
    OPTIMIZERS["adamw"](network().parameters()).load_state_dict(saved)
    model = network(seed=5)
    put(model, parameters)
    with mirrored(OPTIMIZERS["adamw"](model.parameters()), model, **options) as optimizer:
        optimizer.load_state_dict(saved)
        for step in range(7, 14):
            inner_step(model, optimizer, step)
        optimizer.synchronize()
        assert torch.equal(flat_of(model), whole)
        optimizer.load_state_dict(torch.optim.AdamW(network().parameters()).state_dict() if RANK == 0 else None)


def test_editing_begins_a_round_there(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    with mirrored(plain_sgd(model), model, topology=flat, average=LocalSGD(5)) as optimizer:
        inner_step(model, optimizer, 0)
        with optimizer.editing(), torch.no_grad():
            for each in model.parameters():
                each.fill_(RANK + 1.0)
        assert_mirrored(world, model)
        optimizer.synchronize()
        assert flat_of(model).eq(1.0).all()
        with optimizer.no_sync():
            inner_step(model, optimizer, 1)
        optimizer.step(lambda: functional.cross_entropy(model(batch(1, RANK)[0]), batch(1, RANK)[1]))
    assert_mirrored(world, model)  # close() ends the round


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("bad_step", [0, 1])
def test_an_error_of_one_rank_that_the_program_catches(
    world: MPI.Intracomm, flat: allreduce.Topology, bad_step: int, closure: bool
) -> None:
    """The rank stays in step with the others, also where the round ends in the step that fails."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if len(done) == bad_step and RANK == 0:
                raise ZeroDivisionError("on purpose")
            return super().step(closure)

    model, done = network(), list[int]()
    with mirrored(Failing(model.parameters(), lr=0.1), model, topology=flat, average=LocalSGD(2)) as optimizer:
        for step in range(4):
            failing = step == bad_step and RANK == 0
            optimizer.zero_grad()
            loss = model(batch(step, RANK)[0]).sum()
            loss.backward()
            with pytest.raises(ZeroDivisionError, match="on purpose") if failing else contextlib.nullcontext():
                optimizer.step((lambda loss=loss: loss) if closure else None)
            done.append(step)
            if step % 2:
                assert_mirrored(world, model)
        assert optimizer.steps == 4 - (RANK == 0)


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_that_are_not_finite(world: MPI.Intracomm, flat: allreduce.Topology, closure: bool) -> None:
    def step(model: nn.Module, optimizer: MirroredOptimizer, value: float) -> None:
        def compute() -> torch.Tensor:
            for each in model.parameters():
                each.grad = torch.full_like(each, value)
            return torch.zeros(())

        compute()
        optimizer.step(compute if closure else None)

    bad = float("nan") if RANK == SIZE - 1 else 1.0
    options: dict[str, Any] = {"topology": flat, "average": LocalSGD(2)}
    model = network()
    with mirrored(plain_sgd(model), model, transforms=[CheckGradients()], **options) as optimizer:
        step(model, optimizer, bad)
        text = raised_everywhere(world, NotFiniteError, lambda: step(model, optimizer, 1.0))
        assert f"rank {SIZE - 1} has NaN or infinite gradients in its step 1" in text
    model = network()
    with mirrored(plain_sgd(model), model, transforms=[SkipNotFinite()], **options) as optimizer:
        for value in (bad, 1.0, 1.0, 1.0):
            step(model, optimizer, value)
        assert optimizer.steps_skipped == (RANK == SIZE - 1)
        assert torch.isfinite(flat_of(model)).all()
        assert_mirrored(world, model)


@several
def test_replicas_that_differ_after_a_round(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    options: dict[str, Any] = {"transforms": [CheckDivergence(2)], "average": LocalSGD(2, outer="diloco")}
    with mirrored(plain_sgd(model), model, topology=flat, **options) as optimizer:
        if RANK == 1:
            optimizer.param_groups[0]["lr"] = 0.2

        def steps() -> None:
            for step in range(2):
                inner_step(model, optimizer, step)

        assert "lr" in raised_everywhere(world, DivergenceError, steps)


def test_a_parameter_whose_memory_was_replaced(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """It can't be averaged, also not by `close`, which frees everything before it raises."""
    model = network()
    optimizer = MirroredOptimizer(plain_sgd(model), model, "ring", topology=flat, average=LocalSGD(2))
    inner_step(model, optimizer, 0)
    if RANK == 0:
        model[0].weight.data = model[0].weight.data.clone()
    text = raised_everywhere(world, GradientError, lambda: inner_step(model, optimizer, 1))
    assert "the memory of 0.weight was replaced" in text
    raised_everywhere(world, GradientError, optimizer.close)
    assert optimizer.closed
    optimizer.close()
