"""The file that names the options to vary: what it may say, and the named error of each mistake."""

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from trainers.apps.search import command, config
from trainers.apps.search.study import COMPLETE, Ended
from trainers.cli.options import BY_NAME, make_network, parse
from trainers.datasets import load
from trainers.errors import ArgumentError

LR = {"parameterName": "lr", "type": "DOUBLE", "minValue": 1e-4, "maxValue": 0.1, "scaleType": "UNIT_LOG_SCALE"}
GOOD: dict[str, Any] = {"goal": "MAXIMIZE", "maxTrials": 3, "params": [LR]}


class Fixed:
    """A trial that suggests the smallest value, or the largest."""

    def __init__(self, largest: bool) -> None:
        self._at = -1 if largest else 0
        self.asked: dict[str, Any] = {}

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        self.asked[name] = float, low, high, log
        return (low, high)[self._at]

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int:
        self.asked[name] = int, low, high, log
        return (low, high)[self._at]

    def suggest_categorical(self, name: str, choices: tuple[Any, ...]) -> Any:
        self.asked[name] = choices
        return choices[self._at]


def changed(**keys: Any) -> dict[str, Any]:
    """The good file, with other keys; of its parameter too, if they are there. None removes a key."""
    made = copy.deepcopy(GOOD)
    for key, value in keys.items():
        where = made["params"][0] if key in (*LR, "categoricalValues", "discreteValues", "stray") else made
        where.pop(key, None)
        where |= {} if value is None else {key: value}
    return made


def parameter(name: str, kind: str, *values: Any) -> dict[str, Any]:
    """A parameter of one of these values, or from the first to the second."""
    lists = {"CATEGORICAL": "categoricalValues", "DISCRETE": "discreteValues"}
    given = {lists[kind]: [*values]} if kind in lists else {"minValue": values[0], "maxValue": values[1]}
    return {"parameterName": name, "type": kind, **given}


