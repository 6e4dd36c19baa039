"""Status messages: what the ranks of a topology tell each other of themselves when a wait is long.

- A rank that has waited for a second writes where it waits in its row of a table in its node's memory (status.py).
- The leaders of the nodes form a binary tree. When what is known on a leader's side of the tree changes, the leader
  sends it to its neighbours. So every rank knows where all ranks are, and no rank has to answer.
- A rank sends at most three messages for a change, and none where one node has all ranks. One message is on its way
  between two ranks at a time, so none pile up at a rank that receives none.
- A lost rank revokes the topology's communicators. Where ranks may be lost, status messages travel on a communicator
  that is never revoked. Ranks that leave then tell all others, which agree who is left (`Topology.finished`).
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpi4py import MPI

from allreduce.errors import CollectiveTimeoutError, RankLeftError
from allreduce.health import status
from allreduce.health.status import ENDED, FAR_BYTES, LEFT, OWN_BYTES, SILENT, STALLED, WAITING, Fact, State, StatusRows
from allreduce.process import children
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.deferred_free import free_later
from allreduce.transport.liveness import Process
from allreduce.transport.wait import SHORTEST_SLEEP, Call, Pause, WaitRecord, wait_until

SILENT_SECONDS = 5.0  # after which a leader that passes no messages on is reported
GIVEN_UP_SECONDS = 5.0  # a wait that has ended in an error is told for so long
GONE_SECONDS = 1.0  # how often a long wait looks whether the processes of the node live
LAST_SECONDS = 0.3  # a rank that leaves waits so long for its last messages to be received
NOTHING = status.encode({})


class Sent(NamedTuple):
    """A message on its way. since: by time.monotonic()."""

    request: MPI.Request
    buffer: bytearray
    since: float

    def taken(self) -> bool:
        """Whether its receiver has begun to receive it; before that MPI may still read the buffer."""
        try:
            return bool(self.request.Test())
        except MPI.Exception:  # the receiver is lost
            return True


class Neighbour(NamedTuple):
    """A rank that this one exchanges messages with, usually the leader of a node, and the ranks it speaks for."""

    leader: int
    ranks: tuple[int, ...]


def tree(nodes: Sequence[Sequence[int]], own: int) -> list[Neighbour]:
    """The neighbours of the node `own` in the tree. nodes: the ranks of each, the leader first."""

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
    """What the ranks of one topology tell of themselves.

    comm: a communicator of their own. Until `connect` this rank knows of itself alone.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.state: State = {}  # all facts that this rank knows
        self.ended: int | None = None  # the exit code of a rank that ends the job
        self.lost = False  # a rank was lost: only facts about ranks that leave are sent, to all ranks
        self._own: dict[Fact, set[int]] = {}  # the facts that this rank tells
        self._connected = False
        self._given_up: dict[Fact, float] = {}  # waits of this rank that have ended in an error, and when
        self._rows: StatusRows | None = None
        self._node: tuple[int, ...] = (self.rank,)  # the leader first
        self._looks, self._looked_at = 0, 0.0  # of the leader: the last count, and since when it is that
        self._unheard: State = {}  # of other nodes, while the leader does not look
        self._of_node: dict[int, State] = {}  # by index on the node
        self._neighbours: list[Neighbour] = []
        self._processes: dict[int, Process] = {}  # of this machine's other ranks
        self._looked = 0.0  # at them
        self._heard: dict[int, State] = {}  # by the rank that has sent it
        self._version = 0  # of what is known
        self._told: dict[int, tuple[int, bytes]] = {}  # the version that was told, and the message
        self._sent: dict[int, list[Sent]] = {}  # on their way, by receiver: one, or another one when this rank leaves
        weakref.finalize(self, _hold_sent, self._sent).atexit = False
        self._left: dict[Fact, float] = {}  # since when it is known
        self._asks: set[tuple[int, int]] = set()  # for stacks, which were heard
        self._partings: MPI.Intracomm | None = None
        self._finish = WaitRecord(-1)

    def connect(
        self, nodes: Sequence[Sequence[int]], own: int, rows: StatusRows | None, found: Mapping[int, Process]
    ) -> None:
        """Exchange facts with the other ranks from now on. Local; on all ranks.

        nodes: the ranks of each node, the leader first; own: the index of this rank's node. rows: of this node, or None
        where its ranks share no memory: then they send messages to their leader. found: the processes of ranks of this
        machine.
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

    def part_on(self, comm: MPI.Intracomm, finish: WaitRecord) -> None:
        """Send messages on `comm`, which is never revoked. Local.

        finish: the record of the agreements on what is done. A rank that leaves after an agreement is not missed in it.
        """
        self._partings, self._finish = comm, finish

    # What this rank tells

    def waits(self, waits: Iterable[tuple[WaitRecord, Call]]) -> None:
        """These are the long waits of this rank."""
        now = time.monotonic()
        self._given_up = {each: since for each, since in self._given_up.items() if now - since < GIVEN_UP_SECONDS}
        told = [_waiting(wait, call) for wait, call in waits]
        if (facts := list(dict.fromkeys([*told, *self._given_up]))) != [
            each for each in self._own if each.kind == WAITING
        ]:
            self._tell([WAITING], facts)

    def gives_up(self, wait: WaitRecord, call: Call) -> None:
        """A wait ends in an error. Ranks that come to the call a moment later still see that this rank had come."""
        self._given_up[_waiting(wait, call)] = time.monotonic()

    def leaves(self, why: str, wait: WaitRecord | None) -> None:
        """This rank makes no further calls: of one user or, as its program ends, of any."""
        if wait is not None:
            fingerprint = 0 if wait.call is None else wait.call.fingerprint
            self._tell([], [status.fact(LEFT, wait.number, wait.count, fingerprint, why)])
        else:
            passed = self._finish.count - (self._finish.call is not None)
            self._tell([WAITING], [status.fact(LEFT, 0, children.exit_code(), passed, why)])
        self.listen()
        self._spread_last()

    def ends(self, code: int) -> None:
        """This rank ends the job."""
        self._tell([], [Fact(ENDED, turn=code)])
        self._spread_last()

    def asks_for_stacks(self, text: str) -> None:
        """Have all ranks write their stacks to files."""
        asked = max((each.turn for each in self._own if each.kind == STALLED), default=0)
        self._tell([STALLED], [status.fact(STALLED, 0, asked + 1, 0, text)])

    def _tell(self, instead: Collection[int], facts: Iterable[Fact], ranks: Collection[int] | None = None) -> None:
        """Replace the facts of the kinds `instead` by these, about this rank or about `ranks`."""
        own = {each: of for each, of in self._own.items() if each.kind not in instead}
        self._own = {**own, **{each: {*(ranks or [self.rank])} for each in facts}}
        self._write()

    def _write(self) -> None:
        newest_first = list(reversed(self._own))
        facts = sorted(newest_first, key=lambda each: (each.kind == LEFT and each.number != 0, each.kind == WAITING))
        if self._rows is not None:
            self._rows.write(status.fitting({each: self._own[each] for each in facts}, OWN_BYTES))
        self._of_node[self._rows.own if self._rows is not None else 0] = self._own
        self._merge()

    # What is heard

    def exchange(self) -> None:
        """Receive facts, and send the neighbours what has changed."""
        if self._rows is not None:
            self._rows.count_look()
        self.listen()
        self._see_silence()
        self._spread()

    def listen(self) -> None:
        """Receive facts."""
        changed = self._read()
        if self._neighbours or self.lost or not self._connected:
            with suppress(MPI.Exception):  # another rank is lost just now; the messages are received the next time
                if self._partings is not None:
                    ulfm.acknowledge(self._partings)
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
        """Write what was received of other nodes in the long row, for the other ranks of this node."""
        if self._rows is not None and not self.lost:
            heard = status.limited(status.merged(self._heard.values()))
            self._rows.write(status.fitting(heard, FAR_BYTES), far=True)

    @property
    def _channel(self) -> MPI.Intracomm:
        return self._partings or self.comm

    def _take(self, comm: MPI.Intracomm) -> bool:
        envelope, taken = MPI.Status(), False
        while (message := comm.Improbe(status=envelope)) is not None:
            buffer = bytearray(envelope.Get_count(MPI.BYTE))
            message.Recv([buffer, MPI.BYTE])
            self._heard[envelope.source] = status.decode(bytes(buffer), self.size)
            taken = True
        return taken

    def _merge(self) -> None:
        self._version += 1
        self.state = status.merged([*self._of_node.values(), *self._heard.values(), self._unheard])
        now = time.monotonic()
        for each, ranks in self.state.items():
            if each.kind == LEFT and {*ranks} - {self.rank}:
                self._left.setdefault(each, now)
            elif each.kind == ENDED and {*ranks} - {self.rank}:
                self.ended = each.turn if abs(each.turn) < 2**31 else 1

    def asked_for_stacks(self) -> list[tuple[int, str]]:
        """The ranks that have asked for all stacks since the last call, and where they wait."""
        found = []
        for each, ranks in list(self.state.items()):
            for rank in [rank for rank in ranks if each.kind == STALLED and rank != self.rank]:
                if (rank, each.turn) not in self._asks:
                    self._asks = {pair for pair in self._asks if pair[0] != rank} | {(rank, each.turn)}
                    found.append((rank, each.text))
        return found

    def look_for_gone_processes(self) -> None:
        """While any rank waits long: report a rank of this node whose process has ended as lost, or as left."""
        now = time.monotonic()
        if now - self._looked < GONE_SECONDS or not any(each.kind == WAITING for each in self.state):
            return
        self._looked = now
        left = {rank for each, ranks in self.state.items() if each.kind == LEFT and each.number == 0 for rank in ranks}
        for rank, process in list(self._processes.items()):
            if rank not in left and liveness.gone(process):
                del self._processes[rank]
                if not liveness.declare(process):
                    why = f"its process ({process.pid}) has ended without a word"
                    self._tell([], [status.fact(LEFT, 0, 1, -1, why)], [rank])

    # Messages

    def _spread(self) -> None:
        """Send each neighbour what this side of the tree knows, if that has changed and no message is on its way."""
        for neighbour in self._told_to() if self._connected else []:
            self._send(neighbour, False)

    def _spread_last(self) -> None:
        """The same, also where a message is on its way; then wait a moment until the messages are received."""
        neighbours = self._told_to()
        for neighbour in neighbours:
            self._send(neighbour, True)
        if neighbours and ulfm.in_force():  # otherwise the end of MPI waits for all ranks, and delivers them
            wait_until(self._all_taken, LAST_SECONDS)

    def _told_to(self) -> list[int]:
        if self._connected and not self.lost:
            return [each.leader for each in self._neighbours]
        leaves = not self._connected or any(each.kind == LEFT and each.number == 0 for each in self.state)
        return [rank for rank in range(self.size) if rank != self.rank] if leaves else []

    def _send(self, neighbour: int, last: bool) -> None:
        under_way = self._sent[neighbour] = [sent for sent in self._sent.get(neighbour, ()) if not sent.taken()]
        if under_way and not last:
            return
        version, before = self._told.get(neighbour, (-1, NOTHING))
        if version == self._version:
            return
        heard = [state for source, state in self._heard.items() if source != neighbour]
        far = self._rows.far if self._rows is not None else -1
        near = [state for index, state in self._of_node.items() if index != far]
        known = status.merged([*near, *heard])
        if self.lost:
            known = {each: ranks for each, ranks in known.items() if each.kind == LEFT}
        message = status.encode(status.limited(known))
        self._told[neighbour] = self._version, message
        if message == before:
            return
        with suppress(MPI.Exception):  # it is lost
            buffer = bytearray(message)
            under_way.append(Sent(self._channel.Issend([buffer, MPI.BYTE], neighbour), buffer, time.monotonic()))

    def _all_taken(self) -> bool:
        return all(sent.taken() for under_way in self._sent.values() for sent in under_way)

    def _see_silence(self) -> None:
        """Tell which ranks can't be heard, because their leader receives no messages."""
        now, silent = time.monotonic(), {}
        for leader, ranks in self._neighbours:
            if any(now - sent.since > SILENT_SECONDS and not sent.taken() for sent in self._sent.get(leader, ())):
                silent[_silence(leader)] = {*ranks} - {leader}
        silent = {each: ranks for each, ranks in silent.items() if ranks}
        if silent != {each: ranks for each, ranks in self._own.items() if each.kind == SILENT}:
            self._own = {**{each: of for each, of in self._own.items() if each.kind != SILENT}, **silent}
            self._write()
        unheard = self._behind_a_silent_leader(now)
        if unheard != self._unheard:
            self._unheard = unheard
            self._merge()

    def _behind_a_silent_leader(self, now: float) -> State:
        """The ranks of other nodes, when this node's leader no longer shows what it hears of them."""
        leader = self._node[0]
        if self._rows is None or leader == self.rank or len(self._node) == self.size:
            return {}
        if (looks := self._rows.looks(0)) != self._looks:
            self._looks, self._looked_at = looks, now
        if now - self._looked_at <= SILENT_SECONDS:
            return {}
        return {_silence(leader): {*range(self.size)} - {*self._node}}

    def drain(self, limit: float) -> None:
        """Receive all messages, so that the communicators can be freed. Collective.

        limit: seconds after which a CollectiveTimeoutError is raised, when ranks don't come.
        """
        deadline = time.monotonic() + limit

        def until(done: Callable[[], bool]) -> None:
            if not wait_until(done, deadline - time.monotonic(), self.listen, Pause(longest=SHORTEST_SLEEP)):
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks to close a topology")

        until(self._all_taken)
        request = self.comm.Ibarrier()  # then nothing is on its way to anybody
        try:
            until(request.Test)
        except CollectiveTimeoutError:
            free_later(request)
            raise
        self._sent.clear()
        self.release()

    def release(self) -> None:
        """Release the memory that the node shares. Local."""
        self._rows = None

    # Judgement

    @property
    def left(self) -> bool:
        """Whether a rank is known to have left."""
        return bool(self._left)

    def departure(self, rank: int) -> tuple[Fact, float] | None:
        """The fact that a rank has ended its program, or closed the topology, and since when it is known here."""
        for fact, heard in list(self._left.items()):
            if fact.number == 0 and rank in self.state.get(fact, ()):
                return fact, heard
        return None

    def gone(self, wait: WaitRecord, before: float, call: Call) -> RankLeftError | None:
        """The error of `call` when a rank that it needs has left, as was heard before a time, by time.monotonic()."""
        for fact, heard in list(self._left.items()):
            ranks = {*self.state.get(fact, ())} - {self.rank}
            has_come = wait is self._finish and fact.number == 0 and fact.fingerprint >= wait.count
            if fact.number in (0, wait.number) and heard < before and not has_come and ranks:
                error = RankLeftError(
                    f"rank {min(ranks)} has left: {fact.text}, while this rank waits for it in {call}"
                )
                error.job_code = (fact.turn if fact.number == 0 else 0) or 1
                return error
        return None

    def disagree(self, wait: WaitRecord, call: Call) -> bool:
        """Whether another rank makes another call in place of this one."""
        return any(
            (each.kind, each.number, each.turn) == (WAITING, wait.number, wait.count)
            and call.fingerprint != each.fingerprint
            for each in self.state
        )

    def speaker(self, wait: WaitRecord, call: Call, most: int) -> bool:
        """Whether this rank reports a wait: the lowest one that waits in this call, of at most so many calls."""
        others = [each for each, ranks in self.state.items() if each.kind == WAITING and min(ranks) < self.rank]
        here = wait.number, wait.count, call.fingerprint
        return len(others) < most and here not in [(each.number, each.turn, each.fingerprint) for each in others]

    def teller(self, wait: WaitRecord, call: Call) -> int:
        """The number in the job of the rank that reports an error of this call: the lowest one that waits in it."""
        here = WAITING, wait.number, wait.count, call.fingerprint
        ranks = {rank for each, of in self.state.items() if each[:4] == here for rank in of}
        return processes.world_ranks(self.comm)[min({self.rank, *ranks})]

    def look_at_end(self, call: Call) -> None:
        """Raise the error that ends `call`, an agreement on what is done, also after a rank was lost. Costs little."""
        error = self._finish.error or self.gone(self._finish, time.monotonic(), call)
        if error is not None:
            raise error

    def table(self, call: Call) -> str:
        """Where all ranks are, as far as this rank knows, which waits in `call`. At most 20 lines."""
        return status.table(self.state, self.size, self.rank, str(call))


def _hold_sent(sent: Mapping[int, Sequence[Sent]]) -> None:
    """Hold the messages of a topology that was dropped while they were on their way."""
    for under_way in sent.values():
        for each in under_way:
            free_later(each)


def _silence(leader: int) -> Fact:
    return status.fact(
        SILENT, leader, 0, 0, f"can't be heard: rank {leader}, which passes their messages on, takes none"
    )


def _waiting(wait: WaitRecord, call: Call) -> Fact:
    return status.fact(WAITING, wait.number, wait.count, call.fingerprint, str(call))
