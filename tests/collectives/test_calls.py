"""Calls on one rank: their fingerprints, calls that fail halfway, and threads that call at the same time."""

import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import allreduce
from allreduce import errors, registry
from allreduce.arrays.dtypes import TYPES
from allreduce.arrays.memory_kinds import ALLOCATED, UNREGISTERED
from allreduce.arrays.ops import OPS
from allreduce.call import executor, queue
from allreduce.call.call import AGREEING, SEQUENCE_MASK, Call, fingerprint
from allreduce.call.queue import Worker
from allreduce.errors import OptionError
from allreduce.health import abort
from allreduce.transport.control import together


class Working(allreduce.Algorithm):
    """For calls on one rank, which do nothing."""

    def reduce(self, buffer: np.ndarray, op: object) -> None: ...


def working(monkeypatch: pytest.MonkeyPatch, work: Callable[..., object]) -> allreduce.AllReduce:
    monkeypatch.setattr("allreduce.backend.do_nothing", work)
    return allreduce.create(Working)


def test_two_threads_are_never_in_a_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is refused, also if the first one comes while the second is about to begin."""
    inside, leave = threading.Event(), threading.Event()
    entered, refused = [], []

    def work(*_: Any) -> None:
        entered.append(threading.current_thread())
        second()  # nor this thread twice
        inside.set()
        assert leave.wait(20)

    def second() -> None:
        try:
            reduce(np.ones(10), "sum")
        except OptionError as error:
            refused.append(error)

    with working(monkeypatch, work) as reduce:

        def first_comes() -> None:
            if threading.current_thread() is late:
                assert inside.wait(20)

        monkeypatch.setattr(executor.abort, "register_thread", first_comes)
        first, late = threading.Thread(target=reduce, args=(np.ones(10), "sum")), threading.Thread(target=second)
        late.start()
        first.start()
        late.join(5)
        leave.set()
        first.join()
        late.join()
        assert entered == [first]
        assert ["while another thread of this rank is in" in str(error) for error in refused] == [True, True]


@pytest.mark.parametrize("error", [errors.RankLeftError("rank 1 has left"), errors.CollectiveTimeoutError("late")])
def test_an_error_of_this_rank_is_not_taken_for_one_of_all(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may not have this error, so its `ranks` stays None, and no rank begins a collective clean-up."""

    class Lonely:
        def __init__(self, *_: Any) -> None:
            raise error

    with allreduce.Topology() as topology:
        with pytest.raises(type(error)):
            registry._made(Lonely, SimpleNamespace(comm=topology.world), {})  # type: ignore[arg-type]
        assert error.ranks is None  # type: ignore[attr-defined]


def test_a_forked_child_does_not_wait_for_its_parents_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has a copy of the workers but none of their threads, so at its end it would wait, and then end the
    job."""
    with allreduce.Topology() as topology:
        slow = topology.service(Worker).queue("slow", threaded=True)
        inside, leave = threading.Event(), threading.Event()
        future = slow.submit(lambda: (inside.set(), leave.wait(20)))
        assert inside.wait(20)
        monkeypatch.setattr(queue, "EXIT_SECONDS", 0.1)
        child = os.fork()
        if not child:
            monkeypatch.setattr(queue.abort, "end_job", lambda *_: os._exit(7))
            queue._end()
            os._exit(0)
        leave.set()
        future.wait()
        slow.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_check_finds_on_all_ranks_is_printed_once() -> None:
    """The whole traceback, also of the code that raised the error; the line with the error names the rank."""

    def own() -> None:
        raise OptionError("mine")

    with allreduce.Topology() as topology:
        with pytest.raises(errors.UnknownBackendError) as refused:
            allreduce.create("rign", topology)
        assert abort.report(refused.value).count("UnknownBackendError: no backend is called 'rign'") == 1
        with pytest.raises(OptionError) as raised:
            together(topology.world, own)
        text = abort.report(raised.value)
        assert text.splitlines()[-1] == "rank 0 of 1: allreduce.errors.OptionError: mine"
        assert text.count("OptionError: mine") == text.count("in own") == text.count("Traceback") == 1


def test_every_call_has_a_fingerprint_of_its_own() -> None:
    lengths, kinds, dtypes = (1, 70_000, 2**40 - 1), ("all_reduce", "broadcast"), (*TYPES, np.dtype("complex64"))
    choices = itertools.product(kinds, lengths, dtypes, OPS, (UNREGISTERED, ALLOCATED), "CF")
    shapes = ((6,), (2, 3), (3, 2)), (None, 0, 1)
    made = [Call(*each, *more) for each in choices for more in itertools.product(*shapes)]
    found = {fingerprint(each) for each in made}
    assert len(found) == len(made)
    assert min(found) > AGREEING
    assert max(found) < 2**63
    assert not any(each & SEQUENCE_MASK for each in found)
