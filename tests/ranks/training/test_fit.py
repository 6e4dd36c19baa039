"""fit on several ranks: callbacks, a stop that reaches all ranks, data sets, and errors that all ranks raise."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.transport.control import on_all_ranks
from tests.ranks.training.fits import (
    EVERY,
    ROWS,
    TRAINERS,
    Once,
    Rows,
    Seen,
    X,
    Y,
    fail,
    network,
    on_last,
    stop,
    trainer_of,
)
from trainers import Loader, MirroredTrainer
from trainers.errors import ArgumentError, DataError, DivergedError
from trainers.watching.callback import Callback

BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end")
EVENTS = ("on_train_begin", "on_epoch_begin", *BATCH_EVENTS, "on_epoch_end", "on_train_end")


class Recorder(Callback):
    """Records its events."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)
        return lambda *arguments: self.seen.append((name, *arguments))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...  # so that it counts as overridden

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


def test_events_come_in_order_with_the_numbers_of_all_ranks(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    recorder = Recorder()
    with MirroredTrainer(network(), "ring", flat) as trainer:
        history = trainer.fit(X, Y, 2, 20, validation_data=(X, Y), callbacks=[recorder], progress=False)
    batches = [(f"on_train_batch_{side}", batch) for batch in range(3) for side in ("begin", "end")]
    epochs = [[("on_epoch_begin", epoch), *batches, ("on_epoch_end", epoch)] for epoch in range(2)]
    assert [event[:-1] for event in recorder.seen] == [("on_train_begin",), *epochs[0], *epochs[1], ("on_train_end",)]
    ends = [event[-1] for event in recorder.seen if event[0] == "on_train_batch_end"]
    assert all(set(logs) == {"loss", "accuracy"} for logs in ends)
    assert len(set(world.allgather(str(ends)))) == 1
    weighted = sum(logs["loss"] * rows for logs, rows in zip(ends[:3], (20, 20, 10), strict=True)) / ROWS
    assert weighted == pytest.approx(history[0].loss)
    last = recorder.seen[-2][2]
    assert last["val_accuracy"] == history[-1].validation["accuracy"]
    assert last["communication_share"] == history[-1].communication_share
    assert recorder.seen[-1][1] == last
    assert recorder.trainer is None  # it keeps no trainer, so no memory of one


APART = ("async", "spare 1", "workers")  # trainers whose ranks do not all take each step
LAST = 2  # batch of an epoch
FEW = ("on_epoch_begin", "on_train_batch_end", "gradients")  # places, for trainers with the loop of the first two
FAILING = [
    (kind, place)
    for kind in EVERY
    if kind not in ("central", "spare")  # the next test but one has central storage, and "spare 1" is here
    for place in (
        (*EVENTS, *(f"{event} {LAST}" for event in BATCH_EVENTS), "gradients")
        if kind in ("replicated", "sharded")
        else (*FEW, *["update"] * (kind in APART))  # of the others it ends the job
    )
]


@pytest.mark.parametrize(("kind", "place"), FAILING)
def test_an_error_of_one_rank_is_raised_on_all(
    kind: str, place: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a callback, or of a replica, of the first and of the last rank. Afterwards the ranks are in step, and the
    trainer works."""
    event, _, batch = place.partition(" ")
    with trainer_of(kind, flat) as trainer:
        servers = getattr(trainer, "servers", ())
        culprits = {0, 1 if kind == "workers" else flat.size - 1}  # of the ranks of a worker
        if event == "update":
            culprits = {servers[0] if servers else 0}  # rank 0 leads spare replicas
        elif event == "gradients":
            culprits -= {*servers}
        for whose in sorted(culprits):
            failing = [Once(event, fail, batch=int(batch or 0))]
            if event in ("gradients", "update"):
                failing = []
                if flat.rank == whose:
                    monkeypatch.setattr(trainer.replica, event, lambda *_: fail(trainer))
            # Of several epochs, because in one of them others may have done everything when a worker asks.
            given: dict[str, Any] = {"epochs": 100} if kind in APART else {"epochs": 3, "validation_data": (X, Y)}
            given["callbacks"] = failing if flat.rank == whose else []
            with pytest.raises(OSError, match="the disk is full") as caught:
                trainer.fit(X, Y, batch_size=20, progress=False, **given)
            assert caught.value.ranks == tuple(range(flat.size))  # type: ignore[attr-defined]
            monkeypatch.undo()
            assert len(set(trainer.parameters_sha256())) == 1
            assert len(trainer.fit(X, Y, 2, 20, progress=False)) == 2


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("kind", [OSError, DivergedError])
def test_an_error_that_only_some_ranks_know_is_raised_on_all(
    kind: type[Exception], event: str, flat: allreduce.Topology
) -> None:
    """One rank's callback raises an error that ranks of another communicator share, or one of the meter's class."""

    def raise_for_some(trainer: MirroredTrainer) -> None:
        error = kind("only some know")
        raise on_all_ranks(error, MPI.COMM_SELF) if kind is OSError else error

    callbacks = on_last(event, raise_for_some)
    with MirroredTrainer(network(), "ring", flat) as trainer:
        with pytest.raises(kind, match="only some know") as caught:
            trainer.fit(X, Y, 3, 20, callbacks=callbacks, progress=False)
        assert caught.value.ranks == tuple(range(flat.size))  # type: ignore[attr-defined]


def break_gradients(trainer: Any) -> None:
    trainer.replica.gradients = lambda *_: fail(trainer)


@pytest.mark.parametrize("kind", ["replicated", "sharded", "central"])
@pytest.mark.parametrize("action", [fail, break_gradients])
def test_no_rank_updates_by_a_step_that_one_of_them_has_failed(
    action: Any, kind: str, flat: allreduce.Topology
) -> None:
    mine, seen = network(), []
    keep = Once("on_train_batch_begin", lambda trainer: seen.append(trainer.replica.parameters.copy()), epoch=0)
    broken = on_last("on_train_batch_begin", action, epoch=0)
    with TRAINERS[kind](mine, topology=flat) as trainer:
        with pytest.raises(OSError, match="disk is full") as caught:
            trainer.fit(X, Y, 1, 20, callbacks=[keep, *broken], progress=False)
        assert caught.value.ranks == tuple(range(flat.size))  # type: ignore[attr-defined]
        np.testing.assert_array_equal(mine.parameters, seen[0])
        vars(mine).pop("gradients", None)
        assert len(trainer.fit(X, Y, 1, 20, progress=False)) == 1


@pytest.mark.parametrize(
    ("event", "batches"),
    [("on_epoch_begin", 4), ("on_train_batch_begin", 5), ("on_train_batch_end", 6), ("on_epoch_end", 6)],
)
def test_a_stop_on_one_rank_stops_all(event: str, batches: int, flat: allreduce.Topology) -> None:
    """In the second of 5 epochs, of 50 rows in batches of 20, 20 and 10: after the batch whose flags carry the stop."""
    seen = Seen()
    with MirroredTrainer(network(), "native", flat) as trainer:
        history = trainer.fit(X, Y, 5, 20, callbacks=[*on_last(event, stop), seen], progress=False)
        assert trainer.stop_training
        assert len(history) == 2
        assert seen.batches == batches
        assert len(trainer.fit(X, Y, 1, 20, progress=False)) == 1  # and a next fit begins anew


def test_callbacks_of_keras_are_taken(flat: allreduce.Topology) -> None:
    """Another base class, and a model instead of a trainer."""

    class KerasLike:
        def __init__(self) -> None:
            for event in {*EVENTS} - {"on_epoch_end"}:
                setattr(self, event, lambda *_: None)

        def set_params(self, params: dict[str, Any]) -> None:
            self.params = params

        def set_model(self, model: Any) -> None:
            self.model = model

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.model.stop_training = logs["val_loss"] > 0

    callback = KerasLike()
    with MirroredTrainer(network(), "native", flat) as trainer:
        history = trainer.fit(X, Y, 5, 20, validation_data=(X, Y), callbacks=[callback], progress=False)
    assert len(history) == 1
    assert callback.params["steps"] == 3


# Data sets


class Pairs(Rows):
    """A map-style data set: rows one by one."""

    def __init__(self, bad: int | None = None, error: type[Exception] = OSError) -> None:
        super().__init__(X, Y, bad, error)
        self.threads: set[str] = set()

    def __getitem__(self, row: int) -> Any:
        assert isinstance(row, int)
        self.threads.add(threading.current_thread().name)
        return super().__getitem__(row)


class ByLists(Pairs):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        assert all(type(row) is int for row in rows)
        return [self[row] for row in rows]


class Words(Pairs):
    """Rows as Hugging Face's data sets give them."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return {"words": x, "label": y}


def collate(rows: Any) -> Any:
    return np.stack([row["words"] for row in rows]), np.array([row["label"] for row in rows])


@pytest.mark.parametrize("kind", [Pairs, ByLists, Words, np.memmap])
def test_a_data_set_trains_as_arrays_do(kind: Any, flat: allreduce.Topology, tmp_path: Path) -> None:
    plain = network()
    with MirroredTrainer(plain, "shared", flat) as trainer:
        expected = trainer.fit(X, Y, 3, 20, validation_data=(X, Y), progress=False)
        scores = trainer.evaluate(X, Y)
    np.save(tmp_path / "x.npy", X)
    for prefetch in (None,) if kind is np.memmap else (None, True, False):
        if kind is np.memmap:
            given: Any = np.load(tmp_path / "x.npy", mmap_mode="r"), Y
            rows = {"x": given[0], "y": Y}
        else:
            data_set = kind()
            given = Loader(data_set, collate=collate if kind is Words else None, prefetch=prefetch)
            rows = {"x": given}
        mine = network()
        with MirroredTrainer(mine, "shared", flat) as trainer:
            history = trainer.fit(**rows, epochs=3, batch_size=20, validation_data=given, progress=False)
            assert trainer.evaluate(**rows) == scores
        assert np.array_equal(plain.parameters, mine.parameters)
        assert [epoch.validation for epoch in history] == [epoch.validation for epoch in expected]
        if kind is Pairs:
            names = {"MainThread"} if prefetch is False else {"MainThread", "fetches batches"}
            assert data_set.threads == names
        assert not [thread for thread in threading.enumerate() if thread.name == "fetches batches"]


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("kind", ["replicated", "sync", "async", "spare 1"])
def test_a_row_that_fails_is_named_on_all_ranks(kind: str, prefetch: bool, flat: allreduce.Topology) -> None:
    """One rank gets the error; all raise it, and can continue."""
    with trainer_of(kind, flat) as trainer:
        for bad, error, text in (
            (Pairs(17), DataError, r"Pairs can't give rows .*OSError: this row is damaged"),
            (Pairs(17, KeyError), DataError, r"Pairs can't give rows .*KeyError: .this row is damaged"),
            (Wrong(), ArgumentError, "labels run from"),
        ):
            with pytest.raises(error, match=text) as caught:
                # Many epochs: spare replicas leave out a late rank, which then never reads the row in that epoch.
                trainer.fit(Loader(bad, prefetch=prefetch), epochs=20, batch_size=20, progress=False)
            assert caught.value.ranks == tuple(range(flat.size))
            with pytest.raises(error, match=text):
                trainer.evaluate(bad)
        assert len(trainer.fit(Pairs(), epochs=2, progress=False)) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "fetches batches"]


class Wrong(Pairs):
    """A label for which the network has no output, in a row that is not checked in advance."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return x, 3 if row == 17 else y
