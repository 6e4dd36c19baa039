"""The status messages of ranks in a long wait: on 4,096 ranks, simulated in one process, and in jobs."""

import gc
import math
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce.health import status
from allreduce.health.status import FAR_ROWS, HEAD_BYTES, LEFT, ROW_BYTES, WAITING, Fact, StatusRows
from allreduce.health.status_messages import Neighbour, StatusMessages, tree
from allreduce.process import proc
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.wait import NamedCall, WaitRecord
from tests.conftest import JobRunner

LATE = 777  # the rank that does not come


class _Request:
    """A synchronous send's request: done when its message is received."""

    taken = False

    def Test(self) -> bool:  # noqa: N802
        return self.taken


class _Message:
    def __init__(self, content: bytes, request: _Request) -> None:
        self._content, self._request = content, request

    def Recv(self, buffer: Any) -> None:  # noqa: N802
        buffer[0][:] = self._content
        self._request.taken = True


class Network:
    """Messages between ranks of this process, counted."""

    def __init__(self, ranks: int) -> None:
        self.arrived: dict[int, deque] = defaultdict(deque)
        self.sent: Counter[int] = Counter()
        self.pairs: set[tuple[int, int]] = set()
        self.longest, self.size = 0, ranks
        self.failed: frozenset[int] = frozenset()


class Comm:
    """A communicator of one rank of a Network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self.rank, self.size = network, rank, network.size

    def Issend(self, message: Any, rank: int) -> _Request:  # noqa: N802
        if rank in self._network.failed:
            raise MPI.Exception(MPI.ERR_OTHER)
        request, content = _Request(), bytes(message[0])
        self._network.arrived[rank].append((self.rank, content, request))
        self._network.sent[self.rank] += 1
        self._network.pairs.add((min(self.rank, rank), max(self.rank, rank)))
        self._network.longest = max(self._network.longest, len(content))
        return request

    def Improbe(self, status: MPI.Status) -> _Message | None:  # noqa: N802
        if not self._network.arrived[self.rank]:
            return None
        source, content, request = self._network.arrived[self.rank].popleft()
        status.source = source
        status.Set_elements(MPI.BYTE, len(content))
        return _Message(content, request)


@pytest.fixture(params=[(1024, 1), (4096, 64)], ids=str)
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Network, list[StatusMessages]]:
    """Return ranks on nodes of a given size; their shared memory is ordinary memory here."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    return make(*request.param)


def make(ranks: int, of_node: int, shared: bool = True) -> tuple[Network, list[StatusMessages]]:
    network = Network(ranks)
    nodes = [list(range(first, min(first + of_node, ranks))) for first in range(0, ranks, of_node)]
    every = []
    for index, members in enumerate(nodes):
        memory = np.zeros((len(members) + FAR_ROWS, ROW_BYTES), np.uint8)
        for own, rank in enumerate(members):
            messages = StatusMessages(Comm(network, rank))  # type: ignore[arg-type]
            messages.connect(nodes, index, StatusRows(memory, own) if shared and len(members) > 1 else None, {})
            every.append(messages)
    return network, every


def rounds(every: list[StatusMessages], without: frozenset[int] = frozenset()) -> None:
    """Let leaders, and a few other ranks, exchange messages until no rank learns anything new."""
    few = [messages for messages in every if messages._neighbours or messages.rank % 64 > 61 or len(every) < 64]
    looking = [messages for messages in few if messages.rank not in without]
    known = -1
    while known != (known := sum(messages._version for messages in looking)):
        for messages in looking:
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
    size = len(every)
    wait = all_wait(every, LATE)
    rounds(every)
    leaders = [messages for messages in every if messages._neighbours]
    for messages in (*leaders, every[-1]):
        assert messages.state == {Fact(WAITING, 7, 1, 5, "all_reduce"): {*range(size)} - {LATE}}
    assert max(network.sent.values()) <= 4 * math.log2(size)
    assert max(Counter(rank for pair in network.pairs for rank in pair).values()) <= 3
    assert sum(network.sent.values()) <= 2 * math.log2(size) * len(leaders)
    call = NamedCall("all_reduce", 5)
    assert [
        messages.rank
        for messages in (*leaders, every[-1])
        if messages.rank != LATE and messages.is_reporter(wait, call, 8)
    ] == [0]
    assert {messages.reporter(wait, call) for messages in (every[0], every[-1])} == {0}
    assert every[-1].table(call).splitlines() == [
        f"  ranks 0-776, 778-{size - 1}: wait in all_reduce",
        f"  rank {LATE}: {status.NOT_COME}",
    ]


@pytest.mark.parametrize("job", [(800, 1)], indirect=True)
def test_a_straggler_has_one_unread_message_of_each_neighbour(job: tuple[Network, list[StatusMessages]]) -> None:
    """It computes while it holds the GIL, say, and the others wait for it in each of many steps."""
    network, every = job
    for step in range(5):
        all_wait(every, LATE, f"step {step}")
        for messages in every:
            if messages.rank != LATE:
                messages.exchange()
    assert 1 <= len(network.arrived[LATE]) <= 3
    assert max(map(len, network.arrived.values())) <= 3


