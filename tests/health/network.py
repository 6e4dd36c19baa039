"""Messages between ranks of one process, for tests of the status messages."""

from collections import Counter, defaultdict, deque
from typing import Any

from mpi4py import MPI


class Request:
    """A synchronous send's request: done when its message is received."""

    taken = False

    def Test(self) -> bool:  # noqa: N802
        return self.taken


class Message:
    def __init__(self, content: bytes, request: Request) -> None:
        self._content, self._request = content, request

    def Irecv(self, buffer: Any) -> Request:  # noqa: N802
        buffer[0][:] = self._content
        self._request.taken = True
        return self._request


class Halted(Message):
    """Its sender is stopped while MPI transfers it."""

    def Irecv(self, buffer: Any) -> Request:  # noqa: N802
        self._buffer = buffer[0]
        return self._request

    def go_on(self) -> None:
        super().Irecv([self._buffer])


class Network:
    """Messages between ranks of this process, counted."""

    def __init__(self, ranks: int) -> None:
        self.arrived: dict[int, deque] = defaultdict(deque)
        self.sent: Counter[int] = Counter()
        self.pairs: set[tuple[int, int]] = set()
        self.longest, self.size = 0, ranks
        self.failed: frozenset[int] = frozenset()
        self.stopped: dict[int, list[Halted]] = {}  # messages of stopped ranks that others have begun to receive


class Comm:
    """A communicator of one rank of a Network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self.rank, self.size = network, rank, network.size

    def Issend(self, message: Any, rank: int) -> Request:  # noqa: N802
        if rank in self._network.failed:
            raise MPI.Exception(MPI.ERR_OTHER)
        request, content = Request(), bytes(message[0])
        self._network.arrived[rank].append((self.rank, content, request))
        self._network.sent[self.rank] += 1
        self._network.pairs.add((min(self.rank, rank), max(self.rank, rank)))
        self._network.longest = max(self._network.longest, len(content))
        return request

    def Improbe(self, status: MPI.Status) -> Message | None:  # noqa: N802
        if not self._network.arrived[self.rank]:
            return None
        source, content, request = self._network.arrived[self.rank].popleft()
        status.source = source
        status.Set_elements(MPI.BYTE, len(content))
        if source not in self._network.stopped:
            return Message(content, request)
        self._network.stopped[source].append(message := Halted(content, request))
        return message
