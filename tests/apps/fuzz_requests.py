"""Sends hostile requests to the web server: each must get an answer 4xx, or the right one.

python -m tests.apps.fuzz_requests --inputs 20000 --seed 1
"""

import argparse
import json
import random
import re
import socket
import string
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from trainers.apps.serving import web
from trainers.apps.serving.models import NetworkModel
from trainers.apps.serving.versions import AVAILABLE, Version, Versions
from trainers.apps.serving.web import Limits, Pages, Web, listen
from trainers.replicas.numpy.network import NumpyNetwork

CLIENTS = 8
LIMITS = Limits(body_bytes=1 << 16, rows=64, connections=64, seconds=10.0)
PREDICT = "/v1/models/m:predict"
PATHS = [PREDICT, "/v1/models/m/versions/1:predict", "/v1/models/m", "/v1/models/m/metadata", "/metrics",
         "/v1/models/../../etc/passwd:predict", "/v1/models/%2e%2e%2fetc:predict", "/v1/models/m/versions/2:predict",
         "/v1/models/m/versions/99999999999999999999:predict", "/v1/models/m:classify", "/", "/v1/models/", "*",
         "/v1/models/m/versions/-1", "/v1/models/m%00", "http://elsewhere/v1/models/m", "/v1/models/\xff"]  # fmt: skip


class Direct:
    """A service that computes at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def submit(self, version: Version, rows: np.ndarray) -> "Future[np.ndarray]":
        future: Future[np.ndarray] = Future()
        with self._lock:
            future.set_result(version.model.predict(rows))
        return future


class Target:
    """A web server in a thread of this process, and a copy of its model. page: the text of /metrics."""

    def __init__(self, page: bytes = b"x 1\n") -> None:
        self.versions, network = Versions("m"), NumpyNetwork([4, 8, 3], seed=3)
        self.versions.add(Version(1, "m.npz", AVAILABLE, NetworkModel(network)))
        self._network, self._lock = NumpyNetwork([4, 8, 3], seed=3), threading.Lock()
        self.codes: Counter[int] = Counter()
        pages = Pages(self.versions, Direct(), LIMITS, lambda: (page, "text/plain"), self._count)
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._web = Web(pages, self._listener, LIMITS, 1)
        self._web.start()

    def predict(self, rows: np.ndarray) -> np.ndarray:
        with self._lock:
            return self._network.predict(rows)

    def _count(self, code: int, seconds: float) -> None:
        self.codes[code] += 1

    def ask(self, raw: bytes) -> tuple[int, bytes] | None:
        """Send raw bytes; return the code and the body of the answer, None without one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            answer = b""
            try:
                connection.sendall(raw)
                while piece := connection.recv(1 << 16):
                    answer += piece
            except ConnectionError:  # it has closed before all was sent
                if not answer:
                    return None
        while answer.startswith(b"HTTP/1.1 100"):
            answer = answer.partition(b"\r\n\r\n")[2]
        head, _, body = answer.partition(b"\r\n\r\n")
        return (int(head.split()[1]), body) if head else None

    def close(self) -> None:
        self._web.drain()


def request(path: str, body: bytes, method: str = "POST", *heads: bytes) -> bytes:
    given = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: x", b"Connection: close", *heads]
    if not any(head.lower().startswith((b"content-length", b"transfer-encoding")) for head in heads):
        given.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(given) + b"\r\n\r\n" + body


