"""Versions in folders: which are loaded, and which of them answers."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.apps.test_models import export_two_files
from trainers.apps.serving.batches import Batch, Request, Waiting
from trainers.apps.serving.models import NetworkModel
from trainers.apps.serving.versions import (
    AVAILABLE,
    END,
    LOADING,
    UNLOADING,
    Version,
    Versions,
    Watcher,
    checked_canary,
    load_alike,
    scan,
)
from trainers.apps.serving.web import RefusedError
from trainers.errors import ArgumentError, ModelFileError
from trainers.replicas.numpy.network import NumpyNetwork


class World:
    """A folder of versions, and a watcher whose `look` the test calls."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.versions = folder, Versions("m", {7: 0.5})
        self.loaded: list[int] = []
        self.gone: list[int] = []
        self.watcher = Watcher(str(folder), self.versions, keep, 1, self._serve)

    def _serve(self) -> None:
        """Do what the server does."""
        for version in self.versions.listed():
            if version.state == LOADING:
                version.state = AVAILABLE
                self.loaded.append(version.number)
            elif version.state == UNLOADING:
                self.gone.append(version.number)
                self.versions.drop(version.number)

    def write(self, number: int, size: int = 4, part: float = 1.0) -> None:
        own = self.folder / f"{number:04}"
        own.mkdir(exist_ok=True)
        NumpyNetwork([size, 3], seed=number).save(str(self.folder / "m.npz"))
        content = (self.folder / "m.npz").read_bytes()
        (own / "m.npz").write_bytes(content[: int(part * len(content))])

    def look(self, times: int = 2) -> dict[int, str]:
        for _ in range(times):
            self.watcher.look()
        return {version.number: version.state for version in self.versions.listed()}


def test_a_new_version_is_loaded_when_it_is_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(1)
    assert world.look(1) == {}  # seen once
    assert world.look(1) == {1: AVAILABLE}
    world.write(2, part=0.5)
    assert world.look() == {2: END, 1: AVAILABLE}
    assert "damaged" in world.versions.listed()[0].error
    world.write(2)
    assert world.look(3) == {2: AVAILABLE, 1: AVAILABLE}
    world.write(3)
    assert world.look() == {3: AVAILABLE, 2: AVAILABLE, 1: AVAILABLE}
    assert world.look() == {3: AVAILABLE, 2: AVAILABLE}
    shutil.rmtree(tmp_path / "0003")
    assert world.look(3) == {2: AVAILABLE, 1: AVAILABLE}
    assert world.gone == [2, 1, 3]  # the half one when its file changes


def test_a_version_is_loaded_again_when_its_second_file_is_whole(tmp_path: Path) -> None:
    """As an .onnx file above 2 GiB has one, with its constants."""
    (tmp_path / "0001").mkdir()
    second = export_two_files(tmp_path / "0001" / "m.onnx", NumpyNetwork([400, 3]))
    content, world = second.read_bytes(), World(tmp_path)
    second.write_bytes(content[:100])
    assert world.look() == {1: END}
    second.write_bytes(content)
    assert world.look(3) == {1: AVAILABLE}


def test_what_is_no_version(tmp_path: Path) -> None:
    for name in ("x", "0001", "0002", "1000000000", ".3"):
        (tmp_path / name).mkdir()
    (tmp_path / "0001" / ".m.npz").write_text("a temporary file")
    (tmp_path / "0002" / "a.npz").write_text("")
    (tmp_path / "0002" / "b.npz").write_text("two files")
    (tmp_path / "0004").write_text("no folder")
    assert scan(str(tmp_path)) == {}
    (tmp_path / "0001" / "m.npz").write_text("")
    assert set(found := scan(str(tmp_path))) == {1}
    (tmp_path / "0001" / "notes.txt").write_text("its version goes on to answer")
    assert scan(str(tmp_path)) == found


def test_a_state_changes_only_from_those_that_are_named() -> None:
    versions, version = Versions("m"), Version(1, "")
    assert versions.move(version, [LOADING], AVAILABLE)
    assert versions.move(version, [LOADING, AVAILABLE], UNLOADING)
    assert not versions.move(version, [LOADING], END, "rank 1: damaged")
    assert (version.state, version.error) == (UNLOADING, "")
    assert versions.move(other := Version(2, ""), [LOADING], END, "rank 1: damaged")
    assert (other.state, other.error) == (END, "rank 1: damaged")


