"""Files made to break their readers: each raises a named error, and never takes much more memory than the file."""

import gzip
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    with pytest.raises(DataError, match=rf"set\.csv\.gz.* {complaint}"):
        datasets.load(str(path))


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None, float("nan")])
def test_seeds(seed: Any) -> None:
    with pytest.raises(ArgumentError, match="seed must be an integer >= 0, got"):
        NumpyNetwork([4, 3], seed=seed)
