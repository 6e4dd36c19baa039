"""The checks of single arguments, and the arguments of a fit that nothing checked, or that ended in a raw error."""

import argparse
import io
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology, create
from allreduce.errors import OptionError
from trainers import (
    EMA,
    Accumulate,
    Checkpoint,
    ClipNorm,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    Schedule,
    arguments,
)
from trainers.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    Prometheus,
    TensorBoard,
    Timeline,
)
from trainers.errors import ArgumentError
from trainers.fit.source import Given
from trainers.recovery.terminating import Terminated, Terminating
from trainers.watching.history import History

X, Y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)


def fit(**given: Any) -> History:
    with Topology(MPI.COMM_SELF) as topology, MirroredTrainer(NumpyNetwork([4, 3]), topology=topology) as trainer:
        return trainer.fit(X, Y, **{"progress": False, "epochs": 1, **given})


ROOT = "root must be a rank of this topology, 0 to 0"


def with_backend(use: Callable[[Any], object], name: str = "ring", **options: Any) -> object:
    with Topology(MPI.COMM_SELF) as topology, create(name, topology, **options) as made:
        return use(made)


@pytest.mark.parametrize(
    ("check", "good", "bad", "text"),
    [
        (
            arguments.integer(0, 3),
            [0, 3, np.int64(2), np.uint8(1)],
            [True, np.True_, 1.0, "1", None, np.ones(1, int), -1, 4],
            "an integer from 0 to 3",
        ),
        (arguments.integer(0).or_none(), [None, 7], [-1], "an integer >= 0, or None"),
        (arguments.FLAG, [True, np.False_], ["no", 1, 0, None, np.ones(2)], "True or False"),
        (arguments.FLAG.or_none(), [None], [0], "True or False, or None"),
    ],
)
def test_checks_of_values(check: Any, good: list[Any], bad: list[Any], text: str) -> None:
    assert [check.error("rows", value) for value in good] == [""] * len(good)
    assert [check.error("rows", value) for value in bad] == [f"rows must be {text}, got {value!r}" for value in bad]


def test_numbers_and_names() -> None:
    assert all(map(arguments.is_number, (1, -0.5, np.float32(2), np.int8(3))))
    assert not any(map(arguments.is_number, (True, np.True_, "1", None, 10**400, np.inf, np.nan, 1j, np.complex64(1))))
    assert not arguments.name_error("kind", None, ["a"], optional=True)
    for value in ("c", 1, None, np.array(["a", "b"])):
        assert arguments.name_error("kind", value, ("a", "b")) == f"kind={value!r} is unknown; use one of a, b"
    assert arguments.integer(1).or_none()("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer >= 1, or None, got 'three'"):
        arguments.integer(1).or_none()("three")


class OnlyEpochEnd:
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        """Has no other event of a callback."""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shuffle": ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    "progress": ({"progress": "a"}, "progress must be True or False, got 'a'"),
    "resume": ({"resume": 2, "checkpoint": "run"}, "resume must be True or False, got 2"),
    "a number as callback": ({"callbacks": [5]}, "callbacks: 5 is no callback"),
    "a class": ({"callbacks": [EarlyStopping]}, r"callbacks: EarlyStopping is a class; .* EarlyStopping\(\.\.\.\)"),
    "a callback": ({"callbacks": EarlyStopping()}, "callbacks must be a list of callbacks, got <"),
    "a text": ({"callbacks": "all"}, "callbacks must be a list of callbacks, got 'all'"),
    "batch_size": ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
    "epochs": ({"epochs": True}, "epochs must be an integer >= 0, got True"),
    "seed": ({"seed": True}, "seed must be an integer >= 0, got True"),
    "an event": ({"callbacks": [OnlyEpochEnd()]}, r"is no callback \(no on_train_begin\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_fit_refuses(case: str) -> None:
    given, text = WRONG[case]
    with pytest.raises(ArgumentError, match=text):
        fit(**given)


def test_arguments_take_integers_and_flags_of_numpy() -> None:
    one, yes = np.int64(1), np.True_
    fit(epochs=one, batch_size=one, seed=one, transforms=[Accumulate(one), Schedule(warmup=one)], shuffle=yes)
    assert NumpyNetwork([4, 3], lr=np.float32(0.5)).optimizer.lr == 0.5  # type: ignore[arg-type]
    Checkpoint("run", keep=one, same_data=yes)  # type: ignore[arg-type]
    EarlyStopping(patience=one, start_from_epoch=one)  # type: ignore[arg-type]
    Prometheus(port=one)  # type: ignore[arg-type]
    Timeline("trace.json", most=one)  # type: ignore[arg-type]
    with Topology(MPI.COMM_SELF) as topology:
        MirroredTrainer(NumpyNetwork([4, 3]), topology=topology, average=LocalSGD(one)).close()  # type: ignore[arg-type]


def test_the_lines_of_a_fit_go_to_a_stream() -> None:
    lines = io.StringIO()
    fit(epochs=2, progress=lines)
    assert [line.split()[:2] for line in lines.getvalue().splitlines()] == [["epoch", "1"], ["epoch", "2"]]


class Signal(Callback):
    """Sends this process SIGTERM in the first epoch, after which there is no other."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert epoch == 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


KINDS: list[Callable[[list[Callback]], Iterable[Callback]]] = [list, tuple, set, iter, lambda given: (e for e in given)]


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """Without a handler of the fit the signal ends the process of this test."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", KINDS, ids=["list", "tuple", "set", "iterator", "generator"])
@pytest.mark.usefixtures("default_sigterm")
def test_sigterm_ends_a_fit_whatever_holds_its_callbacks(kind: Callable[[list[Callback]], Iterable[Callback]]) -> None:
    with pytest.raises(Terminated):
        fit(epochs=3, callbacks=kind([Signal()]))


