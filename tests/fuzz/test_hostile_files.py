"""Files made to break their readers: each raises a named error, and never takes much more memory than the file."""

import gzip
import json
import os
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz import files
from trainers import datasets
from trainers.datasets import rows, table
from trainers.errors import ArgumentError, DataError, ModelFileError
from trainers.files import model_file
from trainers.replicas.numpy.network import NumpyNetwork

ENOUGH = 1 << 30  # no reader may hold so many bytes for any of these files
ZEROS = gzip.compress(bytes(1 << 26))  # 64 MiB of zeros; members of a gzip file may follow each other
LABELS = struct.pack(">HBBI", 0, 8, 1, 7) + bytes([0, 1, 2, 0, 1, 2, 0])


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ENOUGH


def array(shape: str, nbytes: int = 0, descr: str = "'<f4'") -> bytes:
    """Return the bytes of a .npy file whose header describes another array than its zeros."""
    return files.header(np.zeros(nbytes, np.uint8), descr, shape)


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    path.write_bytes(files.archive([(f"{name}.npy", each) for name, each in members.items()], method, None, b""))


def lying(path: Path, claim: int) -> None:
    """Write a .npz whose directory and .npy header both claim more bytes than the stored member has."""
    content = data(x=array(f"({claim // 8}, 2)"))
    archive(path, content)
    with zipfile.ZipFile(path, "a") as file:
        file.getinfo("x.npy").file_size = len(content["x"]) + claim
        file.writestr("z.npy", content["y"])  # which writes the directory anew


def twice(path: Path, name: str) -> None:
    archive(path, data())
    with zipfile.ZipFile(path, "a") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile notices it too
        for _ in range(2):
            file.writestr(f"{name}.npy", data()["x"])


def data(**replaced: bytes) -> dict[str, bytes]:
    """Return the members of a valid data set, some of them replaced."""
    return {"x": array("(4, 2)", 32), "y": array("(4,)", 32, "'<i8'"), **replaced}


BOMBS: dict[str, Callable[[Path], object]] = {
    "a header of terabytes": lambda path: archive(path, data(x=array("(1099511627776, 2)"))),
    "deflated": lambda path: archive(path, data(x=array("(300, 1048576)", 300 << 20, "'|u1'")), zipfile.ZIP_DEFLATED),
    "a stored member that lies": lambda path: lying(path, 1 << 24),
    "a long name twice": lambda path: twice(path, "x" * 60_000),
    "lzma, which may take gigabytes to unpack": lambda path: archive(path, data(), zipfile.ZIP_LZMA),
    "a zip in a bomb": lambda path: path.write_bytes(ZEROS * 64),
}


@pytest.mark.parametrize("fault", BOMBS)
def test_npz(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "set.npz"
    archive(path, data())
    assert datasets.load(str(path)).features == 2
    BOMBS[fault](path)
    with pytest.raises(DataError, match=r"set\.npz") as caught:
        datasets.load(str(path))
    with pytest.raises(ModelFileError, match=r"set\.npz") as refused:
        NumpyNetwork.load(str(path))
    assert max(len(str(caught.value)), len(str(refused.value))) <= 500


IDX = {
    "100 dimensions": (struct.pack(">HBB100I", 0, 8, 100, *[1] * 100) + b"x", "has magic number 0x00000864"),
    "a bomb": (ZEROS * 64, "has magic number 0x00000000"),
    "a bomb behind a header": (gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 7, 3, 2)) + ZEROS * 64, "is too long"),
    "a bomb that its header owns to": (
        gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 1 << 12, 1 << 10, 1 << 10)) + ZEROS * 64,
        "unpacks to more than",
    ),
}


@pytest.mark.parametrize("fault", IDX)
def test_idx(tmp_path: Path, fault: str) -> None:
    content, complaint = IDX[fault]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{complaint}"):
        datasets.load(str(tmp_path))


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
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(DataError, match="is too long: its header says 134217744 bytes"):
        datasets.load(str(tmp_path))
    assert tracemalloc.get_traced_memory()[1] - before < 1 << 24


def test_errors_are_cut_and_keep_their_end() -> None:
    assert str(DataError("short")) == "short"
    assert str(DataError("x" * 500)) == "x" * 500
    for text in ("x" * 501, "\x1b" * 400, "a" * 100_000):
        said = str(DataError(f"set.csv: {text}; do this"))
        assert said.startswith("set.csv: ")
        assert said.endswith("; do this")
        assert len(said) <= 500
        assert said.isprintable()


CSV = {
    "one long line": (ZEROS * 64, "has a line of more than"),
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
    with pytest.raises(DataError, match=rf"set\.csv\.gz.* {complaint}"):
        datasets.load(str(path))


# Models


def saved(path: Path, config: dict[str, Any] | None = None, **arrays: Any) -> str:
    """Write a model file of NumpyNetwork([4, 3]) with adam, some of its entries replaced."""
    network = NumpyNetwork([4, 3])
    header = {"format": 1, "kind": "NumpyNetwork", "config": {**network.config, **(config or {})}}
    np.savez(path, model=np.array(json.dumps(header)), **{**network.state(), **arrays})  # type: ignore[arg-type]
    return str(path)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "huge sizes": ({"sizes": [10**9, 10**9]}, {}, "describes no network"),
    "sizes beyond int": ({"sizes": [10**30, 3]}, {}, "describes no network"),
    "a huge rate": ({"optimizer_options": {"lr": 10**400}}, {}, "describes no network"),
    "an unhashable optimizer": ({"optimizer": {}}, {}, "describes no network"),
    "text": ({}, {"parameters": np.array(["a"] * 15)}, "parameters is <U1, not numbers"),
    "dates": ({}, {"input.shift": np.zeros(4, "M8[s]")}, "not numbers"),
    "complex": ({}, {"parameters": np.zeros(15, complex)}, "not the state of a NumpyNetwork"),
    "0-d moment": ({}, {"optimizer.first_moment": np.float32(0)}, "is another one: optimizer.first_moment"),
    "NaN parameters": ({}, {"parameters": np.full(15, np.nan, np.float32)}, "parameters has elements"),
    "infinite moment": ({}, {"optimizer.second_moment": np.full(15, np.inf, np.float32)}, "has diverged"),
    "steps": ({}, {"optimizer.steps": np.array(-1)}, "-1 steps"),
    "wide shift": ({}, {"input.shift": np.zeros((1, 4), np.float32)}, "is another one: input.shift"),
    "a header of numbers": ({}, {"model": np.zeros(100000)}, "is not a model file"),
    "a deep header": ({}, {"model": np.array("[" * 100000)}, "is not a model file"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fault", MODELS)
def test_models(tmp_path: Path, fault: str) -> None:
    config, arrays, complaint = MODELS[fault]
    path = tmp_path / "model.npz"
    saved(path)
    assert NumpyNetwork.load(str(path)).sizes == [4, 3]
    header = arrays.pop("model", None)
    saved(path, config, **arrays)
    if header is not None:
        arrays["model"] = header
        np.savez(path, **arrays)
    with pytest.raises(ModelFileError, match=complaint):
        NumpyNetwork.load(str(path))
    if not config:
        with pytest.raises(ModelFileError):
            NumpyNetwork([4, 3]).restore(str(path))


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None, float("nan")])
def test_seeds(seed: Any) -> None:
    with pytest.raises(ArgumentError, match="seed must be an integer >= 0, got"):
        NumpyNetwork([4, 3], seed=seed)
