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
from mpi4py import MPI

import allreduce
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE, Once, fail, stop
from trainers import (
    Checkpoint,
    ClipNorm,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Schedule,
)
from trainers.recovery.terminating import Terminated
from trainers.watching.callback import Callback
from trainers.watching.history import History

EPOCHS, FEATURES = 3, 4
STRATEGIES = fits.STRATEGIES | {"local": partial(MirroredTrainer, allreduce="ring", average=LocalSGD(2))}
SIZES = {  # of the global batches
    "small": [1] * 6,  # of a rank alone, if there are several
    "short": [2 * SIZE] * 5 + [1],
    "odd": [2 * SIZE] * 3,  # a round of local SGD goes on in the next epoch
}
PLACES = [(0, 4), (SIZE - 1, 0)]  # of a stop: a rank, and a step


def interrupt(how: str, rank: int, step: int) -> list[Once]:
    """Return the callbacks that end the training on a rank in the second epoch, by `stop_training` or SIGTERM: after
    this step or a later one, or at the end of the epoch if no batch of this rank came after the step."""
    left = [stop if how == "stop" else lambda trainer: os.kill(os.getpid(), signal.SIGTERM)]

    def act(trainer: Any) -> None:
        if left:
            left.pop()(trainer)

    events = [Once("on_train_batch_end", act, 1, step), Once("on_epoch_end", act, 1)]
    for each in events:
        each.reads_batches = each.reads_model = False
    return events if MPI.COMM_WORLD.rank == rank else []


def fit(trainer: Any, shape: str, **options: Any) -> History:
    """Train on batches of SIZES, or on divided batches, of which the first rank has more than the others."""
    options |= {"epochs": EPOCHS, "progress": False}
    options["transforms"] = [ClipNorm(1.0), Schedule("inverse_sqrt", warmup=2)]
    sizes = SIZES.get(shape, SIZES["short"])
    x = np.random.default_rng(3).normal(size=(sum(sizes), FEATURES)).astype("float32")
    y = x[:, :3].argmax(1)
    if shape in SIZES:
        return trainer.fit(x, y, batch_size=sizes[0], **options)
    own = [rows[trainer.rank :: SIZE] for rows in np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])]
    given = [each for rows in own[: 4 + 2 * (trainer.rank == 0)] for each in (rows[:0], rows)]  # no rows are no step
    np.random.seed(trainer.rank)
    loader = None if trainer.strategy.part is None else Noisy([(x[rows], y[rows]) for rows in given])
    return trainer.fit(Loader(loader, rows="divided"), **options)


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


WAYS = [("SIGTERM", "small"), ("stop", "divided")]
APART = ["local", *["async"] * (SIZE > 1)]  # the matrix has the others, and loaders
CASES = [(strategy, *way) for strategy in ("replicated", *APART) for way in WAYS] + [("local", "stop", "odd")]


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
        options = {"checkpoint": checkpoint, "callbacks": interrupt(how, rank, step)}
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
    """SIGTERM comes to worker 1, which waits for its turn in the warm-up; all compute slowly. Counts the batches."""

    reads_batches = False
    count = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        time.sleep(0.05)


def test_sigterm_on_a_worker_that_waits_for_its_turn_ends_the_epoch(flat: allreduce.Topology) -> None:
    if SIZE < 3:
        pytest.skip("needs a worker that waits")
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
    with make() as trainer, pytest.raises(OSError, match="disk is full"):
        fit(trainer, "short", checkpoint=checkpoint, callbacks=[Once("on_train_batch_end", fail, 1, 2)])
    with make() as trainer:
        assert outcome(trainer, fit(trainer, "short", checkpoint=checkpoint, resume=True), True) == expected