def test_a_canary_gets_its_share() -> None:
    versions = Versions("m", checked_canary(["2=0.1"]), draws=random.Random(1))
    assert versions.choose(None) is None
    versions.add(Version(1, "", AVAILABLE))
    versions.add(Version(2, "", AVAILABLE))
    versions.add(Version(3, "", LOADING))
    chosen = [version.number for _ in range(1000) if (version := versions.choose(None))]
    assert 50 < chosen.count(2) < 150
    assert chosen.count(1) == 1000 - chosen.count(2)
    assert versions.choose(3) is None
    assert (versions.choose(2) or versions.known[1]).number == 2
    versions.drop(1)
    assert (versions.choose(None) or versions.known[3]).number == 2


def test_what_another_rank_refuses_is_not_loaded_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(1)
    world.look()
    world.versions.known[1].state = END
    assert world.look(3) == {1: END}
    assert world.loaded == [1]
    world.write(1, size=6)
    assert world.look(3) == {1: AVAILABLE}


def test_unknown_outputs_are_not_compared(tmp_path: Path) -> None:
    path, other = str(tmp_path / "m.npz"), NetworkModel(NumpyNetwork([4, 2]))
    NumpyNetwork([4, 3]).save(path)
    with pytest.raises(ModelFileError, match=r"3 outputs, .* 2 outputs"):
        load_alike(path, [other])
    other.outputs = None
    assert load_alike(path, [other]).outputs == 3
    with pytest.raises(ModelFileError, match=r"takes rows of 4 float32 .* takes rows of 5 float32"):
        load_alike(path, [NetworkModel(NumpyNetwork([5, 3]))])


@pytest.mark.parametrize("given", ["2", "2=x", "x=0.1", "2=0", "2=1", "2=nan"])
def test_wrong_canaries(given: str) -> None:
    with pytest.raises(ArgumentError, match="--canary"):
        checked_canary([given])


def request(rows: int, version: int = 1, features: int = 4) -> Request:
    return Request(Version(version, ""), np.zeros((rows, features)))


def taken(batch: Batch | None) -> list[Request]:
    """Return the requests of a batch, which has some; [] if there is none."""
    assert batch is None or batch.requests
    return [] if batch is None else batch.requests


def test_batches_are_full_or_old() -> None:
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: None)
    requests = [request(3), request(3), request(3), request(1, 2)]
    for each in requests[:2]:
        waiting.put(each)
    now = requests[0].since
    assert taken(waiting.take(now + 1, lambda _: True)) == []
    for each in requests[2:]:
        waiting.put(each)
    assert taken(waiting.take(now + 1, lambda _: True)) == requests[:2]
    assert waiting.rows == 4
    assert taken(waiting.take(now + 10, lambda request: request.version.number == 3)) == []
    assert taken(waiting.take(now + 10, lambda request: request.version.number == 2)) == requests[3:]
    assert waiting.has(1)
    assert not waiting.has(2)
    assert taken(waiting.take(now, lambda _: True, at_once=True)) == requests[2:3]
    waiting.again(requests[:2])
    assert taken(waiting.take(now, lambda _: True)) == requests[:1]


def test_a_busy_rank_gets_full_batches_of_new_requests_alone() -> None:
    woken: list[int] = []
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: woken.append(waiting.rows))
    requests = [request(3), request(3), request(3)]
    for each in requests[:2]:
        waiting.put(each)
    assert woken == [3]  # at the first request: it has a deadline
    assert taken(waiting.take_full(lambda _: True)) == []
    waiting.put(requests[2])
    assert woken == [3, 9]
    assert taken(waiting.take_full(lambda _: False)) == []
    again = request(1)
    waiting.again([again])
    assert taken(waiting.take_full(lambda _: True)) == []  # or no rank would ever be without work, and take it
    assert taken(waiting.take(0, lambda _: True)) == [again]
    assert taken(waiting.take_full(lambda _: True)) == requests[:2]


def test_requests_without_a_client_are_not_computed() -> None:
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: None)
    requests = [request(1) for _ in range(5)]
    for each in requests[:4]:
        waiting.put(each)
    waiting.again(requests[4:])
    for each in (requests[0], requests[2], requests[4]):
        each.future.cancel()
    assert taken(waiting.take(requests[0].since + 10, lambda _: True)) == [requests[1], requests[3]]
    assert waiting.rows == 0
    waiting.put(each := request(1))
    each.future.cancel()
    assert taken(waiting.take(each.since + 10, lambda _: True)) == []
    assert waiting.rows == 0


def test_overload() -> None:
    waiting = Waiting(most_rows=4, max_batch=8, seconds=5, wake=lambda: None)
    waiting.put(request(9))  # nothing else waits
    with pytest.raises(RefusedError, match="9 rows wait already") as caught:
        waiting.put(request(1))
    assert (caught.value.code, caught.value.headers) == (429, {"Retry-After": "1"})
