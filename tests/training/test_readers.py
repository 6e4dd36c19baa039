"""Processes that read rows: by grain on one rank, and in a job whose ranks are killed."""

import importlib.util
import multiprocessing
import random
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.conftest import JobRunner, lacking
from trainers.data import Batches, Samples
from trainers.errors import DataError
from trainers.fit.workers import Reading, _joined

ROWS, BATCH = 11, 4


class Plain:
    """Rows without PyTorch, with noise; row `bad` is an error."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[dict[str, np.ndarray], int]:
        if row == self.bad and multiprocessing.parent_process() is not None:
            raise ValueError("no such picture")
        return {"number": np.array([row]), "noise": np.array([random.random(), np.random.rand()])}, row


class Views(NamedTuple):
    """The inputs of a model."""

    left: np.ndarray
    right: dict[str, np.ndarray]


def test_pieces_of_several_workers_are_joined_in_their_structure() -> None:
    left, y = np.arange(6).reshape(3, 2), np.arange(3)
    pieces = [(Views(left[part], {"a": -left[part]}), y[part]) for part in (slice(0, 2), slice(2, 3))]
    x, targets = _joined(pieces)
    assert isinstance(x, Views)
    assert all(map(np.array_equal, (x.left, x.right["a"], targets), (left, -left, y)))


def test_grain_reads_the_same_rows_in_the_same_order() -> None:
    """In the middle of an epoch, over its end, and again from another position; then an error."""
    if importlib.util.find_spec("grain") is None:
        lacking("grain is not installed here")
    found = []
    for workers, bad in ((0, None), (1, 10)):
        samples, reading = Samples(Plain(bad)), Reading(workers)
        reading.check(samples)
        batches = Batches(samples, None, BATCH, 0, 1, shuffle=False, reader=reading.reader(samples))
        try:
            read = [*batches.epoch(0, 1), *batches.epoch(1)] if bad is None else [next(batches.epoch(0, 1))]
            found.append([[*batch.x["number"].ravel(), *batch.x["noise"].ravel(), *batch.y] for batch in read])
            if bad is not None:
                with pytest.raises(DataError, match="can't give row 10: ValueError: no such picture"):
                    list(batches.epoch(0, 2))
        finally:
            batches.close()
    assert [len(each) for each in found] == [5, 1]
    assert found[1] == found[0][:1]
    assert not multiprocessing.active_children()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for deals, extra in ((False, "grain"), (True, "torch")):
        with pytest.raises(ValueError, match=f'install the extra "{extra}"'):
            Reading(2, deals_rows=deals).check(Samples(Plain()))


@pytest.mark.jobs
def test_ranks_go_on_with_their_workers_when_one_is_killed(mpirun: JobRunner, tmp_path: Path) -> None:
    """Rank 1 of 2 is killed in the second epoch: the other one reads its rows too, and its workers end."""
    if importlib.util.find_spec("torch") is None:
        lacking("PyTorch is not installed here")
    job = mpirun(2, ["-m", "tests.training.readers_job", tmp_path], ulfm=True, timeout=180)
    assert job.returncode in (0, 137), job.stderr
    assert job.stdout.count("all rows of 3 epochs on 1 ranks") == 1, job.stdout + job.stderr
    workers = [int(pid) for path in tmp_path.glob("workers-*") for pid in path.read_text().split()]
    assert len(workers) == 3, workers  # of rank 0, of rank 1, and the new ones of rank 0
    until = time.monotonic() + 20
    while left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.2)
