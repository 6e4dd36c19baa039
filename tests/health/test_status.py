"""The status messages of ranks in a long wait: on 128 ranks, simulated in one process, and in jobs."""

import gc
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from allreduce.errors import RankLeftError
from allreduce.health import status
from allreduce.health.status import ENDED, LEFT, STALLED, WAITING, Fact, RankFacts
from allreduce.health.status_messages import StatusMessages
from allreduce.process import proc
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.wait import NamedCall, WaitRecord
from tests.conftest import JobRunner
from tests.health.network import Comm, Network, Request


@pytest.fixture(autouse=True)
def _ranks_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))


@pytest.fixture(params=[5, 128], ids=str)
def job(request: pytest.FixtureRequest) -> tuple[Network, list[StatusMessages]]:
    return make(request.param)


def make(ranks: int) -> tuple[Network, list[StatusMessages]]:
    network = Network(ranks)
    return network, [StatusMessages(Comm(network, rank)) for rank in range(ranks)]  # type: ignore[arg-type]


def rounds(every: Sequence[StatusMessages], without: Collection[int] = ()) -> None:
    """Let ranks exchange messages until no rank learns anything new."""
    known = -1
    while known != (known := sum(messages._changes for messages in every)):
        for messages in [*every, *every]:  # the first ones receive messages of the last ones in their second turn
            if messages.rank not in without:
                messages.exchange()


def all_wait(every: list[StatusMessages], but: int, text: str = "all_reduce") -> WaitRecord:
    wait = WaitRecord(7)
    wait.begin(NamedCall(text, 5))
    for messages in every:
        if messages.rank != but:
            messages.set_waits([(wait, NamedCall(text, 5))])
    return wait


def test_all_ranks_hear_of_all_in_a_few_short_messages(job: tuple[Network, list[StatusMessages]]) -> None:
    network, every = job
    size, late = len(every), len(every) * 3 // 4
    wait = all_wait(every, late)
    rounds(every)
    for messages in every:
        assert messages.state == {Fact(WAITING, 7, 1, 5, "all_reduce"): {*range(size)} - {late}}
    few = 2 * math.ceil(math.log2(size))
    assert max(Counter(rank for pair in network.pairs for rank in pair).values()) <= few
    assert max(network.sent.values()) <= 4 * few
    assert network.longest < 2000
    call = NamedCall("all_reduce", 5)
    assert [messages.rank for messages in every if messages.rank != late and messages.is_reporter(wait, call, 8)] == [0]
    assert {messages.reporter(wait, call) for messages in (every[0], every[-1])} == {0}
    assert every[-1].table(call).splitlines() == [
        f"  ranks 0-{late - 1}, {late + 1}-{size - 1}: wait in all_reduce".replace("4-4", "4"),
        f"  rank {late}: {status.NOT_COME}",
    ]
    for messages in every:
        messages.set_waits([])
    rounds(every)
    assert all(messages.state == {} for messages in every)  # whatever way the older and the newer message take


def test_a_straggler_has_one_unread_message_of_each_neighbour(job: tuple[Network, list[StatusMessages]]) -> None:
    """It computes while it holds the GIL, say, and the others wait for it in each of many steps."""
    network, every = job
    late = len(every) // 2
    for step in range(2):
        all_wait(every, late, f"step {step}")
        for messages in every:
            if messages.rank != late:
                messages.exchange()
    unread = Counter(source for source, _, _ in network.arrived[late])
    assert 1 <= len(unread) <= 2 * math.ceil(math.log2(len(every)))
    assert set(unread.values()) == {1}


def test_ends_of_programs_are_told_in_a_few_messages(job: tuple[Network, list[StatusMessages]]) -> None:
    """A rank that has left sends no further messages."""
    network, every = job
    for messages in every:
        messages.announce_leaving("it has ended its program", None)
    assert max(network.sent.values()) <= 2 * math.ceil(math.log2(len(every)))
    network, every = make(100)
    every[30].announce_leaving("it has ended its program", None)
    rounds(every, without=[30])
    assert all(30 in messages._gone for messages in every if messages.rank != 30)


