"""Ranks that send what they like: communicators, as far as the readers of messages use them."""

from pathlib import Path
from typing import Any

from mpi4py import MPI

from allreduce.messages.notes import Notes, Said
from allreduce.tracing import trace


class OneNode:
    """A topology of two ranks that share a node."""

    size, rank, node_sizes, simulated = 2, 0, (2,), False

    def __str__(self) -> str:
        return "2 ranks on 1 node"


class Alone:
    """A trainer on one rank."""

    rank = 0


def read_trace(value: bytes, _: Path) -> None:
    trace._of_rank(1, value)


class _Arrived:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def Recv(self, buffer: Any) -> None:  # noqa: N802
        memory = buffer[0] if isinstance(buffer, list | tuple) else buffer
        memoryview(memory).cast("B")[: len(self._content)] = self._content


class _Post:
    """What has arrived from rank 1."""

    size, rank = 2, 0

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = list(messages)

    def Improbe(self, status: MPI.Status) -> Any:  # noqa: N802
        if not self._messages:
            return None
        content = self._messages.pop(0)
        status.Set_elements(MPI.BYTE, len(content))
        status.source = 1
        return _Arrived(content)


def read_notes(value: list[bytes], _: Path) -> str:
    notes = Notes(_Post(value))  # type: ignore[arg-type]
    notes.listen()
    return notes.table(Said("a call"))
