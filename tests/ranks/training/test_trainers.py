"""The mirrored trainer on several ranks: the results of one rank, equal bits, and the same errors on all ranks."""

import gc
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import algorithms
from allreduce.algorithms.ring import Ring
from allreduce.errors import DisagreementError, OptionError, UnknownBackendError
from tests import launch
from tests.backends import SHARDED
from trainers import (
    EMA,
    Accumulate,
    ClipNorm,
    Exact,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Sharded,
    SkipNotFinite,
    datasets,
)
from trainers.callbacks import CheckDivergence
from trainers.data import Arrays, Batches
from trainers.errors import ArgumentError
from trainers.replica import Replica
from trainers.strategies.rule import FLAGS

JOBS = "quick 1 2 3, openmpi 1 2 3 4 5, mpich 1 2"

EPOCHS, BATCH = 5, 100


def network(seed: int = 3, **options: Any) -> NumpyNetwork:
    made = NumpyNetwork([64, 64, 32, 10], seed=seed, **options)
    made.scale_input(0.0, 1 / 16)
    return made


@pytest.fixture(scope="module")
def digits() -> datasets.Dataset:
    return datasets.load("digits")


def test_training_is_that_of_one_rank(digits: datasets.Dataset, flat: allreduce.Topology) -> None:
    """1437 rows in batches of 100: no number of ranks divides all batches."""
    x, y, alone, losses = digits.x_train, digits.y_train, network(), []
    for epoch in range(EPOCHS):  # a simple loop without trainer, MPI or shares
        order, total = np.random.default_rng([7, epoch]).permutation(len(x)), 0.0
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            total += float(alone.gradients(x[rows], y[rows], 1.0)[0]) * len(rows)
            alone.update()
        losses.append(total / len(x))
    for backend in ("auto", "ring"):  # the matrix has the others
        mine = network(seed=3 + flat.rank)  # the model of rank 0 must win
        with MirroredTrainer(mine, backend, flat) as trainer:
            history = trainer.fit(x, y, EPOCHS, BATCH, seed=7, progress=False)
            hashes = trainer.parameters_sha256()
        assert np.abs(mine.parameters - alone.parameters).max() < 1e-4
        assert len(hashes) == flat.size
        assert len(set(hashes)) == 1
        np.testing.assert_allclose(history.column("loss"), losses, rtol=1e-4)
        assert [epoch.epoch for epoch in history] == [1, 2, 3, 4, 5]
        for epoch in history:
            assert 0 <= epoch.communication_share <= 1
            assert epoch.samples_per_second == pytest.approx(1437 / epoch.seconds)
            assert 0 <= epoch.metrics["accuracy"] <= 1


def test_gradients_lie_in_the_memory_of_the_backend(flat: allreduce.Topology) -> None:
    mine = network()
    with allreduce.create("shared", flat) as backend:
        with MirroredTrainer(mine, backend) as trainer:
            weights, bias = mine._gradient_layers[0]
            assert np.shares_memory(weights, trainer.buffer)
            assert np.shares_memory(bias, trainer.buffer)
            assert len(trainer.buffer) == mine.gradient_length + 2 + len(FLAGS)  # metrics, flags
        assert not backend.closed
        backend(np.ones(3, np.float32))  # still usable: the trainer closes only what it made


def test_predictions_and_scores_are_those_of_all_rows_in_order(
    digits: datasets.Dataset, flat: allreduce.Topology
) -> None:
    mine = network()
    with MirroredTrainer(mine, "native", flat) as trainer:
        for rows in (0, 1, flat.size - 1, flat.size + 1, 360):
            x, y = digits.x_test[:rows], digits.y_test[:rows]
            outputs, probabilities = trainer.predict(x), mine.predict(x).astype(np.float64)
            assert outputs.shape == (rows, 10)
            assert outputs.dtype == np.float32
            np.testing.assert_allclose(outputs, probabilities, rtol=1e-4, atol=1e-6)
            if rows:
                scores = trainer.evaluate(x, y)
                assert scores["loss"] == pytest.approx(-np.log(probabilities[np.arange(rows), y]).mean(), rel=1e-4)
                assert scores["accuracy"] == (probabilities.argmax(1) == y).mean()


def test_a_fit_after_a_failed_one_is_timed_anew(digits: datasets.Dataset, flat: allreduce.Topology) -> None:
    with MirroredTrainer(network(), "native", flat) as trainer:
        trainer.strategy.clock._total = 1000.0  # as an epoch leaves it that raised DivergedError
        history = trainer.fit(digits.x_train, digits.y_train, 1, progress=False)
    assert history[0].communication_share <= 1