def after_a_failure(
    ranks: int, gone: Collection[int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Network, list[StatusMessages]]:
    """Return ranks after ranks `gone` have failed. known: MPI has told the others."""
    monkeypatch.setattr(ulfm, "failed", lambda comm: tuple(gone) if known else ())
    monkeypatch.setattr(ulfm, "acknowledge", lambda comm: None)
    network, every = make(ranks)
    network.failed = frozenset(gone)
    for messages in every:
        messages.lost = True
        messages.use_unrevoked(messages.comm, WaitRecord(-1))
    return network, [messages for messages in every if messages.rank not in gone]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("gone", [[0, 1, 2, 3], [0, 101, 102, 104, 99, 98, 96, 116, 228], [*range(101, 200)]], ids=len)
def test_after_a_failure_a_rank_that_leaves_tells_a_few_and_all_hear_of_it(
    gone: list[int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if ranks between them are gone, and whether or not the rank knows that."""
    network, living = after_a_failure(256, gone, known, monkeypatch)
    leaver = next(messages for messages in living if messages.rank == 100)
    leaver.announce_leaving("it has ended its program", None)
    others = [messages for messages in living if messages is not leaver]
    rounds(others)
    assert all(100 in messages._gone for messages in others)
    assert max(network.sent.values()) <= 2 * math.log2(256)


def test_a_rank_whose_receivers_have_all_ended_tells_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended a moment before, so it does not know; the last living rank hears of it all the same."""
    monkeypatch.setattr(ulfm, "in_force", lambda: True)
    network, every = after_a_failure(64, [], False, monkeypatch)

    def only_one_lives(done: Callable[[], bool], *_: object) -> bool:
        every[40].exchange()
        return done()

    monkeypatch.setattr("allreduce.health.status_messages.wait_until", only_one_lives)
    every[9].announce_leaving("it has ended its program", None)
    with pytest.raises(
        RankLeftError, match="rank 9 has left: it has ended its program, while this rank waits for it in x"
    ):
        every[40].check_present([9], -1, "x")
    every[40].check_present([8], -1, "x")
    assert 11 < network.sent[9] < 63


def test_a_rank_that_takes_no_messages_holds_up_no_news() -> None:
    _, every = make(16)
    all_wait(every, 2)
    rounds(every, without=[2])
    lines = ["  ranks 0-1, 3-15: wait in all_reduce", f"  rank 2: {status.NOT_COME}"]
    others = [messages for messages in every if messages.rank != 2]
    assert all(messages.table(NamedCall("all_reduce")).splitlines() == lines for messages in others)
    rounds(every)  # it goes on, and hears of all
    assert every[2].state == {Fact(WAITING, 7, 1, 5, "all_reduce"): {*range(16)} - {2}}


def test_a_wait_that_has_ended_in_an_error_is_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks time out at about the same moment; the later one must not report that the other has not come."""
    _, every = make(3)
    wait = all_wait(every, 1)
    every[2].note_given_up(wait, NamedCall("all_reduce", 5))
    every[2].set_waits([])
    rounds(every)
    assert "  ranks 0, 2: wait in all_reduce" in every[0].table(NamedCall("all_reduce", 5))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    every[2].set_waits([])
    rounds(every)
    assert "  ranks 1-2: have not arrived" in every[0].table(NamedCall("all_reduce", 5))


@pytest.mark.parametrize("half_received", [False, True])
def test_messages_on_their_way_outlive_a_topology_that_is_dropped(
    half_received: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI still reads a message until its receiver takes it, and writes into one that is half received."""
    kept: list[Any] = []
    monkeypatch.setattr("allreduce.health.status_messages.free_later", kept.append)
    network, every = make(2)
    network.stopped[1] = []
    all_wait(every, 0 if half_received else 1)
    for messages in every[::-1]:
        messages.exchange()
    del messages, every[0]
    gc.collect()
    if half_received:
        assert any(network.stopped[1][0]._buffer is part for each in kept for part in each)
    else:
        assert len(kept) == 1
        assert b"all_reduce" in kept[0][1]


def test_every_rank_hears_which_one_has_left_and_which_differ() -> None:
    _, every = make(10)
    wait = all_wait(every, 9)
    other = NamedCall("broadcast", 6)
    every[9].set_waits([(wait, other)])
    every[3].announce_leaving("it has ended its program", None)
    rounds(every)
    for messages in every[:3] + every[4:]:
        assert messages.disagree(wait, other if messages.rank == 9 else NamedCall("all_reduce", 5))
        error = messages.left_error(wait, time.monotonic() + 1, NamedCall("all_reduce"))
        assert "rank 3 has left: it has ended its program" in str(error)


def test_a_table_has_at_most_20_lines() -> None:
    state = {Fact(WAITING, 1, rank, 0, f"call {rank}"): {rank} for rank in range(1000)}
    state[Fact(LEFT, 0, 1, 0, "it has ended its program")] = {2000}
    lines = status.table(state, 2100, 5, "call 5").splitlines()
    assert len(lines) <= 20
    assert "  rank 2000: has left: it has ended its program" in lines
    assert any(status.SEVERAL[status.NOT_COME] in line for line in lines)
    assert "call 5" in status.table({}, 2, 0, "call 5")


def test_a_message_has_a_few_texts_however_many_calls_there_are() -> None:
    """But all texts of what a rank is."""
    rows = {
        rank: RankFacts(1, (status.fact(WAITING, 1, rank, 0, f"call {rank} " + "x" * 999),)) for rank in range(1000)
    }
    texts = {LEFT: "it has ended", STALLED: "waits in a call", ENDED: "fails"}
    rows[60] = RankFacts(1, tuple(status.fact(kind, 0, 1, 0, text) for kind, text in texts.items()))
    message = status.encode(rows)
    assert len(message) < status.MOST_TEXTS * status.TEXT_BYTES + 1000 * 60
    decoded = dict(status.decode(message, 1000))
    assert decoded[60] == rows[60]
    assert {rank: row.facts[0][:4] for rank, row in decoded.items()} == {
        rank: row.facts[0][:4] for rank, row in rows.items()
    }


@pytest.mark.parametrize("same", [True, False], ids=["one call", "many calls"])
def test_all_of_a_large_job_arrives_in_messages_of_limited_length(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of rows drift apart in a long job; messages that are too long for `decode` would be lost."""
    monkeypatch.setattr(status, "MESSAGE_BYTES", 1 << 16)
    network = Network(ranks := 2048)
    first, second = (StatusMessages(Comm(network, rank)) for rank in range(2))  # type: ignore[arg-type]
    for rank in range(2, ranks):
        facts = (status.fact(WAITING, 7, 1 if same else rank, 5, "all_reduce" if same else f"{rank:0300}"),)
        first._learn(rank, RankFacts(1000 + rank * 7919 % 100_003, facts), 2)
    for _ in range(10):
        first.exchange()
        second.receive()
    assert {rank: each.row for rank, each in second._known.items()} == {
        rank: each.row._replace(facts=second._known[rank].row.facts) for rank, each in first._known.items()
    }
    assert len(second._known) == ranks - 2
    assert 1000 < network.longest <= (16 << 10 if same else status.MESSAGE_BYTES)


def test_the_last_message_of_a_rank_has_all_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MESSAGE_BYTES", 500)
    network, every = make(100)
    for rank in range(2, 100):
        every[0]._learn(rank, RankFacts(1, (status.fact(WAITING, 7, rank, 5, "all_reduce"),)), 2)
    every[0].announce_leaving("it has ended its program", None)
    every[1].receive()
    assert every[1].left
    assert len(every[1]._known) == 99
    assert network.longest <= 500


def test_a_rank_that_is_stopped_while_it_sends_stops_no_receiver() -> None:
    network, every = make(4)
    network.stopped[1] = []
    wait = all_wait(every, 0)
    every[1].exchange()
    every[2].exchange()
    every[0].receive()
    call = Fact(WAITING, 7, 1, 5, "all_reduce")
    assert every[0].state == {call: {2}}
    assert wait.count == 1
    for message in network.stopped[1]:
        message.go_on()
    every[0].receive()
    assert every[0].state == {call: {1, 2}}
    assert not every[0]._arriving


def test_a_signals_handler_may_exchange_messages_in_the_middle_of_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    _, every = make(4)
    all_wait(every, 0)
    every[1].exchange()
    every[2].exchange()
    test = Request.Test
    interrupted = []

    def interrupted_test(request: Request) -> bool:
        if not interrupted:
            interrupted.append(request)
            every[0].request_dumps("a signal has come")
            every[0].exchange()
        return test(request)

    monkeypatch.setattr(Request, "Test", interrupted_test)
    every[0].exchange()
    assert interrupted
    rounds(every)
    assert every[0].state[Fact(WAITING, 7, 1, 5, "all_reduce")] == {1, 2, 3}
    assert not every[0]._arriving
    assert [rank for messages in every[1:] for rank, _ in messages.dump_requests] == [0, 0, 0]


# Threads


def test_another_thread_never_keeps_an_old_state() -> None:
    """It reads the state just before the row of a rank is stored."""
    _, (messages, *_) = make(3)

    class Known(dict):
        def __setitem__(self, rank: int, known: Any) -> None:
            assert messages.state == {}
            super().__setitem__(rank, known)

    messages._known = Known()
    messages._learn(1, RankFacts(1, (Fact(WAITING, 7, 1, 5, "all_reduce"),)), 1)
    assert messages.state == {Fact(WAITING, 7, 1, 5, "all_reduce"): {1}}


def test_a_rank_may_leave_while_another_thread_looks_for_ranks_that_have_left() -> None:
    _, (messages, *_) = make(3)

    class Ranks(set):
        def __contains__(self, rank: object) -> bool:
            messages._gone.add(2)
            return False

    messages._gone.add(1)
    messages.check_present(Ranks(), 0, "a call")
    assert messages._gone == {1, 2}


# Processes


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system has no /proc")
def test_a_process_that_has_ended_is_gone() -> None:
    mine = liveness.own()
    assert mine is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        state = proc.stat(started.pid)
        assert state is not None
        process = mine._replace(pid=started.pid, start=state.start)
        assert not liveness.gone(process)
        assert liveness.gone(process._replace(start=process.start - 1)), "another one has its number"
        started.kill()
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert liveness.gone(process)
    assert liveness.gone(process)
    assert not liveness.gone(process._replace(space="pid:[1]")), "of another container nothing is known"


def test_a_rank_whose_process_has_ended_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "gone", lambda process: process.pid == 2)
    network = Network(3)
    messages = StatusMessages(Comm(network, 0))  # type: ignore[arg-type]
    monkeypatch.setattr(liveness, "_known", {rank: liveness.Process(rank, 0, "", None) for rank in range(3)})
    monkeypatch.setattr(liveness, "_ended", {})
    messages.look_for_gone_processes()
    assert not messages.left, "nobody waits"
    wait = WaitRecord(7)
    wait.begin(NamedCall("all_reduce"))
    messages.set_waits([(wait, NamedCall("all_reduce"))])
    messages.look_for_gone_processes()
    error = messages.left_error(wait, time.monotonic() + 1, NamedCall("all_reduce"))
    assert "rank 2 has left: its process (2) has ended without telling MPI" in str(error)


# Jobs

SOCKETS = """
import os
import numpy as np
import allreduce
def sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try: count += os.readlink("/proc/self/fd/" + name).startswith("socket:")
        except OSError: pass
    return count
before = sockets()
topology = allreduce.Topology(ranks_per_node=4)
found = np.array([sockets() - before])
topology.world.Allreduce(allreduce.topology.MPI.IN_PLACE, found, allreduce.topology.MPI.MAX)
if topology.rank == 0: print("sockets", found[0])
topology.close()
"""


@pytest.mark.expensive
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files by /proc")
def test_a_topology_does_not_connect_all_pairs(mpirun: JobRunner) -> None:
    """Over TCP, as between hosts, every pair of ranks that communicate needs a socket on each side."""
    over_tcp = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    job = mpirun(16, ["-c", SOCKETS], env=over_tcp, timeout=200)
    assert job.returncode == 0, job.stderr
    assert int(job.stdout.split()[-1]) <= 2 * math.log2(16) + 4, job.stdout
