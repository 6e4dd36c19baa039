"""The tree that calls are announced along: its messages, and the order of the calls. All ranks are simulated."""

import json
import math
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from allreduce.call.announcements import JOIN, Announcements, Decision, Request


class Job:
    """The ends of all ranks. messages, nbytes: sent and received by each rank. ran: what each rank has run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ends = [Announcements(rank, size) for rank in range(size)]
        self.arrived: deque[tuple[int, int, str]] = deque()
        self.messages: Counter[int] = Counter()
        self.nbytes = 0
        self.ran: list[list[Decision]] = [[] for _ in range(size)]

    def call(self, rank: int, name: str, **side: Any) -> None:
        request = Request(**{"same": [name, 10], "description": f"call of {name}", **side})
        self.send(rank, self.ends[rank].announce(name, request))

    def send(self, rank: int, announcements: Any) -> None:
        for each in announcements:
            self.post(rank, self.ends[rank].parent, json.dumps(each))

    def post(self, rank: int, to: Any, text: str) -> None:
        self.arrived.append((rank, to, text))
        self.messages.update([rank, to])
        self.nbytes += len(text)

    def settle(self) -> None:
        """Run until no message is on its way."""
        self.decide()
        while self.arrived:
            source, rank, text = self.arrived.popleft()
            if source == self.ends[rank].parent:
                for child in self.ends[rank].children:
                    self.post(rank, child, text)
                self.ran[rank] += self.ends[rank].learn(json.loads(text))
            else:
                self.send(rank, self.ends[rank].hear(source, json.loads(text)))
            self.decide()

    def decide(self) -> None:
        if decided := self.ends[0].decisions():
            for child in self.ends[0].children:
                self.post(0, child, json.dumps(decided))
            self.ran[0] += decided


@pytest.mark.parametrize("size", [2, 5, 13, 16, 4096])
def test_a_call_takes_few_messages_and_bytes(size: int) -> None:
    job, calls = Job(size), ("a", "b", "1")
    for rank in np.random.default_rng(1).permutation(size).tolist():
        for name in calls if rank % 2 else calls[::-1]:
            job.call(rank, name)
    job.settle()
    for ran in job.ran:
        assert sorted(decision.name for decision in ran) == ["1", "a", "b"]
        assert ran == job.ran[0], "in one order"
        assert {(decision.per_rank, decision.refusal) for decision in ran} == {(None, None)}
    most = 1 + math.ceil(math.log2(size))
    assert max(job.messages.values()) <= len(calls) * 2 * most  # sent and received
    assert sum(job.messages.values()) <= len(calls) * 4 * size
    assert job.nbytes <= len(calls) * size * 300  # however many ranks


@pytest.mark.parametrize("size", [2, 5, 13, 16])
def test_calls_with_values_and_calls_that_differ(size: int) -> None:
    job = Job(size)
    rows = [f"{10 + (rank == 1)} elements" for rank in range(size)]
    for rank in reversed(range(size)):
        job.call(rank, "sizes", own=rank)
        job.call(rank, "differs", same=["differs", rank == 1], description=rows[rank])
    job.settle()
    for ran in job.ran:
        found = {each.name: (each.per_rank, each.refusal) for each in ran}
        assert found == {"sizes": ([*range(size)], None), "differs": (None, rows)}
    assert max(job.messages.values()) <= 4 * (1 + math.ceil(math.log2(size)))


@pytest.mark.parametrize("size", [2, 5, 13, 16, 100])
def test_ranks_that_have_joined_are_not_waited_for(size: int) -> None:
    """Whatever the order in which they join, and again after all have joined."""
    job = Job(size)
    for order in (range(size), reversed(range(size)), np.random.default_rng(size).permutation(size).tolist()):
        *ranks, last = order
        for rank in ranks:
            job.call(rank, "early", joinable=True)  # submitted before the join, so it waits for the last rank
            job.call(rank, JOIN, own=rank)
        job.settle()
        assert not any(job.ran)
        for name in ("early", "rest"):
            job.call(last, name, joinable=True)
        job.call(last, "no", same=["no"], joinable=False)
        job.call(last, JOIN, own=last)
        job.settle()
        early, rest, no, join = job.ran[0]
        assert (early.name, early.refusal, early.same) == ("early", None, None)
        assert (rest.name, rest.refusal, rest.same) == ("rest", None, ["rest", 10])
        assert f"ranks {sorted(ranks)} have joined, and no join proxy" in no.refusal
        assert (join.name, join.per_rank) == (JOIN, [last])
        assert all(ran == job.ran[0] for ran in job.ran)
        job.ran = [[] for _ in range(size)]
