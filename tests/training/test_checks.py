"""The checks of replicas, gradients and batches on one rank: the counts and names in their messages."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import DisagreementError
from trainers import MirroredTrainer, SpareReplicasTrainer, checks
from trainers.callbacks import CheckGradients
from trainers.checks import GradientArray, GradientCheck, Span
from trainers.cli import results
from trainers.data import SAMPLED, checksum
from trainers.fit.source import enter
from trainers.strategies import alike
from trainers.watching.history import Epoch
from trainers.watching.meter import NormMeter

SPANS = [Span("weights", 0, 600_000), Span("bias", 600_000, 7)]


def check_of(gradients: np.ndarray, sent: np.dtype) -> GradientCheck:
    """Return a check that has checked these gradients."""
    check = GradientCheck("raise", [GradientArray(SPANS, gradients.dtype, sent)])
    check.check_array(0, gradients)
    return check


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=str)
def test_what_is_no_number_is_counted_and_named(dtype: str) -> None:
    gradients = np.full(600_007, 0.25, dtype)
    found = check_of(gradients, gradients.dtype)
    assert found.finite
    assert found.norm == pytest.approx(0.25 * 600_007**0.5, rel=1e-2)
    gradients[[300_000, 600_001, 600_003]] = np.nan
    gradients[400_000] = -np.inf
    found.check_array(0, gradients)
    assert found.row == [3, 1, 0, 0, 300_000]
    text, _ = found.describe([checks.FINITE, found.row])
    assert text.endswith("rank 1 has 3 NaN and 1 infinite gradients, the first in weights (element 300000)")
    found.begin()
    assert found.finite


def test_an_epoch_without_a_loss_is_written(tmp_path: Path) -> None:
    epoch = Epoch(1, math.nan, {"accuracy": math.nan}, 1.0, 2.0, 0.5, staleness=(1, 2))
    results.write_json(str(tmp_path / "result.json"), {"history": [epoch.as_dict()], "text": "nan"})
    read = json.loads((tmp_path / "result.json").read_text())
    assert read["text"] == "nan"
    assert read["history"][0]["loss"] is None
    assert read["history"][0]["staleness"] == [1, 2]


def test_what_is_too_large_to_be_sent() -> None:
    """Together with NaN; also a sum that becomes too large by rounding."""
    gradients = np.full(600_007, 1.0, np.float32)
    gradients[[5, 7, 600_001]] = 65505, -1e30, np.nan
    found = check_of(gradients, sent := np.dtype(np.float16))
    assert not found.finite
    assert found.row == [1, 0, 2, 0, 5]
    text, advice = found.describe([found.row])
    assert text == (
        "gradients can't be averaged: rank 0 has 1 NaN gradient and 2 too large for float16, "
        "the first in weights (element 5)"
    )
    assert 'compress="bfloat16"' in advice
    assert check_of(gradients, gradients.dtype).row == [1, 0, 0, 1, 1]
    assert checks.largest(np.dtype(ml_dtypes.bfloat16)) < checks.largest(gradients.dtype)
    sums = np.full(600_007, 65500, np.float32)
    assert checks.overflow(MPI.COMM_SELF, sums, sums.size, sent) == 0


def test_what_is_compared_is_bits() -> None:
    assert checks.compare(MPI.COMM_SELF, {"a": np.array([np.nan]), "none": np.zeros((0, 2)), "text": "x"}) == ""


@pytest.mark.parametrize("spare", [False, True], ids=["mirrored", "spare replicas"])
def test_a_step_that_is_left_out_leaves_batch_norm_alone(spare: bool) -> None:
    """The statistics contain the NaN before the gradients can be checked."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    from trainers.replicas.pytorch import TorchReplica

    norm = torch.nn.BatchNorm1d(4)
    module = torch.nn.Sequential(norm, torch.nn.Linear(4, 3))
    replica = TorchReplica(module, torch.nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), 0.1))
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    x[5, 2] = np.nan
    topology = Topology(MPI.COMM_SELF)
    trainer = SpareReplicasTrainer(replica, topology, spare=0) if spare else MirroredTrainer(replica, topology=topology)
    with trainer:
        check = CheckGradients("skip")
        trainer.fit(x, np.arange(12) % 3, 1, 4, shuffle=False, callbacks=[check], progress=False)
    mean = np.zeros(4)
    for rows in x[:4], x[8:]:
        mean = 0.9 * mean + 0.1 * rows.mean(0)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    assert (check.skipped, int(norm.num_batches_tracked)) == (1, 2)


