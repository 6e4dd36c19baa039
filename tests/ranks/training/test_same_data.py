"""A warning if all ranks have the same gradients, because they train on the same batches; and no false warning."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices
from trainers.checks import SameData

JOBS = "openmpi 2"
SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank has all data")


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.delenv("ALLREDUCE_SAME_DATA", raising=False)


def _gradients(step: int, seed: int = 0, length: int = 1000) -> np.ndarray:
    return np.random.default_rng([step, seed]).standard_normal(length).astype(np.float32)


def _warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("DistributedSampler" in each.getMessage() for each in caplog.records if each.name == "allreduce")


def test_the_same_gradients(flat: allreduce.Topology, caplog: pytest.LogCaptureFixture) -> None:
    """Reported once, whatever comes later; the gradients stay as they are."""
    with allreduce.create("auto", flat) as reduce:
        for _ in range(2):
            check = SameData(reduce)
            for step in range(12):
                array = _gradients(step)
                check.compare(array)
                np.testing.assert_array_equal(array, _gradients(step))
    text = [each.getMessage() for each in caplog.records if "DistributedSampler" in each.getMessage()]
    assert len(text) == (RANK == 0)
    assert all("`rows`" in each and "ALLREDUCE_SAME_DATA=allow" in each for each in text)


LEGITIMATE: dict[str, Callable[[int], np.ndarray]] = {
    "data of their own": lambda step: _gradients(step, RANK),
    "one rank differs": lambda step: _gradients(step, int(RANK == SIZE - 1)),
    "zeros": lambda step: np.zeros(1000),
    "constants": lambda step: np.full(1000, step + 1.0),
    "the same array again": lambda step: _gradients(0),
    "few elements": lambda step: _gradients(step, length=50),
    "the first differs": lambda step: _gradients(step, RANK if step == 0 else 0),
    "later steps": lambda step: _gradients(step, RANK if step < 3 else 0),
    "one rank has all data": _gradients,
    "switched off": _gradients,
}


def test_no_false_alarm(
    flat: allreduce.Topology, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, gradients in LEGITIMATE.items():
        if name == "switched off" and RANK == 0:  # a setting of one rank keeps no other waiting
            monkeypatch.setitem(os.environ, "ALLREDUCE_SAME_DATA", "allow")
        with (
            flat.split(RANK if name.startswith("one rank has") else 0) as ranks,
            allreduce.create("ring", ranks) as ring,
        ):
            check = SameData(ring)
            for step in range(12):
                check.compare(gradients(step))
        assert _warnings(caplog) == 0, name


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("own", [False, True], ids=["the same batches", "batches of their own"])
def test_mirrored_optimizer(flat: allreduce.Topology, update: str, own: bool, caplog: pytest.LogCaptureFixture) -> None:
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
