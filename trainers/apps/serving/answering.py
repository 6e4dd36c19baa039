"""Answering: each other rank answers the work that rank 0 deals.

Work has a sequence number, NUMBER in its header, by which an answer that comes late is recognised and dropped. The
messages are those of an Exchange, so no rank waits for one that is stopped or lost.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.elastic.exchange import Exchange, Message
from allreduce.errors import RankLostError

NUMBER = "number"


def lost_dealer() -> RankLostError:
    """Return the error about the loss of rank 0."""
    error = RankLostError("rank 0, which deals the work, was lost")
    error.lost = (0,)
    return error


Handle = Callable[[dict[str, Any], list[np.ndarray]], tuple[dict[str, Any], list[np.ndarray]]]


def answer_requests(exchange: Exchange, handle: Handle, meanwhile: Callable[[], object] | None = None) -> None:
    """Every rank but 0: answer the work that rank 0 deals, until rank 0 ends. Local.

    handle: takes the header and the arrays of some work, and returns those of its answer. An exception becomes an
        answer {"error": its text}. meanwhile: called between two polls.

    Raises RankLostError if rank 0 is lost.
    """
    inbox: list[Message] = []

    def come() -> bool:
        inbox.extend(exchange.poll())
        if meanwhile is not None:
            meanwhile()
        return bool(inbox or exchange.ended or exchange.lost)

    while True:
        exchange.wait(come)
        if exchange.ended:
            return
        if not inbox:
            raise lost_dealer()
        message = inbox.pop(0)
        number = message.header.pop(NUMBER, None)
        try:
            header, arrays = handle(message.header, message.arrays)
        except Exception as error:  # of a model, say: this rank still answers other work
            header, arrays = {"error": f"{type(error).__name__}: {error}"}, []
        exchange.send(0, {**header, NUMBER: number}, arrays)
