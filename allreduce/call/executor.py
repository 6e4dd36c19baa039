"""Runs the collective calls of one AllReduce: the ranks meet and compare the call, then do the work.

`prepare` returns the function that runs calls of one signature: it waits until all ranks have reached the same call
(rendezvous.py), then does the work, and tells the observers. After a call that failed on some ranks only, further calls
are refused.
"""

import contextlib
import contextvars
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays.workspace import Workspace
from allreduce.call.call import AGREEING, HASH_BITS, MEETING, SEQUENCE_BITS, SEQUENCE_MASK, Call, fingerprint
from allreduce.call.queue import Future, Queue, Worker, without_frames
from allreduce.call.rendezvous import (
    AGREED,
    DIFFERENT,
    NO_WORK,
    ORDERED_STORES,
    PARITIES,
    VERDICTS,
    CWork,
    Meet,
    Row,
    Slot,
    Tables,
)
from allreduce.errors import BrokenError, ClosedError, CommunicationError, OptionError, RankLostError
from allreduce.health import abort, dump
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import agree, everywhere, on_all
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import NamedCall, Pause, checking, wait_until

Observer = Callable[[dump.Entry], object]
do_nothing: Callable[[Any], object] = id  # the work of a call that C has done when the ranks met, or of no elements
Place = tuple[int, int]  # of an array: an allocation's number, equal on all ranks, and the byte offset in it
# NumPy 2 keeps np.errstate per contextvars context, NumPy 1 per thread
ERRSTATE_PER_CONTEXT = int(np.__version__.partition(".")[0]) >= 2
AGREEING_NUMBER = AGREEING >> SEQUENCE_BITS
TAGS = 32749  # largest prime below 32767, the smallest MPI_TAG_UB that the standard allows
MOST_PLACES = 64  # of one signature, whose fingerprints are kept
# a waiting rank polls for SPIN_SECONDS, yields its core until YIELD_SECONDS, then sleeps SLEEP_SECONDS between polls
SPIN_SECONDS, YIELD_SECONDS, SLEEP_SECONDS = 2e-5, 1e-3, 5e-5
CROWDED_SECONDS = 1e-4  # how long C yields, in the place of polling, where ranks outnumber cores


class Work(NamedTuple):
    """The work of calls of one signature.

    run: does the work on a 1-D array. quiet: `run` causes no floating-point errors of NumPy, which could raise on one
    rank alone. address: of the array, which all ranks of the node know when `run` begins (`Executor.addresses`). place:
    of the array in memory from `allocate` (Allocations.place), which the ranks compare. in_c: returns the CWork of an
    array, which C does when the ranks have met, before `run`; without a `place` of None. waits_inside_mpi: whether it
    waits for other ranks inside MPI, where no time-out ends the wait.
    """

    run: Callable[[Any], object]
    quiet: bool = False
    address: Callable[[Any], int] | None = None
    place: Callable[[Any], Place | None] | None = None
    in_c: Callable[[Any], CWork] | None = None
    waits_inside_mpi: bool = True


class PreparedCall(NamedTuple):
    """A call of one signature, as the ranks compare it, and its work.

    fingerprint: of the call, and of the tree whose arrays the buffer holds. tree: this tree in words, or "". where: the
    place of its array, in words.
    """

    call: Call
    work: Work
    fingerprint: int
    tree: str = ""
    where: str = ""

    def __str__(self) -> str:
        tree = f", of {self.tree}" if self.tree else ""
        return f"{self.call}{self.where}; {self.call.length * self.call.dtype.itemsize} bytes{tree}"

    def at(self, place: Place | None) -> "PreparedCall":
        """Return the call at one place of memory from `allocate`."""
        here = self._replace(work=self.work._replace(place=None))
        if place is None:
            return here
        digest = hash(place) & (1 << HASH_BITS - 1) - 1  # Python's hash of integers is the same on all ranks
        where = f", array {place[0] & 0xFFFFFFFF} at byte {place[1]}"
        return here._replace(fingerprint=self.fingerprint ^ digest << SEQUENCE_BITS, where=where)


