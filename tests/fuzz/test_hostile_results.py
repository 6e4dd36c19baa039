"""Hostile versions of the files that benchmarks and trainers read, and attacks by users of the same folder."""

import json
import math
import os
import socket
import stat
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from allreduce.files import replacing
from benchmarks import timeline
from benchmarks.lib import outputs, plot, report
from benchmarks.lib.results import FileError
from benchmarks.timeline import load as load_trace
from tests.benchmarks.made_runs import made_run
from tests.fuzz import files, peers
from trainers.cli import results
from trainers.errors import CheckpointError
from trainers.files import checkpoint
from trainers.fit import checkpointing
from trainers.watching.csv_logger import CSVLogger


def test_a_page_shows_what_it_is_told_as_text() -> None:
    run = made_run(sizes=[64, 4096])
    harm = "<script>alert(1)</script>"
    run.results = [result.__class__(**{**vars(result), "backend": f"{result.backend}{harm}"}) for result in run.results]
    run.machine = {"cpu": harm, "cores": 2, "mpi": harm, harm: harm}
    run.command, run.date, run.skipped = harm, harm, {harm: harm}
    page = report.page(run)
    assert page.count("alert(1)") > 10
    assert "<script" not in page


def test_pictures_take_no_text_for_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "$\\frac$.json"
    path.write_text(json.dumps(files.trace()[0]))
    assert timeline.main([str(path), "--plot", str(tmp_path / "picture.png")]) == 0
    run = made_run(sizes=[64, 4096])
    run.machine["cpu"] = "$\\frac$"
    run.results = [result.__class__(**{**vars(result), "backend": "$\\frac$"}) for result in run.results]
    assert plot.draw(run)
    assert timeline.draw(load_trace(str(path)), "$_$")


def test_a_trace_without_numbers_of_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    events = [{"ph": "X", "ts": at, "dur": 1, "pid": at, "tid": 0, "cat": "wait", "args": {"last": 1}} for at in (0, 1)]
    path.write_text(json.dumps(events))
    assert timeline.main([str(path)]) == 0
    assert "rank 0 waited" in capsys.readouterr().out


def test_a_trace_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as a whole it would take ten times its size, and text outside of slices as much."""
    path = tmp_path / "trace.json"
    event = {"ph": "X", "ts": 5, "dur": 1, "pid": 0, "tid": 0, "cat": "wait"}
    monkeypatch.setattr(timeline, "PIECE", 1 << 14)
    small = ", ".join(["{}"] * 30_000)
    path.write_text(f'{{"other": 1, "traceEvents" : [{small}, {json.dumps(event)} , {small}]}}')
    tracemalloc.start()
    assert [each.begin for each in load_trace(str(path))] == [5]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size
    monkeypatch.setattr(timeline, "MOST_SLICES", 2)
    path.write_text(json.dumps([event] * 3))
    with pytest.raises(FileError, match="more than 2 events"):
        load_trace(str(path))


# Files that are written


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


WRITERS: dict[str, Callable[[str], object]] = {
    "model.npz": lambda path: files.network().save(path),
    "checkpoint.npz": lambda path: checkpoint.write(path, files.saved()),
    "run.json": lambda path: outputs.write(path, "{}"),
    "result.json": lambda path: results.write_json(path, {}),
    "trace.json": lambda path: write_trace(path),
}


def write_trace(path: str) -> None:
    with replacing(path, "the trace") as file:
        file.write("{}")


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    """Whatever ended it, also Ctrl-C."""
    path = tmp_path / "trace.json"
    path.write_text("old")

    def write_half(error: type[BaseException]) -> None:
        with replacing(str(path), "the trace") as file:
            file.write("half")
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            write_half(error)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", WRITERS)
def test_files_get_the_users_umask(tmp_path: Path, name: str, umask: int) -> None:
    WRITERS[name](str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("name", WRITERS)
def test_links_that_others_have_laid_are_not_followed(tmp_path: Path, name: str) -> None:
    """A user of the same folder (/tmp, say) who guesses a temporary name can't make us write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    guesses = [f"{name}.{os.getpid()}.part", f".{name}.{os.getpid()}.part", f"{name}.part", f"{name}.tmp"]
    for guess in guesses:
        (tmp_path / guess).symlink_to(victim)
    WRITERS[name](str(tmp_path / name))
    assert victim.read_text() == "mine"
    assert (tmp_path / name).stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*guesses, "victim", name])


# What is read to go on from


@pytest.mark.parametrize(
    ("name", "value"), [("epoch", math.inf), ("dropped", -math.inf), ("seconds", "x"), ("staleness", [math.inf])]
)
def test_a_history_that_makes_no_sense(name: str, value: Any) -> None:
    saved = files.saved()
    checkpointing.check("run", saved, files.network(), saved.progress.settings, 3)
    saved.progress.history[0][name] = value
    with pytest.raises(CheckpointError, match="its history or its shapes can't be read"):
        checkpointing.check("run", saved, files.network(), saved.progress.settings, 3)


def test_a_log_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logger = CSVLogger(path, append=True)
    logger.set_trainer(peers.Alone())
    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 1.0})
    logger.on_train_end()
    assert os.read(end, 100) == b"epoch,loss\n0,1.0\n"
    os.close(end)


def test_a_folder_with_the_name_of_a_leftover_stays(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00000001.npz.01234567").mkdir()
    (tmp_path / ".checkpoint-00000001.npz.76543210").write_bytes(b"part")
    checkpoint.clean(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".checkpoint-00000001.npz.01234567"]


# Messages


def test_a_store_of_one_machine_listens_to_no_other() -> None:
    pytest.importorskip("torch")
    from allreduce.torch_backend import rendezvous

    (listener,) = rendezvous._listeners(True)
    store = rendezvous._serve(listener, timedelta(seconds=5))
    socket.create_connection((rendezvous.LOOPBACK, store.port), 5).close()
    if sys.platform == "linux":  # where the whole of 127.0.0.0/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", store.port), 5)


def test_a_store_of_several_hosts_listens_on_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on the network of MPI's interfaces, if MPI is given some, by name or by network."""
    pytest.importorskip("torch")
    from allreduce.torch_backend import rendezvous

    names = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    entries = [(0, 0, 0, "", (address, 0)) for address in ("127.0.1.1", "10.0.0.5", "fe80::1%eth0", "fd00::5")]
    everything = ["10.0.0.5", "fd00::5", "10.1.0.5"]
    for variable, value, left in (
        ("", "", everything),
        ("OMPI_MCA_btl_tcp_if_include", "10.1.0.0/16", ["10.1.0.5"]),
        ("OMPI_MCA_btl_tcp_if_include", "lo, ib0", ["10.1.0.5"]),
        ("OMPI_MCA_btl_tcp_if_exclude", "127.0.0.1/8,eth0", ["fd00::5", "10.1.0.5"]),
        ("FI_TCP_IFACE", "eth0", ["10.0.0.5"]),
        ("UCX_NET_DEVICES", "mlx5_0:1", everything),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
            patch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
            patch.setattr(rendezvous, "_address_of", names.get)
            for each in (*rendezvous.INCLUDE, *rendezvous.EXCLUDE):
                patch.setenv(each, value if each == variable else "")
            assert rendezvous._addresses() == left, value
    monkeypatch.setattr(rendezvous, "_addresses", lambda: ["127.0.0.2", "198.51.100.77"])  # of no host
    (listener,) = rendezvous._listeners(False)
    store = rendezvous._serve(listener, timedelta(seconds=5))
    socket.create_connection(("127.0.0.2", store.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), 5)