def test_a_backend_of_another_topology_is_refused(
    flat: allreduce.Topology, topology_of: Callable[[int], allreduce.Topology]
) -> None:
    with allreduce.create("native", flat) as backend, pytest.raises(ArgumentError, match="topology of its own"):
        MirroredTrainer(network(), backend, topology_of(1))


@pytest.mark.parametrize("backend", SHARDED)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_sharded_update_gives_the_bits_of_a_replicated_one(
    backend: str, optimizer: str, digits: datasets.Dataset, flat: allreduce.Topology
) -> None:
    """Parameters, losses, and the optimizer's state, which every replica holds completely after the trainer is
    closed."""
    found = []
    for update, name in (("replicated", "shared" if backend == "auto" else backend), ("sharded", backend)):
        mine = network(optimizer=optimizer)
        with MirroredTrainer(mine, name, flat, update=update) as trainer:
            history = trainer.fit(digits.x_train[:330], digits.y_train[:330], 2, BATCH, seed=7, progress=False)
        found.append(mine.state() | {"losses": np.array(history.column("loss"))})
    assert found[0].keys() == found[1].keys()
    for entry, array in found[0].items():
        assert np.array_equal(array, found[1][entry]), entry


class OwnsEverything(Ring):
    """No element has one owner: metrics behind the gradients would count once for each."""

    def owned(self, length: int, rank: int | None = None) -> slice:
        return slice(0, length)


def test_parameters_of_a_sharded_trainer_are_in_common(digits: datasets.Dataset, flat: allreduce.Topology) -> None:
    if flat.size == 1:
        pytest.skip("nobody to share with")
    mine = network()
    with MirroredTrainer(mine, "auto", flat, update="sharded") as trainer:
        if flat.rank == 0:
            mine.parameters[5] = 1234.0
        trainer.topology.world.Barrier()
        assert mine.parameters[5] == 1234.0
        trainer.topology.world.Barrier()
    assert mine.parameters[5] == 1234.0
    if flat.rank == 0:
        mine.parameters[5] = 0.0
    flat.world.Barrier()
    assert mine.parameters[5] == (1234.0 if flat.rank else 0.0)  # closed: each has its own again


class Bare(NumpyNetwork):
    """A replica without support for slices."""

    def slice_error(self) -> str:
        return "it has no slices"


def test_equal_options_in_two_forms_are_no_difference(flat: allreduce.Topology) -> None:
    with MirroredTrainer(network(), "ring", flat, update=Sharded() if flat.rank else "sharded") as trainer:
        assert len(set(trainer.parameters_sha256())) == 1