def test_ends_of_programs_are_told_in_a_few_messages(job: tuple[Network, list[StatusMessages]]) -> None:
    """A rank that has left sends no further messages."""
    network, every = job
    for messages in every:
        messages.announce_leaving("it has ended its program", None)
    assert max(network.sent.values(), default=0) <= 3
    network, every = make(1024, 64)
    every[100].announce_leaving("it has ended its program", None)  # no leader
    rounds(every)
    assert all(messages.left for messages in every if messages._neighbours or messages.rank % 64 > 61)


def after_a_failure(ranks: int, gone: Collection[int], known: bool) -> tuple[Network, list[StatusMessages]]:
    """Return ranks after ranks `gone` have failed. known: MPI has told the others."""
    network, every = make(ranks, 4)
    network.failed = frozenset(gone)
    for messages in every:
        messages.lost = True
        if known:
            messages.use_unrevoked(messages.comm, WaitRecord(-1))
    return network, [messages for messages in every if messages.rank not in gone]


def settle(every: Sequence[StatusMessages]) -> None:
    known = -1
    while known != (known := sum(messages._version for messages in every)):
        for messages in every:
            messages.exchange()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("gone", [[0, 1, 2, 3], [0, 101, 102, 104, 99, 98, 96, 116, 228], [*range(101, 200)]], ids=len)
