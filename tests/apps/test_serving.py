"""The server as a job: ranks are killed and versions replaced under load; and its web side in this process."""

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce.elastic.exchange import Exchange, Message
from allreduce.topology import Topology
from benchmarks import serving
from tests import launch
from tests.apps.server import PREDICT, Target, request
from tests.conftest import in_one_job
from trainers.apps.ensemble import model as ensemble_model
from trainers.apps.ensemble.model import SavedEnsemble, SavedMember
from trainers.apps.ensemble.voting import Voting
from trainers.apps.serving import dealing, web
from trainers.apps.serving.answering import NUMBER
from trainers.apps.serving.command import COMMAND
from trainers.apps.serving.dealing import Peer, Prepared, Server
from trainers.apps.serving.versions import AVAILABLE, LOADING, UNLOADING, Version, Versions, load_whole
from trainers.apps.serving.web import CLIENT_GONE, MOST_HEAD, RefusedError, listen
from trainers.errors import ArgumentError
from trainers.recovery.terminating import Terminating
from trainers.replica import saved_config
from trainers.replicas.numpy.network import NumpyNetwork

ANSWER_SECONDS = "3"  # with less, a busy machine makes ranks late that are not stopped, and requests 504
LOAD_SECONDS = 180.0  # on a busy machine


