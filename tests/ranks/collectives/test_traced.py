"""Traces of several ranks: of a backend, and of a fit."""

import json
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.call import executor
from allreduce.tracing import clocks
from allreduce.tracing import trace as tracing
from allreduce.tracing.trace import Trace
from tests.backends import ON_CPU
from tests.ranks.counting import Counting
from tests.trace_schema import check_trace
from trainers import MirroredTrainer, NumpyNetwork
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback
from trainers.watching.timeline import Timeline

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank waits for nobody")
SLOW = SIZE - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return rank 0's folder, on all ranks."""
    return WORLD.bcast(tmp_path)


def complete(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, after all ranks have finished with it. Collective."""
    WORLD.Barrier()
    return check_trace(json.loads(path.read_text()), SIZE)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_backend(name: str, flat: allreduce.Topology, folder: Path) -> None:
    path = folder / "trace.json"
    with allreduce.create(name, flat, trace=path) as reduce:
        assert reduce.name == name
        array = reduce.allocate(1000)
        for _ in range(3):
            array[:] = reduce.rank
            reduce(array, "max")
            assert (array == SIZE - 1).all()
        reduce.broadcast(array)
        if reduce.two_phase:
            reduce.reduce_scatter(array)
    found = [event for event in complete(path) if event["cat"] == "reduce"]
    assert {event["pid"] for event in found} == set(range(SIZE))
    mine = [event for event in found if event["pid"] == WORLD.rank]
    assert [event["name"].split(",")[0] for event in mine][:4] == ["all_reduce"] * 3 + ["broadcast"]
    details = mine[0]["args"]
    assert (details["bytes"], details["op"], details["dtype"], details["series"]) == (4000, "max", "float32", name)
    assert details["backend"] in allreduce.NAMES
    if name == "auto" and SIZE > 1:
        assert details["backend"] != "auto"
    if SIZE > 1:
        assert all(event["args"]["last"] in range(SIZE) for event in mine)


@several
def test_waits_are_those_of_who_came_early(flat: allreduce.Topology, folder: Path) -> None:
    with Trace(folder / "trace.json", flat) as trace, allreduce.create("ring", flat, trace=trace) as reduce:
        for _ in range(3):
            with trace.span("compute"):
                time.sleep(0.2 * (reduce.rank == SLOW))
            reduce(np.ones(10), "sum")
    events = complete(folder / "trace.json")
    waits = Counter(event["pid"] for event in events if event["name"] == f"wait for rank {SLOW}")
    assert waits == dict.fromkeys(range(SLOW), 3)
    assert Counter(event["cat"] for event in events)["compute"] == 3 * SIZE


def test_what_is_too_much_is_left_out(flat: allreduce.Topology, folder: Path) -> None:
    with Trace(folder / "trace.json", flat, most=5) as trace:
        for _ in range(9):
            with trace.span("compute"):
                pass
    assert len(complete(folder / "trace.json")) == 5 * SIZE
    assert json.loads((folder / "trace.json").read_text())["otherData"]["left_out"] == [4] * SIZE


def test_a_file_that_can_not_be_written(flat: allreduce.Topology, folder: Path) -> None:
    for path in (folder, folder / "missing" / "trace.json"):
        with pytest.raises(errors.OptionError, match="can't be written") as raised:
            allreduce.create("ring", flat, trace=path)
        assert len(set(WORLD.allgather(str(raised.value)))) == 1
    trace = Trace(folder / "trace.json", flat)
    if WORLD.rank == 0:
        (folder / "trace.json").mkdir()  # meanwhile
    WORLD.Barrier()
    with pytest.raises(errors.OptionError, match="can't be written"):
        trace.close()
    assert [each.name for each in folder.iterdir()] == ["trace.json"]


def test_what_is_no_regular_file(flat: allreduce.Topology, folder: Path) -> None:
    """A device is written to, and stays a device; a link stays a link."""
    with Trace("/dev/null", flat):
        pass
    assert not Path("/dev/null").is_file()
    (folder / "link.json").symlink_to(folder / "trace.json") if WORLD.rank == 0 else None
    WORLD.Barrier()
    with Trace(folder / "link.json", flat) as trace, trace.span("compute"):
        pass
    assert complete(folder / "trace.json")
    assert (folder / "link.json").is_symlink()
    with pytest.raises(errors.OptionError, match="No space left"), Trace("/dev/full", flat) as trace:
        pass


def test_clocks_that_differ(flat: allreduce.Topology, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's clock is 1000 s ahead of the previous rank's; the trace brings them to one time."""
    for module in (clocks, tracing):
        monkeypatch.setattr(module, "now", lambda: time.perf_counter_ns() + WORLD.rank * 10**12)
    monkeypatch.setattr(executor, "perf_counter", lambda: time.perf_counter() + WORLD.rank * 1000)
    with allreduce.create("ring", flat, trace=folder / "trace.json") as reduce:
        for _ in range(3):
            reduce(np.ones(10), "sum")
    events = complete(folder / "trace.json")
    assert max(event["ts"] + event["dur"] for event in events) < 900e6


def test_clocks_are_compared_along_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank asks more than log2 of the ranks; offsets and errors add up on the way to rank 0."""
    counting: Any = Counting(WORLD)
    monkeypatch.setattr(clocks, "now", lambda: time.perf_counter_ns() + WORLD.rank * 10**12)
    found = clocks.compare(counting)
    assert counting.calls["Send"] <= clocks.ROUNDS * (SIZE - 1).bit_length() + 1
    assert len(found) == (0 if WORLD.rank else SIZE)
    for rank, offset in enumerate(found):
        assert abs(offset.ahead - rank * 10**12) <= offset.error
        assert 0 <= time.perf_counter_ns() - offset.here < 60 * 10**9


@several
def test_on_some_ranks_only(flat: allreduce.Topology, folder: Path) -> None:
    with pytest.raises(errors.DisagreementError, match=r"trace=\.\.\."):
        allreduce.create("ring", flat, trace=folder / "trace.json" if WORLD.rank == 0 else None)
    callbacks = [Timeline(folder / "fit.json")] if WORLD.rank == 0 else []
    # the error comes before the training and names the callback
    with trainer_of(flat) as trainer, pytest.raises(errors.DisagreementError, match="communicate: Terminating, Time"):
        trainer.fit(*DATA, epochs=1, batch_size=20, progress=False, callbacks=callbacks)


def trainer_of(topology: allreduce.Topology, update: str = "replicated") -> MirroredTrainer:
    return MirroredTrainer(NumpyNetwork([4, 8, 3], seed=1), "shared", topology, update=update)


DATA = np.random.default_rng(0).normal(size=(60, 4)).astype("float32"), np.arange(60) % 3


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_fit(update: str, flat: allreduce.Topology, folder: Path) -> None:
    path = folder / "fit.json"
    with trainer_of(flat, update) as trainer:
        plain = trainer.allreduce
        trainer.fit(*DATA, epochs=2, batch_size=20, progress=False, callbacks=[Timeline(path)])
        assert trainer.allreduce is plain
        traced = trainer.parameters_sha256()
        assert len(set(traced)) == 1
    with trainer_of(flat, update) as trainer:
        trainer.fit(*DATA, epochs=2, batch_size=20, progress=False)
        assert trainer.parameters_sha256() == traced
    events = complete(path)
    counts = Counter(event["cat"] for event in events if event["pid"] == 0)
    assert (counts["data"], counts["compute"], counts["update"]) == (6, 6, 6)
    reductions = Counter(
        event["name"].split(",")[0] for event in events if (event["cat"], event["pid"]) == ("reduce", 0)
    )
    assert reductions == {"reduce_scatter" if update == "sharded" and SIZE > 1 else "all_reduce": 6}
    assert counts["communication"] == (6 if update == "sharded" and SIZE > 1 else 0)
    assert counts["epoch"] == 4  # what is measured of an epoch, and what callbacks make of it
    order = [event["cat"] for event in events if event["pid"] == 0 and event["cat"] not in ("wait", "agree")]
    assert [kind for kind, _ in groupby(order)][:4] == ["data", "compute", "reduce", "update"]


class Fails(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ArgumentError("on purpose")


def test_a_fit_that_fails_leaves_nothing_behind(flat: allreduce.Topology, folder: Path) -> None:
    with trainer_of(flat) as trainer:
        plain = trainer.allreduce
        callbacks = [Timeline(folder / "fit.json"), *([Fails()] if WORLD.rank == 0 else [])]
        with pytest.raises(ArgumentError, match="on purpose"):
            trainer.fit(*DATA, epochs=2, batch_size=20, progress=False, callbacks=callbacks)
        assert trainer.allreduce is plain
        assert trainer.trace is None
        assert list(folder.iterdir()) == []
        trainer.fit(*DATA, epochs=1, batch_size=20, progress=False)
