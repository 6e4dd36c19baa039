"""A stop and a SIGTERM on one rank, with and without rows: a resume gives the training that nothing has interrupted."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE
from trainers import (
    Checkpoint,
    ClipNorm,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Schedule,
    SpareReplicasTrainer,
)
from trainers.recovery.terminating import Terminated
from trainers.watching.callback import Callback
from trainers.watching.history import History

EPOCHS, FEATURES = 3, 4
STRATEGIES = fits.STRATEGIES | {"local": partial(MirroredTrainer, allreduce="ring", average=LocalSGD(2))}
if SIZE == 1:
    del STRATEGIES["sync"], STRATEGIES["async"]
SIZES = {  # of the global batches
    "small": [1] * 6,  # of a rank alone, if there are several
    "short": [2 * SIZE] * 5 + [1],
    "odd": [2 * SIZE] * 3,  # a round of local SGD goes on in the next epoch
}
PLACES = [(0, 4), (SIZE - 1, 0)]  # of a stop: a rank, and a step


class InterruptError(Exception):
    """Raised by a callback."""


class Interrupt(Callback):
    """Ends the training on a rank, or on all (-1), in the second epoch: by `stop_training`, SIGTERM or an error."""

    reads_batches = reads_model = False

    def __init__(self, how: str, rank: int, step: int) -> None:
        self._how, self._rank, self._step = how, rank, step
        self._epoch, self._done = 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._epoch == 1 and batch >= self._step:
            self._interrupt()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:  # no batch of this rank came after the step
            self._interrupt()

    def _interrupt(self) -> None:
        if self._done or self.trainer.rank != self._rank >= 0:
            return
        self._done = True
        if self._how == "stop":
            self.trainer.stop_training = True
        elif self._how == "error":
            raise InterruptError
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(trainer: Any, shape: str, **options: Any) -> History:
    options = {
        "epochs": EPOCHS,
        "progress": False,
        "transforms": [ClipNorm(1.0), Schedule("inverse_sqrt", warmup=2)],
        **options,
    }
    sizes = SIZES.get(shape, SIZES["short"])
    x = np.random.default_rng(3).normal(size=(sum(sizes), FEATURES)).astype("float32")
    y = x[:, :3].argmax(1)
    if shape in SIZES:
        return trainer.fit(x, y, batch_size=sizes[0], **options)
    ends = np.cumsum(sizes)[:-1]
    batches = list(zip(np.split(x, ends), np.split(y, ends), strict=True))
    computing = getattr(trainer, "workers", None)
    if shape == "divided":  # the first ranks have more batches than the others
        share = slice(0, 4 + 2 * (trainer.rank == 0))
        batches = [(x[trainer.rank :: SIZE], y[trainer.rank :: SIZE]) for x, y in batches[share]]
        batches = [each for batch in batches for each in ((x[:0], y[:0]), batch)]  # those without rows are no steps
    np.random.seed(trainer.rank)
    serves = computing is not None and not isinstance(trainer, SpareReplicasTrainer) and trainer.rank == SIZE - 1
    return trainer.fit(Loader(None if serves else Noisy(batches), rows=shape), **options)


class Noisy:
    """A loader that adds random numbers of NumPy's global generator to each batch: one that is read twice differs."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._batches:
            yield x + np.random.normal(size=x.shape).astype("float32"), y


def outcome(trainer: Any, history: History, exact: bool) -> list[Any]:
    """Return what a resumed training has in common with one that nothing has interrupted."""
    taken = [sum(epoch.staleness) + epoch.dropped for epoch in history]
    if not exact:
        return [taken]
    return [taken, trainer.parameters_sha256(), [epoch.metrics | {"loss": epoch.loss} for epoch in history]]


WAYS = [("SIGTERM", "small"), ("stop", "divided")]  # the matrix has stops of more loaders and sizes
CASES = [(strategy, *way) for strategy in STRATEGIES for way in WAYS] + [("local", "stop", "odd")]


@pytest.mark.parametrize(("strategy", "how", "shape"), CASES)
def test_a_resumed_training_is_the_uninterrupted_one(
    strategy: str, how: str, shape: str, flat: allreduce.Topology, folder: Path
) -> None:
    exact = strategy != "async" or SIZE == 2  # gradients of several workers arrive in any order

    def make() -> Any:
        return STRATEGIES[strategy](NumpyNetwork([FEATURES, 6, 3], seed=1, lr=0.1), topology=flat)

    with make() as trainer:
        expected = outcome(trainer, fit(trainer, shape), exact)
    for rank, step in PLACES:
        where = f"rank {rank}, step {step}"
        checkpoint = Checkpoint(str(folder / f"{rank}-{step}"))
        options = {"checkpoint": checkpoint, "callbacks": [Interrupt(how, rank, step)]}
        with make() as trainer:
            if how == "stop":
                assert len(fit(trainer, shape, **options)) == 2, where
            else:
                with pytest.raises(Terminated):
                    fit(trainer, shape, **options)
        with make() as trainer:
            history = fit(trainer, shape, checkpoint=checkpoint, resume=True)
            assert outcome(trainer, history, exact) == expected, where


class WarmsUp(Callback):
    """SIGTERM comes to worker 1, which has no batches in the warm-up; worker 0 computes slowly. Counts its batches."""

    reads_batches = False
    count = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        time.sleep(0.05)


def test_sigterm_on_a_worker_without_batches_ends_the_epoch(flat: allreduce.Topology) -> None:
    if SIZE < 3:
        pytest.skip("needs an idle worker")
    x = np.random.default_rng(3).normal(size=(200, FEATURES)).astype("float32")
    counts = WarmsUp()
    replica = NumpyNetwork([FEATURES, 6, 3], seed=1, lr=0.1)
    with ParameterServerTrainer(replica, flat, warm_up=1) as trainer, pytest.raises(Terminated):
        trainer.fit(x, x[:, :3].argmax(1), 3, 2, progress=False, callbacks=[counts])
    assert counts.count < 50 * (SIZE - 1)  # of 100 batches, each in as many parts


@pytest.mark.parametrize("strategy", ["sharded", *["sync"] * (SIZE > 1)])
def test_the_checkpoint_of_a_step_counts_it_though_a_callback_has_failed(
    strategy: str, flat: allreduce.Topology, folder: Path
) -> None:
    def make() -> Any:
        return STRATEGIES[strategy](NumpyNetwork([FEATURES, 6, 3], seed=1, lr=0.1), topology=flat)

    with make() as trainer:
        expected = outcome(trainer, fit(trainer, "short"), True)
    checkpoint = Checkpoint(str(folder), "1 step")
    with make() as trainer, pytest.raises(InterruptError):
        fit(trainer, "short", checkpoint=checkpoint, callbacks=[Interrupt("error", -1, 2)])
    with make() as trainer:
        assert outcome(trainer, fit(trainer, "short", checkpoint=checkpoint, resume=True), True) == expected
