"""Replicas that differ, and gradients that are NaN, in real fits: all ranks get an error that names the rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices
from allreduce.errors import DisagreementError, DivergenceError
from tests.ranks.together import raised_everywhere as raised
from tests.ranks.training.fits import EVERY, STRATEGIES, Once
from trainers import Loader, MirroredTrainer, NumpyNetwork
from trainers.callbacks import (
    Callback,
    CheckDivergence,
    CheckGradients,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    TensorBoard,
)
from trainers.checks import compare
from trainers.errors import ArgumentError, DivergedError, NotFiniteError
from trainers.trainer import Trainer

SIZE = MPI.COMM_WORLD.size
X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
BAD = X.copy()
BAD[39, 1] = np.nan  # of three ranks, the last one's row in the second batch
ONCE = SIZE == 3 and MPI.get_vendor()[0] != "MPICH"
pytestmark = pytest.mark.skipif(not ONCE, reason="a majority needs three ranks, and once is enough")


def made(ranks: allreduce.Topology, kind: str = "replicated") -> Trainer:
    return EVERY[kind](NumpyNetwork([4, 8, 3], seed=1, optimizer="momentum", lr=0.02), topology=ranks)


def fit(trainer: Trainer, *callbacks: Callback, x: np.ndarray = X) -> Any:
    return trainer.fit(x, Y, 2, 20, shuffle=False, callbacks=callbacks, progress=False)


def editing(change: Callable[[Any], object]) -> Callback:
    """Return a callback that changes this rank's replica in the second step."""
    return Once("on_train_batch_end", lambda trainer: change(trainer.replica), epoch=0)


def bias(replica: NumpyNetwork) -> None:
    replica.parameters[-1] += 1e-6


def rate(replica: NumpyNetwork) -> None:
    replica.learning_rates = [0.5]


