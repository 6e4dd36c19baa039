"""Data in several files, of which each rank reads its own: the training is that of one rank with all files."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.training.fits import TRAINERS
from tests.training.test_tables import HEADER, people, write
from trainers import Checkpoint, Exact, Loader, MirroredTrainer, ParameterServerTrainer, load_shards, network_of
from trainers.cli.main import main
from trainers.data import Batches
from trainers.datasets.columns import Category, Columns, Number
from trainers.datasets.shards import Shards, shares
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit.evaluation import evaluate_on_ranks
from trainers.fit.source import Given, to_evaluate

JOBS = "openmpi 1 2 3 5"

ROWS = (40, 9, 0, 33)  # of the shards
SIZES: dict[str, Any] = {"batch_size": 16, "progress": False}


@pytest.fixture
def made(folder: Path, world: MPI.Intracomm) -> Path:
    """A folder with shards of a table, and of arrays; one of each has no rows."""
    if world.rank == 0:
        folder.mkdir()
        random = np.random.default_rng(4)
        for number, rows in enumerate(ROWS):
            write(folder / f"part-{number}.csv", people(rows, seed=number))
            x = random.normal(5, 2, size=(rows, 3))
            np.savez(folder / f"part-{number}.npz", x=x, y=(x.sum(axis=1) > 15).astype(np.int64))
    world.Barrier()
    return folder


def load(folder: Path, ending: str, topology: allreduce.Topology) -> Shards:
    label = "income" if ending == "csv" else None
    return load_shards(str(folder / f"part-*.{ending}"), label, topology=topology)


def trained(trainer: Any, data: Shards, epochs: int = 2, **options: Any) -> tuple[np.ndarray, list[float]]:
    """Train and evaluate; returns the parameters, the losses and the scores."""
    history = trainer.fit(data.train, epochs=epochs, **SIZES, **options)
    scores = trainer.evaluate(data.test)
    assert len(set(trainer.parameters_sha256())) == 1
    found = trainer.replica.state()["parameters"].copy()
    return found, [*(epoch.loss for epoch in history), scores["loss"], scores["accuracy"]]


def test_shards_of_a_table_train_as_on_one_rank(made: Path, flat: allreduce.Topology) -> None:
    """The matrix has shards of arrays."""
    with allreduce.Topology(MPI.COMM_SELF) as alone:
        whole = load(made, "csv", alone)
        with MirroredTrainer(network_of(whole, (6,), seed=3, lr=0.02), "native", alone) as trainer:
            expected, scores = trained(trainer, whole, validation_data=whole.test)
    data = load(made, "csv", flat)
    assert (data.columns, data.classes) == (whole.columns, whole.classes)
    assert np.array_equal(data.shift, whole.shift)
    for kind, trainer_of in TRAINERS.items():
        if kind == "sync" and flat.size == 1:
            continue
        with trainer_of(network_of(data, (6,), seed=3, lr=0.02), topology=flat) as trainer:
            found, seen = trained(trainer, data, validation_data=data.test)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5, err_msg=kind)
        np.testing.assert_allclose(seen, scores, rtol=1e-4, err_msg=kind)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_rows_of_a_batch_delay_no_step(ranks: int, folder: Path, flat: allreduce.Topology) -> None:
    """A small shard has no rows in most batches. The losses, at a rate of almost 0, are means over all rows."""
    if flat.size < 3:
        pytest.skip("a server, and two ranks that compute")
    if flat.rank == 0:
        folder.mkdir()
        random = np.random.default_rng(4)
        for number, rows in enumerate((60, 5, 5)):
            x = random.normal(5, 2, size=(rows, 3))
            np.savez(folder / f"part-{number}.npz", x=x, y=(x.sum(axis=1) > 15).astype(np.int64))
    flat.world.Barrier()
    data = load(folder, "npz", flat)
    made: Any = functools.partial(ParameterServerTrainer, ranks_per_worker=ranks)
    losses = []
    for trainer_of in (TRAINERS["replicated"], made):
        with trainer_of(network_of(data, (6,), seed=3, lr=1e-12), topology=flat) as trainer:
            history = trainer.fit(data.train, epochs=2, batch_size=8, progress=False)
        losses.append([history.column(name) for name in ("loss", "accuracy")])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_a_fit_resumes_on_shards_with_the_same_columns_only(made: Path, flat: allreduce.Topology) -> None:
    data, checkpoint = load(made, "csv", flat), Checkpoint(str(made / "run"))
    with MirroredTrainer(network_of(data, (6,), seed=3), "native", flat) as trainer:
        trained(trainer, data, 2, checkpoint=checkpoint)
    network, columns = network_of(data, (6,), seed=3), data.columns
    assert columns is not None
    kept = [each for each in columns.columns if isinstance(each, Category)]
    network.columns = Columns([Number("age", 1.0, 1.0, True), *kept], columns.label, columns.classes)
    with (
        MirroredTrainer(network, "native", flat) as trainer,
        pytest.raises(CheckpointError, match="with other columns, means, categories or classes"),
    ):
        trained(trainer, data, 3, checkpoint=checkpoint, resume=True)


def test_an_evaluation_reads_all_shards_after_other_ranks_have_failed(
    made: Path, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation of a fit is made once; here the group then has this rank alone."""
    data = load(made, "npz", flat)
    with MirroredTrainer(network_of(data, (6,), seed=3), "native", flat) as trainer:
        rows, group = to_evaluate(trainer.strategy, "evaluate", Given.of(data.test)), trainer.group
        assert evaluate_on_ranks(trainer.replica, rows, group, exact=False)[2] == len(data.test)
        for name, value in (("rank", 0), ("size", 1), ("comm", MPI.COMM_SELF)):
            monkeypatch.setattr(group, name, value)
        assert evaluate_on_ranks(trainer.replica, rows, group, exact=False)[2] == len(data.test)
        monkeypatch.undo()


