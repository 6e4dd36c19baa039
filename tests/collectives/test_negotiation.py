"""Calls that are matched by name: the messages, and the order of the calls. All ranks are simulated in one process."""

import math
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce.arrays.chunks import binomial, subtree
from allreduce.call.negotiation import Fused, NamedFuture, NamedQueue, Request
from allreduce.errors import DisagreementError
from allreduce.transport import processes
from allreduce.transport.tables import table
from allreduce.transport.wait import WaitRecord

SIZES = [2, 5, 13, 4096]


class _Done:
    def Test(self) -> bool:  # noqa: N802
        return True


class Comm:
    """A communicator of one rank. arrived, sent, nbytes: of all ranks."""

    def __init__(self, job: "Job", rank: int) -> None:
        self._job, self.rank, self.size = job, rank, job.size

    def Isend(self, text: np.ndarray, rank: int) -> _Done:  # noqa: N802
        self._job.arrived[rank].append((self.rank, text.tobytes()))
        self._job.sent[self.rank] += 1
        self._job.nbytes += len(text)
        return _Done()

    def Iprobe(self, status: MPI.Status) -> bool:  # noqa: N802
        if not self._job.arrived[self.rank]:
            return False
        status.source, status.tag = self._job.arrived[self.rank][0][0], 0
        status.Set_elements(MPI.BYTE, len(self._job.arrived[self.rank][0][1]))
        return True

    def Recv(self, text: np.ndarray, source: int, tag: int) -> None:  # noqa: N802
        text[:] = np.frombuffer(self._job.arrived[self.rank].popleft()[1], np.uint8)


class Worker:
    """Runs each call at once."""

    def __init__(self) -> None:
        self.number, self.detector = 1, SimpleNamespace(wait_record=lambda number, raises: WaitRecord(number, raises))
        self.ran: list[tuple[str, Any, BaseException | None]] = []

    def submit(self, queue: NamedQueue, future: NamedFuture) -> NamedFuture:
        queue.announce(future)
        return future

    def decide(self, queue: NamedQueue, future: Any, added: int) -> None:
        assert not isinstance(future, Fused)
        future.run()
        self.ran.append((future.name, future.per_rank, future.error))


class Job:
    """The queues of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived: dict[int, deque] = defaultdict(deque)
        self.sent: Counter[int] = Counter()
        self.nbytes = 0
        self.workers = [Worker() for _ in range(size)]
        self.queues = [
            NamedQueue(worker, Comm(self, rank), 1, "a test", lambda same: lambda per_rank: None, 0)  # type: ignore[arg-type]
            for rank, worker in enumerate(self.workers)
        ]

    def call(self, rank: int, name: str, **side: Any) -> None:
        self.queues[rank].call(
            name, Request(**{"same": [name, 10], "description": f"call of {name}", **side}), lambda per_rank: None
        )

    def settle(self) -> None:
        """Run until no message is on its way."""
        while any(self.arrived.values()):
            for rank in [rank for rank, messages in self.arrived.items() if messages]:
                for source, text in self.queues[rank].receive():
                    self.queues[rank].handle(source, text)
                self.queues[rank].send_decisions()
        self.queues[0].send_decisions()
        if any(self.arrived.values()):
            self.settle()


@pytest.fixture(autouse=True)
def _one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "world_ranks", lambda comm: tuple(range(comm.size)))


@pytest.mark.parametrize("size", SIZES)
def test_a_call_takes_few_messages_and_bytes(size: int) -> None:
    job = Job(size)
    for rank in np.random.default_rng(1).permutation(size).tolist():
        for name in ("a", "b") if rank % 2 else ("b", "a"):
            job.call(rank, name)
    job.settle()
    for worker in job.workers:
        assert sorted(name for name, *_ in worker.ran) == ["a", "b"]
        assert [each[:1] for each in worker.ran] == [each[:1] for each in job.workers[0].ran], "in one order"
        assert worker.ran[0][1:] == ([None] * size, None)
    assert max(job.sent.values()) <= 2 * (1 + math.ceil(math.log2(size)))
    assert sum(job.sent.values()) <= 4 * size
    assert job.nbytes <= 2 * size * (500 + 6 * math.log2(size))  # the ranks of a subtree are in its announcement


@pytest.mark.parametrize("size", SIZES[:-1])
def test_all_ranks_are_told_the_sides_of_all(size: int) -> None:
    job = Job(size)
    for rank in reversed(range(size)):
        job.call(rank, "sizes", own=[rank, "rows"])
    job.settle()
    for worker in job.workers:
        assert worker.ran == [("sizes", [[rank, "rows"] for rank in range(size)], None)]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_differ_are_refused_on_all(size: int) -> None:
    job = Job(size)
    for rank in range(size):
        job.call(rank, "a", same=["a", 10 + (rank == 1)], description=f"{10 + (rank == 1)} elements")
    job.settle()
    for worker in job.workers[:20]:
        error = worker.ran[0][2]
        assert isinstance(error, DisagreementError)
        assert str(error).endswith("\n" + table([f"{10 + (rank == 1)} elements" for rank in range(size)]))
    assert len({str(worker.ran[0][2]) for worker in job.workers}) == 1


@pytest.mark.parametrize("size", SIZES[:-1])
def test_ranks_that_have_joined_are_not_waited_for(size: int) -> None:
    """Whatever the order in which they join, and again after all have joined."""
    job, last = Job(size), []
    for order in (range(size), reversed(range(size))):
        ranks = list(order)
        for rank in ranks[:-1]:
            job.queues[rank].join(last.append)
        job.settle()
        job.call(ranks[-1], "rest", joinable=True)
        job.settle()
        job.call(ranks[-1], "no", same=["no"], joinable=False)
        job.settle()
        job.queues[ranks[-1]].join(last.append)
        job.settle()
        assert [name for name, *_ in job.workers[ranks[-1]].ran] == ["rest", "no", "join"]
        assert "have joined, and no join proxy" in str(job.workers[ranks[-1]].ran[1][2])
        for rank in ranks[:-1]:
            assert [name for name, *_ in job.workers[rank].ran] == ["rest", "join"]
        assert last == [ranks[-1]] * size
        last.clear()
        for worker in job.workers:
            worker.ran.clear()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 100])
def test_subtrees(size: int) -> None:
    for rank in range(size):
        _, children = binomial(rank, 0, size)
        below = [each for child in children for each in subtree(child, size)]
        assert sorted([rank, *below]) == list(subtree(rank, size))
