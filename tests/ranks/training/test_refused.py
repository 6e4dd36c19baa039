"""Calls that are wrong on one rank, of every trainer: all ranks raise one named error, and the trainer goes on."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import FEATURES, SIZE, STRATEGIES, Rows, data, trainer_of
from trainers import Checkpoint, Loader
from trainers.callbacks import Callback, EarlyStopping
from trainers.errors import ArgumentError, ModelFileError

JOBS = "quick 2, openmpi 1 2, mpich 2"

CLASSES = 3
X, Y = data(6)


class Text(Rows):
    """Rows that are no pairs."""

    def __getitem__(self, row: int) -> Any:
        return "no pair"


class Words(Rows):
    """Rows as Hugging Face's data sets give them."""

    def __getitem__(self, row: int) -> Any:
        return {"words": self.x[row], "label": self.y[row]}


class Empty(Rows):
    def __len__(self) -> int:
        return 0


class Gone(Rows):
    def __len__(self) -> int:
        raise OSError("the disk is gone")


def made_up(rows: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, features)), np.zeros(rows, int)


class Collects(Callback):
    """A callback that only one rank has, although it calls the trainer on all."""

    collective = True


def fit(trainer: Any, x: Any = X, y: Any = Y, epochs: Any = 1, batch_size: Any = 2, **options: Any) -> None:
    trainer.fit(x, y, epochs, batch_size, progress=False, **options)


def fit_set(trainer: Any, bad: bool, x: Any, y: Any = None) -> None:
    """Fit with a bad data set on this rank, or with a good one."""
    fit(trainer, x if bad else Rows(X, Y), y if bad else None)


Call = tuple[Callable[[Any, bool], Any], Any, str]  # the call, the error and its words
Refused = dict[str, Call]  # bad: whether this rank gives the wrong argument


def alone(name: str) -> Call:
    """Return a call of one rank alone. The classic mistake: if trainer.rank == 0: trainer.save(path)."""

    def call(trainer: Any, bad: bool) -> None:
        path = os.path.join(trainer.folder, "model.npz")
        given: dict[str, tuple[Any, ...]] = {"save": (path,), "load": (path,), "predict": (X,), "surviving": (list,)}
        getattr(trainer, name)(*given.get(name, (X, Y))) if bad else trainer.parameters_sha256()

    return call, DisagreementError, f"parameters_sha256 and {name} are collective: every rank calls them, in one order"


