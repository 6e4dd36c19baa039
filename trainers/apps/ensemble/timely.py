"""Votes of an ensemble's members by a deadline: rank 0 deals a call to the others, and takes the votes in time."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.elastic.exchange import Exchange
from trainers.apps.ensemble.model import votes_of
from trainers.apps.ensemble.voting import Voting, misfit
from trainers.apps.serving.answering import NUMBER, Answer, Dealer, lost_dealer
from trainers.arguments import is_integer, is_number
from trainers.data import Tree, leaves, mapped, structure_of, without_rows
from trainers.errors import ArgumentError, DeadlineExceededError
from trainers.replica import Replica

CALL, ENDED = "call", "ended"  # in the headers of rank 0
MEMBERS, ERRORS, STRUCTURES, X = "members", "errors", "structures", "x"  # in the header of an answer
LATE = "its vote had not come by the deadline"


class Prediction(NamedTuple):
    """What has come by the deadline.

    outputs: the result of the vote, as `predict` returns it without a deadline. members: the numbers of the members
    that have voted. missing: the number of each other member -> why its vote is missing.
    """

    outputs: Any
    members: tuple[int, ...]
    missing: dict[int, str]


class Position(NamedTuple):
    """A rank in its part. members: the numbers of the members that the part has, in ascending order."""

    rank: int
    ranks: int
    members: list[int]

    def duties(self, voters: Sequence[int]) -> list[int]:
        """Return the members that this rank computes alone. voters: the members that vote.

        The ranks of a part divide its members. If there are more ranks than members, several compute the same one, and
        the first answer counts.
        """
        own = [number for number in self.members if number in voters]
        if self.ranks >= len(own):
            return own[self.rank % len(own) : self.rank % len(own) + 1] if own else []
        return own[self.rank :: self.ranks]


class TimelyVotes:
    """Takes the votes that have come by a deadline. Made on all ranks, which all call `predict`, in one order.

    Rank 0 deals a call to the other ranks, and tells them when it has ended. They wait for rank 0, which waits for none
    of them. exchange: of all ranks. positions: of the ranks, by rank.
    """

    def __init__(self, exchange: Exchange, positions: Sequence[Position]) -> None:
        self._exchange, self._positions = exchange, positions
        self._dealer = Dealer(exchange)
        self._call = 0  # the number of the last call on this rank
        self._over = 0  # the number of the last call that rank 0 has ended, as far as this rank knows
        self._work: tuple[int, int] | None = None  # dealt to this rank: the number of the call, of the work

    def predict(
        self,
        x: Tree | ArgumentError,
        replicas: Mapping[int, Replica],
        voting: Voting,
        shares: Mapping[int, float],
        deadline: float,
        quorum: int,
        missing: Mapping[int, str],
    ) -> Prediction | None:
        """Return on rank 0 the votes that have come by the deadline, and None on other ranks, which send their votes.

        A rank that was late or stopped computes nothing for calls that rank 0 has ended.

        x: the rows; or the error in the arguments, which is raised after it was sent. replicas: of this rank. shares:
        of the members that can vote. deadline: seconds from now. missing: the other members.
        """
        begin, voters = time.monotonic(), [number for number, share in shares.items() if share]
        own = {number: replicas[number] for number in self._positions[self._exchange.rank].duties(voters)}
        self._call += 1
        if self._exchange.rank:
            self._answer_call(x, own, voting)
        if isinstance(x, ArgumentError):
            self._end()
            raise x
        if self._exchange.rank:
            return None
        votes, reasons = self._collected(x, own, voting, voters, begin + deadline)
        absent = {**missing, **{number: reasons[number] for number in voters if number not in votes}}
        if len(votes) < quorum:
            texts = "\n".join(f"  member {number}: {reason}" for number, reason in sorted(absent.items()))
            raise DeadlineExceededError(
                f"{len(votes)} of {len(voters)} members had voted after {deadline:g} s, and the quorum is {quorum}:\n"
                f"{texts}"
            )
        return Prediction(voting.combined(votes, shares), tuple(votes), dict(sorted(absent.items())))

    # Every rank but 0

    def _answer_call(self, x: Tree | ArgumentError, own: Mapping[int, Replica], voting: Voting) -> None:
        """Answer the work that rank 0 deals, until work of this call is answered, or rank 0 has ended this call."""
        exchange = self._exchange

        def come() -> bool:
            return bool(self._is_over() or self._work is not None or exchange.ended or exchange.lost)

        while True:
            exchange.wait(come)
            if exchange.lost:
                raise lost_dealer()
            if self._work is None or self._work[0] > self._call:
                return
            (call, number), self._work = self._work, None
            header: dict[str, Any] = {MEMBERS: [], ERRORS: []}
            arrays: list[np.ndarray] = []
            if call == self._call and not self._is_over():
                header, arrays = self._votes(x, own, voting)
            exchange.send(0, {**header, NUMBER: number}, arrays)
            if call == self._call:
                return

    def _is_over(self) -> bool:
        for message in self._exchange.poll():
            self._over = max(self._over, message.header.get(ENDED, 0))
            if CALL in message.header:
                self._work = message.header[CALL], message.header[NUMBER]
        return self._over >= self._call

    def _votes(
        self, x: Tree | ArgumentError, own: Mapping[int, Replica], voting: Voting
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        if isinstance(x, ArgumentError):
            return {MEMBERS: [], ERRORS: [[number, str(x)] for number in own]}, []
        votes, errors = _computed(x, own, voting, lambda: not self._is_over())
        trees = list(votes.values())
        header = {MEMBERS: list(votes), ERRORS: list(errors.items()), X: _print_of(x)}
        header[STRUCTURES] = [structure_of(tree) for tree in trees]
        return header, [leaf for tree in trees for leaf in leaves(tree)]

    # Rank 0

    def _collected(
        self, x: Tree, own: Mapping[int, Replica], voting: Voting, voters: Sequence[int], ends: float
    ) -> tuple[dict[int, Tree], dict[int, str]]:
        """Return the votes that have come by `ends`, in the order of the members, and for every member the reason to
        give if its vote is missing."""
        duties_of = {rank: each.duties(voters) for rank, each in enumerate(self._positions)}
        undealt = [rank for rank, duties in duties_of.items() if rank and duties]
        dealt: set[int] = set()  # the numbers of the work that is not answered
        found: list[Answer] = []

        def goes_on() -> bool:
            self._step(undealt, dealt, found)
            return time.monotonic() < ends

        def enough() -> bool:
            self._step(undealt, dealt, found)
            come = {number for answer in found for number in (answer.header or {MEMBERS: []})[MEMBERS]}
            return not (dealt or undealt) or {*votes, *come} >= set(voters)

        votes, errors = _computed(x, own, voting, goes_on)
        self._exchange.wait(enough, max(0.0, ends - time.monotonic()), eager=True)
        for number in dealt:
            self._dealer.forget(number)
        self._end()
        reasons = {number: self._reason(number, duties_of) for number in voters}
        reasons |= {number: f"rank 0: {text}" for number, text in errors.items()}
        for answer in found:
            _take(answer, x, votes, reasons)
        votes = dict(sorted(votes.items()))
        for number in [*votes][1:]:
            if error := misfit(votes[number], next(iter(votes.values()))):
                reasons[number] = error
                del votes[number]
        return votes, reasons

    def _step(self, undealt: list[int], dealt: set[int], found: list[Answer]) -> None:
        """Take answers, and deal the call to ranks that have answered an earlier one."""
        for answer in self._dealer.answers():
            if answer.number in dealt:
                dealt.remove(answer.number)
                found.append(answer)
        for rank in [rank for rank in undealt if not self._dealer.busy(rank)]:
            undealt.remove(rank)
            if rank not in self._exchange.lost:
                dealt.add(self._dealer.deal(rank, {CALL: self._call}))

    def _end(self) -> None:
        """Tell the others that this call has ended."""
        for rank in self._exchange.living if self._exchange.rank == 0 else ():
            self._exchange.send(rank, {ENDED: self._call})

    def _reason(self, number: int, duties_of: Mapping[int, Sequence[int]]) -> str:
        """Return why the vote of a member is missing, if no rank sends another reason."""
        ranks = [rank for rank, each in duties_of.items() if number in each]
        name = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        lost = set(ranks) <= self._exchange.lost
        return f"{name}: {'lost' if lost else LATE}"

    def close(self) -> None:
        """Collective, but a rank that is lost or stopped is not waited for long."""
        self._exchange.close()

    def abandon(self) -> None:
        """Local."""
        if not self._exchange.closed:
            self._exchange.abandon()


def _take(answer: Answer, x: Tree, votes: dict[int, Tree], reasons: dict[int, str]) -> None:
    """Add the votes in a rank's answer to `votes`, and why others are missing to `reasons`."""
    if answer.header is None:
        return
    header, arrays = answer.header, iter(answer.arrays)
    reasons.update({number: f"rank {answer.rank}: {text}" for number, text in header[ERRORS]})
    for number, structure in zip(header[MEMBERS], header.get(STRUCTURES, ()), strict=True):
        tree = mapped(lambda _: next(arrays), without_rows(structure))
        if header[X] != _print_of(x):
            reasons[number] = f"rank {answer.rank}: it was given other rows x"
        else:
            votes.setdefault(number, tree)


