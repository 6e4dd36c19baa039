"""Answering: rank 0 deals work to the other ranks, or asks all of them, and takes their answers until a deadline.

- Dealer (rank 0) and `answer_requests` (the others): a rank gets work by message, and answers it. The server uses them.
- Rounds: every rank computes its answer by itself, in the same order of calls; rank 0 collects what has come by the
  deadline. `ensemble.predict` uses it.

Work has a sequence number, by which an answer that comes late is recognised and dropped. The messages are those of an
Exchange, so no rank waits for one that is stopped or lost.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.elastic.exchange import Exchange, Message
from allreduce.errors import RankLostError

AHEAD = 16  # calls by which a rank may be ahead of rank 0 (Rounds)
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
            error = RankLostError("rank 0, which deals the work, was lost")
            error.lost = (0,)
            raise error
        message = inbox.pop(0)
        number = message.header.pop(NUMBER, None)
        try:
            header, arrays = handle(message.header, message.arrays)
        except Exception as error:  # of a model, say: this rank still answers other work
            header, arrays = {"error": f"{type(error).__name__}: {error}"}, []
        exchange.send(0, {**header, NUMBER: number}, arrays)


# Answers to calls that every rank makes


class Rounds:
    """Answers of all ranks to calls that each of them makes by itself, in the same order; rank 0 collects them.

    Made on all ranks after an Exchange. Each call has a round; its number is equal on all ranks. `begin` begins it, and
    MPI makes progress in `take`, `over`, `send` and `collect`.

    Attributes: number: of the last round. late: how many answers rank 0 has dropped.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.number = self.late = 0
        # answers to rounds that rank 0 has not ended: number of the round -> rank -> answer
        self._held: dict[int, dict[int, Message]] = {}
        self._ended = 0  # the last round that rank 0 has ended, as far as this rank knows
        self._told: dict[int, int] = {}  # rank 0: rank -> the last round of whose end it was told

    def begin(self) -> None:
        """Begin the next round, before this rank computes its answer."""
        self.number += 1
        if self.exchange.rank == 0:
            self._ended = self.number - 1
            self._held = {number: held for number, held in self._held.items() if number > self._ended}
        self.take()

    def take(self) -> None:
        """Take the messages that have come: on rank 0 answers, on another rank the number of the last ended round."""
        for message in self.exchange.poll():
            number = message.header.get(NUMBER, 0)
            if self.exchange.rank:
                self._ended = max(self._ended, number)
            elif number > self._ended:
                self._held.setdefault(number, {})[message.source] = message
            else:
                self.late += NUMBER in message.header
        if self.exchange.rank == 0:
            self._tell()

    @property
    def over(self) -> bool:
        """Whether rank 0 has ended this round, so that an answer is of no use: this rank was late or stopped."""
        self.take()
        return self._ended >= self.number

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Every rank but 0: answer this round. Waits if this rank is far ahead of rank 0.

        Raises RankLostError if rank 0 is lost.
        """
        self.exchange.wait(self._near)
        if self.exchange.lost:
            error = RankLostError("rank 0, which collects the answers, was lost")
            error.lost = (0,)
            raise error
        self.exchange.send(0, {**header, NUMBER: self.number}, arrays)

    def _near(self) -> bool:
        self.take()
        exchange = self.exchange
        return bool(self.number - self._ended <= AHEAD or exchange.ended or exchange.lost)

    def collect(
        self,
        deadline: float,
        wanted: Collection[int] | None = None,
        enough: Callable[[dict[int, Message]], bool] | None = None,
    ) -> dict[int, Message]:
        """Rank 0: end the round, and return its answers by rank. Waits for the living ranks until `deadline`.

        deadline: by time.monotonic(). wanted: the ranks whose answers are awaited, by default all others. enough: ends
            the wait, given the answers that have come. The ranks that are missing in the result are late or lost.
        """
        ranks = set(range(1, self.exchange.size) if wanted is None else wanted)
        found = self._held.setdefault(self.number, {})

        def done() -> bool:
            self.take()
            return found.keys() >= ranks - self.exchange.lost or (enough is not None and enough(found))

        self.exchange.wait(done, max(0.0, deadline - time.monotonic()), eager=True)
        self.end()
        return found

    def end(self) -> None:
        """Rank 0: end the round, as `collect` does; without it the others wait when they are far ahead."""
        self._ended = self.number
        self._held.pop(self.number, None)
        self._tell()

    def _tell(self) -> None:
        """Rank 0: tell the others which round has ended. A rank that takes no messages gets no more of them: when it
        takes them again, it gets the newest number."""
        for rank in self.exchange.living:
            if self._told.get(rank, 0) < self._ended and not self.exchange.unsent(rank):
                self.exchange.send(rank, {NUMBER: self._ended})
                self._told[rank] = self._ended