class Job:
    """A server that runs. code: its exit code, when it has ended."""

    def __init__(self, started: serving.Job) -> None:
        self.process, self.port, self.text = started.process, started.port, started.text
        self.code: int | None = None

    def get(self, path: str) -> str:
        """Return the body of a GET."""
        with contextlib.closing(_connection(self)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def wait_for(self, states: dict[int, str]) -> None:
        """Wait until the versions have these states."""
        deadline, found = time.monotonic() + LOAD_SECONDS, dict[int, str]()
        while found != states:
            assert time.monotonic() < deadline, f"the server has the versions {found}, and {states} are expected"
            time.sleep(0.05)
            listed = json.loads(self.get(serving.PATH))["model_version_status"]
            found = {int(each["version"]): each["state"] for each in listed}

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank."""
        processes = {number: Path(f"/proc/{number}/environ") for number in launch.marked(os.environ[launch.MARK])}
        found = {
            number: re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)", each.read_bytes()) for number, each in processes.items()
        }
        return {int(rank[1]): number for number, rank in found.items() if rank}

    def end(self) -> None:
        """End by SIGTERM to a rank: mpirun itself would kill the ranks a moment later."""
        if self.process.poll() is None:
            os.kill(self.ranks()[0], signal.SIGTERM)
        self.code = self.process.wait(serving.STOP_SECONDS)


@contextlib.contextmanager
def server(ranks: int, options: Sequence[str], folder: Path, *launcher: str) -> Iterator[Job]:
    """Context manager: start a server, yield it when it answers, end it. launcher: more options of mpirun."""
    with serving.server(ranks, options, folder, *launcher) as started:
        yield (job := Job(started))
        job.end()


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launch.variables(uuid.uuid4().hex).items():
        monkeypatch.setenv(name, value)


@pytest.mark.jobs
@pytest.mark.usefixtures("_environment")
def test_a_rank_is_killed_and_a_version_replaced(tmp_path: Path) -> None:
    sizes, requests, reached, replaced = [2048, 16, 4], 400, [0], threading.Event()
    bodies, inputs = serving.requests_of(sizes, 2)  # more than MPI sends at once
    networks, models = [NumpyNetwork(sizes, seed=seed) for seed in (1, 2)], tmp_path / "models"

    def write(number: int) -> None:
        networks[number - 1].save(str(tmp_path / "model.npz"))
        (models / f"{number:04}").mkdir(parents=True)
        (tmp_path / "model.npz").rename(models / f"{number:04}" / "model.npz")

    def trouble(job: Job) -> None:
        while reached[0] < requests // 4:
            time.sleep(0.001)
        os.kill(job.ranks()[2], signal.SIGKILL)
        write(2)
        job.wait_for({2: "AVAILABLE", 1: "AVAILABLE"})
        shutil.rmtree(models / "0001")
        job.wait_for({2: "AVAILABLE"})
        replaced.set()

    def ends(number: int) -> bool:
        reached[0] = max(reached[0], number)
        return number >= requests

    write(1)
    given = ["--model", str(models), "--poll-seconds", "0.1", "--max-batch", "8"]
    with server(3, given, tmp_path, "--with-ft", "ulfm") as job:
        load, thread = serving.Load(job.port, bodies, 4), threading.Thread(target=trouble, args=(job,))
        thread.start()
        elapsed = load.run(ends)
        thread.join()
        metrics = job.get("/metrics").splitlines()
    result = serving.result_of(load, [[network.predict(each) for network in networks] for each in inputs], elapsed)
    assert serving.is_right(result), result
    assert replaced.is_set()
    assert job.code == 0
    assert {"allreduce_serving_ranks 2.0", "allreduce_serving_newest_version 2.0"} <= {*metrics}


@pytest.mark.jobs
@pytest.mark.usefixtures("_environment")
def test_a_canary_a_file_that_is_replaced_and_a_stopped_rank(tmp_path: Path) -> None:
    folder, x = tmp_path / "models", np.ones((1, 4), np.float32)
    networks = [NumpyNetwork([4, 3], seed=number) for number in (1, 2, 5)]
    first, canary, replacing = (network.predict(x) for network in networks)
    for number in (1, 2):
        (folder / f"{number:04}").mkdir(parents=True)
        networks[number - 1].save(str(folder / f"{number:04}" / "m.npz"))
    given = ["--model", os.path.relpath(folder), "--canary", "0002=0.5"]
    given += ["--poll-seconds", "0.05", "--answer-seconds", ANSWER_SECONDS]
    with server(2, given, tmp_path) as job, contextlib.closing(_connection(job)) as connection:
        found = [_ask(connection, x) for _ in range(40)]
        assert 0 < sum(np.allclose(each, canary) for each in found) < 40
        assert all(np.allclose(each, canary) or np.allclose(each, first) for each in found)
        shutil.rmtree(folder / "0002")
        networks[2].save(str(folder / "0001" / "m.npz"))  # no rank answers by the first one again
        while not np.allclose(_ask(connection, x), replacing, atol=1e-5):
            time.sleep(0.02)
        assert all(np.allclose(_ask(connection, x), replacing, atol=1e-5) for _ in range(20))
        _check_a_stopped_rank(job, connection, x)
    assert job.code == 0, job.text()
    assert "answered" in job.text()


@pytest.mark.jobs
@pytest.mark.usefixtures("_environment")
def test_sigterm_answers_what_has_come(tmp_path: Path) -> None:
    """Also requests that wait for others to fill their batch, and one whose body is not whole yet."""
    NumpyNetwork([4, 3]).save(str(tmp_path / "m.npz"))
    given = ["--model", str(tmp_path / "m.npz"), "--max-wait-ms", "60000", "--max-queue", "2", "--answer-seconds", "60"]
    head = f"POST {serving.PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: 29\r\n\r\n".encode()
    raw = head + b'{"instances": [[1, 2, 3, 4]]}'
    with server(1, given, tmp_path) as job, contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(("127.0.0.1", job.port), timeout=60)) for _ in range(4)
        ]
        clients[0].sendall(raw[:-9])
        for client in clients[1:3]:
            client.sendall(raw)
        while "allreduce_serving_waiting_rows 2.0" not in job.get("/metrics"):
            time.sleep(0.02)
        clients[3].sendall(raw)
        assert b"retry-after: 1\r\n" in (refused := clients[3].recv(4096))
        assert refused.startswith(b"HTTP/1.1 429 ")
        os.kill(job.ranks()[0], signal.SIGTERM)
        while "the last requests are answered" not in job.text():
            time.sleep(0.02)
        for client in (clients[1], clients[2]):
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        clients[0].sendall(raw[-9:])
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200 ")
        job.process.wait(60)
    assert job.code == 0, job.text()


@contextlib.contextmanager
def _server(path: Path, *given: str) -> Iterator[tuple[Server, Version]]:
    """Context manager: a server of one rank, whose turns the test makes, and the version that it serves."""
    options = COMMAND.parse(["--model", str(path), "--max-wait-ms", "0", *given], True, "serve")
    versions, topology = Versions("m"), Topology()
    versions.add(version := Version(1, str(path), AVAILABLE, load_whole(str(path))))
    with contextlib.closing(listen("127.0.0.1", 0)) as listener, Terminating() as sigterm:
        exchange = Exchange(topology)
        yield Server(options, exchange, Prepared(versions, listener, {}), sigterm), version
        exchange.close()
    topology.close()


def test_votes_that_can_not_be_combined_do_not_end_the_server(tmp_path: Path) -> None:
    path = tmp_path / "e.npz"
    networks = [NumpyNetwork([4, 2 + number]) for number in range(2)]
    saved = [SavedMember(number, 0, "NumpyNetwork", saved_config(each)) for number, each in enumerate(networks)]
    states = {number: each.state() for number, each in enumerate(networks)}
    ensemble_model.write(str(path), SavedEnsemble(saved, {}, Voting()), states)
    with _server(path) as (served, version):
        future = served.submit(version, np.zeros((1, 4), np.float32))
        while not future.done():
            served._turn()
    with pytest.raises(RefusedError, match="member 1 can't vote") as caught:
        future.result()
    assert caught.value.code == 500


class OtherRank:
    """An Exchange with one other rank. sent: the headers of its work. given: its answers."""

    lost: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.given: list[Message] = []

    def send(self, rank: int, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        self.sent.append(header)

    def poll(self) -> list[Message]:
        found, self.given = self.given, []
        return found


def test_a_rank_that_loads_for_long_is_late_and_then_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NumpyNetwork([4, 3]).save(str(tmp_path / "m.npz"))
    monkeypatch.setattr(dealing, "LOAD_SECONDS", 0.0)
    with _server(tmp_path / "m.npz") as (server, version):
        server._exchange, server._peers[1] = (other := OtherRank()), (peer := Peer(1, {}))  # type: ignore[assignment]

        def turn() -> None:
            server._awake.set()
            server._turn()

        turn()
        turn()
        assert peer.late
        other.given = [Message(1, {NUMBER: 1}, [])]
        turn()
        assert not peer.late
        assert peer.holds(version)
        turn()
        assert [dealing.LOAD in header for header in other.sent] == [True]


def test_a_version_that_is_gone_meanwhile_does_not_answer(tmp_path: Path) -> None:
    class Meanwhile(Peer):
        """The thread of the watcher runs while the server asks this rank."""

        def holds(self, version: Version) -> bool:
            version.state = UNLOADING
            return True

    NumpyNetwork([4, 3]).save(str(tmp_path / "m.npz"))
    with _server(tmp_path / "m.npz") as (server, version):
        server._exchange = OtherRank()  # type: ignore[assignment]
        server._peers[1] = Meanwhile(1, {1: version.stamp})
        version.state = LOADING
        server._awake.set()
        server._turn()
        assert version.state == UNLOADING
        assert not server._versions.listed()


def _check_a_stopped_rank(job: Job, connection: http.client.HTTPConnection, x: np.ndarray) -> None:
    """Its batch, of more than MPI sends at once, is dealt once more; it gets no other until it has answered."""
    rows = np.repeat(x, 1000, axis=0)
    stopped, before = job.ranks()[1], job.text().count("has not answered")
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert [len(_ask(connection, rows)) for _ in range(5)] == [1000] * 5
        while "has not answered" not in job.text():
            time.sleep(0.02)
        assert job.text().count("has not answered") <= before + 1
    finally:
        os.kill(stopped, signal.SIGCONT)


def _connection(job: Job) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", job.port, timeout=30)


def _ask(connection: http.client.HTTPConnection, rows: np.ndarray) -> np.ndarray:
    """Return the outputs for rows; NaN if the server refuses these."""
    connection.request("POST", serving.PREDICT, json.dumps({"instances": rows.tolist()}))
    return np.array(json.loads(connection.getresponse().read()).get("predictions", np.nan))


@pytest.mark.jobs
def test_errors_at_the_start(tmp_path: Path) -> None:
    """The same on all ranks, in one line, with exit code 2."""
    NumpyNetwork([4, 3]).save(str(tmp_path / "m.npz"))
    whole = (tmp_path / "m.npz").read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "0001").mkdir(parents=True)
    (tmp_path / "half" / "0001" / "m.npz").write_bytes(whole[: len(whole) // 2])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--model", "absent.npz"], "No such file"),
            (["--model", "m.txt"], "ends in .npz or .onnx"),
            (["--model", "empty"], "has no version"),
            (["--model", "half"], "is not a model file, or it is damaged"),
            (["--model", "m.npz", "--canary", "0002=0.1"], "is a file"),
            (["--model", "m.npz", "--name", "a/b"], "can't be in a path"),
            (["--model", "m.npz", "--port", port], "Address already in use"),
            (["--model", "m.npz", "--port", "70000"], "must be an integer from 0 to 65535, got '70000'"),
        ]
        lines = [("trainers.cli.main", ["serve", *given], str(tmp_path)) for given, _ in cases]
        found = in_one_job(2, lines, tmp_path)
    for (given, text), ranks in zip(cases, found, strict=True):
        assert [rank["code"] for rank in ranks] == [2, 2], (given, ranks)
        assert text in ranks[0]["stderr"], (given, ranks)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    web.check_packages()
    monkeypatch.setattr(web, "PACKAGES", ("starlette", "absent_package"))
    with pytest.raises(ArgumentError, match=r'absent_package.*pip install "\.\[serve\]"'):
        web.check_packages()


def test_answers_leave_at_once() -> None:
    """asyncio sets TCP_NODELAY for sockets of this protocol alone; without it an answer waits for 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "BODY_SECONDS", 0.2)
    target = Target(bytes(1 << 25))  # more than the buffers of the system hold
    try:
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            connection.sendall(request("/metrics", b"", "GET"))
            with pytest.raises(ConnectionError):
                _send_for_seconds(connection, 20)
    finally:
        target.close()


