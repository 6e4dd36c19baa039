"""Messages between rank 0 and the others, and dealt work."""

import time

import numpy as np
import pytest

from allreduce import Topology
from allreduce.elastic import exchange as exchanges
from allreduce.elastic.exchange import Exchange, Message
from trainers.apps.serving.answering import NUMBER, answer_requests

SHAPES = [(), (0,), (3, 0, 2), (5,), (70_000, 3), (1 << 20,)]


@pytest.fixture
def exchange(topology: Topology) -> Exchange:
    return Exchange(topology)


@pytest.fixture
def topology() -> Topology:
    return Topology()


def end(exchange: Exchange, topology: Topology) -> None:
    exchange.close()
    exchange.close()
    topology.close()


def test_work_is_answered(exchange: Exchange, topology: Topology) -> None:
    def handle(header: dict, arrays: list[np.ndarray]) -> tuple[dict, list[np.ndarray]]:
        if header["fails"]:
            raise ValueError("no such row")
        return {"text": header["text"] + "é"}, [array + array.dtype.type(1) for array in arrays]

    if topology.rank:
        answer_requests(exchange, handle)
        end(exchange, topology)
        return
    given = [np.full(shape, 2, dtype) for shape, dtype in zip(SHAPES, "fdilbH", strict=True)]
    work = [(rank, fails) for rank in range(1, topology.size) for fails in (False, True, False)]
    for number, (rank, fails) in enumerate(work):
        exchange.send(rank, {NUMBER: number, "text": "ü", "fails": fails}, given)
    found: list[Message] = []
    assert exchange.wait(lambda: bool(found.extend(exchange.poll()) or len(found) == len(work)), 60)
    numbers = [answer.header.pop(NUMBER) for answer in found]
    for answer, number in zip(found, numbers, strict=True):
        assert answer.source == work[number][0]
        if work[number][1]:
            assert answer.header == {"error": "ValueError: no such row"}
            continue
        assert answer.header == {"text": "üé"}
        assert [array.dtype for array in answer.arrays] == [array.dtype for array in given]
        assert all(np.array_equal(own, array + 1) for own, array in zip(answer.arrays, given, strict=True))
    assert sorted(numbers) == list(range(len(work)))
    end(exchange, topology)


def test_a_rank_that_is_late_at_the_end_learns_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the whole timeout of the topology."""
    monkeypatch.setattr(exchanges, "CLOSE_SECONDS", 0.1)
    topology = Topology(timeout=6)
    exchange = Exchange(topology)
    wait, waits = exchange.wait, []
    monkeypatch.setattr(exchange, "wait", lambda *given: waits.append(wait(*given)))
    if topology.rank and topology.rank == topology.size - 1:
        time.sleep(0.5)
    exchange.close()
    if topology.rank:
        assert waits == [True]
    topology.close()


def test_the_topology_closes_it(exchange: Exchange, topology: Topology) -> None:
    topology.close()
    assert exchange.closed