def test_after_a_failure_a_rank_that_leaves_tells_a_few_and_all_hear_of_it(
    gone: list[int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if ranks between them are gone, and whether or not the rank knows that."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    monkeypatch.setattr(ulfm, "failed", lambda comm: tuple(comm._network.failed))
    monkeypatch.setattr(ulfm, "acknowledge", lambda comm: None)
    network, living = after_a_failure(256, gone, known)
    leaver = next(messages for messages in living if messages.rank == 100)
    leaver.announce_leaving("it has ended its program", None)
    others = [messages for messages in living if messages is not leaver]
    settle(others)
    assert all(messages.departure(100) is not None for messages in others)
    assert max(network.sent.values()) <= 2 * math.log2(256)


def test_a_rank_whose_receivers_have_all_ended_tells_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended a moment before, so it does not know; the last living rank hears of it all the same."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    monkeypatch.setattr(ulfm, "in_force", lambda: True)
    network, every = after_a_failure(64, [], known=False)

    def only_one_lives(done: Callable[[], bool], limit: float) -> bool:
        every[40].exchange()
        return done()

    monkeypatch.setattr("allreduce.health.status_messages.wait_until", only_one_lives)
    every[9].announce_leaving("it has ended its program", None)
    assert every[40].departure(9) is not None
    assert 11 < network.sent[9] < 63


def test_ranks_behind_one_that_takes_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    _, every = make(16, 2)
    all_wait(every, 2)
    rounds(every, without=frozenset([2]))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    rounds(every, without=frozenset([2]))
    lines = every[1].table(NamedCall("all_reduce")).splitlines()
    assert lines == [
        "  ranks 0-1, 4-5, 10-13: wait in all_reduce",
        f"  rank 2: {status.NOT_COME}",
        "  ranks 3, 6-9, 14-15: can't be heard: rank 2, which forwards their messages, receives none",
    ]


def test_ranks_of_a_node_whose_leader_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get no messages of other nodes; they must not report that no rank of those nodes has come."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    _, every = make(6, 2)
    all_wait(every, 2)
    rounds(every, without=frozenset([2]))
    assert "  ranks 0-2, 4-5: have not arrived" in every[3].table(NamedCall("all_reduce")), "not known yet"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    rounds(every, without=frozenset([2]))
    assert every[3].table(NamedCall("all_reduce")).splitlines() == [
        "  ranks 0-1, 4-5: can't be heard: rank 2, which forwards their messages, receives none",
        f"  rank 2: {status.NOT_COME}",
        "  rank 3: waits in all_reduce",
    ]
    lines = ["  ranks 0-1, 3-5: wait in all_reduce", f"  rank 2: {status.NOT_COME}"]
    rounds(every)  # it goes on
    assert [messages.table(NamedCall("all_reduce")).splitlines() for messages in (every[0], every[3], every[5])] == [
        lines
    ] * 3


def test_a_wait_that_has_ended_in_an_error_is_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks time out at about the same moment; the later one must not report that the other has not come."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    _, every = make(3, 3)
    wait = all_wait(every, 1)
    every[2].note_given_up(wait, NamedCall("all_reduce", 5))
    every[2].set_waits([])
    every[0].exchange()
    assert "  ranks 0, 2: wait in all_reduce" in every[0].table(NamedCall("all_reduce", 5))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    every[2].set_waits([])
    every[0].exchange()
    assert "  ranks 1-2: have not arrived" in every[0].table(NamedCall("all_reduce", 5))


def test_messages_on_their_way_outlive_a_topology_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI still reads a message until its receiver takes it."""
    kept: list[Any] = []
    monkeypatch.setattr("allreduce.health.status_messages.free_later", kept.append)
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    _, every = make(2, 1)
    all_wait(every, 1)
    every[0].exchange()
    del every[0]
    gc.collect()
    assert len(kept) == 1
    assert b"all_reduce" in kept[0].buffer


@pytest.mark.parametrize("shared", [True, False])
def test_every_rank_hears_which_one_has_left_and_which_differ(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the ranks of a node share no memory."""
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    _, every = make(10, 4, shared)
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
    assert len(status.encode(status.limited(state))) < 4000 + status.MOST_FACTS * 100


def test_a_row_that_is_being_written_is_read_later() -> None:
    memory = np.zeros((2 + FAR_ROWS, ROW_BYTES), np.uint8)
    own, other = StatusRows(memory, 0), StatusRows(memory, 1)
    other.write(b"first")
    assert own.changed() == [(1, b"first")]
    memory[1, HEAD_BYTES] = 0  # a byte of the next content
    other._heads[1] = len(b"later"), 12345
    assert own.changed() == []
    other.write(b"later")
    assert own.changed() == [(1, b"later")]
    assert own.changed() == []


# Processes


def other_process(code: str) -> tuple[subprocess.Popen, liveness.Process]:
    started = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    mine = liveness.own()
    assert mine is not None
    state = proc.stat(started.pid)
    assert state is not None
    return started, mine._replace(pid=started.pid, start=state.start)


@pytest.fixture
def waiting_process() -> Iterator[tuple[subprocess.Popen, liveness.Process]]:
    started, process = other_process("input()")
    yield started, process
    started.kill()
    started.communicate()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system has no /proc")
def test_a_process_that_has_ended_is_gone(waiting_process: tuple[subprocess.Popen, liveness.Process]) -> None:
    started, process = waiting_process
    assert not liveness.gone(process)
    assert liveness.gone(process._replace(start=process.start - 1)), "another one has its number"
    started.kill()
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert liveness.gone(process)
    started.wait()
    assert liveness.gone(process)
    assert not liveness.gone(process._replace(space="pid:[1]")), "of another container nothing is known"


def test_a_rank_whose_process_has_ended_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "world_ranks", lambda comm: range(comm.size))
    monkeypatch.setattr(liveness, "gone", lambda process: process.pid == 2)
    network = Network(3)
    messages = StatusMessages(Comm(network, 0))  # type: ignore[arg-type]
    found = {rank: liveness.Process(rank, 0, "", None) for rank in range(3)}
    messages.connect([[0, 1, 2]], 0, StatusRows(np.zeros((3 + FAR_ROWS, ROW_BYTES), np.uint8), 0), found)
    messages.look_for_gone_processes()
    assert not messages.left, "nobody waits"
    wait = WaitRecord(7)
    wait.begin(NamedCall("all_reduce"))
    messages.set_waits([(wait, NamedCall("all_reduce"))])
    messages.look_for_gone_processes()
    error = messages.left_error(wait, time.monotonic() + 1, NamedCall("all_reduce"))
    assert "rank 2 has left: its process (2) has ended without telling MPI" in str(error)


def test_the_tree() -> None:
    nodes = [[0, 1], [2], [3, 4], [5]]
    assert tree(nodes, 0) == [Neighbour(2, (2, 5)), Neighbour(3, (3, 4))]
    assert tree(nodes, 1) == [Neighbour(5, (5,)), Neighbour(0, (0, 1, 3, 4))]
    assert tree(nodes, 3) == [Neighbour(2, (0, 1, 2, 3, 4))]


# Jobs

ONE_IS_LATE = """
import time, numpy as np
import allreduce
topology = allreduce.Topology(ranks_per_node=2)
reduce = allreduce.create("ring", topology)
reduce(np.ones(10), "max")
if topology.rank == 3: time.sleep(6)
reduce(np.ones(10), "max")
topology.close()
"""


def test_one_rank_reports_a_wait_of_many(mpirun: JobRunner) -> None:
    job = mpirun(8, ["-c", ONE_IS_LATE], env={"ALLREDUCE_STALL_SECONDS": "3"}, timeout=120)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("for other ranks in: all_reduce") == 1, job.stderr
    assert "rank 0 has waited 3 s for other ranks in: all_reduce" in job.stderr
    assert "  ranks 0-2, 4-7: wait in all_reduce" in job.stderr
    assert f"  rank 3: {status.NOT_COME}" in job.stderr


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


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files by /proc")
def test_a_topology_does_not_connect_all_pairs(mpirun: JobRunner) -> None:
    """Over TCP, as between hosts, every pair of ranks that communicate needs a socket on each side."""
    over_tcp = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    job = mpirun(16, ["-c", SOCKETS], env=over_tcp, timeout=200)
    assert job.returncode == 0, job.stderr
    assert int(job.stdout.split()[-1]) <= 2 * math.log2(16) + 4, job.stdout
