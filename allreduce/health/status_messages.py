"""Status messages: during a long wait, the ranks of a topology tell each other where they wait.

- A rank that has waited for a second writes where it waits in its row of a table in its node's memory (status.py).
- The leaders of the nodes form a binary tree. When the facts on a leader's side of the tree change, the leader sends
  them to its neighbours. So every rank knows where all ranks are, and no rank has to answer.
- A rank sends at most three messages for a change, and none if all ranks are on one node. Between two ranks at most one
  message is pending, so none pile up at a rank that does not receive.
- After a rank fails, the surviving ranks revoke the topology's communicators. Under ULFM, status messages therefore use
  a communicator that is never revoked. Ranks of the tree may be gone then. So a rank that leaves tells the ranks at
  distances 1, 2, 4, ... among the ranks that it takes for alive, and each receiver tells as many ranks. If no rank
  receives the message, the rank that leaves tells twice as many, at last all. They agree in `Topology.finished`.
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from allreduce.errors import CollectiveTimeoutError, RankLeftError
from allreduce.health import status
from allreduce.health.status import ENDED, FAR_BYTES, LEFT, OWN_BYTES, SILENT, STALLED, WAITING, Fact, State, StatusRows
from allreduce.process import children
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.deferred_free import free_later
from allreduce.transport.liveness import Process
from allreduce.transport.wait import SHORTEST_SLEEP, DescribedCall, Pause, WaitRecord, wait_until

SILENT_SECONDS = 5.0  # a leader that forwards no messages for longer is reported
GIVEN_UP_SECONDS = 5.0  # how long a wait that has ended in an error stays announced
GONE_SECONDS = 1.0  # how often the node's processes are checked during a long wait
LAST_SECONDS = 0.3  # how long a rank that leaves waits until its last messages are received
NOTHING = status.encode({})


class Sent(NamedTuple):
    """A message that is being sent. since: by time.monotonic()."""

    request: MPI.Request
    buffer: bytearray
    since: float

    def received(self) -> bool:
        """Return whether its receiver has begun to receive it; before that MPI may still read the buffer."""
        try:
            return bool(self.request.Test())
        except MPI.Exception:  # the receiver has failed
            return True


class Neighbour(NamedTuple):
    """A rank that this one exchanges messages with, usually a node's leader, and the ranks whose facts it sends."""

    leader: int
    ranks: tuple[int, ...]