def _send_for_seconds(connection: socket.socket, seconds: int) -> None:
    for _ in range(20 * seconds):
        connection.sendall(b"x")
        time.sleep(0.05)


# The web side: answers of GETs, overload, and requests of unusual form


RIGHT = b'{"instances": [[1, 2, 3, 4]]}'
CHUNKED = b"Transfer-Encoding: chunked"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    found = Target()
    yield found
    found.close()


def answer(target: Target, raw: bytes, code: int) -> dict:
    found = target.ask(raw)
    assert found is not None
    assert found[0] == code, found
    return json.loads(found[1])


def get(target: Target, path: str, code: int = 200) -> dict:
    return answer(target, request(path, b"", "GET"), code)


def test_gets_are_those_of_tensorflow_serving(target: Target) -> None:
    status = {
        "model_version_status": [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    assert get(target, "/v1/models/m") == status
    assert get(target, "/v1/models/m/versions/1") == status
    assert "versions/2" not in str(error := get(target, "/v1/models/m/versions/2", 404))
    assert set(error) == {"error"}
    assert target.ask(request("/metrics", b"", "GET")) == (200, b"x 1\n")
    assert target.ask(request("/v1/models/m", b"", "HEAD")) == (200, b"")


def test_the_health_of_the_server(target: Target) -> None:
    assert get(target, "/health") == {"status": "ok"}
    target.versions.known[1].state = UNLOADING
    try:
        assert "no version" in get(target, "/health", 503)["status"]
    finally:
        target.versions.known[1].state = AVAILABLE


def test_a_head_has_at_most_16_kib(target: Target) -> None:
    """uvicorn refuses a longer one when it comes in pieces."""
    head = request(PREDICT, RIGHT, "POST", b"X-Long: " + b"x" * (10 * MOST_HEAD))
    with socket.create_connection(("127.0.0.1", target.port)) as connection:
        with suppress(ConnectionError):
            for start in range(0, len(head), MOST_HEAD):
                connection.sendall(head[start : start + MOST_HEAD])
                time.sleep(0.05)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_requests_of_unusual_form(target: Target) -> None:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (RIGHT[:5], RIGHT[5:])) + b"0\r\n\r\n"
    old = b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (PREDICT.encode(), len(RIGHT), RIGHT)
    for raw in (request(PREDICT, RIGHT), old, request(PREDICT, pieces, "POST", CHUNKED)):
        assert len(answer(target, raw, 200)["predictions"]) == 1
    for raw, code in [
        (request(PREDICT, gzip.compress(RIGHT), "POST", b"Content-Encoding: gzip"), 415),
        (request(PREDICT, RIGHT, "POST", b"Content-Type: application/xml"), 415),
        (request("/v1/models/%2e%2e%2fm:predict", RIGHT), 404),
        (request("/v1/models/../m:predict", RIGHT), 404),
        (request("/v1/models/m%2fversions%2f1:predict", RIGHT), 200),
        (request("/v1/models/m.npz:predict", RIGHT), 404),
        (request(PREDICT, RIGHT, "PUT"), 405),
        (request("/v1/models/m", RIGHT), 405),
        (request(PREDICT, b"z\r\n" + pieces, "POST", CHUNKED), 400),
    ]:
        answer(target, raw, code)


def test_clients_that_close_early(target: Target) -> None:
    """The others get their answers."""
    whole = request(PREDICT, RIGHT)
    for length in (1, 20, len(whole) - 5, len(whole)):
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            connection.sendall(whole[:length])
    assert len(answer(target, whole, 200)["predictions"]) == 1
    while target.codes[CLIENT_GONE] < 1:  # of the one that has sent a part of a body
        time.sleep(0.01)
    assert target.codes[500] == 0
