"""Status messages: during a long wait, the ranks of a topology tell each other where they wait.

- Each rank has a row of facts (status.py). It sends the rows that have changed to the ranks at distances 1, 2, 4, ...
  in both directions, and these pass them on: O(log n) messages of each rank, and no rank has to answer.
- Between two ranks at most one message is pending; only a rank that leaves sends its last ones besides. Rows that do
  not fit into a message follow in the next one.
- No rank waits for a message that it has begun to receive: its sender may be stopped.
- Under ULFM, status messages use a communicator that is never revoked, and distances count only the ranks that this
  one takes for alive. If none of them receives the message of a rank that leaves, it tells twice as many, at last all.
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from allreduce.errors import CollectiveTimeoutError, RankLeftError
from allreduce.health import status
from allreduce.health.status import ENDED, FINAL, LEFT, STALLED, WAITING, Fact, RankFacts
from allreduce.process import children
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import SHORTEST_SLEEP, DescribedCall, Pause, WaitRecord, wait_until

GIVEN_UP_SECONDS = 5.0  # how long a wait that has ended in an error stays announced
GONE_SECONDS = 1.0  # how often the processes of this machine are checked during a long wait
LAST_SECONDS = 0.3  # how long a rank that leaves waits until its last messages are received
MOST_FACTS = 16  # of one kind that a rank announces
Pending = tuple[MPI.Request, bytearray, int]  # a message that is being sent or received, and the other rank


class KnownFacts(NamedTuple):
    """The row of a rank, as this rank knows it.

    since: when this rank learned each fact, by time.monotonic(). change: of this rank's knowledge, by its number.
    source: the rank that has sent it.
    """

    row: RankFacts
    since: Mapping[Fact, float]
    change: int
    source: int


class StatusMessages:
    """Exchanges facts between the ranks of a topology. comm: used for these messages only."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.ended: int | None = None  # the exit code of a rank that ends the job
        self.lost = False  # whether a rank has failed
        self.dump_requests: list[tuple[int, str]] = []  # new ones: the rank, and where it waits
        self._own: dict[int, list[Fact]] = {}  # facts about this rank, by kind
        self._given_up: dict[Fact, float] = {}  # waits of this rank that have ended in an error, and when
        self._known: dict[int, KnownFacts] = {}  # by rank, this one included
        self._changes = 0  # the number of changes of the known facts
        self._state: tuple[int, dict[Fact, set[int]]] = 0, {}  # after how many changes
        self._gone: set[int] = set()  # other ranks that have ended their programs or closed the topology
        self._looked = 0.0  # when the processes of this machine were checked
        self._told: dict[int, int] = {}  # by receiver: after how many changes the last message was sent
        self._sent: dict[int, list[Pending]] = {}  # pending messages by receiver: one, or more when this rank leaves
        self._arriving: list[Pending] = []  # messages that this rank has begun to receive
        weakref.finalize(self, _hold_pending, self._sent, self._arriving).atexit = False
        self._receivers: tuple[Collection[int] | None, list[int]] = None, []  # see `receivers`
        self._unrevoked: MPI.Intracomm | None = None
        self._finish = WaitRecord(-1)

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
        facts = list(dict.fromkeys([*(_waiting(wait, call) for wait, call in waits), *self._given_up]))
        if (facts := facts[:MOST_FACTS]) != self._own.get(WAITING, []):
            self._announce(WAITING, facts)

    def note_given_up(self, wait: WaitRecord, call: DescribedCall) -> None:
        """Keep announcing a wait that ends in an error, so that late ranks see that this one had reached the call."""
        self._given_up[_waiting(wait, call)] = time.monotonic()

    def announce_leaving(self, why: str, wait: WaitRecord | None) -> None:
        """Announce that this rank makes no further calls of one user or, without `wait`, of any."""
        if wait is not None:
            fact = status.fact(LEFT, wait.number, 0, 0, why)
        else:
            self._own[WAITING] = []
            passed = self._finish.count - (self._finish.call is not None)
            fact = status.fact(LEFT, 0, children.exit_code(), passed, why)
        self._announce(LEFT, [*self._own.get(LEFT, []), fact][-MOST_FACTS:])
        self.receive()
        self._send_last()

    def announce_end(self, code: int) -> None:
        """Announce that this rank ends the job."""
        self._announce(ENDED, [Fact(ENDED, turn=code)])
        self._send_last()

    def request_dumps(self, text: str) -> None:
        """Request that all ranks write their stacks and last calls to files. text: why."""
        asked = max((each.turn for each in self._own.get(STALLED, [])), default=0)
        self._announce(STALLED, [status.fact(STALLED, 0, asked + 1, 0, text)])

    def _announce(self, kind: int, facts: list[Fact]) -> None:
        self._own[kind] = facts
        version = self._known[self.rank].row.version if self.rank in self._known else 0
        self._learn(
            self.rank, RankFacts(version + 1, tuple(each for facts in self._own.values() for each in facts)), -1
        )

    # Facts of other ranks

    def exchange(self) -> None:
        """Receive facts, and send the changed ones."""
        self.receive()
        for receiver in self.receivers() if self._changes else []:
            self._send(receiver, False)

    def receive(self) -> None:
        """Receive facts, without sending."""
        if self.size == 1:
            return
        if not self.lost:
            self._receive(self.comm)
        if self._unrevoked is not None:
            self._receive(self._unrevoked)
        for _, content, source in _take_done(self._arriving):
            for rank, row in status.decode(bytes(content), self.size).items():
                if rank != self.rank and (rank not in self._known or self._known[rank].row.version < row.version):
                    self._learn(rank, row, source)

    def _receive(self, comm: MPI.Intracomm) -> None:
        envelope = MPI.Status()
        with suppress(MPI.Exception):  # another rank has just failed; the messages are received the next time
            if comm is self._unrevoked:
                ulfm.acknowledge(comm)
            while (message := comm.Improbe(status=envelope)) is not None:
                buffer = bytearray(envelope.Get_count(MPI.BYTE))
                self._arriving.append((message.Irecv([buffer, MPI.BYTE]), buffer, envelope.source))

    def _learn(self, rank: int, row: RankFacts, source: int) -> None:
        before = self._known[rank].since if rank in self._known else {}
        since = {fact: before.get(fact, time.monotonic()) for fact in row.facts}
        self._known[rank] = KnownFacts(row, since, self._changes + 1, source)
        self._changes += 1  # after the row: another thread may read `state` in between
        if rank == self.rank:
            return
        for fact in [fact for fact in since if fact not in before]:
            if fact.kind == LEFT and fact.number == 0:
                self._gone.add(rank)
            elif fact.kind == STALLED:
                self.dump_requests.append((rank, fact.text))
            elif fact.kind == ENDED:
                self.ended = fact.turn if abs(fact.turn) < 2**31 else 1

    @property
    def state(self) -> Mapping[Fact, Collection[int]]:
        """The ranks of each fact, as known to this rank. From any thread."""
        changes, state = self._state
        if changes != self._changes:
            changes, state = self._changes, {}
            for rank, known in list(self._known.items()):
                for fact in known.row.facts:
                    state.setdefault(fact, set()).add(rank)
            self._state = changes, state
        return state

    def look_for_gone_processes(self) -> None:
        """If any rank waits long, report this machine's ranks whose process has ended: as failed, or else as left."""
        now = time.monotonic()
        if now - self._looked < GONE_SECONDS or not any(each.kind == WAITING for each in self.state):
            return
        self._looked = now
        ended = liveness.look()
        for rank, number in enumerate(processes.world_ranks(self.comm)) if ended else ():
            if number in ended and rank not in self._gone:
                why = f"its process ({ended[number].pid}) has ended without telling MPI"
                self._learn(rank, RankFacts(FINAL, (status.fact(LEFT, 0, 1, -1, why),)), -1)

    # Messages

    def receivers(self) -> list[int]:
        """Return the ranks to which this one sends: 2 log2 of the number of ranks that it takes for alive."""
        gone = self._gone.union(self._failed())
        if gone != self._receivers[0]:  # the watchdog asks often
            living = self._living(gone)
            steps = [1 << power for power in range(len(living).bit_length())]
            self._receivers = gone, list(dict.fromkeys(living[place] for step in steps for place in (step - 1, -step)))
        return self._receivers[1]

    def _failed(self) -> tuple[int, ...]:
        return ulfm.failed(self._unrevoked) if self.lost and self._unrevoked is not None else ()

    def _living(self, gone: Collection[int]) -> list[int]:
        """Return the other ranks, except for the `gone` ones, the next one first."""
        following = (rank % self.size for rank in range(self.rank + 1, self.rank + self.size))
        return [rank for rank in following if rank not in gone]

    def _send(self, receiver: int, last: bool) -> None:
        """Send the oldest changes not yet sent, unless a message is pending. last: send all, in any case."""
        pending = self._sent.setdefault(receiver, [])
        _take_done(pending)
        told, changes = self._told.get(receiver, 0), self._changes
        if told == changes or (pending and not last):
            return
        known = sorted(self._known.items(), key=lambda item: item[1].change)
        rows = [(rank, each) for rank, each in known if each.change > told and each.source != receiver]
        while rows:
            content, count = status.encode_first([(rank, each.row) for rank, each in rows])
            self._told[receiver] = rows[count - 1][1].change
            with suppress(MPI.Exception):  # the receiver has failed
                buffer = bytearray(content)
                request = (self._unrevoked or self.comm).Issend([buffer, MPI.BYTE], receiver)
                pending.append((request, buffer, receiver))
            rows = rows[count:]
            if rows and not last:
                return
        self._told[receiver] = changes

    def _send_last(self) -> None:
        """Send the facts even if a message is pending; under ULFM then wait a moment until all are received."""
        told = list(self.receivers())
        for receiver in told:
            self._send(receiver, True)
        if not told or not ulfm.in_force():  # without ULFM, MPI_Finalize waits for all ranks, and delivers the messages
            return
        wait_until(self._all_received, LAST_SECONDS, self.receive)
        while self.lost and not self._heard(told):  # these ranks have ended meanwhile: tell as many others
            others = self._living({*self._gone, *self._failed(), *told})[: len(told)]
            if not others:
                return
            for rank in others:
                self._send(rank, True)
            told += others
            wait_until(partial(self._heard, told), LAST_SECONDS, self.receive)

    def _heard(self, told: Collection[int]) -> bool:
        """Return whether one of these ranks, which has not failed, has received all messages of this rank."""
        living = [sent for rank in {*told} - {*self._failed()} if (sent := self._sent.get(rank))]
        return any(all(map(_done, sent)) for sent in living)

    def _all_received(self) -> bool:
        return all(_done(sent) for pending in self._sent.values() for sent in pending)

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
        until(lambda: not self._arriving)
        self._sent.clear()

    # Judgement

    @property
    def left(self) -> bool:
        """Whether this rank knows of one that has ended its program or closed the topology."""
        return bool(self._gone)

    def check_present(self, ranks: Collection[int], patience: float, what: str) -> None:
        """Raise RankLeftError if this rank has known for `patience` seconds that one of these ranks has left."""
        before = time.monotonic() - patience
        for rank in [rank for rank in tuple(self._gone) if rank in ranks]:  # the watchdog may add others meanwhile
            for fact, since in self._known[rank].since.items():
                if fact.kind == LEFT and fact.number == 0 and since < before:
                    raise _left_error(rank, fact, what)

    def left_error(self, wait: WaitRecord, before: float, call: DescribedCall) -> RankLeftError | None:
        """Return the error of `call` if this rank knew before the time `before` that a needed rank has left."""
        for fact, ranks in self.state.items():
            has_come = wait is self._finish and fact.number == 0 and fact.fingerprint >= wait.count
            if fact.kind != LEFT or fact.number not in (0, wait.number) or has_come:
                continue
            known = [rank for rank in ranks if rank != self.rank and self._known[rank].since.get(fact, before) < before]
            if known:
                return _left_error(min(known), fact, str(call))
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


def _left_error(rank: int, fact: Fact, what: str) -> RankLeftError:
    error = RankLeftError(f"rank {rank} has left: {fact.text}, while this rank waits for it in {what}")
    error.job_code = fact.turn or 1
    return error


def _done(message: Pending) -> bool:
    """Return whether a message has been received; before that MPI may still use the buffer."""
    try:
        return bool(message[0].Test())
    except MPI.Exception:  # the other rank has failed
        return True


def _take_done(messages: list[Pending]) -> list[Pending]:
    """Remove and return the messages that have been received."""
    done = [message for message in messages if _done(message)]
    for message in done:
        with suppress(ValueError):  # the handler of a signal has come in between, and has taken it
            messages.remove(message)
    return done


def _hold_pending(sent: Mapping[int, Iterable[Pending]], arriving: Iterable[Pending]) -> None:
    """Keep the pending messages of a topology that was dropped."""
    for pending in (*sent.values(), arriving):
        for each in pending:
            free_later(each)


def _waiting(wait: WaitRecord, call: DescribedCall) -> Fact:
    return status.fact(WAITING, wait.number, wait.count, call.fingerprint, str(call))