ALONE: Refused = {
    "epochs": (lambda of, bad: fit(of, epochs=-bad), ArgumentError, "epochs must be an integer >= 0, got -1"),
    "batch": (lambda of, bad: fit(of, batch_size=2 * (not bad)), ArgumentError, "batch_size must be an integer >= 1"),
    "features": (lambda of, bad: fit(of, X[:, bad:]), ArgumentError, "6 features"),
    "lengths": (lambda of, bad: fit(of, y=Y[bad:]), ArgumentError, "the same number of rows"),
    "labels": (lambda of, bad: fit(of, y=Y + CLASSES * bad), ArgumentError, "expected 0 to 2"),
    "floats": (lambda of, bad: fit(of, y=Y.astype("float32") if bad else Y), ArgumentError, "class numbers"),
    "empty": (lambda of, bad: fit(of, X[6 * bad :], Y[6 * bad :]), ArgumentError, "no samples"),
    "ragged": (lambda of, bad: fit(of, [[1.0], [1.0, 2.0]] if bad else X), ArgumentError, "fit: "),
    "number": (lambda of, bad: fit(of, 3 if bad else X), ArgumentError, "x has shape ()"),
    "no resume": (lambda of, bad: fit(of, resume=True), ArgumentError, "resume=True needs the folder"),
    "validation": (lambda of, bad: fit(of, validation_data=(X, Y[bad:])), ArgumentError, "the same number of rows"),
    "keyword": (lambda of, bad: of.fit(X, Y, epoch=3), TypeError, "unexpected keyword argument 'epoch'"),
    "callbacks": (lambda of, bad: fit(of, callbacks=5 if bad else []), ArgumentError, "callbacks"),
    "evaluate": (lambda of, bad: of.evaluate(X[:, bad:], Y), ArgumentError, "6 features"),
    "evaluate nothing": (lambda of, bad: of.evaluate(X[6 * bad :], Y[6 * bad :]), ArgumentError, "no samples"),
    "predict": (lambda of, bad: of.predict(X[:, bad:]), ArgumentError, "6 features"),
    "save": (lambda of, bad: of.save("/no/such/folder/model.npz"), ModelFileError, "can't be written"),
    "load": (lambda of, bad: of.load("missing.npz"), ModelFileError, "missing.npz can't be read: No such file"),
    "row": (lambda of, bad: fit_set(of, bad, Rows(X, Y, 0)), ArgumentError, "OSError: this row is damaged"),
    "iterator": (lambda of, bad: fit_set(of, bad, iter([])), ArgumentError, "or a data set with len"),
    "array without y": (lambda of, bad: fit_set(of, bad, X), ArgumentError, "ndarray can't give rows"),
    "text": (lambda of, bad: fit_set(of, bad, Text(X, Y)), ArgumentError, "a row is a str, not a pair"),
    "dictionaries": (lambda of, bad: fit_set(of, bad, Words(X, Y)), ArgumentError, "give a Loader(x, collate="),
    "no rows": (lambda of, bad: fit_set(of, bad, Empty(X, Y)), ArgumentError, "the Empty is empty"),
    "length": (lambda of, bad: fit_set(of, bad, Gone(X, Y)), ArgumentError, "OSError: the disk is gone"),
    "collate with y": (
        lambda of, bad: fit_set(of, bad, Loader(X, collate=list), Y), ArgumentError, "leave out collate",
    ),
    "collated features": (
        lambda of, bad: fit_set(of, bad, Loader(Rows(X, Y), collate=lambda rows: made_up(len(rows), 9))),
        ArgumentError, "6 features",
    ),
    "collated lengths": (
        lambda of, bad: fit_set(of, bad, Loader(Rows(X, Y), collate=lambda rows: made_up(3, FEATURES))),
        ArgumentError, "for 2 rows",
    ),
}  # fmt: skip
DIFFERS: Refused = {
    "epochs": (lambda of, bad: fit(of, epochs=1 + bad), DisagreementError, "epochs=2"),
    "batch": (lambda of, bad: fit(of, batch_size=2 + bad), DisagreementError, "batch_size=3"),
    "seed": (lambda of, bad: fit(of, seed=int(bad)), DisagreementError, "seed=1"),
    "data": (lambda of, bad: fit(of, X + bad), DisagreementError, "rank 0: fit: x float32[6, 6]"),
    "callbacks": (lambda of, bad: fit(of, callbacks=[Collects()] * bad), DisagreementError, "Collects"),
    "validation": (
        lambda of, bad: fit(of, validation_data=(X, Y) if bad else None), DisagreementError, "validation_data=none",
    ),
    "checkpoint": (
        lambda of, bad: fit(of, checkpoint=Checkpoint(of.folder) if bad else None), DisagreementError, "checkpoint",
    ),
    "rows of a data set": (
        lambda of, bad: fit(of, Rows(X[bad:], Y[bad:]), None), DisagreementError,
        "rank 0: fit: Rows of 6 rows, x float32",
    ),
    **{call: alone(call) for call in ("fit", "evaluate", "predict", "save", "load", "surviving")},
}  # fmt: skip


@pytest.mark.parametrize("kind", STRATEGIES)
def test_calls_that_are_refused_on_all_ranks(
    kind: str, flat: allreduce.Topology, world: MPI.Intracomm, folder: Path
) -> None:
    with trainer_of(kind, flat) as trainer:
        trainer.folder = os.fspath(folder)
        before = trainer.parameters_sha256()
        for culprits in ([SIZE - 1], range(SIZE)):
            for name, (call, error, words) in {**ALONE, **(DIFFERS if len(culprits) < SIZE else {})}.items():
                text = raised_everywhere(world, error, partial(call, trainer, flat.rank in culprits))
                assert words in text, f"{name}: {text}"
                assert "collective" not in text or "collective" in words
        assert trainer.parameters_sha256() == before
        assert not folder.exists()
        missing = [EarlyStopping("nothing")] if flat.rank == SIZE - 1 else []
        assert "'nothing'" in raised_everywhere(world, ArgumentError, partial(fit, trainer, callbacks=missing))
        assert len(set(trainer.parameters_sha256())) == 1  # after an epoch
        fit(trainer)