class Executor:
    """Runs the calls of one user in one order. The constructor and `close` are collective.

    user: an AllReduce, closed with the topology. check: False: on several nodes no calls are compared, also not inside
    a node, but for `agree` and `compare`. The message tag then differs from call to call. sleeps: a waiting rank leaves
    its core to other threads soon.
    """

    def __init__(self, topology: Topology, user: Any, check: bool) -> None:
        self.check = check
        self._topology, self._user = topology, user
        # the error that ended a call on some ranks only; later calls are refused
        self.broken: BaseException | None = None
        self.stopped = False  # the user is closed, or `broken`, or a copy in a forked child
        self.observers: list[Observer] = []  # besides dump.record
        _executors.add(self)
        self.wait = topology.wait_record()
        self.sleeps = False
        self._made: list[MPI.Intracomm] = []
        self._workspaces: list[Workspace] = []
        self.comm = topology.private(user, self.wait)  # for data
        self._control = topology.private(wait=self.wait)
        self._slot: Slot | None = None
        self.orders = False  # whether the meetings of all ranks of the only node order their stores
        self._several = False  # True: the leaders of several nodes compare the calls of their nodes
        self._leaders: MPI.Intracomm | None = None  # their communicator, on leaders
        if topology.size > 1:
            self._connect(topology)
        oversubscribed = topology.sharing > topology.cores  # a late rank may need the core that this rank would poll on
        self._spin = -CROWDED_SECONDS if oversubscribed else SPIN_SECONDS
        ordered = ORDERED_STORES or self.orders
        self._fence = self._slot.meeting(MEETING, self._spin) if self._slot is not None and ordered else None
        # ids of the thread whose next call need not wait for its turn, and of the one that runs submitted calls
        self._thread = self._worker = 0
        self._queue: Queue | None = None  # of submitted calls, from the first one on
        self._submitted: Future | None = None  # the last one
        self._sequence = self._slot.sequence if self._slot else 0  # rendezvous in the slot so far
        self._silent = contextvars.Context()
        self._silent.run(np.seterr, all="ignore")

    def _connect(self, topology: Topology) -> None:
        """Take a slot of the node's table, and connect the leaders. Where a node has no shared memory, all ranks
        compare calls by messages."""
        self._tables = topology.service(Tables)
        slot = self._tables.take() if topology.node_size > 1 else None
        if topology.nodes == 1:
            self._slot = slot
            # Python can't order its stores, and a rank that calls C does not wait in the barrier of one that does not
            self.orders = ORDERED_STORES or topology.by_c
        elif on_all(self._control, slot is not None or topology.node_size == 1, "share fingerprints"):
            self._slot = slot
            leaders = self.communicator(topology.cross, alone=topology.node_rank > 0)
            self._leaders = None if topology.node_rank else leaders
            self._several = True
        elif slot is not None:
            self._tables.release(slot, slot.sequence)

    # What algorithms use

    def communicator(self, ranks: MPI.Intracomm, colour: int | None = None, alone: bool = False) -> MPI.Intracomm:
        """Return a new communicator of all ranks of `ranks`, or of its ranks with this rank's `colour`. Collective over
        `ranks`, a communicator of the topology; a rank that is `alone` gets MPI.COMM_SELF, and does not take part."""
        if alone or ranks.size == 1:
            return MPI.COMM_SELF
        number = (self.wait.number << 16) + len(self._made) + 1  # not the topology's next: some ranks are alone
        wait = self._topology.detector.wait_record(number, raises=True)
        self._made.append(self._topology.private(wait=wait, ranks=ranks, colour=colour))
        return self._made[-1]

    def scratch(self, make: Callable[[int], np.ndarray] | None = None) -> Workspace:
        """Return new scratch memory, which `close` frees. Local."""
        self._workspaces.append(Workspace() if make is None else Workspace(make))
        return self._workspaces[-1]

    @property
    def compares(self) -> bool:
        """Whether the ranks compare their calls."""
        return self.check or (self.meets and not self._several)

    @property
    def meets(self) -> bool:
        """Whether the ranks of this node can `meet`."""
        return self._slot is not None

    def addresses(self) -> list[int]:
        """Return the addresses that the ranks of this node gave in the last rendezvous. Local."""
        assert self._slot is not None
        return self._slot.rows[self._sequence % PARITIES].addresses.tolist()

    def fence(self, _: object = None) -> None:
        """Wait until all ranks of this node are here. Collective over the node, inside of a call. Afterwards each rank
        sees the memory that the others have written before."""
        if self._fence is None:
            self.meet(0)
            return
        assert self._slot is not None
        number = self._sequence = self._sequence + 1
        if not self._fence(number, None):
            self._wait_for(self._slot.rows[number % PARITIES], number & SEQUENCE_MASK)
            self._fence(number, None)  # reads again, in order

    def meet(self, address: int) -> list[int]:
        """As `fence`, but return the addresses that the ranks give."""
        row, mine = self._enter(MEETING, address)
        if row.fingerprints.tolist().count(mine) < len(row.fingerprints):
            self._wait_for(row, mine & SEQUENCE_MASK)
        if not ORDERED_STORES:
            self._topology.node.Barrier()
        return row.addresses.tolist()

    def tag(self) -> int:
        """Return the message tag of the running call. Local.

        It is 0 with check=True. With check=False it depends on the call, so messages of different calls do not match;
        the ranks then wait until the stall detector reports them.
        """
        call = self.wait.call
        return 0 if call is None or self.check else ((call.fingerprint >> SEQUENCE_BITS) + self.wait.count) % TAGS

    def _quiet(self, work: Callable[..., object]) -> Callable[..., Any]:
        """Wrap `work` so that NumPy ignores floating-point errors in it, whatever np.seterr is in the calling thread.

        Otherwise an overflow could raise on one rank alone.
        """
        if ERRSTATE_PER_CONTEXT:
            return partial(self._silent.copy().run, work)  # a context can't be entered twice
        return np.errstate(all="ignore")(work)

    # Calls

    def run(self, call: Call, work: Callable[[Any], object], array: Any, tree: str = "") -> None:
        """Wait until all ranks have reached the same call, then do `work` on an array. Collective."""
        self.prepare(PreparedCall(call, Work(work), fingerprint(call, tree), tree))(array)

    def submit(self, work: Callable[[], object], description: str) -> Future:
        """Let a thread do `work`, a call of this executor, after all calls that were submitted before. The first use is
        collective, later ones are local."""
        self.check_open(waits=False)
        if self._queue is None:
            self._queue = self._topology.service(Worker).queue(self._user.name, threaded=True, goes_on=True)

        def run() -> None:
            self._worker = get_ident()
            work()

        self._submitted = future = self._queue.submit(run, description)
        self._thread = 0  # after `_submitted`: the next call waits for it
        return future

    def _wait_for_turn(self) -> None:
        """Wait for the submitted calls, unless this is one of them; then raise the error of a call that can't start."""
        self._thread = get_ident()  # before `_submitted` is read: `submit` in another thread then clears it
        last = self._submitted
        abort.register_thread()
        if last is not None and self._thread != self._worker:
            with contextlib.suppress(Exception):  # the caller of `submit` gets it
                last.wait()
            self._submitted = None
        if self.wait.call is not None or self.broken is not None or self.stopped:
            self._thread = 0
            self.refuse()

    def prepare(self, prepared: PreparedCall, bound: Any = None) -> Callable[..., None]:
        """Return a function that runs the call on a 1-D array. Local; the function is collective.

        bound: the array to work on if the function is called without one. The function reads few attributes, because
        small calls spend their time here.
        """
        wait, ident, record = self.wait, get_ident, dump.record
        user, observers, call = wait.user, self.observers, prepared.call
        work = prepared.work.run if prepared.work.quiet else self._quiet(prepared.work.run)
        fixed, find = self._meeting(prepared, bound), self._find(prepared)
        meets = self._topology.size > 1

        def run(flat: Any = bound) -> None:
            begin, end = perf_counter(), 0.0
            here, meet = prepared, fixed
            if ident() != self._thread or wait.call is not None:
                self._wait_for_turn()
            count = wait.count + 1
            try:
                wait.count = count
                wait.begun = begin
                wait.call = prepared  # no function call, so no thread switch, between the check above and this line
                if find is not None:
                    here, meet = find(flat)
                if meet is not None:
                    sequence = self._sequence = self._sequence + 1
                    if not meet(sequence, flat):
                        self._compare(here.fingerprint, here, meet=partial(meet, sequence, flat))
                elif meets:
                    self._rendezvous(prepared, flat)
                if work is not do_nothing:
                    work(flat)
                end = perf_counter()
            except BaseException as error:
                self._handle_failure(prepared, error, flat)
                raise
            finally:
                wait.call = None
                event = (user, count, call, begin, end)
                record(event)
                for observe in observers:
                    observe(event)

        return run

    def compare(self, text: str, where: str = "") -> None:
        """Return when all ranks have reached the call of this text; raise DisagreementError on all of them if one has
        reached another call, also with check=False. Collective. where: text for the stall report."""
        self.check_open(waits=False)
        if not self.compares:
            self.agree([fingerprint(text) >> SEQUENCE_BITS], text)
            return
        self.wait.begin(NamedCall(text + where))
        try:
            self._meet(fingerprint(text), 0, text, None)
        finally:
            self.wait.end()

    def agree(self, values: list[int], text: str, error: Exception | None = None) -> None:
        """Return if all ranks pass equal `values` and no error; raise on all of them otherwise. Collective.

        text: this rank's call in words, for the table in the DisagreementError.
        """
        wait, named = self.wait, NamedCall(text, AGREEING)
        self._wait_for_turn()
        end = 0.0
        try:
            wait.call = named
            wait.begin(named)
            if self._topology.size > 1:
                self._meet(AGREEING, 0, text, error)
            agree(self._control, values, text, error)
            end = perf_counter()
        except BaseException as raised:
            self._handle_failure(named, raised)
            raise
        finally:
            wait.end()
            for observe in (dump.record, *self.observers):
                observe((wait.user, wait.count, named, wait.begun, end))

    # The rendezvous

    def _meeting(self, prepared: PreparedCall, array: Any) -> Meet | None:
        """Return how the ranks of the only node meet in a call, if they only compare numbers. array: None if it is not
        known yet."""
        work = prepared.work
        if self._slot is None or not self.orders or work.address is not None:
            return None
        in_c = NO_WORK if work.in_c is None or (array is None and work.place is not None) else work.in_c(array)
        return self._slot.meeting(prepared.fingerprint, self._spin, in_c)

    def _find(self, prepared: PreparedCall) -> Callable[[Any], tuple[PreparedCall, Meet | None]] | None:
        """Return a function that returns a call at an array's place in memory from `allocate`, and how the ranks meet
        in it; None if they compare no places."""
        place = prepared.work.place
        if place is None or self._meeting(prepared, None) is None:
            return None
        known: dict[Place | None, tuple[PreparedCall, Meet | None]] = {}

        def find(array: Any) -> tuple[PreparedCall, Meet | None]:
            key = place(array)
            found = known.get(key)
            if found is None:
                if len(known) >= MOST_PLACES:  # a program with ever new slices
                    known.clear()
                here = prepared.at(key)
                known[key] = found = here, self._meeting(here, array)
            return found

        return find

    def _rendezvous(self, prepared: PreparedCall, flat: Any) -> None:
        """Meet in a call for which `prepare` has no faster way: by place or address, on several nodes, by messages."""
        place, address_of = prepared.work.place, prepared.work.address
        if place is not None:
            prepared = prepared.at(place(flat))
        address = 0 if address_of is None else address_of(flat)
        self._meet(prepared.fingerprint, address, prepared, None)

    def _meet(self, fingerprint: int, address: int, text: object, error: Exception | None) -> None:
        """Wait until all ranks have reached a call; raise DisagreementError on all of them if the calls differ."""
        if self._slot is None:
            comm, number = self._leaders or self._control, fingerprint >> SEQUENCE_BITS
            if (self.check or number == AGREEING_NUMBER) and not self._alike_between(comm, number, True):
                self._refuse_call(number, text, error)
            return
        self._enter(fingerprint, address)
        self._compare(fingerprint, text, error)

    def _enter(self, fingerprint: int, address: int) -> tuple[Row, int]:
        """Write this rank's fingerprint into the row of the next rendezvous. Return the row and the written number."""
        assert self._slot is not None
        self._sequence += 1
        row, mine = self._slot.rows[self._sequence % PARITIES], fingerprint | self._sequence & SEQUENCE_MASK
        row.addresses[self._slot.rank] = address
        row.fingerprints[self._slot.rank] = mine
        return row, mine

    def _compare(
        self, fingerprint: int, text: object, error: Exception | None = None, meet: Callable[[], bool] | None = None
    ) -> None:
        """Wait for the node's ranks; raise if the calls differ. On several nodes the leaders' verdict decides, or with
        check=False nothing does: only AGREEING is compared there. meet: this rank has entered by it."""
        assert self._slot is not None
        row, mine = self._slot.rows[self._sequence % PARITIES], fingerprint | self._sequence & SEQUENCE_MASK
        # all ranks read the same row, so all of them agree here or none does
        alike = self._wait_for(row, mine & SEQUENCE_MASK).count(mine) == len(row.fingerprints)
        if meet is not None:
            alike = alike and meet()  # which reads again, in order, and may have more to do
        elif not ORDERED_STORES and (alike or self._several):
            self._topology.node.Barrier()
        number = fingerprint >> SEQUENCE_BITS
        if self._several:
            alike = not (self.check or number == AGREEING_NUMBER) or self._verdict(row, mine, alike)
        if not alike:
            self._refuse_call(number, text, error)

    def _refuse_call(self, number: int, text: object, error: Exception | None) -> None:
        """Raise DisagreementError on all ranks, which all know that their calls differ. Collective."""
        # in one call from here on: the stall detector would end the waits of ranks that it sees in different calls
        self.wait.begin(NamedCall(str(text), AGREEING))
        agree(self._control, [number], str(text), error)

    def _verdict(self, row: Row, mine: int, alike: bool) -> bool:
        """Return whether the calls of all nodes are alike. The leader compares them, and publishes the result."""
        # not every rendezvous has a verdict, so the verdict carries the whole count
        verdict, sequence = row.verdict, self._sequence
        if self._leaders is not None:
            alike = self._alike_between(self._leaders, mine >> SEQUENCE_BITS, alike)
            verdict[0] = sequence * VERDICTS + (AGREED if alike else DIFFERENT)
            return alike
        self._poll(lambda: verdict[0] // VERDICTS == sequence)
        return verdict[0] % VERDICTS == AGREED

    def _alike_between(self, comm: MPI.Intracomm, number: int, alike: bool) -> bool:
        """Return whether all ranks of `comm` pass equal numbers, and alike=True. Collective over them."""
        low = np.array([number, -number, alike], np.int64)
        request = comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN)
        try:
            self._poll(request.Test)
        except BaseException:
            free_later(request)  # MPI may still write into its buffer
            raise
        return low.tolist() == [number, -number, 1]

    def _wait_for(self, row: Row, number: int) -> list[int]:
        """Wait until every rank of the node has written a fingerprint with this sequence number; return all of them."""
        found: list[int] = []

        def complete() -> bool:
            found[:] = row.fingerprints.tolist()
            return all(each & SEQUENCE_MASK == number for each in found)

        self._poll(complete)
        return found

    def _poll(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns True: other ranks have written to the node's table, or have answered."""
        begin = time.monotonic()
        self.wait.error, raises, self.wait.raises = None, self.wait.raises, True

        def pause(now: float) -> None:
            if now - begin > YIELD_SECONDS:
                time.sleep(SLEEP_SECONDS)
            elif now - begin >= self._spin:
                os.sched_yield()

        try:
            check = checking(self._topology.detector, self.wait)
            wait_until(done, meanwhile=check, pause=Pause() if self.sleeps else pause)
            self.wait.error = None  # the others came at the last moment, and the call goes on
        finally:
            self.wait.raises = raises

    # Ends

    def check_open(self, waits: bool = True) -> None:
        """Wait for the submitted calls, and raise the error of a call that can't start. Local. waits: False: do not
        wait, and raise only the errors of a user that is closed or broken."""
        if waits:
            self._wait_for_turn()
        elif self.broken is not None or self.stopped:
            self.refuse()

    def refuse(self) -> None:
        """Raise the error of a call that can't start: broken, closed, or another thread is in a call. Local."""
        if isinstance(self.broken, RankLostError):
            raise ulfm.again(self.broken)
        if self.broken is not None:
            raise BrokenError(
                f"{self._user!r} is broken: an earlier call failed part-way ({type(self.broken).__name__}: "
                f"{self.broken}), so ranks may be in different calls. Create a new Topology and backend on all of them"
            ) from self.broken
        if self.stopped:
            raise ClosedError(f"{self._user.name} is closed; create a new one")
        raise OptionError(
            f"{self._user!r} is called while another thread of this rank is in {self.wait.call}; give each thread "
            "a backend on its own Topology, or let one thread make all calls"
        )

    def stop(self) -> None:
        """Refuse all calls from now on. Local."""
        self.stopped, self._thread = True, 0

    def close(self) -> None:
        """Free the communicators, the scratch memory and the slot of the fingerprint table. Collective."""
        self.stop()
        if self._queue is not None:
            self._queue.close()
        if self._slot is not None:
            self._tables.release(self._slot, self._sequence)
        for workspace in self._workspaces:
            workspace.clear()
        for comm in [*reversed(self._made), self._control]:
            self._topology.release(comm)
        self._topology.release(self.comm, self._user)

    def abandon(self) -> None:
        """Drop the scratch memory, to which late ranks and unfinished messages may still write. Local."""
        self.stop()
        if self._queue is not None:
            self._queue.abandon()
        free_later([workspace.take() for workspace in self._workspaces])

    def _handle_failure(self, call: Any, error: BaseException, array: Any = None) -> None:
        """Mark the user as broken, unless all ranks raise this error: then they are still in step.

        Raises RankLostError or CommunicationError instead if one of them names the cause.
        """
        if everywhere(error, self._topology.world):
            return
        free_later(array)  # late ranks and unfinished messages may still write there
        self.stop()
        if (lost := self._topology.detector.failure_behind(error)) is not None:
            self.broken = lost
            raise lost from (None if isinstance(error, RankLostError) else error)
        self.broken = without_frames(error)
        self._topology.detector.leave(f"its call failed ({type(error).__name__}: {error})", self.wait)
        if isinstance(error, MPI.Exception):
            raise CommunicationError(f"MPI reports an error in {call}: {error}") from error


_executors: "weakref.WeakSet[Executor]" = weakref.WeakSet()


def _stop_in_child() -> None:
    if children.forked():
        for executor in _executors:
            executor.stop()


children.guard(Executor, "refuse")
os.register_at_fork(after_in_child=_stop_in_child)
