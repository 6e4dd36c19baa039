"""A web server in this process, for tests: its answers to raw bytes. tests.fuzz sends it hostile requests."""

import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainers.apps.serving.models import NetworkModel
from trainers.apps.serving.versions import AVAILABLE, Version, Versions
from trainers.apps.serving.web import Limits, Pages, Web, listen
from trainers.replicas.numpy.network import NumpyNetwork

LIMITS = Limits(body_bytes=1 << 16, rows=64, connections=64, seconds=10.0)
PREDICT = "/v1/models/m:predict"


class Target:
    """A web server in a thread of this process, and a copy of its model. page: the text of /metrics."""

    def __init__(self, page: bytes = b"x 1\n") -> None:
        self.versions, network = Versions("m"), NumpyNetwork([4, 8, 3], seed=3)
        self.versions.add(Version(1, "m.npz", AVAILABLE, NetworkModel(network)))
        self._network, self._lock = NumpyNetwork([4, 8, 3], seed=3), threading.Lock()
        self.codes: Counter[int] = Counter()
        computing = ThreadPoolExecutor(1)
        pages = Pages(
            self.versions,
            lambda version, rows: computing.submit(version.model.predict, rows),
            LIMITS,
            lambda: (page, "text/plain"),
            self._count,
        )
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