def tree(nodes: Sequence[Sequence[int]], own: int) -> list[Neighbour]:
    """Return the neighbours of the node `own` in the tree. nodes: the ranks of each, the leader first. Local."""

    def below(node: int) -> list[int]:
        found, left = [], [node]
        while left:
            node = left.pop()
            found.append(node)
            left += [child for child in (2 * node + 1, 2 * node + 2) if child < len(nodes)]
        return found

    def side(node: int, of: Iterable[int]) -> Neighbour:
        return Neighbour(nodes[node][0], tuple(sorted(rank for each in of for rank in nodes[each])))

    found = [side(child, below(child)) for child in (2 * own + 1, 2 * own + 2) if child < len(nodes)]
    if own:
        found.append(side((own - 1) // 2, {*range(len(nodes))} - {*below(own)}))
    return found


class StatusMessages:
    """Exchanges facts between the ranks of a topology.

    comm: used for these messages only. Before `connect` this rank knows its own facts only.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.state: State = {}  # all facts that this rank knows
        self.ended: int | None = None  # the exit code of a rank that ends the job
        self.lost = False  # True after a failure: only facts about ranks that leave are sent; see `_living`
        self._own_facts: dict[Fact, set[int]] = {}  # that this rank reports
        self._connected = False
        self._given_up: dict[Fact, float] = {}  # waits of this rank that have ended in an error, and when
        self._rows: StatusRows | None = None
        self._node: tuple[int, ...] = (self.rank,)  # the leader first
        self._checks, self._looked_at = 0, 0.0  # the leader's count of checks, and when it last grew
        self._unreachable: State = {}  # SILENT facts of other nodes, while the leader makes no checks
        self._of_node: dict[int, State] = {}  # by index on the node
        self._neighbours: list[Neighbour] = []
        self._processes: dict[int, Process] = {}  # of other ranks on this machine
        self._looked = 0.0  # when these were checked
        self._received: dict[int, State] = {}  # by sender
        self._version = 0  # of the known facts
        self._last_sent: dict[int, tuple[int, bytes]] = {}  # by receiver: version and message
        self._chosen: tuple[tuple[int, tuple[int, ...]], list[int]] = (-1, ()), []  # after a failure: see `_receivers`
        self._sent: dict[int, list[Sent]] = {}  # pending messages by receiver: one, or two when this rank leaves
        weakref.finalize(self, _hold_sent, self._sent).atexit = False
        self._left: dict[Fact, float] = {}  # LEFT facts of other ranks: when this rank learned them
        self._seen_requests: set[tuple[int, int]] = set()  # requests for dumps that were answered
        self._unrevoked: MPI.Intracomm | None = None
        self._finish = WaitRecord(-1)

    def connect(
        self, nodes: Sequence[Sequence[int]], own: int, rows: StatusRows | None, found: Mapping[int, Process]
    ) -> None:
        """Begin to exchange facts with the other ranks. Local; on all ranks.

        nodes: the ranks of each node, the leader first; own: the index of this rank's node. rows: the rows of this
        node, or None if its ranks share no memory: then they send messages to their leader. found: the processes of
        ranks of this machine.
        """
        members, self._connected = nodes[own], True
        self._of_node.clear()
        if members[0] == self.rank:
            self._neighbours = tree(nodes, own)
        if rows is not None:
            self._rows, self._node, self._looked_at = rows, tuple(members), time.monotonic()
        elif members[0] == self.rank:
            self._neighbours += [Neighbour(rank, (rank,)) for rank in members[1:]]
        else:
            self._neighbours = [Neighbour(members[0], tuple(rank for rank in range(self.size) if rank != self.rank))]
        self._processes = {rank: process for rank, process in found.items() if rank != self.rank}
        numbers = processes.world_ranks(self.comm)
        liveness.know({numbers[rank]: process for rank, process in self._processes.items()})
        self._write()

    def use_unrevoked(self, comm: MPI.Intracomm, finish: WaitRecord) -> None:
        """Send messages on `comm`, which is never revoked. Local.

        finish: the wait record of the `finished` agreements. A rank that leaves after one is not missing in it.
        """
        self._unrevoked, self._finish = comm, finish

    # The facts of this rank

    def set_waits(self, waits: Iterable[tuple[WaitRecord, DescribedCall]]) -> None:
        """Announce this rank's long waits, in place of those announced before."""
        now = time.monotonic()
        self._given_up = {each: since for each, since in self._given_up.items() if now - since < GIVEN_UP_SECONDS}
        announced = [_waiting(wait, call) for wait, call in waits]
        if (facts := list(dict.fromkeys([*announced, *self._given_up]))) != [
            each for each in self._own_facts if each.kind == WAITING
        ]:
            self._replace_facts([WAITING], facts)

    def note_given_up(self, wait: WaitRecord, call: DescribedCall) -> None:
        """Keep announcing a wait that ends in an error, so that late ranks see that this one had reached the call."""
        self._given_up[_waiting(wait, call)] = time.monotonic()

    def announce_leaving(self, why: str, wait: WaitRecord | None) -> None:
        """Announce that this rank makes no further calls of one user or, without `wait`, of any."""
        if wait is not None:
            fingerprint = 0 if wait.call is None else wait.call.fingerprint
            self._replace_facts([], [status.fact(LEFT, wait.number, wait.count, fingerprint, why)])
        else:
            passed = self._finish.count - (self._finish.call is not None)
            self._replace_facts([WAITING], [status.fact(LEFT, 0, children.exit_code(), passed, why)])
        self.receive()
        self._send_last()

    def announce_end(self, code: int) -> None:
        """Announce that this rank ends the job."""
        self._replace_facts([], [Fact(ENDED, turn=code)])
        self._send_last()

    def request_dumps(self, text: str) -> None:
        """Request that all ranks write their stacks and last calls to files. text: why."""
        asked = max((each.turn for each in self._own_facts if each.kind == STALLED), default=0)
        self._replace_facts([STALLED], [status.fact(STALLED, 0, asked + 1, 0, text)])

    def _replace_facts(
        self, instead: Collection[int], facts: Iterable[Fact], ranks: Collection[int] | None = None
    ) -> None:
        """Replace this rank's facts of the kinds `instead` by `facts`, about this rank or about `ranks`."""
        own = {each: of for each, of in self._own_facts.items() if each.kind not in instead}
        self._own_facts = {**own, **{each: {*(ranks or [self.rank])} for each in facts}}
        self._write()

    def _write(self) -> None:
        newest_first = list(reversed(self._own_facts))
        facts = sorted(newest_first, key=lambda each: (each.kind == LEFT and each.number != 0, each.kind == WAITING))
        if self._rows is not None:
            self._rows.write(status.fitting({each: self._own_facts[each] for each in facts}, OWN_BYTES))
        self._of_node[self._rows.own if self._rows is not None else 0] = self._own_facts
        self._merge()

    # Facts of other ranks

    def exchange(self) -> None:
        """Receive facts, and send changes to the neighbours."""
        if self._rows is not None:
            self._rows.count_check()
        self.receive()
        self._update_silent()
        self._send_changes()

    def receive(self) -> None:
        """Receive facts, from the node's rows and as messages, without sending."""
        changed = self._read()
        if self._neighbours or self.lost or not self._connected:
            with suppress(MPI.Exception):  # another rank has just failed; the messages are received the next time
                if self._unrevoked is not None:
                    ulfm.acknowledge(self._unrevoked)
                if self._take(self._channel):
                    self._pass_on()
                    changed = True
        if changed:
            self._merge()

    def _read(self) -> bool:
        """Read the rows of this node. True: one has changed."""
        news = self._rows.changed() if self._rows is not None else []
        for index, content in news:
            self._of_node[index] = status.decode(content, self.size)
        return bool(news)

    def _pass_on(self) -> None:
        """Write the facts received from other nodes to the long row, for the other ranks of this node."""
        if self._rows is not None and not self.lost:
            received = status.limited(status.merged(self._received.values()))
            self._rows.write(status.fitting(received, FAR_BYTES), far=True)

    @property
    def _channel(self) -> MPI.Intracomm:
        return self._unrevoked or self.comm

    def _take(self, comm: MPI.Intracomm) -> bool:
        envelope, taken = MPI.Status(), False
        while (message := comm.Improbe(status=envelope)) is not None:
            buffer = bytearray(envelope.Get_count(MPI.BYTE))
            message.Recv([buffer, MPI.BYTE])
            self._received[envelope.source] = status.decode(bytes(buffer), self.size)
            taken = True
        return taken

    def _merge(self) -> None:
        self._version += 1
        self.state = status.merged([*self._of_node.values(), *self._received.values(), self._unreachable])
        now = time.monotonic()
        for each, ranks in self.state.items():
            if each.kind == LEFT and {*ranks} - {self.rank}:
                self._left.setdefault(each, now)
            elif each.kind == ENDED and {*ranks} - {self.rank}:
                self.ended = each.turn if abs(each.turn) < 2**31 else 1

    def new_dump_requests(self) -> list[tuple[int, str]]:
        """Return the ranks that have requested dumps since the last call, and where they wait."""
        found = []
        for each, ranks in list(self.state.items()):
            for rank in [rank for rank in ranks if each.kind == STALLED and rank != self.rank]:
                if (rank, each.turn) not in self._seen_requests:
                    self._seen_requests = {pair for pair in self._seen_requests if pair[0] != rank} | {
                        (rank, each.turn)
                    }
                    found.append((rank, each.text))
        return found

    def look_for_gone_processes(self) -> None:
        """If any rank waits long, report this machine's ranks whose process has ended: as failed, or else as left."""
        now = time.monotonic()
        if now - self._looked < GONE_SECONDS or not any(each.kind == WAITING for each in self.state):
            return
        self._looked = now
        left = {rank for each, ranks in self.state.items() if each.kind == LEFT and each.number == 0 for rank in ranks}
        for rank, process in list(self._processes.items()):
            if rank not in left and liveness.gone(process):
                del self._processes[rank]
                if not liveness.declare(process):
                    why = f"its process ({process.pid}) has ended without telling MPI"
                    self._replace_facts([], [status.fact(LEFT, 0, 1, -1, why)], [rank])

    # Messages

    def _send_changes(self) -> None:
        """Send the facts of this side of the tree to each neighbour, if they have changed and no message is pending."""
        for neighbour in self._receivers() if self._connected else []:
            self._send(neighbour, False)

    def _send_last(self) -> None:
        """Send the facts even if a message is pending; under ULFM then wait a moment until all are received."""
        told = self._receivers()
        for neighbour in told:
            self._send(neighbour, True)
        if not told or not ulfm.in_force():  # without ULFM, MPI_Finalize waits for all ranks, and delivers the messages
            return
        wait_until(self._all_received, LAST_SECONDS)
        while self.lost and not self._heard(told):  # these ranks have ended meanwhile: tell as many others
            others = [rank for rank in self._living() if rank not in told][: len(told)]
            if not others:
                return
            for rank in others:
                self._send(rank, True)
            told += others
            wait_until(partial(self._heard, told), LAST_SECONDS)

    def _receivers(self) -> list[int]:
        if self._connected and not self.lost:
            return [each.leader for each in self._neighbours]
        if not self._connected:
            return [rank for rank in range(self.size) if rank != self.rank]
        if not any(each.kind == LEFT and each.number == 0 for each in self.state):
            return []
        known = self._version, self._failed()
        if known != self._chosen[0]:  # the watchdog asks often
            living = self._living()
            steps = [1 << power for power in range(len(living).bit_length())]
            chosen = dict.fromkeys(living[place] for step in steps for place in (step - 1, -step))
            self._chosen = known, list(chosen)
        return list(self._chosen[1])

    def _failed(self) -> tuple[int, ...]:
        return ulfm.failed(self._unrevoked) if self._unrevoked is not None else ()

    def _living(self) -> list[int]:
        """Return the other ranks that are not known to have failed or left, the next one first."""
        gone = {rank for each, ranks in self.state.items() if each.kind == LEFT and each.number == 0 for rank in ranks}
        gone.update(self._failed())
        following = (rank % self.size for rank in range(self.rank + 1, self.rank + self.size))
        return [rank for rank in following if rank not in gone]

    def _heard(self, told: Sequence[int]) -> bool:
        """Return whether one of these ranks, which has not failed, has received all messages of this rank."""
        failed = self._failed()
        return any(
            rank not in failed and all(sent.received() for sent in self._sent.get(rank, ()))
            for rank in told
            if self._sent.get(rank)
        )

    def _send(self, neighbour: int, last: bool) -> None:
        under_way = self._sent[neighbour] = [sent for sent in self._sent.get(neighbour, ()) if not sent.received()]
        if under_way and not last:
            return
        version, before = self._last_sent.get(neighbour, (-1, NOTHING))
        if version == self._version:
            return
        received = [state for source, state in self._received.items() if source != neighbour]
        far = self._rows.far if self._rows is not None else -1
        near = [state for index, state in self._of_node.items() if index != far]
        known = status.merged([*near, *received])
        if self.lost:
            known = {each: ranks for each, ranks in known.items() if each.kind == LEFT}
        message = status.encode(status.limited(known))
        self._last_sent[neighbour] = self._version, message
        if message == before:
            return
        with suppress(MPI.Exception):  # the neighbour has failed
            buffer = bytearray(message)
            under_way.append(Sent(self._channel.Issend([buffer, MPI.BYTE], neighbour), buffer, time.monotonic()))

    def _all_received(self) -> bool:
        return all(sent.received() for under_way in self._sent.values() for sent in under_way)

    def _update_silent(self) -> None:
        """Announce ranks as SILENT if their leader receives no messages."""
        now, silent = time.monotonic(), {}
        for leader, ranks in self._neighbours:
            if any(now - sent.since > SILENT_SECONDS and not sent.received() for sent in self._sent.get(leader, ())):
                silent[_silence(leader)] = {*ranks} - {leader}
        silent = {each: ranks for each, ranks in silent.items() if ranks}
        if silent != {each: ranks for each, ranks in self._own_facts.items() if each.kind == SILENT}:
            self._own_facts = {**{each: of for each, of in self._own_facts.items() if each.kind != SILENT}, **silent}
            self._write()
        unheard = self._behind_a_silent_leader(now)
        if unheard != self._unreachable:
            self._unreachable = unheard
            self._merge()

    def _behind_a_silent_leader(self, now: float) -> State:
        """Return a SILENT fact of other nodes' ranks if this node's leader no longer forwards their facts."""
        leader = self._node[0]
        if self._rows is None or leader == self.rank or len(self._node) == self.size:
            return {}
        if (checks := self._rows.checks(0)) != self._checks:
            self._checks, self._looked_at = checks, now
        if now - self._looked_at <= SILENT_SECONDS:
            return {}
        return {_silence(leader): {*range(self.size)} - {*self._node}}

    def drain(self, limit: float) -> None:
        """Receive all messages, so that the communicators can be freed. Collective.

        limit: seconds after which it raises CollectiveTimeoutError.
        """
        deadline = time.monotonic() + limit

        def until(done: Callable[[], bool]) -> None:
            if not wait_until(done, deadline - time.monotonic(), self.receive, Pause(longest=SHORTEST_SLEEP)):
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks to close a topology")

        until(self._all_received)
        request = self.comm.Ibarrier()  # after it no message is pending on any rank
        try:
            until(request.Test)
        except CollectiveTimeoutError:
            free_later(request)
            raise
        self._sent.clear()
        self.release()

    def release(self) -> None:
        """Drop the node's shared rows. Local."""
        self._rows = None

    # Judgement

    @property
    def left(self) -> bool:
        """Whether this rank knows of one that has left."""
        return bool(self._left)

    def departure(self, rank: int) -> tuple[Fact, float] | None:
        """Return the fact that a rank has ended its program or closed the topology, and since when it is known."""
        for fact, since in list(self._left.items()):
            if fact.number == 0 and rank in self.state.get(fact, ()):
                return fact, since
        return None

    def left_error(self, wait: WaitRecord, before: float, call: DescribedCall) -> RankLeftError | None:
        """Return the error of `call` if this rank knew before the time `before` that a needed rank has left."""
        for fact, since in list(self._left.items()):
            ranks = {*self.state.get(fact, ())} - {self.rank}
            has_come = wait is self._finish and fact.number == 0 and fact.fingerprint >= wait.count
            if fact.number in (0, wait.number) and since < before and not has_come and ranks:
                error = RankLeftError(
                    f"rank {min(ranks)} has left: {fact.text}, while this rank waits for it in {call}"
                )
                error.job_code = (fact.turn if fact.number == 0 else 0) or 1
                return error
        return None

    def disagree(self, wait: WaitRecord, call: DescribedCall) -> bool:
        """Return whether another rank waits in a different call with the same wait record and count."""
        return any(
            (each.kind, each.number, each.turn) == (WAITING, wait.number, wait.count)
            and call.fingerprint != each.fingerprint
            for each in self.state
        )

    def is_reporter(self, wait: WaitRecord, call: DescribedCall, most: int) -> bool:
        """Return whether this rank reports a wait: the lowest rank in its call does, for at most `most` calls."""
        others = [each for each, ranks in self.state.items() if each.kind == WAITING and min(ranks) < self.rank]
        here = wait.number, wait.count, call.fingerprint
        return len(others) < most and here not in [(each.number, each.turn, each.fingerprint) for each in others]

    def reporter(self, wait: WaitRecord, call: DescribedCall) -> int:
        """Return the world rank that reports an error of this call: the lowest one that waits in it."""
        here = WAITING, wait.number, wait.count, call.fingerprint
        ranks = {rank for each, of in self.state.items() if each[:4] == here for rank in of}
        return processes.world_ranks(self.comm)[min({self.rank, *ranks})]

    def check_finish(self, call: DescribedCall) -> None:
        """Raise the error that ends `call`, a `finished` agreement. Works after a rank has failed; cheap."""
        error = self._finish.error or self.left_error(self._finish, time.monotonic(), call)
        if error is not None:
            raise error

    def table(self, call: DescribedCall) -> str:
        """Format a table of where all ranks are, as known to this rank, which waits in `call`. At most 20 lines."""
        return status.table(self.state, self.size, self.rank, str(call))


def _hold_sent(sent: Mapping[int, Sequence[Sent]]) -> None:
    """Keep the pending messages of a topology that was dropped."""
    for under_way in sent.values():
        for each in under_way:
            free_later(each)


def _silence(leader: int) -> Fact:
    return status.fact(
        SILENT, leader, 0, 0, f"can't be heard: rank {leader}, which forwards their messages, receives none"
    )


def _waiting(wait: WaitRecord, call: DescribedCall) -> Fact:
    return status.fact(WAITING, wait.number, wait.count, call.fingerprint, str(call))
