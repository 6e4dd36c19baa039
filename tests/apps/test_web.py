"""The web server in this process: the answers of GETs, overload, and requests of unusual form."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.apps.server import PREDICT, Target, request
from trainers.apps.serving.versions import AVAILABLE, UNLOADING
from trainers.apps.serving.web import CLIENT_GONE, MOST_HEAD

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
