"""Ensembles: votes, weights, the rows of members, files, and jobs whose ranks fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from tests.conftest import JobRunner, in_one_job
from trainers import EMA, MirroredTrainer, NumpyNetwork, Samples, datasets
from trainers.apps.ensemble import model as ensemble_model
from trainers.apps.ensemble.drawn_rows import DrawnRows, taken
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.apps.ensemble.model import EnsembleModel
from trainers.apps.ensemble.voting import Scorer, Voting
from trainers.apps.serving.versions import load_model
from trainers.data import Arrays
from trainers.errors import ArgumentError, CheckpointError, ModelFileError
from trainers.files import model_file

JOB = ["-m", "tests.apps.ensemble_job"]


def test_killed_ranks(mpirun: JobRunner) -> None:
    job = mpirun(4, [*JOB, "members"], ulfm=True)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.split("\n"))[-2:] == ["rank 0 ends", "rank 1 ends"], job.stdout + job.stderr


def test_a_rank_that_is_killed_while_the_ensemble_is_created_ends_the_job(mpirun: JobRunner) -> None:
    job = mpirun(3, [*JOB, "creation"], ulfm=True)
    assert job.returncode != 0
    assert "the ensemble was not created: rank 1 of 3 was lost; start the job again" in job.stderr


def test_killed_ranks_of_parts_that_have_several(mpirun: JobRunner, tmp_path: Path) -> None:
    """The other ranks of the part have its member."""
    path = tmp_path / "ensemble.npz"
    job = mpirun(5, [*JOB, "parts", path], ulfm=True)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.split("\n"))[-2:] == ["rank 0 ends", "rank 2 ends"], job.stdout + job.stderr
    saved, states = ensemble_model.read(str(path))
    assert len(saved.members) == len(states) == 2


REFUSED = {  # options beside --members 3 -> what the error says
    "--strategy central_storage": "--members 3 has no effect with --strategy central_storage",
    "--load x.npz": "--members 3 can't be used with --load x.npz: members begin with their own seeds",
    "--csv x.csv": "--members 3 can't be used with --csv x.csv: all members would write one file",
    "--on-failure continue --standby 1": "--members 3 can't be used with --standby 1",
    "--data part-*.npz": "--data part-*.npz: each rank reads its own files",
    "--bagging columns": "invalid choice: 'columns'",
    "--members 0": "must be an integer >= 1, got '0'",
}

DIVERGES = "--epochs 1 --batch-size 1437 --optimizer sgd --lr 1e38 --hidden none"  # in the only step


@pytest.mark.jobs
def test_the_command(tmp_path: Path, digits: datasets.Dataset) -> None:
    options = "--members 3 --bagging rows --voting hard --epochs 2 --hidden none --ema 0.5 --checkpoint run"
    line = options.split()
    lines = [[*line, "--save", "e.npz", "--json", "e.json"]]
    lines += [["--members", "3", *given.split()] for given in REFUSED] + [["--bagging", "rows"]]
    lines += [["--members", "2", *DIVERGES.split()]]
    first, *others, diverged = in_one_job(2, [("trainers.cli.main", each, str(tmp_path)) for each in lines], tmp_path)
    assert [each["code"] for each in first] == [0, 0], first
    found, model = json.loads((tmp_path / "e.json").read_text()), load_model(str(tmp_path / "e.npz"))
    assert model.members == len(found["members"]) == 3
    accuracy = float(np.mean(model.predict(digits.x_test).argmax(axis=1) == digits.y_test))
    assert found["test_accuracy"] == pytest.approx(accuracy, abs=0.01)
    own = [each["test_accuracy"] for each in found["members"]]
    assert found["mean_member_accuracy"] == pytest.approx(np.mean(own))
    said = "\n".join(each["stdout"] for each in first)
    for text in (
        "3 members on 2 parts of the ranks, each trained on a bootstrap sample of the rows; hard voting",
        f"members: mean test accuracy {np.mean(own):.4f}, best {max(own):.4f} (member {1 + int(np.argmax(own))})",
        f"out-of-bag accuracy: {found['oob']['accuracy']:.4f} ({found['oob']['rows']:.0f} rows)",
        f"\ntest accuracy: {found['test_accuracy']:.4f}",
    ):
        assert text in said, said
    for text, outcome in zip([*REFUSED.values(), "--bagging rows needs --members N"], others, strict=True):
        assert [each["code"] for each in outcome] == [2, 2], outcome
        assert text in "".join(each["stderr"] for each in outcome), outcome
    assert [each["code"] for each in diverged] == [1, 1], diverged
    assert "the loss of the test data is nan" in "".join(each["stderr"] for each in diverged), diverged


def test_sigterm(mpirun: JobRunner, tmp_path: Path) -> None:
    """Both parts have written their checkpoints when the first rank ends."""
    job = mpirun(2, [*JOB, "sigterm", tmp_path])
    for rank in range(2):
        assert f"rank {rank} ends with 143, 2 folders" in job.stdout, job.stdout + job.stderr


def test_votes() -> None:
    outputs = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.4]], np.float32)
    assert Voting().votes(outputs).dtype == np.float32
    np.testing.assert_array_equal(Voting().votes(outputs), outputs)
    np.testing.assert_array_equal(Voting("hard").votes(outputs), [[0, 1, 0], [1, 0, 0]])
    logits = Voting(logits=True).votes(np.log(outputs[:1]))
    np.testing.assert_allclose(logits, outputs[:1], rtol=1e-6)
    votes = {0: outputs, 2: outputs[::-1]}
    np.testing.assert_allclose(Voting().combined(votes), 0.5 * outputs + 0.5 * outputs[::-1])
    both = Voting().combined({1: {"a": outputs}, 3: {"a": 3 * outputs}})
    np.testing.assert_allclose(both["a"], 2 * outputs)
    with pytest.raises(ArgumentError, match="is for classes"):
        Voting("hard").votes(np.zeros(4))


def test_scores() -> None:
    outputs = np.array([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]])
    expected = {"loss": -np.log([0.9, 0.6, 0.2]).mean(), "accuracy": 2 / 3}
    for y in (np.array([0, 1, 1]), np.array([[1, 0], [0, 1], [0, 1.0]])):
        assert Scorer(outputs, y)(outputs) == pytest.approx(expected)
    assert Scorer(outputs, np.array([0, 1, 1]))(5 * outputs) == pytest.approx({"accuracy": 2 / 3})
    numbers = np.array([1.0, 2.0])
    assert Scorer(numbers[:, None], numbers)(numbers[:, None] + 1) == {"loss": 1.0}
    for bad in (np.array([0, 1, 2]), np.array([0.5, 0.5]), np.zeros((3, 3))):
        with pytest.raises(ArgumentError):
            Scorer(outputs, bad)


def test_rows_of_members() -> None:
    drawn = DrawnRows("rows", 3, 4, 100)
    first = drawn.of(0)
    assert first is not None
    assert len(first) == 100
    assert 50 < len(np.unique(first)) < 75  # 63 are expected
    assert set(drawn.unseen(0)) == set(range(100)) - set(first)
    assert not np.array_equal(first, drawn.of(1))
    np.testing.assert_array_equal(first, DrawnRows("rows", 3, 9, 100).of(0))
    shards = [DrawnRows("shards", 3, 3, 10).of(number) for number in range(3)]
    assert sorted(np.concatenate(shards)) == list(range(10))  # type: ignore[arg-type]
    assert [len(each) for each in shards] == [3, 3, 4]  # type: ignore[arg-type]
    assert DrawnRows(None, 3, 3, 10).of(1) is None
    with pytest.raises(ArgumentError, match="2 rows for 3 members"):
        DrawnRows("shards", 0, 3, 2)
    x = np.arange(10)
    for given in (Arrays((x, 2 * x)), Samples(list(zip(x, 2 * x, strict=True)))):
        assert taken(given, DrawnRows(None, 0, 1, 10), True, 0).data in (given.data, given)
        part: Any = taken(given, DrawnRows("shards", 3, 3, 10), None, 2).data
        first, second = part if isinstance(given, Arrays) else part.take(np.arange(4))
        assert (first.tolist(), second.tolist()) == (shards[2].tolist(), (2 * shards[2]).tolist())  # type: ignore[index]


@pytest.fixture(scope="module")
def digits() -> datasets.Dataset:
    return datasets.load("digits")


def make(seed: int) -> NumpyNetwork:
    network = NumpyNetwork([64, 32, 10], seed=seed)
    network.scale_input(0.0, 1 / 16)
    return network


def test_one_member_is_its_trainer(digits: datasets.Dataset) -> None:
    x, y = digits.x_train[:200], digits.y_train[:200]
    with EnsembleTrainer(make, 1) as ensemble:
        ensemble.fit(x, y, 2, progress=False, transforms=[EMA(0.9)])
        network = make(ensemble.seeds[0])
        with MirroredTrainer(network) as trainer:
            trainer.fit(x, y, 2, seed=ensemble.seeds[0], progress=False, transforms=[EMA(0.9)])
            expected = trainer.predict(x)
        np.testing.assert_allclose(ensemble.predict(x), expected, rtol=1e-6)
        assert not np.array_equal(network.predict(x), expected)  # the average votes


def test_checkpoints_data_sets_and_classes_that_a_member_has_not_seen(tmp_path: Path, digits: datasets.Dataset) -> None:
    order = np.argsort(digits.y_train[:40], kind="stable")
    x, y = digits.x_train[:40][order], digits.y_train[:40][order]
    rows = list(zip(x, y, strict=True))
    with EnsembleTrainer(make, 8, bagging="shards") as ensemble:  # 5 rows each
        ensemble.fit(rows, epochs=1, batch_size=3, checkpoint=str(tmp_path / "run"), progress=False)
        before = ensemble.predict(x)
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [f"member{number}" for number in range(8)]
    with EnsembleTrainer(make, 8, bagging="shards", voting="hard") as ensemble:
        again: dict[str, Any] = {"epochs": 2, "batch_size": 3, "checkpoint": str(tmp_path / "run"), "progress": False}
        with pytest.raises(CheckpointError):
            ensemble.fit(rows, **again)
        assert ensemble.missing == {}
        assert [len(each.history) for each in ensemble.fit(rows, resume=True, **again)] == [2] * 8
        ensemble.fit(x, y, 1, class_weight="balanced", progress=False)
        np.testing.assert_allclose(ensemble.predict(x).sum(axis=1), 1, rtol=1e-6)
        assert not np.array_equal(before, ensemble.predict(x))


def test_a_file_needs_no_mpi(tmp_path: Path, digits: datasets.Dataset) -> None:
    path, x = str(tmp_path / "ensemble.npz"), digits.x_test[:20]
    with EnsembleTrainer(make, 3, voting="hard") as ensemble:
        ensemble.fit(digits.x_train[:100], digits.y_train[:100], 1, progress=False)
        ensemble.save(path)
        expected = ensemble.predict(x)
    model = load_model(path)
    assert (model.kind, model.shape, model.dtype, model.members) == ("Ensemble", (64,), np.float32, 3)
    assert model.outputs == 10
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-6)
    with pytest.raises(ArgumentError, match="64 features"):
        model.check(x[:, :9])
    loading = f"from trainers.apps.ensemble.model import EnsembleModel; print(EnsembleModel.load({path!r}).members)"
    done = launch.child(f"import sys; sys.modules['mpi4py'] = None; {loading}")
    assert done.stdout == "3\n", done.stderr


def test_damaged_files(tmp_path: Path) -> None:
    path = str(tmp_path / "ensemble.npz")
    with EnsembleTrainer(make, 2) as ensemble:
        ensemble.save(path)
    config, arrays = model_file.read(path, "Ensemble")

    def refused(change: dict[str, Any], lacks: str = "") -> str:
        state = {name: array for name, array in arrays.items() if name != lacks}
        model_file.write(path, "Ensemble", config | change, state)
        with pytest.raises(ModelFileError) as caught:
            EnsembleModel.load(path)
        return str(caught.value)

    assert "members whose votes have weights" in refused({"weights": [1.0, 2.0]})
    assert "describes no ensemble" in refused({"voting": "loud"})
    assert "describes no ensemble" in refused({"members": "all"})
    assert "describes no ensemble" in refused({"members": [{"number": 0}]})
    assert "describes no ensemble" in refused({"missing": None})
    assert "belong to no member" in refused({"members": config["members"][:1], "missing": [[1, "lost"]]})
    assert "member 1" in refused({}, "member1.parameters")
    other = [config["members"][0] | {"kind": "Net"}, config["members"][1]]
    model_file.write(path, "Ensemble", config | {"members": other}, arrays)
    with pytest.raises(ArgumentError, match="give make_replica"):
        EnsembleModel.load(path)
    with pytest.raises(ModelFileError, match="is a Net, and make_replica makes a NumpyNetwork"):
        EnsembleModel.load(path, make)
    model_file.write(path, "Ensemble", config, arrays)
    assert EnsembleModel.load(path, make).members == 2