def test_refused_trainers_leave_nothing_behind(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators and topologies are counted."""
    monkeypatch.setattr(algorithms, "BACKENDS", dict(algorithms.BACKENDS))
    allreduce.register("owns_everything", OwnsEverything)
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"update": "shrded"}, ArgumentError, "update='shrded' is unknown"),
        ({"allreduce": "rign"}, UnknownBackendError, "did you mean 'ring'"),
        ({"allreduce": "native", "update": "sharded"}, OptionError, "reduce_scatter and all_gather, and 'native' has"),
        ({"replica": Bare([4, 3]), "update": "sharded", "allreduce": "ring"}, ArgumentError, "it has no slices"),
    ]
    if flat.size > 1:
        others: list[tuple[NumpyNetwork, str]] = [
            (NumpyNetwork([4, 3 + flat.rank]), "allocate"),
            (network(optimizer="adam" if flat.rank else "sgd"), r"optimizer\.first_moment"),
            (network(activation="tanh" if flat.rank else "relu"), '"activation": "tanh"'),
        ]
        refusals += [({"replica": replica}, DisagreementError, text) for replica, text in others]
        refusals.append(({"update": "sharded" if flat.rank else "replicated"}, DisagreementError, "update='sharded'"))
        every = {"update": "sharded", "allreduce": "owns_everything"}
        refusals.append((every, OptionError, "gives elements to several ranks"))
        refusals.append(({"compress": "int8" if flat.rank else "float16"}, DisagreementError, "float16(.|\n)*int8"))
    else:
        refusals.pop(3)  # with one rank nothing is divided
    for own_topology in (False, True):
        topology = None if own_topology else flat
        open_before, users_before = _open_topologies(), len(flat._users)
        for options, kind, text in refusals:
            for _ in range(3):
                arguments: dict[str, Any] = {"replica": NumpyNetwork([4, 3]), "allreduce": "ring", **options}
                with pytest.raises(kind, match=text) as caught:
                    MirroredTrainer(**arguments, topology=topology)
                assert caught.value.ranks
        del caught
        assert _open_topologies() == open_before
        assert len(flat._users) == users_before


def _open_topologies() -> list[int]:
    """The number of communicators of each topology that is not closed."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, allreduce.Topology) and not each.closed]
    return sorted(len(each._owned) for each in found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "sharded"},
        {"average": Exact(micro_batch=4)},
        {"average": LocalSGD(2)},
        {"servers": 1, "updates": "sync"},
    ],
)
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_the_memory_of_an_ended_trainer_is_free_at_once(
    end: str, options: dict[str, Any], flat: allreduce.Topology
) -> None:
    """Without a garbage collection: the next trainer may need that memory, and its checkpoints its backend's state."""
    if "servers" in options and flat.size == 1:
        pytest.skip("one rank has no servers")
    gc.disable()
    try:
        mine = network()
        kind = ParameterServerTrainer if "servers" in options else MirroredTrainer
        trainer = kind(mine, topology=flat, **options)
        trainer.fit(np.ones((8, 64), np.float32), np.zeros(8, int), epochs=1, batch_size=8, progress=False)
        held = [weakref.ref(trainer.strategy.core.buffer)]
        if "update" in options and flat.size > 1:
            held.append(weakref.ref(mine.parameters.base))
        getattr(trainer, end)()
        assert [each() for each in held] == [None] * len(held)
        mine.gradients(np.ones((2, 64), np.float32), np.zeros(2, int), 1.0)
        mine.update()
    finally:
        gc.enable()


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_an_abandoned_trainer_keeps_no_memory_of_the_backend(
    update: str, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    mine = network()
    with allreduce.create("shared", flat) as backend:
        trainer = MirroredTrainer(mine, backend, update=update)
        buffer = trainer.buffer
        trainer.abandon()
        assert trainer.closed
        assert trainer.buffer is None
        assert not np.shares_memory(mine._buffer, buffer)
        mine.gradients(np.ones((2, 64), np.float32), np.zeros(2, int), 1.0)
        mine.update()
        world.Barrier()


class BadBind(NumpyNetwork):
    """A replica whose `bind` raises on the last rank."""

    binds = 0

    def bind(self, parameters: Any, gradients: Any) -> None:
        self.binds += 1
        if self.binds == 2 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
            raise ArgumentError("no such memory")
        super().bind(parameters, gradients)


def test_replicas_keep_no_memory_of_a_trainer_that_one_rank_has_refused(flat: allreduce.Topology) -> None:
    mine = BadBind([4, 3])
    with pytest.raises(ArgumentError, match="no such memory"):
        MirroredTrainer(mine, "ring", flat)
    assert mine.binds == 3  # the last one is to memory of its own


def test_an_error_of_one_rank_while_a_trainer_is_made_leaves_none_behind() -> None:
    class Refuses(NumpyNetwork):
        @property
        def gradient_dtype(self) -> str:
            raise RuntimeError("a replica's own error")

    topology = allreduce.Topology(MPI.COMM_SELF)  # so no other rank waits
    with pytest.raises(RuntimeError, match="own error"):
        MirroredTrainer(Refuses([4, 2]), "ring", topology)
    topology.close()
    assert topology.closed


def test_the_micro_batches_of_a_part_have_their_seeds_whatever_the_own_parts_are() -> None:
    """`share` gives a part of any number of parts."""
    x = np.arange(12)
    whole, halves = (Batches(Arrays((x, x)), 12, 0, parts, micro_batch=2) for parts in (1, 2))
    for part in (0, 1):
        found = whole.share(0, 0, part, 2)
        assert len(found.seeds) == len(found.parts) == 3
        assert found.seeds == halves.share(0, 0, part).seeds


def example(name: str) -> Any:
    """Return the class of an example on the page of Replica."""
    page = (launch.ROOT / "docs" / "api" / "replica.md").read_text()
    texts = re.findall(r"^class Line.*?(?=\n\n\nx = np.random|\n```)", page, re.MULTILINE | re.DOTALL)
    assert [text.count("\n") <= 60 for text in texts] == [True, True]
    names: dict[str, Any] = {"np": np, "Replica": Replica, "__name__": "own_replica"}
    for text in texts:
        exec(text, names)
    return names[name]


def line(**changes: Any) -> Any:
    """Return a replica of the second example, some of whose attributes are others."""
    return type("Own", (example("LineWithMomentum"),), changes)(7)


@pytest.mark.parametrize("name", ["shapes", "config"])
def test_a_replica_does_not_add_to_the_attributes_of_all_replicas(name: str) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(example("Line")(7), name)["w"] = (3,)


def test_a_replica_of_a_user_restores_a_model_before_a_trainer_binds_it(tmp_path: Path) -> None:
    first, second = line(), line()
    first.flat[:], first.momentum[:] = np.arange(8), 2
    first.save(str(tmp_path / "model.npz"))
    second.restore(str(tmp_path / "model.npz"))
    np.testing.assert_array_equal(second.flat, np.arange(8))
    np.testing.assert_array_equal(second.momentum, 2)


def bind_copies(replica: Any, parameters: Any, gradients: Any) -> None:
    """As `bind` of a replica that trains in memory of its own."""
    parameters[:], replica.grads = replica.flat, gradients


MAKE: dict[str, Callable[..., Any]] = {
    "sharded": partial(MirroredTrainer, allreduce="ring", update="sharded"),
    "servers": partial(ParameterServerTrainer, updates="sync"),
}
several = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="a server and a worker, or two slices, are two ranks")


