"""python -m trainers with the options of the group "watching"."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests import event_files, launch
from tests.conftest import JobRunner
from tests.trace_schema import check_trace
from trainers.callbacks import CSVLogger, EarlyStopping, Timeline
from trainers.cli import options, results
from trainers.cli.options import parse
from trainers.errors import ArgumentError


@pytest.mark.jobs
@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_all_of_them(strategy: str, mpirun: JobRunner, tmp_path: Path) -> None:
    """Three ranks: events, a table and a trace, which agree with the results."""
    pytest.importorskip("tensorboardX")
    arguments = ["--strategy", strategy, "--epochs", "3", "--early-stopping", "5", "--json", "result.json"]
    files = ["--trace", "trace.json", "--tensorboard", "logs", "--csv", "log.csv"]
    if strategy == "parameter_server":
        arguments += ["--servers", "1", "--updates", "async"]
    job = mpirun(3, ["-m", "trainers", "--data", "iris", *arguments, *files], cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    history = json.loads((tmp_path / "result.json").read_text())["history"]
    assert len(history) == 3
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [epoch["loss"] for epoch in history]
    shown = event_files.values(tmp_path / "logs" / "train")
    for name in ("loss", "accuracy", "learning_rate", "samples_per_second", "communication_share", "seconds"):
        values = [each for each in shown if each.tag == f"epoch_{name}"]
        assert [each.step for each in values] == [0, 1, 2]
        if name != "learning_rate":
            assert [each.value for each in values] == pytest.approx([epoch[name] for epoch in history], rel=1e-6)
    if strategy == "parameter_server":
        counts = [each.value for each in shown if each.tag == "epoch_staleness"]
        assert counts == [epoch["staleness"] for epoch in history]
    events = check_trace(json.loads((tmp_path / "trace.json").read_text()), 3)
    kinds = {event["cat"] for event in events}
    assert {"data", "compute", "update"} < kinds
    assert ("wait" in kinds) == (strategy == "mirrored")


def test_what_the_options_mean() -> None:
    assert options.make_callbacks(parse([], shown=False)) == []
    (stopping,) = options.make_callbacks(parse(["--early-stopping", "3"], shown=False))
    assert (type(stopping), stopping.monitor, stopping.patience) == (EarlyStopping, "loss", 3)
    for resume in (False, True):  # a resumed training goes on with its table
        (table,) = options.make_callbacks(
            parse(["--csv", "log.csv", "--checkpoint", "run"] + ["--resume"] * resume, False)
        )
        assert (type(table), table.filename, table.append) == (CSVLogger, "log.csv", resume)
    (trace,) = options.make_callbacks(parse(["--trace", "trace.json"], shown=False))
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