def limits_error(deadline: Any, quorum: Any, members: int) -> ArgumentError | None:
    """Return the error if a deadline or a quorum is invalid, or None."""
    if not is_number(deadline) or deadline < 0:
        return ArgumentError(f"predict: deadline must be a number of seconds >= 0, got {deadline!r}")
    if not is_integer(quorum, 1, members):
        return ArgumentError(f"predict: quorum must be an integer from 1 to {members} (members), got {quorum!r}")
    return None


def _computed(
    x: Tree, replicas: Mapping[int, Replica], voting: Voting, goes_on: Callable[[], bool] = lambda: True
) -> tuple[dict[int, Tree], dict[int, str]]:
    """Return the votes of replicas that are complete while `goes_on` returns True, and the errors of others."""
    votes: dict[int, Tree] = {}
    errors: dict[int, str] = {}
    for number, replica in replicas.items():
        try:
            found = votes_of(replica, x, voting, goes_on)
        except Exception as error:  # of a model; the ensemble does without it
            errors[number] = f"{type(error).__name__}: {error}"
        else:
            if found is not None:
                votes[number] = found
    return votes, errors


def _print_of(x: Tree) -> int:
    """Return a checksum of the shapes and of the first and last row of x."""
    found = 0
    for array in leaves(x):
        found = zlib.crc32(f"{array.dtype}{array.shape}".encode(), found)
        if len(array):
            found = zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes(), found)
    return found
