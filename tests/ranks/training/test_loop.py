"""fit(transforms=): averages, rates and norms, and refused transforms; tests/matrix compares fits with one process."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.together import raised_everywhere
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE, X, Y
from trainers import (
    EMA,
    Accumulate,
    ClipNorm,
    Exact,
    Loader,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Schedule,
)
from trainers.arrays import squares
from trainers.errors import ArgumentError
from trainers.options.buckets import Buckets
from trainers.replica import Replica, Slices
from trainers.state.adopt import copy_state
from trainers.strategies.transforms.transform import Applied, Compute, Rows, Transform
from trainers.watching.callback import Callback
from trainers.watching.history import History
from trainers.watching.meter import NormMeter

JOBS = "openmpi 1 2 5"

EPOCHS, BATCH, STEPS = 2, 20, 3
CLIP, DECAY, WARM_UP = 0.3, 0.8, 2
TRAINERS = fits.TRAINERS | {"sync": functools.partial(ParameterServerTrainer, updates="sync", servers=min(2, SIZE - 1))}
if SIZE == 1:
    del TRAINERS["sync"]  # a server needs a worker
few = pytest.mark.skipif(SIZE > 3, reason="what happens on three ranks happens on more")


def network(optimizer: str = "adam") -> NumpyNetwork:
    return fits.network(optimizer=optimizer, lr=0.02)


def fitted(trainer: Any, transforms: Sequence[Transform], **options: Any) -> tuple[np.ndarray, History]:
    """Train; returns the parameters and the history."""
    history = trainer.fit(X, Y, EPOCHS, BATCH, transforms=transforms, progress=False, **options)
    assert len(set(trainer.parameters_sha256())) == 1
    return np.array(trainer.replica.state()["parameters"]), history


def test_running_statistics_of_micro_batches_are_averaged(flat: allreduce.Topology) -> None:
    """Micro-batches are ranks, as far as batch norm is concerned: here each batch is divided into SIZE * 2 parts."""
    if SIZE > 2:
        pytest.skip("many ranks take long to import PyTorch")
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch.replica import TorchReplica

    def make() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        return TorchReplica(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))

    found = []
    with allreduce.Topology(MPI.COMM_SELF) as single:
        for topology, count in ((flat, 2), (single, 2 * SIZE)):
            with MirroredTrainer(make(), topology=topology) as trainer:
                trainer.fit(X, Y, EPOCHS, BATCH, transforms=[Accumulate(count), ClipNorm(CLIP)], progress=False)
                found.append(trainer.replica.state())
    for name, array in found[0].items():
        np.testing.assert_allclose(array, found[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


@few
def test_the_average_is_evaluated_and_saved(flat: allreduce.Topology, folder: Path) -> None:
    for kind in ("replicated", "sharded", "central"):  # of the others the matrix has the average
        with TRAINERS[kind](network(), topology=flat) as trainer:
            missing = functools.partial(trainer.evaluate, X, Y, ema=True)
            assert "there is no average" in raised_everywhere(trainer.topology.world, ArgumentError, missing)
            history = trainer.fit(X, Y, EPOCHS, BATCH, transforms=[EMA(DECAY)], validation_data=(X, Y), progress=False)
            raw, averaged = trainer.evaluate(X, Y, ema=False), trainer.evaluate(X, Y)
            assert raw != averaged == history[-1].validation
            if flat.size > 1:
                with pytest.raises(DisagreementError, match="evaluate: ema=False"):
                    trainer.evaluate(X, Y, ema=flat.rank > 0)
            outputs = trainer.predict(X, ema=False), trainer.predict(X)
            trainer.save(str(folder) + kind)
            before = trainer.parameters_sha256()
            trainer.load(str(folder) + kind)
            assert (trainer.parameters_sha256(), trainer.evaluate(X, Y)) == (before, averaged)
            quiet = [EMA(DECAY, validate=False)]
            history = trainer.fit(X, Y, 1, BATCH, transforms=quiet, validation_data=(X, Y), progress=False)
            assert history[-1].validation == trainer.evaluate(X, Y, ema=False) != trainer.evaluate(X, Y)
            trainer.fit(X, Y, 1, BATCH, progress=False)
            assert trainer.evaluate(X, Y) == trainer.evaluate(X, Y, ema=False)
            trainer.save(str(folder) + "plain")
            trainer.fit(X, Y, 1, BATCH, transforms=[EMA(DECAY)], progress=False)
            trainer.load(str(folder) + "plain")
            assert "ema" not in copy_state(trainer.strategy, on_all=False), "no fit keeps an average now"
        alone = NumpyNetwork.load(str(folder) + kind)
        assert np.allclose(alone.predict(X), outputs[0])
        alone.use_average()
        assert np.allclose(alone.predict(X), outputs[1])
        assert not np.allclose(*outputs)
        alone.use_parameters()
        assert np.allclose(alone.predict(X), outputs[0])
        alone.use_average()  # a trainer ends it
        with TRAINERS[kind](alone if flat.rank == 0 else network(), topology=flat) as trainer:
            assert np.allclose(trainer.predict(X), outputs[1])
            assert np.allclose(trainer.predict(X, ema=False), outputs[0])
            assert len(set(trainer.parameters_sha256())) == 1


class Untold(list):  # type: ignore[type-arg]
    """A loader that counts its batches when they are read."""

    def __len__(self) -> int:
        return 0


@few
def test_a_function_of_the_step(flat: allreduce.Topology) -> None:
    """Also of steps of a loader, whose number is not known; a named schedule that ends needs it."""
    seen: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.trainer.replica.learning_rates[0])

    batches = [(X[:4], Y[:4]), (X[4:9], Y[4:9])]
    with MirroredTrainer(network(), "ring", flat) as trainer:

        def fit(loader: Loader, schedule: Schedule) -> None:
            trainer.fit(loader, epochs=2, progress=False, callbacks=[Rates()], transforms=[schedule])

        whole = Loader(batches, rows="whole")
        fit(whole, Schedule(lambda step: 1 / (step + 1), warmup=1))
        np.testing.assert_allclose(seen, [0.01, 0.01, 0.02 / 3, 0.005])
        for unknown in (iter(batches), Untold(batches)):
            refused = functools.partial(fit, Loader(unknown, rows="whole"), Schedule("linear"))
            assert "give the steps of the Loader" in raised_everywhere(flat.world, ArgumentError, refused)
        longer = Loader([*batches, *[(X[9:10], Y[9:10])] * flat.rank], rows="divided")
        endless = Loader(itertools.cycle(batches), rows="whole", steps=2)
        for given, steps in ((endless, 4), (whole, 4), (longer, 2 * (flat.size + 1))):
            fit(given, Schedule("linear"))  # with the length of the longest loader
            np.testing.assert_allclose(seen[-steps:], 0.02 * (1 - np.arange(steps) / steps))


def test_bad_options_raise_the_same_error_on_all_ranks(flat: allreduce.Topology) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"transforms": 5}, "transforms must be a list of Accumulate, "),
        ({"transforms": [EMA]}, "EMA is a class"),
        ({"transforms": [np.ones(2)]}, "is no transform; use Accumulate, "),
        ({"transforms": [EMA(0.9), EMA(0.99)]}, "two EMA"),
        ({"transforms": [Schedule(lambda step: math.nan)]}, "must return a number"),
        ({"resume": True}, "resume=True needs the folder of the checkpoints"),
    ]
    with MirroredTrainer(network(), "ring", flat) as trainer:
        fit = functools.partial(trainer.fit, X, Y, 1, BATCH, progress=False)
        for options, text in wrong:
            assert text in raised_everywhere(flat.world, ArgumentError, functools.partial(fit, **options))
        if SIZE > 1:
            own: Any = {"transforms": [5]} if flat.rank else {}
            assert "5 is no transform" in raised_everywhere(flat.world, ArgumentError, functools.partial(fit, **own))
            own = {"transforms": [EMA(DECAY)]} if flat.rank else {}
            raised_everywhere(flat.world, DisagreementError, functools.partial(fit, **own))
        narrow = functools.partial(trainer.fit, X[:, :2], Y, progress=False, transforms=[EMA(DECAY)])
        assert "6 features" in raised_everywhere(flat.world, ArgumentError, narrow)
        assert trainer.replica.average is None  # so the ranks evaluate the same weights
        assert trainer.evaluate(X, Y) == trainer.evaluate(X, Y, ema=False)
        trainer.fit(X, Y, 1, BATCH, progress=False)


@dataclass(frozen=True)
class Scale(Transform):
    """A transform of a program: multiplies gradients by the square of `factor`, in both places of a step."""

    factor: float

    def start(self, replica: Replica) -> Applied:
        return Scaling(replica, self.factor)


class Scaling(Applied):
    needs_squares = True

    def __init__(self, replica: Replica, factor: float) -> None:
        self.meter: NormMeter = NormMeter("scaled_norm")
        self._replica, self._factor = replica, factor

    def compute(self, inner: Compute, rows: Rows) -> Any:
        values = inner(rows)
        rows.memory[: self._replica.parameter_count] *= self._factor
        return values

    def reduced(self, gradients: Sequence[Any], part: Slices | None, squares: Any) -> None:
        self.meter.set(self._factor * squares**0.5)
        for each in gradients:
            each *= self._factor


@few
@pytest.mark.parametrize("kind", [*TRAINERS, "exact"])
def test_a_fit_takes_a_transform_of_a_program(kind: str, flat: allreduce.Topology) -> None:
    """In its place in the list: the clipping that follows gets the sum of the squares of the scaled gradients."""
    make = TRAINERS.get(kind) or functools.partial(MirroredTrainer, update="sharded", average=Exact(3))
    found = []
    for transforms in ([Scale(0.5), ClipNorm(CLIP)], [ClipNorm(2 * CLIP), Scale(0.5)]):
        with make(network("sgd"), topology=flat) as trainer:
            found.append(fitted(trainer, transforms))
    (parameters, first_history), (other_parameters, second_history) = found
    np.testing.assert_allclose(parameters, other_parameters, rtol=1e-5, atol=1e-6)
    for first, second in zip(first_history, second_history, strict=True):
        assert first.metrics["grad_norm"] == pytest.approx(first.metrics["scaled_norm"], rel=1e-4)
        assert second.metrics["grad_norm"] == pytest.approx(2 * first.metrics["grad_norm"], rel=1e-4)
        assert second.metrics["scaled_norm"] < CLIP * 1.01


@dataclass(frozen=True)
class Failing(Transform):
    """Its method fails on the last rank."""

    method: str

    def start(self, replica: Replica) -> Applied:
        applied = Applied()
        if MPI.COMM_WORLD.rank + 1 == SIZE:
            setattr(applied, self.method, lambda *_: {}["on purpose"])
        return applied


@few
@pytest.mark.parametrize("method", ["begin", "begin_step", "compute", "reduced", "updated", "end_step"])
@pytest.mark.parametrize("kind", ["replicated", "sharded", "central"])
def test_an_error_of_a_transform_is_raised_on_all_ranks(
    kind: str, method: str, flat: allreduce.Topology, folder: Path
) -> None:
    with TRAINERS[kind](network(), topology=flat) as trainer, pytest.raises(KeyError, match="on purpose"):
        fitted(trainer, [Failing(method), ClipNorm(CLIP)], checkpoint=str(folder))


def test_meters_have_names_of_their_own(flat: allreduce.Topology) -> None:
    class Named(Scale):
        def start(self, replica: Replica) -> Applied:
            applied = super().start(replica)
            applied.meter = NormMeter()
            return applied

    with TRAINERS["replicated"](network(), topology=flat) as trainer:
        with pytest.raises(ArgumentError, match='two numbers of a step are named "grad_norm"'):
            fitted(trainer, [Named(1.0), ClipNorm(CLIP)])
        assert "grad_norm" in fitted(trainer, [Named(1.0)])[1][0].metrics


@few
def test_a_compute_of_its_own_is_not_overlapped(flat: allreduce.Topology) -> None:
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch.replica import TorchReplica

    found = []
    for buckets in (None, Buckets(True, mb=1e-4, first_mb=1e-4)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        replica = TorchReplica(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        with MirroredTrainer(replica, "ring", topology=flat, buckets=buckets) as trainer:
            found.append(fitted(trainer, [Scale(0.5)])[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_sums_of_squares() -> None:
    random = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 1000, squares.WIDTH - 1, squares.WIDTH, 2 * squares.WIDTH + 17):
        array = random.standard_normal(length).astype("float32")
        assert squares.sum_of_squares(array) == pytest.approx(float((array.astype(float) ** 2).sum()), rel=1e-5)
    assert squares.sum_of_squares(np.full(4, 1e30, "float32")) == pytest.approx(4e60)
    assert squares.sum_of_squares(np.full(4, 300, "float16")) == pytest.approx(360000)
    assert math.isnan(squares.sum_of_squares(np.array([1, np.nan])))
