"""A warning if all ranks have the same gradients, because they train on the same batches; and no false warning."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices
from allreduce.backend import AllReduce, TwoPhase
from tests.backends import ON_CPU
from tests.ranks.together import admitted_call

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
several = pytest.mark.skipif(SIZE == 1, reason="one rank has all data")


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.delenv("ALLREDUCE_SAME_DATA", raising=False)


def _gradients(step: int, seed: int = 0, length: int = 1000) -> np.ndarray:
    return np.random.default_rng([step, seed]).standard_normal(length).astype(np.float32)


def _warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("DistributedSampler" in each.getMessage() for each in caplog.records if each.name == "allreduce")


def _train(reduce: AllReduce, gradients: Callable[[int], Any], op: str = "mean", steps: int = 12) -> None:
    for step in range(steps):
        reduce(gradients(step), op)


@several
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("op", ["mean", "average"])
def test_the_same_gradients(flat: allreduce.Topology, name: str, op: str, caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (1, 1):  # once, whatever comes later
        with allreduce.create(name, flat) as reduce:
            for step in range(12):
                array = _gradients(step)
                reduce(array, op)
                np.testing.assert_allclose(array, _gradients(step), rtol=1e-5)
                assert _warnings(caplog) <= wanted
            text = [each.getMessage() for each in caplog.records if "DistributedSampler" in each.getMessage()]
            assert len(text) == wanted * (RANK == 0)
            assert all("`rows`" in each and "ALLREDUCE_SAME_DATA=allow" in each for each in text)
            assert admitted_call(reduce).settling is None  # the work is settled


@several
def test_other_forms(flat: allreduce.Topology, caplog: pytest.LogCaptureFixture) -> None:
    forms: dict[str, Callable[[AllReduce, int], Any]] = {
        "a list": lambda reduce, step: reduce([_gradients(step), _gradients(step, 1)]),
        "a phase": lambda reduce, step: reduce.reduce_scatter(_gradients(step)),  # type: ignore[attr-defined]
        "allocated": lambda reduce, step: reduce(_allocated(reduce, step)),
        "layer by layer": lambda reduce, step: [reduce(_gradients(step, length=100 + layer)) for layer in range(20)],
        "between zeros": lambda reduce, step: (reduce(np.zeros(1000)), reduce(_gradients(step))),
    }
    for name, form in forms.items():
        notices._said.clear()
        caplog.clear()
        with allreduce.create("shared", flat) as reduce:
            assert isinstance(reduce, TwoPhase)
            for step in range(8):
                form(reduce, step)
        assert _warnings(caplog) == (RANK == 0), name


def _allocated(reduce: AllReduce, step: int) -> np.ndarray:
    array = reduce.allocate(1000)
    array[:] = _gradients(step)
    return array


@several
def test_no_false_alarm(flat: allreduce.Topology, caplog: pytest.LogCaptureFixture) -> None:
    legitimate: dict[str, tuple[Callable[[int], Any], str]] = {
        "data of their own": (lambda step: _gradients(step, RANK), "mean"),
        "one rank differs": (lambda step: _gradients(step, int(RANK == SIZE - 1)), "mean"),
        "zeros": (lambda step: np.zeros(1000), "mean"),
        "constants": (lambda step: np.full(1000, step + 1.0), "mean"),
        "the same array again": (lambda step: _gradients(0), "mean"),
        "sums": (_gradients, "sum"),
        "few elements": (lambda step: _gradients(step, length=50), "mean"),
        "the first differs": (lambda step: _gradients(step, RANK if step == 0 else 0), "mean"),
        "parameters, layer by layer": (lambda layer: _gradients(0, length=100 + layer), "mean"),
        "later steps": (lambda step: _gradients(step, RANK if step < 3 else 0), "mean"),
    }
    for name, (gradients, op) in legitimate.items():
        with allreduce.create("ring", flat) as reduce:
            _train(reduce, gradients, op)
        assert _warnings(caplog) == 0, name


@several
def test_it_can_be_switched_off(
    flat: allreduce.Topology, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with allreduce.create("ring", flat, check="never") as reduce:
        _train(reduce, _gradients)
    if RANK == 0:  # what one rank has set keeps no other waiting
        monkeypatch.setitem(os.environ, "ALLREDUCE_SAME_DATA", "allow")
    with allreduce.create("ring", flat) as reduce:
        _train(reduce, _gradients)
    assert _warnings(caplog) == 0


def test_one_rank_has_all_data(caplog: pytest.LogCaptureFixture) -> None:
    with allreduce.Topology(MPI.COMM_SELF) as alone, allreduce.create("auto", alone) as reduce:
        _train(reduce, _gradients)
    assert _warnings(caplog) == 0


@several
@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("own", [False, True], ids=["the same batches", "batches of their own"])
def test_mirrored_optimizer(flat: allreduce.Topology, update: str, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    if SIZE > 3:
        pytest.skip("many ranks take long to import PyTorch")
    torch = pytest.importorskip("torch")
    from trainers.pytorch import MirroredOptimizer

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK * own)
    with MirroredOptimizer(plain, model, topology=flat, update=update) as optimizer:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 10, generator=generator)).square().mean().backward()
            optimizer.step()
    assert _warnings(caplog) == (RANK == 0 and not own)
