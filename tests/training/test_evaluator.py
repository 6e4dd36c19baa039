"""The evaluator of checkpoints: it evaluates the newest, each once, until the training has ended, and skips damaged
ones."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainers import NumpyNetwork
from trainers.cli.evaluator import Evaluator
from trainers.errors import ArgumentError, CheckpointError
from trainers.files import checkpoint

X, Y = np.eye(6, 4, dtype=np.float32), np.arange(6) % 3


def write(folder: Path, total: int, seed: int = 0, sizes: tuple[int, ...] = (4, 3)) -> NumpyNetwork:
    """Write a checkpoint after this number of steps; an epoch has two."""
    network = NumpyNetwork(sizes, seed=seed)
    progress = checkpoint.Progress(
        epoch=total // 2, step=total % 2, total=total, ranks=1, values=np.zeros((total % 2, 2))
    )
    saved = checkpoint.Saved("NumpyNetwork", network.config, network.state(), progress, [{}])
    folder.mkdir(exist_ok=True)
    checkpoint.write(checkpoint.path_of(str(folder), total), saved)
    return network


def after(*steps: Callable[[], object]) -> Callable[[], bool]:
    """Return `ended`, which does one action between two polls, and is True after all of them."""
    left = list(steps)

    def ended() -> bool:
        if not left:
            return True
        left.pop(0)()
        return False

    return ended


def nothing() -> None: ...


def loss(network: NumpyNetwork) -> float:
    return float(network.evaluate(X, Y)[0]) / len(X)


def test_each_checkpoint_is_evaluated_once_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, made = tmp_path / "run", {}

    def train(total: int) -> Callable[[], None]:
        return lambda: made.update({total: write(folder, total, seed=total)})

    evaluator = Evaluator(NumpyNetwork([4, 3]), str(folder), X, Y, output=str(tmp_path / "e.jsonl"))
    rows = evaluator.run(after(nothing, train(2), nothing, train(3), train(4), nothing))
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 2), (1, 3), (2, 4)]
    for row in rows:
        assert row["loss"] == pytest.approx(loss(made[row["step"]]))
        assert 0 <= row["accuracy"] <= 1
        assert row["checkpoint"] == f"checkpoint-{row['step']:08d}.npz"
    assert [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()] == rows
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"evaluator: epoch 2, step 2  loss {rows[1]['loss']:.4f}  accuracy ")


def test_the_newest_is_evaluated_and_the_last_is_not_missed(tmp_path: Path) -> None:
    """Two checkpoints came while it was busy, and the last one with the end."""

    def two() -> None:
        write(tmp_path, 1)
        write(tmp_path, 2)

    steps = iter([two, lambda: write(tmp_path, 3)])

    def ended() -> bool:
        next(steps)()
        return len(list(tmp_path.iterdir())) == 3

    rows = Evaluator(NumpyNetwork([4, 3]), str(tmp_path), X, Y).run(ended)
    assert [row["step"] for row in rows] == [2, 3]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def damage(total: int) -> None:
        write(tmp_path, total)
        path = Path(checkpoint.path_of(str(tmp_path), total))
        path.write_bytes(path.read_bytes()[:-40])

    steps = after(lambda: write(tmp_path, 1), lambda: damage(2), nothing, nothing, lambda: write(tmp_path, 3))
    rows = Evaluator(NumpyNetwork([4, 3]), str(tmp_path), X, Y).run(steps)
    assert [row["step"] for row in rows] == [1, 3]
    assert len(caplog.records) == 1


def test_a_table_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    for total in (1, 2):
        write(tmp_path, total)
        Evaluator(NumpyNetwork([4, 3]), str(tmp_path), X, Y, output=str(path), append=total > 1).run(after())
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "step", "loss", "accuracy", "seconds", "checkpoint"]
    assert [row["step"] for row in rows] == ["1", "2"]


def test_a_loss_that_is_no_number_is_json(tmp_path: Path) -> None:
    write(tmp_path, 1)
    network = NumpyNetwork([4, 3])
    x = np.full_like(X, np.nan)
    output = tmp_path / "e.jsonl"
    Evaluator(network, str(tmp_path), x, Y, output=str(output)).run(after())
    assert json.loads(output.read_text(), parse_constant=pytest.fail)["loss"] is None


class Other(NumpyNetwork):
    """A network of another kind."""


@pytest.mark.parametrize(
    ("kind", "sizes", "error", "text"),
    [
        (NumpyNetwork, (4, 5, 3), Exception, "network of sizes 4-5-3, and this one has 4-3"),
        (NumpyNetwork, (5, 3), Exception, "network of sizes 5-3, and this one has 4-3"),
        (Other, (4, 3), CheckpointError, "is of a NumpyNetwork, and the evaluator has a Other"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(
    kind: type[NumpyNetwork], sizes: tuple[int, ...], error: type[Exception], text: str, tmp_path: Path
) -> None:
    write(tmp_path, 1, sizes=sizes)
    with pytest.raises(error, match=text):
        Evaluator(kind([4, 3]), str(tmp_path), X, Y).run(after())


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"the checkpoints in .*run can't be read: Not a directory"):
        Evaluator(NumpyNetwork([4, 3]), str(tmp_path / "run"), X, Y).run(after())


def test_a_file_that_cant_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"e\.csv can't be written: No such"):
        Evaluator(NumpyNetwork([4, 3]), str(tmp_path), X, Y, output=str(tmp_path / "no/such/e.csv"))