@several
@pytest.mark.parametrize("kind", MAKE)
def test_a_replica_that_divides_no_state_is_refused(kind: str, flat: allreduce.Topology) -> None:
    with pytest.raises(ArgumentError, match=r"the state 'momentum' of this Own .* is not in its `elementwise`"):
        MAKE[kind](line(elementwise=()), topology=flat)
    with pytest.raises(ArgumentError, match="does not train its parameters in the memory of bind"):
        MAKE[kind](line(bind=bind_copies), topology=flat)


OPTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "transforms": (
        partial(MirroredTrainer, allreduce="ring"),
        {"transforms": [ClipNorm(1e9), SkipNotFinite(), EMA(0.5)], "callbacks": [CheckDivergence(every=1)]},
    ),
    "accumulate": (partial(MirroredTrainer, allreduce="ring"), {"transforms": [Accumulate(2), EMA(0.5)]}),
    "sharded": (MAKE["sharded"], {"transforms": [ClipNorm(1e9), EMA(0.5)]}),
    "copies": (
        partial(MirroredTrainer, allreduce="ring", update=Sharded(copies=2)),
        {"transforms": [Accumulate(2), SkipNotFinite()]},
    ),
    "exact": (
        partial(MirroredTrainer, allreduce="ring", average=Exact(micro_batch=4)),
        {"transforms": [EMA(0.5)]},
    ),
    "local": (partial(MirroredTrainer, allreduce="ring", average=LocalSGD(1)), {"transforms": [ClipNorm(1e9)]}),
    "servers": (MAKE["servers"], {}),
}


@pytest.mark.parametrize("name", ["Line", "LineWithMomentum"])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_examples_of_a_replica_need_no_line_for_any_option(
    option: str, name: str, flat: allreduce.Topology
) -> None:
    if option in ("copies", "servers") and flat.size == 1:
        pytest.skip("a copy, or a server, is on another rank")
    if (option, name) == ("local", "LineWithMomentum"):
        return  # each rank has a momentum of its own
    make, fit = OPTIONS[option]
    x = np.random.default_rng(0).normal(size=(60, 7)).astype("float32")
    y, alone = x @ np.arange(7, dtype="float32"), example(name)(7)
    alone.bind(*np.zeros((2, alone.gradient_length), "float32"))
    alone.w.fill(1.0)
    for _ in range(6):
        alone.gradients(x, y, 1.0)
        alone.update()
    with make(example(name)(7), topology=flat) as trainer:
        trainer.edit(lambda: trainer.replica.w.fill(1.0))
        trainer.fit(x, y, 6, 60, shuffle=False, progress=False, **fit)
        np.testing.assert_allclose(trainer.replica.w, alone.w, rtol=1e-4, atol=1e-5)
        assert trainer.evaluate(x, y, ema=False)["loss"] == pytest.approx(alone.evaluate(x, y)[0] / 60, rel=1e-3)
        averages = any(isinstance(each, EMA) for each in fit.get("transforms", ()))
        assert (trainer.evaluate(x, y) == trainer.evaluate(x, y, ema=False)) != averages
    if name == "LineWithMomentum":
        np.testing.assert_allclose(trainer.replica.state()["momentum"], alone.momentum, rtol=1e-3, atol=1e-4)
