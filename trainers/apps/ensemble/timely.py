"""Votes of an ensemble's members by a deadline: each rank computes members by itself, rank 0 takes what has come."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.elastic.exchange import Message
from trainers.apps.ensemble.model import votes_of
from trainers.apps.ensemble.voting import Voting, misfit
from trainers.apps.serving.answering import Rounds
from trainers.arguments import is_integer, is_number
from trainers.data import Tree, leaves, mapped, structure_of, without_rows
from trainers.errors import ArgumentError, DeadlineExceededError
from trainers.replica import Replica

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
    """Takes the votes that have come by a deadline. Made on all ranks.

    rounds: of all ranks. positions: of the ranks, by rank.
    """

    def __init__(self, rounds: Rounds, positions: Sequence[Position]) -> None:
        self._rounds, self._positions = rounds, positions
        self.rank = rounds.exchange.rank

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
        """Return on rank 0 what has come by the deadline, and None on other ranks, which send their votes.

        A rank that was late or stopped computes nothing for calls that rank 0 has ended.

        x: the rows; or the error in the arguments, which is raised after it was sent. replicas: of this rank. shares:
        of the members that can vote. deadline: seconds from now. missing: the other members.
        """
        begin, voters = time.monotonic(), [number for number, share in shares.items() if share]
        own = {number: replicas[number] for number in self._positions[self.rank].duties(voters)}
        self._rounds.begin()
        if self.rank:
            self._answer(x, own, voting)
            return None
        if isinstance(x, ArgumentError):
            self._rounds.end()
            raise x
        votes, reasons = self._collected(x, own, voting, voters, begin + deadline)
        absent = {**missing, **{number: reasons[number] for number in voters if number not in votes}}
        if len(votes) < quorum:
            texts = "\n".join(f"  member {number}: {reason}" for number, reason in sorted(absent.items()))
            raise DeadlineExceededError(
                f"{len(votes)} of {len(voters)} members had voted after {deadline:g} s, and the quorum is {quorum}:\n"
                f"{texts}"
            )
        return Prediction(voting.combined(votes, shares), tuple(votes), dict(sorted(absent.items())))

    def _answer(self, x: Tree | ArgumentError, own: Mapping[int, Replica], voting: Voting) -> None:
        """Every rank but 0: compute its members and send their votes, unless rank 0 has ended the call."""
        if isinstance(x, ArgumentError):
            self._rounds.send({MEMBERS: [], ERRORS: [[number, str(x)] for number in own]}, [])
            raise x
        votes, errors = _computed(x, own, voting, lambda: not self._rounds.over)
        if self._rounds.over:
            return
        trees = list(votes.values())
        header = {MEMBERS: list(votes), ERRORS: list(errors.items()), X: _print_of(x)}
        header[STRUCTURES] = [structure_of(tree) for tree in trees]
        self._rounds.send(header, [leaf for tree in trees for leaf in leaves(tree)])

    def _collected(
        self, x: Tree, own: Mapping[int, Replica], voting: Voting, voters: Sequence[int], ends: float
    ) -> tuple[dict[int, Tree], dict[int, str]]:
        """Rank 0: return the votes that have come by `ends`, in the order of the members, and for every member why its
        vote is missing if it is."""

        def goes_on() -> bool:
            self._rounds.take()
            return time.monotonic() < ends

        votes, errors = _computed(x, own, voting, goes_on)
        duties_of = {rank: each.duties(voters) for rank, each in enumerate(self._positions)}

        def enough(found: Mapping[int, Message]) -> bool:
            return {*votes, *(number for each in found.values() for number in each.header[MEMBERS])} >= set(voters)

        found = self._rounds.collect(ends, [rank for rank, each in duties_of.items() if rank and each], enough)
        reasons = {number: self._reason(number, duties_of) for number in voters}
        reasons |= {number: f"rank 0: {text}" for number, text in errors.items()}
        for rank, message in found.items():
            _take(rank, message, x, votes, reasons)
        votes = dict(sorted(votes.items()))
        for number in [*votes][1:]:
            if error := misfit(votes[number], next(iter(votes.values()))):
                reasons[number] = error
                del votes[number]
        return votes, reasons

    def _reason(self, number: int, duties_of: Mapping[int, Sequence[int]]) -> str:
        """Return why the vote of a member is missing, if no rank sends another reason."""
        ranks = [rank for rank, each in duties_of.items() if number in each]
        name = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        lost = set(ranks) <= self._rounds.exchange.lost
        return f"{name}: {'lost' if lost else LATE}"

    def close(self) -> None:
        """Collective, but a rank that is lost or stopped is not waited for long."""
        self._rounds.exchange.close()

    def abandon(self) -> None:
        """Local."""
        if not self._rounds.exchange.closed:
            self._rounds.exchange.abandon()


def _take(rank: int, message: Message, x: Tree, votes: dict[int, Tree], reasons: dict[int, str]) -> None:
    """Add the votes in a rank's answer to `votes`, and why others are missing to `reasons`."""
    header, arrays = message.header, iter(message.arrays)
    reasons.update({number: f"rank {rank}: {text}" for number, text in header[ERRORS]})
    for number, structure in zip(header[MEMBERS], header.get(STRUCTURES, ()), strict=True):
        tree = mapped(lambda _: next(arrays), without_rows(structure))
        if header[X] != _print_of(x):
            reasons[number] = f"rank {rank}: it was given other rows x"
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