@pytest.mark.usefixtures("default_sigterm")
def test_a_sigterm_before_a_fit_ends_it_before_its_first_step() -> None:
    with Topology(MPI.COMM_SELF) as topology, MirroredTrainer(NumpyNetwork([4, 3]), topology=topology) as trainer:
        with Terminating(topology.world, quiet=True) as outer:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Terminated):
                trainer.fit(X, Y, 1, progress=False)
            assert outer.asked()
        assert trainer.steps == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Loader(X, rows="both"), """Loader: rows must be "divided" or "whole", or None, got 'both'"""),
        (lambda: Loader(X, rows="whole", steps=0), "Loader: steps must be an integer >= 1, or None, got 0"),
        (lambda: Loader(X, steps=3), "Loader: steps are of batches: give rows too"),
        (lambda: Loader(X, prefetch="yes"), "prefetch must be True or False, or None, got 'yes'"),
        (lambda: Loader(X, "whole", prefetch=True), "prefetch is of data sets"),
        (lambda: Accumulate(0), "Accumulate: micro_batches must be an integer >= 1, got 0"),
        (lambda: ClipNorm(0), "ClipNorm: norm must be a number > 0, got 0"),
        (lambda: EMA(1.0), "EMA: decay must be a number between 0 and 1, such as 0.999, got 1.0"),
        (lambda: EMA(0.9, validate=1), "EMA: validate must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: Schedule("sine"), "Schedule: rates must be constant, linear, cosine, .* function .*, got 'sine'"),
        (lambda: Schedule(warmup=-1), "Schedule: warmup must be an integer >= 0, got -1"),
        (lambda: NumpyNetwork([4, 3], seed=False), "seed must be an integer >= 0, got False"),
        (lambda: NumpyNetwork([4, 3], lr=True), "lr must be a number > 0.* got True"),
        (lambda: ModelCheckpoint("model.npz", initial_value_threshold=True), "initial_value_threshold.*True"),
        (lambda: EarlyStopping(mode="least"), "mode='least'"),
        (lambda: EarlyStopping(patience=-1), "patience must be an integer >= 0, got -1"),
        (lambda: EarlyStopping(min_delta=math.nan), "min_delta must be a finite number, got nan"),
        (lambda: EarlyStopping(baseline="low"), "baseline must be a finite number, got 'low'"),  # type: ignore[arg-type]
        (lambda: ModelCheckpoint("m.npz", save_freq=10), 'save_freq="epoch"'),  # type: ignore[arg-type]
        (lambda: CSVLogger("x.csv", separator=", "), "separator=', '"),
        (lambda: Timeline("trace.json", 0), "most must be an integer >= 1, got 0"),
        (lambda: TensorBoard(update_freq="step"), "update_freq='step'"),
        (lambda: Prometheus(70000), "port=70000: give a number"),
        (lambda: Checkpoint("run", keep=0), "Checkpoint: keep must be an integer >= 1, got 0"),
        (lambda: Checkpoint("run", same_data=1), "Checkpoint: same_data must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: Checkpoint(""), "Checkpoint"),
        (lambda: Checkpoint("a\0b"), "Checkpoint"),
        (lambda: Topology(MPI.COMM_SELF, ranks_per_node=True), "ranks_per_node=True"),
        (lambda: Topology(MPI.COMM_SELF, ranks_per_node=[True]), r"ranks_per_node=\[True\]"),
        (lambda: Topology(MPI.COMM_SELF, timeout=True), "timeout must be a number of seconds > 0, got True"),
        (lambda: with_backend(lambda made: made.allocate(True, "float32")), "length must be an integer .*, got True"),
        (lambda: with_backend(lambda made: made.broadcast(np.zeros(3), False)), f"{ROOT}, got False"),
        (lambda: with_backend(lambda made: made.broadcast({"a": np.zeros(3)}, False)), f"{ROOT}, got False"),
        (lambda: with_backend(repr, "reduce_to_one", root=False), f"{ROOT}, got False"),
    ],
)
def test_an_option_checks_itself(make: Callable[[], Any], text: str) -> None:
    with pytest.raises((ArgumentError, OptionError), match=text):
        make()


def test_numbers_of_numpy_are_as_good_and_a_limit_may_be_infinite() -> None:
    for timeout in (np.float64(30), np.int64(30), float("inf"), None):
        ranks = Topology(MPI.COMM_SELF, ranks_per_node=np.int64(1), timeout=timeout)
        with ranks, create("ring", ranks, check=np.bool_(True)) as made:
            assert made.allocate(np.int32(3), "float32").size == 3


def test_a_tuple_is_rows_or_batches() -> None:
    """In a Loader without rows= it is (x, y), and so it is in validation_data; three pairs are a data set of them."""
    pair = X, Y
    assert Given.of(Loader(pair))[:3] == (X, Y, None)
    assert Given.of(Loader((pair, pair), rows="whole"))[:2] == ((pair, pair), None)
    assert Given.to_validate((X, Y, Y))[:3] == (X, Y, Y)
    assert Given.to_validate((pair, pair, pair))[:3] == ((pair, pair, pair), None, None)
