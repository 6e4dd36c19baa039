"""Messages between rank 0 and the others, dealt work, and rounds that every rank answers."""

import time

import numpy as np
import pytest

from allreduce import Topology
from allreduce.elastic import exchange as exchanges
from allreduce.elastic.exchange import Exchange
from trainers.apps.serving.answering import AHEAD, Dealer, Rounds, answer_requests

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
    dealer, found = Dealer(exchange), {}
    given = [np.full(shape, 2, dtype) for shape, dtype in zip(SHAPES, "fdilbH", strict=True)]
    numbers = {
        dealer.deal(rank, {"text": "ü", "fails": fails}, given): (rank, fails)
        for rank in range(1, topology.size)
        for fails in (False, True, False)
    }

    def done() -> bool:
        found.update({answer.number: answer for answer in dealer.answers()})
        return len(found) == len(numbers)

    assert exchange.wait(done, 60)
    for number, (rank, fails) in numbers.items():
        answer = found[number]
        assert answer.rank == rank
        assert dealer.busy(rank) == 0
        if fails:
            assert answer.header == {"error": "ValueError: no such row"}
            continue
        assert answer.header == {"text": "üé"}
        assert [array.dtype for array in answer.arrays] == [array.dtype for array in given]
        assert all(np.array_equal(own, array + 1) for own, array in zip(answer.arrays, given, strict=True))
    end(exchange, topology)


def test_a_late_answer_is_dropped(exchange: Exchange, topology: Topology) -> None:
    if topology.rank:
        answer_requests(exchange, lambda header, arrays: ({"own": header["own"]}, arrays))
        end(exchange, topology)
        return
    dealer = Dealer(exchange)
    for rank in range(1, topology.size):
        dealer.forget(dealer.deal(rank, {"own": "first"}))
        assert dealer.busy(rank) == 1
        second, found = dealer.deal(rank, {"own": "second"}), []
        assert exchange.wait(lambda found=found: bool(found.extend(dealer.answers()) or found), 60)
        assert [(answer.number, answer.header) for answer in found] == [(second, {"own": "second"})]
        assert dealer.busy(rank) == 0
    assert dealer.late == topology.size - 1
    end(exchange, topology)


def test_rounds_name_who_is_late(exchange: Exchange, topology: Topology) -> None:
    """Rank 0 goes on without the last rank, whose answers it drops later."""
    rounds, rank, last = Rounds(exchange), topology.rank, topology.size - 1
    for number in range(1, 2 * AHEAD):
        rounds.begin()
        if rank:
            while rank == last and number == 3 and not rounds.over:
                time.sleep(0.001)
            rounds.send({"round": number}, [np.full(3, rank * number)])
            continue
        found = rounds.collect(time.monotonic() + (0.01 if number == 3 else 60))
        assert set(found) == set(range(1, topology.size)) - ({last} if number == 3 else set())
        for each, message in found.items():
            assert message.header["round"] == number
            assert message.arrays[0].tolist() == [each * number] * 3
    if rank == 0 and last > 0:
        assert rounds.late == 1
    end(exchange, topology)


def test_enough_ends_the_wait(exchange: Exchange, topology: Topology) -> None:
    rounds = Rounds(exchange)
    rounds.begin()
    if topology.rank:
        if topology.rank == 1:
            rounds.send({}, [])
    else:
        found = rounds.collect(time.monotonic() + 60, enough=lambda found: topology.size == 1 or 1 in found)
        assert set(found) == ({1} if topology.size > 1 else set())
    end(exchange, topology)


def test_a_late_rank_learns_that_its_rounds_are_over(exchange: Exchange, topology: Topology) -> None:
    """Rank 0 ends many rounds before the others begin the first one."""
    rounds, last = Rounds(exchange), 2000
    for _ in range(0 if topology.rank else last):
        rounds.begin()
        rounds.end()
    if topology.rank:
        topology.world.Recv(np.empty(1), 0)
        computed = 0
        for _ in range(last):
            rounds.begin()
            if not rounds.over:
                computed += 1
                rounds.send({}, [])
        assert computed <= last // 10
    for rank in range(1, topology.size if topology.rank == 0 else 0):
        topology.world.Send(np.empty(1), rank)
    end(exchange, topology)


def test_a_rank_that_is_ahead_waits(exchange: Exchange, topology: Topology) -> None:
    """So nothing grows without limit; the end of rank 0 releases it."""
    rounds = Rounds(exchange)
    if topology.rank:
        for _ in range(AHEAD + 5):
            rounds.begin()
            rounds.send({}, [])
        assert topology.rank
    else:
        ahead: list[object] = []
        exchange.wait(lambda: bool(ahead.extend(exchange.poll())), 0.3)
        assert len(ahead) <= AHEAD * (topology.size - 1)
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
