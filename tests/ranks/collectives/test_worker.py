"""The worker of a topology: runs the calls of several users in one order, and compares them between ranks."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.call.announcements import Request
from allreduce.call.queue import Future, Worker
from allreduce.errors import (
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    DisagreementError,
    OptionError,
    RankLeftError,
    UnsupportedOpError,
)
from allreduce.health import stall
from allreduce.transport.wait import wait_for

JOBS = "openmpi 1 2, mpich 2"

WORLD = MPI.COMM_WORLD
several = pytest.mark.skipif(WORLD.size == 1, reason="one rank waits for nobody")
THREADED = pytest.mark.parametrize("threaded", [False, True])


@pytest.fixture
def topology() -> Generator[allreduce.Topology]:
    made = allreduce.Topology()
    yield made
    if not made.closed:
        made.close()


@THREADED
def test_users_may_submit_in_different_orders(topology: allreduce.Topology, threaded: bool) -> None:
    """Three users submit in a different order on each rank; every call's sum is right, so no calls were mixed up."""
    comm = topology.private()
    queues = [topology.service(Worker).queue(f"user {number}", threaded=threaded) for number in range(3)]
    results = np.zeros((20, 3))

    def add(turn: int, number: int) -> None:
        results[turn, number] = comm.allreduce(100 * turn + number)

    pending = []
    for turn in range(20):
        order = np.random.default_rng([topology.rank, turn]).permutation(3).tolist()
        pending += [queues[number].submit(lambda t=turn, n=number: add(t, n), f"adds {turn}") for number in order]
    for each in reversed(pending):
        each.wait()
    wanted = topology.size * (100 * np.arange(20)[:, None] + np.arange(3))
    np.testing.assert_array_equal(results, wanted)
    assert all(each.done() for each in pending)
    for queue in queues:
        queue.close()


@THREADED
def test_a_call_that_only_some_have_does_not_hold_up_others(topology: allreduce.Topology, threaded: bool) -> None:
    """Rank 0 submits to `a` first, the others only when `b` has run everywhere."""
    a, b = (topology.service(Worker).queue(name, threaded=threaded) for name in "ab")
    ran: list[str] = []
    early = a.submit(lambda: ran.append("a")) if topology.rank == 0 else None
    b.submit(lambda: ran.append("b")).wait()
    (early or a.submit(lambda: ran.append("a"))).wait()
    assert ran == (["b", "a"] if topology.size > 1 else ["a", "b"])


@several
@THREADED
def test_ranks_that_disagree_hear_of_it(topology: allreduce.Topology, threaded: bool) -> None:
    queue, other = (
        topology.service(Worker).queue("optimizer", threaded=threaded),
        topology.service(Worker).queue("another"),
    )
    queue.submit(lambda: None, "averages 1").wait()
    ran: list[int] = []
    different = queue.submit(lambda: ran.append(1), f"averages {2 + (topology.rank == 0)}")
    with pytest.raises(DisagreementError, match=r"rank 0: averages 3 of optimizer\n  rank 1: averages 2 of") as caught:
        different.wait()
    assert caught.value.ranks == tuple(range(topology.size))
    assert not ran
    assert len(set(WORLD.allgather(str(caught.value)))) == 1
    with pytest.raises(BrokenError, match=r"optimizer is broken.*DisagreementError"):
        queue.submit(lambda: None)
    other.submit(lambda: ran.append(2), "goes on").wait()  # another user's calls do not suffer
    assert ran == [2]


@THREADED
def test_a_queue_that_goes_on_loses_only_the_call_that_differs(topology: allreduce.Topology, threaded: bool) -> None:
    queue, ran = topology.service(Worker).queue("user", threaded=threaded, goes_on=True), list[int]()
    first = [queue.submit(lambda: ran.append(0), "before"), queue.submit(lambda: ran.append(1), f"sum {topology.rank}")]
    last = queue.submit(lambda: ran.append(2), "after")
    if topology.size > 1:
        with pytest.raises(DisagreementError, match=r"rank 0: sum 0 of user\n  rank 1: sum 1 of user"):
            first[1].wait()
    last.wait()
    assert ran == ([0, 2] if topology.size > 1 else [0, 1, 2])
    queue.close()


