"""Hostile files, each with a named error and without much more memory than the file, and attacks by users of the same
folder."""

import gzip
import json
import math
import os
import socket
import stat
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce.files import replacing
from benchmarks import timeline
from benchmarks.lib import outputs
from benchmarks.lib.results import FileError
from tests.fuzz import files, peers
from tests.fuzz.examples import ZEROS
from trainers import datasets
from trainers.cli import results
from trainers.datasets import rows, table
from trainers.errors import CheckpointError, DataError, ModelFileError
from trainers.files import checkpoint, model_file
from trainers.fit import checkpointing
from trainers.watching.csv_logger import CSVLogger


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Check that the block holds no more bytes at a time."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size


@pytest.mark.parametrize("packed", [False, True])
def test_idx_that_declares_less_than_it_has_takes_no_memory(tmp_path: Path, packed: bool) -> None:
    """The header declares 128 MiB, and the file has one byte more."""
    path, declared = tmp_path / "train-images-idx3-ubyte", 1 << 27
    header = struct.pack(">HBB3I", 0, 8, 3, declared >> 10, 1 << 5, 1 << 5)
    if packed:
        noise = np.random.default_rng(0).bytes(1 << 23)  # 8 MiB that don't compress, so that 128 MiB are believed
        path.write_bytes(gzip.compress(header + noise, 1) + gzip.compress(bytes(declared - len(noise) + 1)))
    else:
        path.write_bytes(header)
        os.truncate(path, len(header) + declared + 1)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(files.LABELS[0])
    with at_most(1 << 24), pytest.raises(DataError, match="is too long: its header says 134217744 bytes"):
        datasets.load(str(tmp_path))


@pytest.mark.parametrize("kind", [DataError, ModelFileError])
def test_errors_are_cut_and_keep_their_end(kind: type[Exception]) -> None:
    assert str(kind("short")) == "short"
    assert str(kind("x" * 500)) == "x" * 500
    for text in ("x" * 501, "\x1b" * 400, "a" * 100_000):
        said = str(kind(f"set.csv: {text}; do this"))
        assert said.startswith("set.csv: ")
        assert said.endswith("; do this")
        assert len(said) <= 500
        assert said.isprintable()


CSV = {
    "one long line": (ZEROS * 64, "line 1 has more than"),
    "no line at all": (gzip.compress(b"\n" * (1 << 18)), "unpacks to more than"),
    "short lines": (gzip.compress(b"1,1\n" * (1 << 16)), "unpacks to more than"),
    "many names": (gzip.compress("".join(f"1,a{label}\n" for label in range(1 << 12)).encode()), "different labels"),
}


@pytest.mark.parametrize("fault", CSV)
def test_csv_bomb(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "LEAST_LIMIT", 1 << 17)
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(table, "MOST_VALUES", 1 << 10)
    path, (content, complaint) = tmp_path / "set.csv.gz", CSV[fault]
    path.write_bytes(content)
    with at_most(1 << 30), pytest.raises(DataError, match=rf"set\.csv\.gz.* {complaint}"):
        datasets.load(str(path))


def test_a_trace_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as a whole it would take ten times its size, and text outside of slices as much."""
    path = tmp_path / "trace.json"
    event = {"ph": "X", "ts": 5, "dur": 1, "pid": 0, "tid": 0, "cat": "wait"}
    monkeypatch.setattr(timeline, "PIECE", 1 << 14)
    small = ", ".join(["{}"] * 30_000)
    path.write_text(f'{{"other": 1, "traceEvents" : [{small}, {json.dumps(event)} , {small}]}}')
    with at_most(4 * path.stat().st_size):
        assert [each.begin for each in timeline.load(str(path))] == [5]
    monkeypatch.setattr(timeline, "MOST_SLICES", 2)
    path.write_text(json.dumps([event] * 3))
    with pytest.raises(FileError, match="more than 2 events"):
        timeline.load(str(path))


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
    """Also if Ctrl-C ended it."""
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
