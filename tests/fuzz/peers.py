"""Ranks and clients that send hostile messages: communicators with the methods that the readers of messages use, and a
web server."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.health.status_messages import StatusMessages
from allreduce.tracing import merging
from allreduce.transport import chunked as sizes
from allreduce.transport.wait import NamedCall
from tests.apps.server import Target
from tests.health.network import Comm, Network, Request
from tests.training.test_serving import Counter, NoShard
from trainers.apps.serving import web
from trainers.strategies.servers.asynchronous import Asynchronous, Dealer, EpochLedger
from trainers.strategies.servers.mailbox import BYE, PUSH, Arrival, Header, Message
from trainers.strategies.servers.options import Options
from trainers.strategies.servers.server import Server


class OneNode:
    """A topology of two ranks that share a node."""

    size, rank, node_sizes, simulated = 2, 0, (2,), False

    def __str__(self) -> str:
        return "2 ranks on 1 node"


class Alone:
    """A trainer on one rank."""

    rank = 0


def read_trace(value: bytes, _: Path) -> None:
    merging.parse_record(1, value)


def read_notes(value: list[bytes], _: Path) -> str:
    network = Network(2)
    network.arrived[0].extend((1, content, Request()) for content in value)
    notes = StatusMessages(Comm(network, 0))  # type: ignore[arg-type]
    notes.receive()
    return notes.table(NamedCall("a call"))


def read_sizes(value: list[Any], _: Path) -> None:
    """Read the numbers of bytes that ranks are about to send."""
    sizes._checked(MPI.COMM_SELF, value, "a test")


class _Mailbox(Counter):
    """A server's mailbox with messages of workers."""

    def next(self, text: str) -> Arrival:
        if not self.messages:
            raise CommunicationError("nothing comes any more")
        return super().next(text)


PARTS = 6


def read_pushes(value: tuple[bool, str, list[tuple[int, int, Header]]], _: Path) -> None:
    """Run an epoch of a server to which three workers send hostile headers. first: this server deals the parts."""
    first, stale, messages = value
    shard: Any = NoShard()
    epoch = EpochLedger()
    epoch.begin(0, PARTS)
    options = Options(1, "async", stale, 2)

    def apply(message: Message, factor: float) -> None:
        shard.version += 1

    dealer = Dealer([iter(range(PARTS))], 3, options.bound, PARTS) if first else None
    mailbox = _Mailbox([*messages, *((worker, PUSH, Header(BYE)) for worker in range(3))])
    Server(mailbox, shard).serve(Asynchronous(shard, options, dealer, apply, lambda: False, epoch), range(3))


@functools.cache
def _server() -> Target:
    web.HEAD_SECONDS = web.BODY_SECONDS = web.KEEP_ALIVE_SECONDS = 0.1  # what is lost with requests that are not whole
    return Target()


def read_request(value: bytes, _: Path) -> None:
    """Send a request to the web server: it answers as the model does, refuses it, or closes the connection."""
    answer = _server().ask(value)
    if answer is None or 400 <= answer[0] < 500:
        raise web.RefusedError(400, "closed" if answer is None else f"code {answer[0]}")
    code, body = answer
    assert code == 200, code
    head, sent = [*re.split(rb"\r?\n\r?\n", value, maxsplit=1), b""][:2]  # lines may end in a line feed alone
    if b":predict" in head.split(b"\r\n")[0]:
        lengths = re.findall(rb"^content-length[ \t]*:[ \t]*(\d+)[ \t]*\r?$", head, re.IGNORECASE | re.MULTILINE)
        rows = json.loads(sent[: int(lengths[0])] if lengths else sent)["instances"]
        wanted = _server().predict(np.array(rows, np.float32))
        np.testing.assert_allclose(json.loads(body)["predictions"], wanted, atol=1e-5)