@pytest.mark.parametrize(
    ("side", "explained"), [("fit: x 3, epochs=1", True), ("fit: x 2, epochs=2", False), ("save", False)]
)
def test_only_other_rows_are_explained(side: str, explained: bool) -> None:
    group = Mock()
    group.enter.side_effect = DisagreementError(f"they disagree:\n  rank 0: fit: x 2, epochs=1\n  rank 1: {side}")
    with pytest.raises(DisagreementError) as met:
        enter(group, "fit: x 2, epochs=1", None, {"epochs": 1})
    assert ("A trainer takes all rows" in str(met.value)) == explained


# Fingerprints of whole batches: float32 sums tell whether all ranks have the same, on any number of ranks


@pytest.mark.parametrize("ranks", [1, 2, 100, 8000])
def test_sums_tell_equal_fingerprints_from_others(ranks: int) -> None:
    """In any order of the sum; ranks that read nothing are left out."""
    random, missed = np.random.default_rng(ranks), 0
    for _ in range(20):
        own = {3: (1, int(random.integers(1, 1 << 32)))}
        other = {3: (1, int(random.integers(1, 1 << 32)))}
        for different in {0, min(1, ranks - 1), ranks - 1}:
            sources: list[Any] = [SimpleNamespace(divided=False, seen=own)] * (ranks - different)
            sources += [SimpleNamespace(divided=False, seen=other)] * different
            rows = [alike.marks(each, range(3, 4), ranks) for each in random.permutation(sources)]
            rows.append(alike.marks(SimpleNamespace(divided=True), range(3, 4), ranks))  # type: ignore[arg-type]
            found = alike.differ(np.cumsum(np.array(rows, np.float32), axis=0)[-1].tolist())
            assert different or not found
            missed += bool(different) and not found
    assert missed <= 1  # with 8,000 ranks, one difference in 4,096


def test_a_checksum_shows_rows_in_another_order() -> None:
    """Also of a batch of which a sample is read."""
    for columns in (3, SAMPLED // 64):
        x = np.random.default_rng(0).normal(size=(32, columns)).astype(np.float32)
        y = np.arange(32)
        assert checksum((x, y)) == checksum((x.copy(), y))
        assert len({checksum(each) for each in ((x, y), (x[::-1], y), (x, y[::-1]), (x[:-1], y[:-1]), (y, x))}) == 5


# The norms of an epoch, when steps are taken back


def meter_of(*norms: float) -> NormMeter:
    meter = NormMeter()
    meter.on_epoch_begin(0)
    for norm in norms:
        meter.set(norm)
        meter.on_train_batch_end(0)
    return meter


def test_a_step_taken_back_leaves_nothing() -> None:
    """A step that was left out has left nothing, and a loaded state has no step to take back."""
    two = meter_of(0.1, 0.2)
    for last in (0.0, 1e20, np.inf, np.nan, 0.3):
        meter = meter_of(0.1, 0.2, last)
        meter.step_back()
        assert meter.sums().tobytes() == two.sums().tobytes()
    left_out, loaded = meter_of(0.1), meter_of(5.0)
    left_out.on_train_batch_end(1)
    left_out.step_back()
    assert left_out.sums().tolist() == [0.1, 1]
    loaded.load_state({name: np.asarray(value) for name, value in two.state().items()})
    loaded.step_back()
    assert loaded.sums().tobytes() == two.sums().tobytes()