def test_a_part_shuffles_the_rows_of_its_own_shards_once_an_epoch(
    made: Path, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, shuffled, generator = load(made, "npz", flat).train, [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seeds: shuffled.append(seeds) or generator(seeds))
    batches = Batches(rows, 16, 1, 3, seed=5)
    read = [batch.own for epoch in (0, 1) for batch in batches.epoch(epoch)]
    own = [share.shard for share in shares(rows.shards.sizes, 1, 3) if rows.counts[share.shard]]
    assert sum(read) == 2 * rows.counts[own].sum() > 0
    assert sorted(seeds for seeds in shuffled if isinstance(seeds, list)) == [
        [5, epoch, shard] for epoch in (0, 1) for shard in own
    ]


def test_arguments_that_shards_do_not_take_are_named(made: Path, flat: allreduce.Topology) -> None:
    data = load(made, "npz", flat)
    with MirroredTrainer(network_of(data, (6,), seed=3), "native", flat) as trainer:
        with pytest.raises(ArgumentError, match="shards do not take class_weight: leave"):
            trainer.fit(data.train, class_weight={0: 2.0}, **SIZES)
        with pytest.raises(ArgumentError, match="shards do not take collate, rows: leave"):
            trainer.fit(Loader(data.train, rows="divided", steps=2, collate=max), **SIZES)
        with pytest.raises(ArgumentError, match="shards do not take prefetch: leave"):
            trainer.fit(Loader(data.train, prefetch=True), **SIZES)


def test_faults_are_the_same_error_on_all_ranks(made: Path, flat: allreduce.Topology) -> None:
    world = flat.world

    def fails(kind: type[Exception], text: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text) as error:
            load_shards(*args, **options, topology=flat)
        assert len(set(world.allgather(str(error.value)))) == 1

    pattern = str(made / "part-*.csv")
    fails(DataError, "no file matches", str(made / "no-*.csv"))
    fails(DataError, "no.csv can't be read: No such file", [str(made / "no.csv")], "income")
    fails(DataError, "name the column of the label", pattern)
    fails(DataError, "all tables .* or all", [str(made / "part-0.csv"), str(made / "part-0.npz")], "income")
    fails(ArgumentError, "is for tables", str(made / "part-*.npz"), "income")
    data = load(made, "csv", flat)
    for name, content, text in (
        ("part-4.csv", b"", "part-4.csv is empty"),
        ("part-4.csv", b"age,city,job,income\n", "part-4.csv has the columns age, city, job, income, and"),
        ("part-4.csv", b"age,job,city,income\n1,a\n", "part-4.csv, line 2 has 2 cells"),
    ):
        if flat.rank == 0:
            (made / name).write_bytes(content)
        world.Barrier()
        fails(DataError, text, pattern, "income")
        world.Barrier()
    if flat.rank == 0:
        write(made / "part-4.csv", [["1", "a", "b", "medium"]], HEADER)
        np.savez(made / "part-4.npz", x=np.zeros((5, 2)), y=np.zeros(5, int))
    world.Barrier()
    fails(DataError, "training has not met the label 'medium'", pattern, columns=data.columns)
    fails(DataError, "has 2 features, float64, and .* has 3, float64", str(made / "part-*.npz"))
    with MirroredTrainer(network_of(data, (6,)), "native", flat) as trainer:
        for options in ({"y": np.zeros(3)}, {"batch_size": 0}):
            with pytest.raises(ArgumentError):
                trainer.fit(data.train, **{"progress": False, **options})
    exact = MirroredTrainer(network_of(data, (6,)), "ring", flat, average=Exact())
    with exact, pytest.raises(ArgumentError, match="Exact takes all rows on every rank"):
        exact.fit(data.train, progress=False)


def test_the_command_trains_on_shards_and_predicts_them(made: Path, flat: allreduce.Topology) -> None:
    model = str(made / "model.npz")
    pattern = str(made / "part-*.csv")
    assert main(["--data", pattern, "--label", "income", "--epochs", "1", "--hidden", "6", "--save", model]) == 0
    assert main(["--data", pattern, "--load", model, "--epochs", "0"]) == 0
    assert main(["predict", "--load", model, "--data", pattern, "--out", str(made / "out.csv")]) == 0
    assert len((made / "out.csv").read_text().splitlines()) == 1 + sum(ROWS)
    assert main(["--data", str(made / "no-*.csv"), "--label", "income"]) == 2
