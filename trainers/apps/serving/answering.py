"""Answering: rank 0 deals work to the other ranks by a Dealer, and each answers it, a server by `answer_requests`.

Work has a sequence number, by which an answer that comes late is recognised and dropped. The messages are those of an
Exchange, so no rank waits for one that is stopped or lost.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.elastic.exchange import Exchange, Message
from allreduce.errors import RankLostError

NUMBER = "number"


# Work that rank 0 deals


class Answer(NamedTuple):
    """An answer to dealt work. header: None if the rank was lost before it answered."""

    number: int
    rank: int
    header: dict[str, Any] | None
    arrays: list[np.ndarray]


class Dealer:
    """Rank 0: deals work to the other ranks and takes their answers. Local; made after an Exchange.

    Attributes: late: the number of answers that came after `forget`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._number = self.late = 0
        self._open: dict[int, int] = {}  # sequence number -> rank
        self._forgotten: dict[int, int] = {}
        self.told: list[Message] = []  # messages that are no answers, oldest first; take and clear them

    def deal(self, rank: int, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> int:
        """Start to send work to a rank; returns its sequence number. The arrays must not change until the answer."""
        self._number += 1
        self._open[self._number] = rank
        self.exchange.send(rank, {**header, NUMBER: self._number}, arrays)
        return self._number

    def busy(self, rank: int) -> int:
        """Return how much work a rank has not answered, with what is forgotten."""
        return sum(each == rank for each in [*self._open.values(), *self._forgotten.values()])

    def forget(self, number: int) -> None:
        """Drop the answer to this work when it comes. The rank is busy until then."""
        if number in self._open:
            self._forgotten[number] = self._open.pop(number)

    def answers(self) -> list[Answer]:
        """Return the answers that have come, and one without a header for each work of a rank that was lost."""
        found = []
        for message in self.exchange.poll():
            number = message.header.pop(NUMBER, None)
            if number is None:
                self.told.append(message)
            elif self._open.pop(number, None) is not None:
                found.append(Answer(number, message.source, message.header, message.arrays))
            else:
                self.late += self._forgotten.pop(number, None) is not None
        lost = self.exchange.lost
        for number in [number for number, rank in self._open.items() if rank in lost]:
            found.append(Answer(number, self._open.pop(number), None, []))
        self._forgotten = {number: rank for number, rank in self._forgotten.items() if rank not in lost}
        return found


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