def test_announcements_of_queues_that_come_or_have_gone(topology: allreduce.Topology) -> None:
    """A rank keeps what it hears of a queue that it is about to create, and nothing of one that it has dropped."""
    worker = topology.service(Worker)
    gone = worker.queue("gone")
    if topology.rank > 0:
        gone.submit(lambda: None, "which rank 0 never makes")
    topology.agree([], "all have submitted")
    gone.drop()
    for number in range(5):
        ran: list[int] = []
        queue = worker.queue(f"user {number}", threaded=number > 2)
        if number % 2 == topology.rank % 2:
            time.sleep(0.01)
        queue.submit(lambda ran=ran: ran.append(1)).wait()
        assert ran == [1]
        queue.close()
    assert (worker._early, worker._queues) == ([], {})


@several
@THREADED
@pytest.mark.parametrize("first", [False, True], ids=["the last rank", "rank 0"])
@pytest.mark.parametrize("early", [False, True], ids=["before", "after the others' calls"])
def test_calls_end_when_a_rank_has_dropped_their_queue(
    first: bool, early: bool, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_STALL_SECONDS", "0.4")  # waits are looked at after 0.2 seconds
    monkeypatch.setattr(stall, "LEFT_SECONDS", 0.2)
    with allreduce.Topology(timeout=60) as topology:
        queue, other = (topology.service(Worker).queue(name, threaded=threaded) for name in ("user", "another"))
        queue.submit(lambda: None, "call").wait()
        drops = 0 if first else topology.size - 1
        if topology.rank != drops and early:
            waiting = queue.submit(lambda: None, "call")
        if early:
            other.submit(lambda: None, "all ranks are here").wait()
        if topology.rank == drops:
            queue.abandon()
        else:
            future = waiting if early else queue.submit(lambda: None, "call")
            with pytest.raises(RankLeftError, match=f"rank {drops} has left: it has dropped user"):
                future.wait()
            with pytest.raises(BrokenError, match="has dropped user"):
                queue.submit(lambda: None)
        other.submit(lambda: None, "goes on").wait()
        for each in (queue, other):
            each.close()


@THREADED
def test_what_a_call_raises_is_raised_by_wait(topology: allreduce.Topology, threaded: bool) -> None:
    queue = topology.service(Worker).queue("user", threaded=threaded)

    def fail() -> None:
        raise ValueError("on purpose")

    failing, following = queue.submit(fail), queue.submit(lambda: None)
    with pytest.raises(ValueError, match="on purpose"):
        failing.wait()
    following.wait()
    queue.close()
    with pytest.raises(ClosedError):
        queue.submit(lambda: None)


def test_a_caller_that_waits_does_the_work_itself(topology: allreduce.Topology) -> None:
    """The worker thread may do it while it is awake; no call is lost in any order of the ranks."""
    queues = [topology.service(Worker).queue(name, threaded=True) for name in "ab"]
    threads: list[threading.Thread] = []
    mine = False
    while not WORLD.allreduce(mine, MPI.LAND):  # the worker thread falls asleep once no call is left
        queues[0].submit(lambda: threads.append(threading.current_thread()), waits=True).wait()
        mine |= threads.pop() is threading.current_thread()
    for turn in range(20):
        first, second = queues if (topology.rank + turn) % 2 else queues[::-1]
        earlier = first.submit(lambda: threads.append(threading.current_thread()))
        second.submit(lambda: threads.append(threading.current_thread()), waits=True).wait()
        earlier.wait()
        assert len(threads) == 2
        threads.clear()


@several
def test_the_worker_thread_goes_on_after_an_interrupt(topology: allreduce.Topology) -> None:
    queue = topology.service(Worker).queue("interrupted", threaded=True)
    done = threading.Event()
    if topology.rank == 0:
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            queue.submit(done.set, waits=True)
        assert done.wait(20)
    else:
        time.sleep(0.5)
        queue.submit(done.set, waits=True).wait()
    queue.submit(lambda: None, waits=True).wait()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_the_thread_runs_before_others_where_that_is_permitted(topology: allreduce.Topology) -> None:
    found: list[int] = []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def try_it() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority() - 10)
        found.append(priority())

    before = priority()
    permitted = threading.Thread(target=try_it)
    permitted.start()
    permitted.join()
    queue = topology.service(Worker).queue("a user", threaded=True)
    queue.submit(lambda: found.append(priority())).wait()
    assert found[0] == found[1]
    assert priority() == before  # of this thread


