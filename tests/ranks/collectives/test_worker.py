"""The worker of a topology: calls of several users in one order, compared on the way."""

import gc
import threading
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.engine.queue import Worker
from allreduce.errors import BrokenError, ClosedError, DisagreementError
from allreduce.wrappers.background import Background

THREADED = pytest.mark.parametrize("threaded", [False, True])


@pytest.fixture
def topology() -> allreduce.Topology:
    return allreduce.Topology()


@THREADED
def test_users_may_submit_in_different_orders(topology: allreduce.Topology, threaded: bool) -> None:
    """Rank by rank another order of three users; every call's sum is right, so no two were mixed up."""
    comm = topology.private()
    lanes = [topology.once(Worker).queue(f"user {number}", threaded=threaded) for number in range(3)]
    results = np.zeros((20, 3))

    def add(turn: int, number: int) -> None:
        results[turn, number] = comm.allreduce(100 * turn + number)

    pending = []
    for turn in range(20):
        order = np.random.default_rng([topology.rank, turn]).permutation(3).tolist()
        pending += [lanes[number].submit(lambda t=turn, n=number: add(t, n), "adds", [turn]) for number in order]
    for each in reversed(pending):
        each.wait()
    wanted = topology.size * (100 * np.arange(20)[:, None] + np.arange(3))
    np.testing.assert_array_equal(results, wanted)
    assert all(each.done() and each.end >= each.begin > 0 for each in pending)
    for lane in lanes:
        lane.close()
    topology.close()


@THREADED
def test_a_call_that_only_some_have_does_not_hold_up_others(topology: allreduce.Topology, threaded: bool) -> None:
    """Rank 0 submits to `a` first, the others only when `b` has run everywhere."""
    a, b = (topology.once(Worker).queue(name, threaded=threaded) for name in "ab")
    ran: list[str] = []
    early = a.submit(lambda: ran.append("a")) if topology.rank == 0 else None
    b.submit(lambda: ran.append("b")).wait()
    (early or a.submit(lambda: ran.append("a"))).wait()
    assert ran == (["b", "a"] if topology.size > 1 else ["a", "b"])
    topology.close()


@THREADED
def test_ranks_that_disagree_hear_of_it(topology: allreduce.Topology, threaded: bool, world: MPI.Intracomm) -> None:
    if topology.size == 1:
        pytest.skip("a rank agrees with itself")
    lane, other = topology.once(Worker).queue("optimizer", threaded=threaded), topology.once(Worker).queue("another")
    lane.submit(lambda: None, "averages", [1]).wait()
    ran: list[int] = []
    different = lane.submit(lambda: ran.append(1), "averages", [2 + (topology.rank == 0)])
    with pytest.raises(
        DisagreementError, match=r"rank 0: averages of optimizer \[3\]\n  rank 1: averages of"
    ) as caught:
        different.wait()
    assert caught.value.ranks == tuple(range(topology.size))
    assert not ran
    assert len(set(world.allgather(str(caught.value)))) == 1
    with pytest.raises(BrokenError, match=r"optimizer can't go on.*DisagreementError"):
        lane.submit(lambda: None)
    other.submit(lambda: ran.append(2), "goes on").wait()  # another user's calls do not suffer
    assert ran == [2]
    topology.close()


@THREADED
def test_what_a_call_raises_is_raised_by_wait(topology: allreduce.Topology, threaded: bool) -> None:
    lane = topology.once(Worker).queue("user", threaded=threaded)

    def fail() -> None:
        raise ValueError("on purpose")

    failing, following = lane.submit(fail), lane.submit(lambda: None)
    with pytest.raises(ValueError, match="on purpose"):
        failing.wait()
    following.wait()
    lane.close()
    with pytest.raises(ClosedError):
        lane.submit(lambda: None)
    topology.close()


def test_the_thread_runs_alone_and_ends(topology: allreduce.Topology) -> None:
    lane = topology.once(Worker).queue("user", threaded=True)
    names = []
    lane.submit(lambda: names.append(threading.current_thread().name)).wait()
    assert names == ["allreduce worker"]
    before = threading.active_count()
    topology.close()
    assert threading.active_count() == before - 1


@pytest.mark.parametrize("name", ["ring", "auto"])
def test_two_backgrounds_on_one_backend(name: str, topology: allreduce.Topology) -> None:
    """Two users of the same backend, in another order on another rank: the sums are right."""
    inner = allreduce.create(name, topology)
    users = [Background(topology, inner=inner) for _ in range(2)]
    buffers = [user.allocate(5000, "float64") for user in users]
    for turn in range(10):
        for number, buffer in enumerate(buffers):
            buffer[:] = (topology.rank + 1) * (number + 1) + turn
        order = (0, 1) if (topology.rank + turn) % 2 else (1, 0)
        pending = [users[number].submit(lambda n=number: inner(buffers[n], "sum"), "sum") for number in order]
        for each in pending:
            each.wait()
        ranks = topology.size * (topology.size + 1) / 2
        for number, buffer in enumerate(buffers):
            assert (buffer == ranks * (number + 1) + topology.size * turn).all()
    for user in users:
        user.close()
    inner.close()
    topology.close()


def test_a_thread_that_dies_leaves_nobody_waiting(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    """Whatever ends it, on all ranks here: who waits for a call gets that error, and the next call is refused."""
    if topology.size == 1:
        pytest.skip("one rank hears of no announcements")
    lane = topology.once(Worker).queue("user", threaded=True)
    lane.submit(lambda: None).wait()

    def die() -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(topology.once(Worker), "_listen", die)
    world.Barrier()
    with pytest.raises(MemoryError, match="on purpose"):
        lane.submit(lambda: None).wait(20)
    with pytest.raises(BrokenError, match="MemoryError: on purpose"):
        lane.submit(lambda: None)
    world.Barrier()
    topology.abandon()


def test_two_auto_backends_in_two_threads(topology: allreduce.Topology) -> None:
    """Each makes its parts in the middle of its calls, on communicators that the other one does not use."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    backends = [allreduce.create("auto", topology) for _ in range(2)]
    wrong: list[object] = []

    def train(number: int) -> None:
        for length in (10, 5_000, 300_000, 3_000_000) * 2:
            array = np.full(length, float(topology.rank + number))
            backends[number](array, "sum")
            wanted = topology.size * (topology.size - 1) / 2 + topology.size * number
            if not (array == wanted).all():
                wrong.append((number, length))

    threads = [threading.Thread(target=train, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    topology.close()


@pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="one rank agrees with itself")
def test_a_broken_lane_keeps_nothing_alive(topology: allreduce.Topology) -> None:
    """An error holds all that the functions held through which it went: an optimizer, say."""
    lane = topology.once(Worker).queue("user")

    class Large:
        pass

    def disagree() -> weakref.ref:
        held = Large()
        with pytest.raises(DisagreementError):
            lane.submit(lambda: None, "call", [topology.rank]).wait()
        return weakref.ref(held)

    held = disagree()
    gc.collect()
    assert held() is None
    with pytest.raises(BrokenError, match="DisagreementError: the ranks disagree"):
        lane.submit(lambda: None)