def test_a_file_of_every_type_and_scale(tmp_path: Path) -> None:
    path = tmp_path / "tuning.yaml"
    path.write_text(
        """
goal: MINIMIZE
maxTrials: 05
maxParallelTrials: 2
params:
- {parameterName: lr, type: DOUBLE, minValue: 1e-4, maxValue: '0.1', scaleType: UNIT_LOG_SCALE}
- {parameterName: batch-size, type: INTEGER, minValue: 010, maxValue: 100, scaleType: UNIT_LINEAR_SCALE}
- {parameterName: momentum, type: DOUBLE, minValue: 0.5, maxValue: 0.99}
- {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [adam, momentum]}
- {parameterName: units, type: DISCRETE, discreteValues: [8, 16]}
- {parameterName: exact, type: CATEGORICAL, categoricalValues: [false, true]}
"""
    )
    found = config.load(str(path))
    assert (found.direction, found.metric, found.trials, found.parallel) == ("minimize", "val_loss", 5, 2)
    found.check(["--data", "iris"])
    low, high = Fixed(False), Fixed(True)
    text = ["--batch-size", "10", "--units", "8", "--optimizer", "adam", "--lr", "0.0001"]
    assert found.suggest(low) == text  # type: ignore[arg-type]  # no --momentum, which adam has not
    first = parse(found.suggest(high), shown=False)  # type: ignore[arg-type]
    assert (first.lr, first.batch_size, first.optimizer, first.units, first.exact) == (0.1, 100, "momentum", 16, True)
    assert first.momentum == 0.99
    assert high.asked["batch_size"] == (int, 10, 100, False)
    assert low.asked["lr"] == (float, 1e-4, 0.1, True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], r"the file: Input should be a valid dictionary.*got \[\]"),
        (changed(maxTrails=3), r"^maxTrails: Extra inputs are not permitted, got 3$"),
        (changed(stray=1), r"^params.0.DOUBLE.stray: Extra inputs are not permitted"),
        (changed(successiveHalving={"factr": 2}), r"^successiveHalving.factr: Extra inputs are not permitted"),
        (changed(successiveHalving={"factor": "1"}), r"factor: Input should be greater than or equal to 2, got '1'"),
        (changed(successiveHalving={}, enableTrialEarlyStopping="false"), r"can't be used with successiveHalving"),
        (changed(goal=None), r"^goal: Field required[^;]*$"),
        (changed(hyperparameterMetricTag="auc"), r"hyperparameterMetricTag: Input should be 'val_accuracy', "),
        (changed(maxTrials=0), r"maxTrials: Input should be greater than or equal to 1, got 0"),
        (changed(params=[]), r"params: List should have at least 1 item after validation, not 0, got \[\]"),
        (changed(params=[LR, LR]), r"lr is there twice"),
        (changed(parameterName="learning_rate"), r"params.0.DOUBLE.parameterName: 'learning_rate' is no option"),
        (changed(parameterName="bach_size"), r"did you mean 'batch-size'\?"),
        (changed(parameterName="save"), r"a search does not vary --save"),
        (changed(type="FLOAT"), r"params.0: Input tag 'FLOAT' .*'DOUBLE', 'INTEGER', 'CATEGORICAL', 'DISCRETE'"),
        (changed(minValue=0), r"UNIT_LOG_SCALE needs a minValue > 0, got 0"),
        (changed(scaleType="LOG"), r"scaleType: Input should be 'UNIT_LINEAR_SCALE' or 'UNIT_LOG_SCALE'"),
        (changed(params=[parameter("lr", "CATEGORICAL", "a", "a")]), r"CATEGORICAL: the values must be different"),
        (changed(minValue=0.5), r"minValue 0.5 is larger than maxValue 0.1"),
        (changed(maxValue=float("inf")), r"maxValue: Input should be a finite number, got inf"),
        (changed(type="INTEGER"), r"params.0.INTEGER.minValue: Input should be a valid integer, got a"),
        (changed(goal="MINIMIZE", hyperparameterMetricTag="accuracy"), r"MINIMIZE would find the worst accuracy"),
        (changed(goal="MAXIMIZE", hyperparameterMetricTag="val_loss"), r"MAXIMIZE would find the worst val_loss"),
        (changed(maxTrials=5000 * "9"), r"^maxTrials: .*, got '999.{180,300}$"),
    ],
)
def test_a_mistake_has_a_named_error(content: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        config.read(content)


def test_parameters_follow_those_that_they_need() -> None:
    def suggested(largest: bool, *params: dict[str, Any]) -> str:
        found = config.read({**GOOD, "params": [*params]})
        found.check([])
        return " ".join(found.suggest(Fixed(largest)))  # type: ignore[arg-type]

    stale = parameter("max-staleness", "CATEGORICAL", "3", "4")
    updates = parameter("updates", "CATEGORICAL", "sync", "async")
    servers = stale, updates, parameter("strategy", "CATEGORICAL", "mirrored", "parameter_server")
    assert suggested(False, *servers) == "--strategy mirrored"
    assert suggested(True, *servers) == "--strategy parameter_server --updates async --max-staleness 4"
    exact = parameter("micro-batch", "CATEGORICAL", "2", "4"), parameter("exact", "CATEGORICAL", "false", "true")
    assert suggested(False, *exact) == ""
    assert suggested(True, *exact) == "--exact --micro-batch 4"


def test_the_best_model_stays_when_a_trial_is_told_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing: Any = None
    keeper = command.Keeper(command.Job(Namespace(json=None), [], config.read(GOOD), nothing, nothing), str(tmp_path))
    for number, value, kept in ((0, 0.5, 0), (0, 0.5, 0), (1, 0.4, 0), (2, 0.6, 2), (2, 0.6, 2), (1, 0.4, 2)):
        command.file_of(tmp_path, number).touch()
        keeper.told(Ended(number, COMPLETE, [value], {}, None, 1.0, [0], None))
        assert list(tmp_path.iterdir()) == [command.file_of(tmp_path, kept)]
    assert capsys.readouterr().out.count("trial") == 6


@pytest.mark.parametrize(
    ("given", "base", "text"),
    [
        (parameter("momentum", "DOUBLE", 0.1, 1), [], "--momentum"),
        (parameter("batch_size", "INTEGER", 0, 9), [], "0 can't be used"),
        (parameter("units", "INTEGER", 1, 9), ["--hidden", "3"], "--hidden gives"),
        (parameter("lr", "DISCRETE", 0.1, -1), [], "-1 can't be used"),
    ],
)
def test_the_options_take_the_whole_range(given: dict[str, Any], base: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        config.read({**GOOD, "params": [given]}).check(base)


RANGE = "goal: MAXIMIZE\nparams: [{parameterName: lr, type: DOUBLE, minValue: 0, maxValue: %s}]"


@pytest.mark.parametrize(
    "content", ["goal: [", "\x00", "a: &a [*a]", "- 1", f"maxTrials: {8000 * '9'}", RANGE % (400 * "9")]
)
def test_a_file_of_other_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuning.yaml"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="--config"):
        config.load(str(path))
    with pytest.raises(ArgumentError, match="can't be read"):
        config.load(str(tmp_path / "none.yaml"))


def test_options_for_the_network_that_people_tune() -> None:
    iris = load("iris")

    def made(text: str) -> Any:
        return make_network(parse(["--data", "iris", *text.split()], shown=False), iris)

    assert made("--layers 3 --units 5").sizes == [4, 5, 5, 5, 3]
    assert made("--layers 2").sizes == [4, 64, 64, 3]
    assert made("--units 7").sizes == [4, 7, 3]
    assert made("--layers 0").sizes == [4, 3]
    assert made("").sizes == [4, 10, 10, 3]
    assert made("--optimizer momentum --momentum 0.5").optimizer.config() == {"lr": 0.05, "momentum": 0.5}
    decays = made("--beta1 0.8 --beta2 0.99").optimizer.config()
    assert (decays["lr"], decays["beta1"], decays["beta2"]) == (0.01, 0.8, 0.99)
    for text, error in (
        ("--hidden 3 --layers 2", "--hidden gives"),
        ("--momentum 0.5", "has no effect with --optimizer adam|needs --optimizer momentum"),
        ("--beta1 0.5 --optimizer sgd", "has no effect with --optimizer sgd"),
        ("--beta1 1", "must be a number >= 0 and < 1"),
        ("--layers 2 --load model.npz", "leave out --layers"),
    ):
        with pytest.raises(ArgumentError, match=error):
            parse(["--data", "iris", *text.split()], shown=False)
    assert {"momentum", "layers", "units", "beta1", "beta2"} <= set(BY_NAME)