def test_submit_returns_at_once(topology: allreduce.Topology) -> None:
    """A rank submits two calls before the others submit the first one; and a call of the main thread waits for both."""
    with allreduce.create("ring", topology) as reduce:
        arrays = np.ones(10), np.full(10, 2.0)
        reduce.submit(np.ones(1)).wait()  # the first call is collective
        reduce(np.ones(1), "sum")  # so the main thread has called last
        if topology.rank > 0:
            WORLD.Barrier()
        pending = [reduce.submit(array, "sum") for array in arrays]
        if topology.rank == 0:
            WORLD.Barrier()
        reduce(arrays[0], "sum")
        for each in pending:
            each.wait()
        assert (arrays[0] == topology.size**2).all()
        assert (arrays[1] == 2 * topology.size).all()


@pytest.mark.parametrize("alone", [False, True])
def test_an_invalid_array_is_submitted(alone: bool, topology: allreduce.Topology) -> None:
    """By one rank, or by all: the future of each raises an error that names the cause, and other calls go on."""
    with allreduce.create("ring", topology) as reduce:
        reduce.submit(np.ones(1)).wait()
        invalid = not alone or topology.rank == topology.size - 1
        future = reduce.submit(np.ones(3), "no such op" if invalid else "sum")
        kind = DisagreementError if alone and topology.size > 1 else UnsupportedOpError
        with pytest.raises(kind, match="no such op"):
            future.wait(20)
        array = np.ones(3)
        reduce(array, "sum")
        assert (array == topology.size).all()