def value(draw: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kind = draw.randrange(9 if depth < 5 else 7)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 8:
        return {draw.choice(["instances", "x", "", "ü"]): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    large = draw.choice([2**31, 2**63, 2**64, 10**30, 10**400]) * draw.choice([1, -1])
    return [draw.random(), draw.randrange(-9, 99), large, None, True, "\u0000\ud800"[: draw.randrange(3)], 1e308][kind]


def rows(draw: random.Random) -> list[Any]:
    return [[round(draw.uniform(-9, 9), 3) for _ in range(4)] for _ in range(draw.randrange(1, 6))]


def mutated(draw: random.Random, text: bytes) -> bytes:
    given = bytearray(text)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(given) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            del given[place : place + draw.randrange(1, 9)]
        elif kind == 1:
            given[place:place] = bytes([draw.randrange(256)])
        elif kind == 2:
            given[place:place] = draw.choice(
                [b"[" * 50, b"NaN", b"1e999", b"-", b"]", b"{", b'"', b"\\", b",", b"true"]
            )
        else:
            given[place : place + 1] = draw.choice(string.printable).encode()
    return bytes(given)


def one(draw: random.Random) -> bytes:
    """Return the bytes of a random request."""
    right = json.dumps({"instances": rows(draw)}).encode()
    kind = draw.randrange(8)
    if kind == 0:
        return request(PREDICT, right)
    if kind <= 2:
        return request(PREDICT, mutated(draw, right))
    if kind == 3:
        return request(PREDICT, json.dumps({"instances": value(draw)}).encode())
    if kind == 4:
        return request(PREDICT, json.dumps(value(draw)).encode())
    if kind == 5:
        return request(draw.choice(PATHS), right, draw.choice(["GET", "POST", "PUT", "HEAD", "DELETE", "get", "G T"]))
    if kind == 6:
        heads = [b"Content-Type: application/octet-stream", b"Content-Encoding: gzip", b"Content-Length: -1",
                 b"Content-Length: 99999999999999999999", b"Content-Length: 70000", b"Transfer-Encoding: chunked",
                 b"X: " + b"y" * draw.choice([10, 70_000]), b"Content-Length: 1\r\nContent-Length: 2", b": ",
                 b"Upgrade: websocket\r\nConnection: upgrade", b"Expect: 100-continue"]  # fmt: skip
        return request(PREDICT, right, "POST", *draw.sample(heads, draw.randrange(1, 3)))
    return mutated(draw, request(PREDICT, right))


def judge(target: Target, raw: bytes, answer: tuple[int, bytes]) -> str:
    """Return the outcome; "DEFECT ..." if the answer is wrong."""
    code, body = answer
    if 400 <= code < 500:
        return "4xx"
    if code != 200:
        return f"DEFECT: code {code}"
    if b":predict" not in raw.split(b"\r\n")[0]:
        return "other page"
    try:
        sent = json.loads(_parts(raw)[1][: _length(raw)])["instances"]
        wanted = target.predict(np.array(sent, np.float32))
        found = np.array(json.loads(body)["predictions"], np.float32)
    except (ValueError, KeyError, TypeError) as error:
        return f"DEFECT: {type(error).__name__}: {error}"
    return "right" if np.allclose(found, wanted, atol=1e-5) else "DEFECT: wrong"


def _parts(raw: bytes) -> list[bytes]:
    """Return the head and the body; a line of a head may end in a line feed alone."""
    return [*re.split(rb"\r?\n\r?\n", raw, maxsplit=1), b""][:2]


def _length(raw: bytes) -> int | None:
    for line in _parts(raw)[0].splitlines():
        name, _, number = line.partition(b":")
        if name.strip().lower() == b"content-length" and number.strip().isdigit():
            return int(number)
    return None


def run(inputs: int, seed: int, show: Callable[[str], object] = print) -> Counter[str]:
    """Send this many requests; return the outcomes. An input that shows a defect is shown."""
    web.HEAD_SECONDS = web.BODY_SECONDS = web.KEEP_ALIVE_SECONDS = 0.3  # what is lost with requests that are not whole
    target, outcomes = Target(), Counter[str]()

    def client(number: int) -> None:
        raw, answer = one(random.Random(seed * 1_000_003 + number)), None
        try:
            answer = target.ask(raw)
            outcome = "closed" if answer is None else judge(target, raw, answer)
        except TimeoutError:
            outcome = "DEFECT: no answer in time"
        outcomes[outcome] += 1
        if outcome.startswith("DEFECT"):
            show(f"{outcome}\n{raw[:3000]!r}\n{answer!r}"[:6000])

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(inputs)))
    final = target.ask(request(PREDICT, b'{"instances": [[1, 2, 3, 4]]}'))
    outcomes["alive at the end"] = int(final is not None and final[0] == 200)
    target.close()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.apps.fuzz_requests", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcomes = run(options.inputs, options.seed)
    print(dict(outcomes))
    return int(any(outcome.startswith("DEFECT") for outcome in outcomes) or not outcomes["alive at the end"])


if __name__ == "__main__":
    sys.exit(main())