def velocity(replica: NumpyNetwork) -> None:
    replica.optimizer.state["velocity"][7] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [(bias, "layer 2 bias. Gradients"), (rate, "learning rates"), (velocity, "optimizer.velocity")],
)
def test_who_differs_in_what(
    change: Callable[[Any], object], words: str, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    """The training stops on all ranks."""
    edits = [editing(change)] if world.rank == 1 else []
    with made(flat) as trainer:
        text = raised(world, DivergenceError, lambda: fit(trainer, *edits, CheckDivergence(every=2)))
        assert text.startswith("after step 2 of epoch 1 the replicas are no longer equal: rank 1 differs from")
        assert words in text
        assert all(f"rank {rank}: " in text for rank in range(3))


@pytest.mark.parametrize("kind", ["sharded", "sync", "spare"])
def test_replicas_that_are_equal(
    kind: str, flat: allreduce.Topology, world: MPI.Intracomm, caplog: pytest.LogCaptureFixture
) -> None:
    """No false alarm; state without copies is listed. All ranks raise the error of one rank beside a check, and none
    hangs."""
    notices._said.clear()
    with made(flat, kind) as trainer:
        fit(trainer, CheckDivergence(every=1))
        if world.rank == 0 and kind == "sharded":
            assert "CheckDivergence does not compare state without copies: " in caplog.text
            assert "parameters (the ranks share one copy)" in caplog.text

        def fails(replica: Any) -> None:
            raise ArgumentError("on purpose")

        edits = [editing(fails)] if world.rank == 0 else []
        assert "on purpose" in raised(world, ArgumentError, lambda: fit(trainer, *edits, CheckDivergence(every=1)))


@pytest.mark.parametrize("kind", [*STRATEGIES, "local"])
def test_who_brings_nan(kind: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    with made(flat, kind) as trainer:
        text = raised(world, NotFiniteError, lambda: fit(trainer, CheckGradients(), x=BAD))
        if kind in ("replicated", "sharded", "central"):
            assert text.startswith("in epoch 1, step 2, gradients are not finite: rank 2 has 67 NaN gradients, ")
        assert "NaN gradients, the first in layer 1 weights (element 0): look at" in text
        raised(world, DivergedError, lambda: fit(trainer, x=BAD))  # which names no rank
    with made(flat, kind) as trainer:
        check = CheckGradients("skip")
        fit(trainer, check, x=BAD)
        together = kind not in ("async", "spare", "local")
        assert world.allreduce(check.skipped) == (2 * SIZE if together else 2)
        assert len(set(trainer.parameters_sha256())) == 1
        skipped = trainer.evaluate(X, Y)["loss"]
    if together:
        with made(flat, kind) as trainer:
            without = np.delete(X, slice(20, 40), axis=0), np.delete(Y, slice(20, 40), axis=0)
            trainer.fit(*without, 2, 20, shuffle=False, progress=False)
            assert skipped == trainer.evaluate(X, Y)["loss"]  # as if there were no such batch
    else:
        assert np.isfinite(skipped)


@pytest.mark.every_pair
@pytest.mark.parametrize("check", ["raise", "skip"])
@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("compress", [None, "float16", "bfloat16"])
def test_gradients_too_large_to_be_sent(
    compress: str | None, update: str, check: str, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    """Rank 1's gradients are too large for float16 in the second step; in the fourth, only the sum of all ranks' is."""
    replica = NumpyNetwork([4, 8, 3], seed=1, lr=1e-9)
    with MirroredTrainer(replica, "ring", flat, update=update, compress=compress) as trainer:
        plain, calls = replica.gradients, []

        def large(*batch: Any) -> Any:
            values = plain(*batch)
            calls.append(None)
            if len(calls) == 2 and world.rank == 1:
                replica._buffer[5] = 1e5
            if len(calls) == 4:
                replica._buffer[6] = -4e4 if compress else -2e38
            return values

        replica.gradients = large  # type: ignore[method-assign]
        if check == "raise" and compress != "bfloat16":
            if compress:
                text = raised(world, NotFiniteError, lambda: fit(trainer, CheckGradients()))
                assert text.startswith("in epoch 1, step 2, gradients can't be averaged: rank 1 has 1 gradient too la")
                assert "too large for float16, the first in layer 1 weights (element 5)" in text
                assert 'compress="bfloat16"' in text
            calls[:] = [None, None]
            text = raised(world, NotFiniteError, lambda: fit(trainer, CheckGradients()))
            assert text.startswith("in epoch 1, step 2, the sum of gradients overflows in layer 1 weights (element 6)")
            assert ('compress="bfloat16"' in text) == bool(compress)
            return
        gradients = CheckGradients(check)
        history = fit(trainer, gradients)
        assert gradients.skipped == {None: 1, "float16": 2, "bfloat16": 0}[compress]
        assert np.isfinite(history.column("loss")).all()
        assert min(history.column("loss")) > 0.5
        assert np.isfinite(replica.parameters).all()


class Poisoned:
    """A loader whose features are NaN in the first epoch."""

    def set_epoch(self, epoch: int) -> None:
        self._x = X if epoch else np.full_like(X, np.nan)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for at in range(0, 60, 20):
            yield self._x[at : at + 20], Y[at : at + 20]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_epochs_without_steps_have_no_loss(
    kind: str, flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path
) -> None:
    """The loss is NaN, also in the logs of batches before the first step. It does not count as the best; a resumed fit
    has the same history."""
    folder, told = Path(world.bcast(str(tmp_path))), list[float]()

    class Tells(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told.extend([logs["loss"]] * (self.epoch == 0))

    def trained(trainer: Trainer, **options: Any) -> Any:
        loader = Loader(None if trainer.strategy.part is None else Poisoned(), rows="whole")
        return trainer.fit(loader, epochs=3, progress=False, checkpoint=str(folder / "written"), **options)

    with made(flat, kind) as trainer:
        stopping = EarlyStopping("loss", patience=5, restore_best_weights=True)
        best = ModelCheckpoint(folder / "model-{epoch}.npz", "loss", save_best_only=True)
        others = [Tells(), CSVLogger(folder / "log.csv"), TensorBoard(folder / "logs", update_freq=1)]
        history = trained(trainer, callbacks=[CheckGradients("skip"), stopping, best, *others])
        losses = history.column("loss")
        assert np.isnan([losses[0], history.column("accuracy")[0], *told]).all()
        assert kind == "async" or told
        assert np.isfinite(losses[1:]).all()
        assert stopping.best == min(losses[1:])
    if world.rank == 0:
        assert not (folder / "model-1.npz").exists()
        assert (folder / "model-2.npz").exists()
        assert np.isfinite(NumpyNetwork.load(str(folder / "model-2.npz")).parameters).all()
    with made(flat, kind) as trainer:
        np.testing.assert_equal(trained(trainer, resume=True).column("loss"), losses)


class LeavesOut(Callback):
    def __init__(self, raises: bool = False) -> None:
        self._raises = raises

    def before_update(self, epoch: int, batch: int) -> bool:
        if self._raises and batch:
            raise ArgumentError("on purpose")
        return batch == 1


@pytest.mark.every_pair
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", ["replicated", "sharded", "central", "sync"])
def test_one_rank_leaves_a_step_out(kind: str, alone: bool, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """Then all ranks leave it out, as if the batch did not exist; all raise an exception of the callback."""
    with made(flat, kind) as trainer:
        own = LeavesOut() if world.rank == 1 else Callback()
        fit(trainer, *([own] if alone and world.rank == 1 else [] if alone else [own]), CheckGradients("skip"))
        assert len(set(trainer.parameters_sha256())) == 1
        skipped = trainer.evaluate(X, Y)["loss"]
        wrong = [LeavesOut(raises=True)] if world.rank == 2 else []
        assert "on purpose" in raised(world, ArgumentError, lambda: fit(trainer, *wrong))
    with made(flat, kind) as trainer:
        without = np.delete(X, slice(20, 40), axis=0), np.delete(Y, slice(20, 40), axis=0)
        trainer.fit(*without, 2, 20, shuffle=False, progress=False)
        assert skipped == trainer.evaluate(X, Y)["loss"]


def test_an_heir_of_a_callback_that_agrees_is_heard(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """A subclass with its own before_update, which returns different values on the ranks."""

    class Heir(CheckGradients):
        def before_update(self, epoch: int, batch: int) -> bool:
            return super().before_update(epoch, batch) or batch == world.rank

    with made(flat) as trainer:
        assert np.isnan(fit(trainer, Heir()).column("loss")).all()


def test_bad_arguments(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    with made(flat) as trainer:
        wrong = raised(world, ArgumentError, lambda: fit(trainer, CheckDivergence(0)))
        assert "CheckDivergence: every must be an integer >= 1, got 0" in wrong
        other = CheckDivergence(2 + (world.rank == 2))
        assert "every=3" in raised(world, DisagreementError, lambda: fit(trainer, other))
        assert "on_bad='ignore'" in raised(world, ArgumentError, lambda: fit(trainer, CheckGradients("ignore")))


@pytest.mark.parametrize("own", [{"b": np.ones(3), "c": np.ones(2)}, {"c": np.zeros(2)}], ids=["more", "another"])
def test_state_that_only_one_rank_has(world: MPI.Intracomm, own: dict[str, np.ndarray]) -> None:
    """The entry is reported by its name, also if its values equal those of another entry, or the numbers of entries
    differ."""
    held = {"a": np.ones(4)} | (own if world.rank == 1 else {"b": np.zeros(2)})
    found = compare(world, held)
    assert len(set(world.allgather(found))) == 1
    assert "rank 1 differs from the others in b, the first of 2 differences" in found
    assert ("rank 1: b: has none" in found) == ("b" not in own)