@several
def test_a_thread_that_dies_leaves_nobody_waiting(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks: a user who waits for a call gets the error that ended the thread, and the next call is refused."""
    queue = topology.service(Worker).queue("user", threaded=True)
    queue.submit(lambda: None).wait()

    def die() -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(topology.service(Worker), "_listen", die)
    WORLD.Barrier()
    with pytest.raises(MemoryError, match="on purpose"):
        queue.submit(lambda: None).wait(20)
    with pytest.raises(BrokenError, match="MemoryError: on purpose"):
        queue.submit(lambda: None)
    WORLD.Barrier()
    topology.abandon()


@THREADED
def test_a_call_that_exceeds_its_limit_ends_all_that_wait(topology: allreduce.Topology, threaded: bool) -> None:
    """On this rank alone, whatever its thread does. The later call ends first, because a user may wait for it."""
    if topology.size == 1 or (threaded and MPI.Query_thread() != MPI.THREAD_MULTIPLE):
        pytest.skip("nothing looks at the waits of one rank; a thread needs MPI_THREAD_MULTIPLE")
    queue, leave, ended = topology.service(Worker).queue("user", threaded=threaded, alone=True), threading.Event(), []

    class Noted(Future):
        def finish(self, error: BaseException | None) -> None:
            super().finish(error)
            ended.append(self.description)
            leave.set()

    first = Noted(lambda _: leave.wait(60), queue, "waits", limit=0.5)
    second = Noted(lambda _: None, queue, "comes later")
    for future in (first, second):
        topology.service(Worker).submit(queue, future)
    for future in (first, second):
        with pytest.raises(CollectiveTimeoutError, match=r"waits was not done within 0\.5 s"):
            future.wait(50)
    assert ended[:2] == ["comes later", "waits"]
    assert second.begin == float("inf")  # it never began
    with pytest.raises(BrokenError, match="an earlier call failed"):
        queue.submit(lambda: None)


def test_the_error_of_an_ended_call_stays() -> None:
    """Also if its work, which nobody waits for any more, ends in another error."""

    def work(_: object) -> None:
        future.finish(CollectiveTimeoutError("too late"))
        raise MemoryError("on purpose")

    future = Future(work)
    future.run()
    with pytest.raises(CollectiveTimeoutError, match="too late"):
        future.wait()


def test_no_limit_applies_before_a_call_has_begun(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stall detector looks just before the worker runs or refuses a call."""
    worker, looks = topology.service(Worker), []

    def looks_first(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def look(*arguments: object) -> None:
            before = set(threading.enumerate())
            worker.check_deadline()
            for thread in set(threading.enumerate()) - before:
                thread.join(20)
            looks.append(name)
            method(*arguments)

        monkeypatch.setattr(owner, name, look)

    looks_first(Future, "run")
    looks_first(Future, "finish")
    queue = worker.queue("user")

    def submit(description: str) -> Future:
        return worker.submit(queue, Future(lambda _: None, queue, description, limit=60), Request(description))

    submit("call").wait()
    if topology.size > 1:
        with pytest.raises(DisagreementError):
            submit(f"call {topology.rank}").wait()
    assert looks == ["run", "finish", "finish"][: 2 * topology.size]


def test_a_wait_that_begins_after_its_queue_was_given_up_ends(topology: allreduce.Topology) -> None:
    """As in a call between its look at `broken` and its wait, while another thread gives up the queue."""
    worker = topology.service(Worker)
    queue, ended = worker.queue("user", alone=True), []
    comm = topology.private(wait=queue.wait)

    def work() -> None:
        worker.give_up(queue, ClosedError("given up"))
        try:
            wait_for(comm, MPI.Grequest.Start(None, None, None), "what never comes", limit=20)
        except Exception as error:
            ended.append(str(error))

    with pytest.raises(ClosedError, match="given up"):
        queue.submit(work).wait()
    assert ended == ["given up"]


def test_two_auto_backends_in_two_threads(topology: allreduce.Topology) -> None:
    """Each creates its parts during its calls, on communicators that the other does not use."""
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


@several
def test_a_broken_queue_keeps_nothing_alive(topology: allreduce.Topology) -> None:
    """An error references everything that the functions in its traceback hold: an optimizer, say."""
    queue = topology.service(Worker).queue("user")

    class Large:
        pass

    def disagree() -> weakref.ref:
        held = Large()
        with pytest.raises(DisagreementError):
            queue.submit(lambda: None, f"call {topology.rank}").wait()
        return weakref.ref(held)

    held = disagree()
    gc.collect()
    assert held() is None
    with pytest.raises(BrokenError, match="DisagreementError: the ranks disagree"):
        queue.submit(lambda: None)


def test_a_worker_keeps_no_topology_alive() -> None:
    """A program that drops its topology tells the other ranks, also if a thread of its worker runs."""
    topology = allreduce.Topology()
    backend = allreduce.create("ring", topology)
    backend.submit(np.ones(3), "sum").wait()
    held = weakref.ref(topology)
    del topology, backend
    gc.collect()
    assert held() is None


def test_a_queue_is_made_in_one_thread_and_a_backend_in_another(topology: allreduce.Topology) -> None:
    """In any order: they agree on communicators of their own."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    first, second = (allreduce.create("ring", topology) for _ in range(2))
    first.submit(np.ones(3), "sum").wait()  # the worker exists
    failed: list[Exception] = []

    def act(number: int) -> None:
        try:
            if number == topology.rank % 2:
                second.submit(np.ones(3), "sum").wait()  # its first one makes a queue
            else:
                allreduce.create("ring", topology)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=act, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(60)
    assert not failed


def test_a_call_that_was_submitted_before_the_thread_started_runs(topology: allreduce.Topology) -> None:
    worker = topology.service(Worker)
    future, before = worker.queue("user").submit(lambda: None), threading.active_count()
    worker.queue("another", threaded=True)
    future.wait(20)
    topology.close()
    assert threading.active_count() == before  # the thread has ended


def test_polls_do_the_work(topology: allreduce.Topology) -> None:
    """Without a thread, waits of no length alone end a call."""
    future, end = topology.service(Worker).queue("user").submit(lambda: None), time.monotonic() + 20
    while not future.done() and time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            future.wait(0)
    assert future.done()


def test_a_name_is_free_as_soon_as_its_call_is_done(topology: allreduce.Topology) -> None:
    queue, request = topology.service(Worker).queue("user"), Request(None, description="call")
    first = queue.call("name", request, lambda per_rank: None)
    with pytest.raises(OptionError, match="a call named name has not ended yet"):
        queue.call("name", request, lambda per_rank: None)
    first.wait()
    queue.call("name", request, lambda per_rank: None).wait()
    queue.close()
