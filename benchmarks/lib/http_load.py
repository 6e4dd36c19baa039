"""Load for an HTTP server on this machine: requests from one thread, over connections that stay open.

It does little for each request, so that a server on the same cores keeps them: requests are made before, and answers
are counted while the load runs and judged after it.
"""

import itertools
import re
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LOST_SECONDS = 60.0  # without any answer
AGAIN_SECONDS = 0.02  # until a request that met an overload is sent again
OVERLOAD = 429
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class Connection:
    """A connection with at most one request. number: of the request. begin: when it was first sent."""

    def __init__(self, port: int) -> None:
        self.number, self.begin = -1, 0.0
        self._found, self._length = bytearray(), 0  # of an answer: its bytes so far; its length, when known
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LOST_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> tuple[int, bytes] | None:
        """Return the code and the body of an answer when all of it has come. Raises OSError."""
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise ConnectionError("the server has closed the connection")
        self._found += piece
        end = self._found.find(b"\r\n\r\n") + 4
        if end < 4:
            return None
        if not self._length:
            length = LENGTH.search(self._found, 0, end)
            if length is None:
                raise ConnectionError("an answer does not say its length")
            self._length = end + int(length[1])
        if len(self._found) < self._length:
            return None
        code, body = int(self._found[9:12]), bytes(self._found[end : self._length])
        self._found, self._length = bytearray(), 0
        return code, body


@dataclass
class Load:
    """Sends POST requests, some at a time, and takes the answers.

    port: of the server. path: of all requests. bodies: sent in turn. clients: connections.

    Attributes: seconds: of each answer; answers: (the index of its body, its code, its body) -> how often it came, but
    those of an overload, after which the request is sent again; overloads: how many; lost: errors of connections.
    """

    port: int
    path: str
    bodies: Sequence[bytes]
    clients: int
    seconds: list[float] = field(default_factory=list)
    answers: Counter[tuple[int, int, bytes]] = field(default_factory=Counter)
    overloads: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    def run(self, ends: Callable[[int], bool]) -> float:
        """Send requests until ends(the number of the next one), and return the seconds until the last answer."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        self._requests = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in self.bodies]
        self._numbers, self._ends = itertools.count(), ends
        self._open: set[Connection] = set()
        self._again: list[tuple[float, Connection]] = []  # (when, which) to send again, in the order of time
        begin = time.perf_counter()
        with selectors.DefaultSelector() as self._selector:
            for _ in range(self.clients):
                self._connect()
            while self._open:
                found = self._selector.select(AGAIN_SECONDS if self._again else LOST_SECONDS)
                if not found and not self._again:
                    self.lost["no answer in time"] += len(self._open)
                    break
                for key, _ in found:
                    self._take(key.data)
                while self._again and self._again[0][0] <= time.perf_counter():
                    self._send(self._again.pop(0)[1])
        for connection in self._open:
            connection.socket.close()
        return time.perf_counter() - begin

    def _connect(self) -> None:
        """Send the next request over a new connection, unless it was the last one."""
        while not self._ends(number := next(self._numbers)):
            try:
                connection = Connection(self.port)
            except OSError as error:
                self.lost[type(error).__name__] += 1
                time.sleep(AGAIN_SECONDS)
                continue
            self._open.add(connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._begin(connection, number)
            return

    def _begin(self, connection: Connection, number: int) -> None:
        connection.number, connection.begin = number, time.perf_counter()
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        try:
            connection.socket.sendall(self._requests[connection.number % len(self._requests)])
        except OSError as error:
            self._lose(connection, error)

    def _take(self, connection: Connection) -> None:
        try:
            answer = connection.receive()
        except OSError as error:
            self._lose(connection, error)
            return
        if answer is None:
            return
        now = time.perf_counter()
        code, body = answer
        if code == OVERLOAD:
            self.overloads += 1
            self._again.append((now + AGAIN_SECONDS, connection))
            return
        self.seconds.append(now - connection.begin)
        self.answers[connection.number % len(self.bodies), code, body] += 1
        number = next(self._numbers)
        if self._ends(number):
            self._close(connection)
        else:
            self._begin(connection, number)

    def _lose(self, connection: Connection, error: OSError) -> None:
        self.lost[type(error).__name__] += 1
        self._again = [each for each in self._again if each[1] is not connection]
        self._close(connection)
        self._connect()

    def _close(self, connection: Connection) -> None:
        self._open.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
