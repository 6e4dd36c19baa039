"""Runs the collective calls of one backend: the ranks compare the call, wait for each other, then do the work.

A call has three steps. `agree_once`: the ranks agree on the arguments, at the first call of a signature. `admit`: makes
the call's record. `prepare`: returns the function that waits until all ranks have reached the same call, then does the
work. After a call that failed on some ranks only, the backend refuses further calls.
"""

import contextvars
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from allreduce.arrays.ops import Op
from allreduce.arrays.trees import Layout
from allreduce.engine.call import AGREEING, SEQUENCE_BITS, SEQUENCE_MASK, Call, fingerprint
from allreduce.engine.consistency import FingerprintTable, Slot
from allreduce.engine.queue import without_frames
from allreduce.errors import AllReduceError, BrokenError, CommunicationError, OptionError, RankLostError
from allreduce.health import abort, dump
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import Comparison, agree, combine, everywhere
from allreduce.transport.deferred_free import free_later
from allreduce.transport.shared_segment import Location
from allreduce.transport.wait import CHECK_SECONDS, NamedCall
from allreduce.transport.wait import Call as DescribedCall

Work = Callable[[Any, Op], object]  # works on a 1-D array in place; called after all ranks have reached the call
BoundWork = tuple[Callable[[Any, Any], object], Any, Any]  # a function and its two arguments
Locate = Callable[[Any], Location | None]  # returns the location of a 1-D array, or None
CHECKS = ("first", "always", "never")
# NumPy 2 keeps np.errstate per contextvars context, NumPy 1 per thread
ERRSTATE_PER_CONTEXT = int(np.__version__.partition(".")[0]) >= 2
TAGS = 32749  # largest prime below 32767, the smallest MPI_TAG_UB that the standard allows
POLLS = 20  # reads of the fingerprint table before the slower loop of `_wait_for_fingerprints`
# a waiting rank polls for SPIN_SECONDS, yields its core until YIELD_SECONDS, then sleeps SLEEP_SECONDS between polls
SPIN_SECONDS, YIELD_SECONDS, SLEEP_SECONDS = 2e-5, 1e-3, 5e-5


@dataclass(frozen=True, slots=True)
class DirectWork:
    """Work that can't cause NumPy floating-point errors, so it runs without the np.errstate wrapper of `quiet`.

    argument: passed to `run` instead of the Op, if not None. bind: returns the fastest way to do the work on one array
    again and again: a function and its two arguments.
    """

    run: Callable[[Any, Any], object]
    argument: Any = None
    bind: Callable[[np.ndarray], BoundWork] | None = None

    def __call__(self, flat: Any, op: Op) -> object:
        return self.run(flat, op if self.argument is None else self.argument)


class AdmittedCall:
    """The record of a call whose arguments all ranks have agreed on.

    work: called with the array and `argument`. fingerprint: of the call, the tree and the location. tree: layout of the
    tree whose arrays the buffer holds, or None. locate: locates a buffer in memory from `allocate`, if the ranks must
    compare locations; location: the location found. bind: see DirectWork.
    rounds: see Slot.
    """

    __slots__ = "argument", "bind", "call", "fingerprint", "locate", "location", "rounds", "tree", "work"

    def __init__(
        self,
        slot: Slot | None,
        call: Call,
        argument: Any,
        work: Callable[[Any, Any], object],
        tree: Layout | None = None,
        locate: Locate | None = None,
        location: Location | None = None,
    ) -> None:
        self.call, self.argument, self.work = call, argument, work
        self.tree, self.locate, self.location = tree, locate, location
        self.bind: Callable[[np.ndarray], BoundWork] | None = None
        self.fingerprint = fingerprint(call) ^ (tree.number << SEQUENCE_BITS if tree else 0)
        if location is not None:
            self.fingerprint ^= zlib.crc32(f"{location}".encode()) << SEQUENCE_BITS
        self.rounds = () if slot is None else slot.rounds(self.fingerprint)

    def __str__(self) -> str:
        location = f", array {self.location[0]} from allocate() at byte {self.location[1]}" if self.location else ""
        tree = f", of {self.tree.text}" if self.tree else ""
        return f"{self.call}{location}; {self.call.length * self.call.dtype.itemsize} bytes{tree}"


class Engine:
    """Compares a backend's calls between the ranks, and runs them. The constructor and `close` are collective.

    Before a call changes data, the ranks compare fingerprints of their arguments: in shared memory if all ranks are on
    one node, otherwise by one small all-reduce. If fingerprints differ, all ranks raise the same DisagreementError, and
    the backend stays usable. No rank starts the work before all ranks have reached the call.

    user: the backend. check: one of CHECKS (see AllReduce). With "never" nothing is compared, and the message tag
    differs from call to call.
    """

    def __init__(self, topology: Topology, user: Any, check: str) -> None:
        compare = check != "never"
        self.check = check
        self._topology, self._user = topology, user
        # the error that ended a call on some ranks only; later calls are refused
        self.broken: BaseException | None = None
        self.stopped = False  # the backend is closed, or `broken`, or a copy in a forked child
        _engines.add(self)
        self.wait = topology.wait_record()
        self.comm = topology.private(user, self.wait)  # for data
        self._control = topology.private(wait=self.wait) if compare else self.comm
        self._compares = compare and topology.size > 1
        self._slot = topology.service(FingerprintTable).take() if compare else None
        self._comparison = Comparison(self._control) if self._compares and self._slot is None else None
        oversubscribed = topology.sharing > topology.cores  # a late rank may need the core that this rank would poll on
        self._polls, self._spin = range(1 if oversubscribed else POLLS), 0.0 if oversubscribed else SPIN_SECONDS
        self._agreed: set[Any] = set()  # keys of calls on which the ranks have agreed
        self._thread = 0  # id of the thread that called last; 0 sends the next call through `_record_for`
        self._sequence = self._slot.sequence if self._slot else 0  # rendezvous in the slot so far
        self._silent = contextvars.Context()
        self._silent.run(np.seterr, all="ignore")
        self._tree: Layout | None = None  # layout of the tree that `_tree_thread`'s calls work on
        self._tree_thread = 0  # id of that thread
        self._any_locate = False  # True: some call has `locate`, so all calls go through `_record_for`
        # (fingerprint, tree id) -> record of that call on that tree
        self._of_trees: dict[tuple[int, int], AdmittedCall] = {}
        self._agreeing = () if self._slot is None else self._slot.rounds(AGREEING)

    # Admission

    def agree_once(self, key: Any, text: object, values: list[int], error: AllReduceError | None) -> None:
        """Agree on `values` with the other ranks: at the first call with `key` (check="first"), or always ("always").

        The keys seen so far are the same on all ranks, so all ranks agree here or none does. error: why this rank
        refuses the call. A rank that refuses always starts an agreement. The other ranks join it here or when they
        compare their calls, and all raise `error`. With check="never" only this rank raises it.
        """
        if self.check == "always" or (self.check == "first" and (error or key not in self._agreed)):
            text = f"refused, {type(error).__name__}: {error}" if error else text
            self.agree(values, str(text), error)
        if error is not None:
            raise error
        self._agreed.add(key)

    def admit(self, call: Call, op: Op, work: Work, locate: Locate | None) -> AdmittedCall:
        """Return the record of a call that `work` does. Local. locate: see AdmittedCall."""
        if isinstance(work, DirectWork):
            argument = op if work.argument is None else work.argument
            admitted = AdmittedCall(self._slot, call, argument, work.run, locate=locate)
            admitted.bind = work.bind
        else:
            admitted = AdmittedCall(self._slot, call, op, self.quiet(work), locate=locate)
        if locate is not None:
            self._any_locate, self._thread = True, 0
        return admitted

    def quiet(self, work: Callable[..., object]) -> Callable[..., Any]:
        """Wrap `work` so that NumPy ignores floating-point errors in it, whatever np.seterr is in the calling thread.

        Otherwise an overflow could raise on one rank alone.
        """
        if ERRSTATE_PER_CONTEXT:
            return partial(self._silent.copy().run, work)  # a context can't be entered twice

        def quietly(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                return work(*args)

        return quietly

    # Calls

    def run(self, call: Call, op: Op, work: Work, flat: Any) -> None:
        """Wait until all ranks have reached the same call, then do `work` on the 1-D array `flat`. Collective."""
        self.prepare(AdmittedCall(self._slot, call, op, work))(flat)

    def prepare(self, admitted: AdmittedCall, bound: Any = None) -> FunctionType:
        """Return a function that runs the call on a 1-D array: it waits until all ranks have reached the same call,
        then does the work. Local; the function is collective.

        bound: the array to work on if the function is called without one. The function reads few attributes, because
        small calls spend their time here.
        """
        wait, slot, comparison, polls, ident = self.wait, self._slot, self._comparison, self._polls, get_ident
        rank = 0 if slot is None else slot.rank
        user, record = wait.user, dump.record

        def run(flat: Any = bound) -> None:
            begin, end = perf_counter(), 0.0
            call = admitted if ident() == self._thread else self._record_for(admitted, flat)
            if wait.call is not None or self.stopped:
                self.refuse()
            try:
                wait.count += 1
                wait.begun = begin
                wait.call = call  # no function call, so no thread switch, between the check above and this line
                if slot is not None:
                    sequence = self._sequence = self._sequence + 1
                    fingerprints, mine, alike = call.rounds[sequence & SEQUENCE_MASK]
                    fingerprints[rank] = mine
                    for _ in polls:
                        if fingerprints.tobytes() == alike:
                            break
                    else:
                        self._rendezvous(fingerprints, mine, call)
                elif comparison is not None:
                    comparison.agree(call)
                admitted.work(flat, admitted.argument)
                end = perf_counter()
            except BaseException as error:
                self._handle_failure(call, error, (flat, admitted.argument))
                raise
            finally:
                wait.call = None
                record((user, wait.count, call.call, begin, end))

        return cast(FunctionType, run)

    def bind(self, admitted: AdmittedCall, flat: Any) -> Callable[[], None]:
        """Return a function without arguments that runs the call on `flat`, as `prepare` does. Local."""
        location = None if admitted.locate is None else admitted.locate(flat)  # the array does not move
        plain = admitted.work, flat, admitted.argument
        work, given, argument = plain if admitted.bind is None else admitted.bind(flat)
        call = AdmittedCall(self._slot, admitted.call, argument, work, location=location)
        return self.prepare(call, given)

    @contextmanager
    def working_on(self, tree: Layout) -> Iterator[None]:
        """Context manager: in this thread's calls inside, the ranks also compare `tree`. Local.

        It clears `_thread`, so that calls go through `_record_for`, which adds the tree. Raises OptionError while
        another thread is in a call.
        """
        if self.wait.call is not None:
            self.refuse()
        self._tree, self._tree_thread, self._thread = tree, get_ident(), 0
        try:
            yield
        finally:
            self._tree = None

    def _notice_thread(self) -> None:
        self._thread = get_ident() if self._tree is None and not self._any_locate else 0
        abort.register_thread()

    def _record_for(self, admitted: AdmittedCall, flat: Any) -> AdmittedCall:
        """Return the record that the ranks compare: `admitted`, or a copy of it with the tree of `working_on` and the
        location of `flat`.

        Only its text and fingerprint are used; the work is that of `admitted`.
        """
        self._notice_thread()
        tree = self._tree if self._tree_thread == get_ident() else None
        if admitted.locate is not None:
            location = admitted.locate(flat)
            return AdmittedCall(self._slot, admitted.call, admitted.argument, nothing, tree, location=location)
        if tree is None:
            return admitted
        key = admitted.fingerprint, tree.number
        if key not in self._of_trees:
            self._of_trees[key] = AdmittedCall(self._slot, admitted.call, None, nothing, tree)
        return self._of_trees[key]

    def tag(self) -> int:
        """Return the message tag of the running call. Local.

        It is 0 where calls are compared. With check="never" it depends on the call, so messages of different calls do
        not match; the ranks then wait until the stall detector reports them.
        """
        call = self.wait.call
        return 0 if call is None or self._compares else ((call.fingerprint >> SEQUENCE_BITS) + self.wait.count) % TAGS

    def agree(self, values: list[int], text: str, error: Exception | None = None) -> None:
        """Return if all ranks pass equal `values` and no error; raise on all of them otherwise. Collective.

        text: this rank's call in words, for the table in the DisagreementError.
        """
        wait, named = self.wait, NamedCall(text, AGREEING)
        if get_ident() != self._thread:
            self._notice_thread()
        if wait.call is not None or self.broken is not None:
            self.refuse()
        end = 0.0
        try:
            wait.call = named
            wait.begin(named)
            if self._slot is not None:
                self._sequence += 1
                fingerprints, mine, _ = self._agreeing[self._sequence & SEQUENCE_MASK]
                fingerprints[self._slot.rank] = mine
                self._rendezvous(fingerprints, mine, named, error)
            agree(self._control, values, text, error)
            end = perf_counter()
        except BaseException as raised:
            self._handle_failure(named, raised)
            raise
        finally:
            wait.end()
            dump.record((wait.user, wait.count, named, wait.begun, end))

    def minimum(self, numbers: np.ndarray) -> np.ndarray:
        """Return a small array, overwritten by its minimum over all ranks. Collective, inside an agreed call only."""
        return combine(self._control, numbers, "compare arrays", MPI.MIN)

    # Ends

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
            self._user.check_open()
        raise OptionError(
            f"{self._user!r} is called while another thread of this rank is in {self.wait.call}; give each thread "
            "a backend on its own Topology, or let one thread make all calls"
        )

    def stop(self) -> None:
        """Refuse all calls from now on. Local."""
        self.stopped = True
        self._agreed.clear()
        self._of_trees.clear()

    def close(self) -> None:
        """Free the communicator and the slot of the fingerprint table. Collective."""
        self.stop()
        if self._slot is not None:
            self._topology.service(FingerprintTable).release(self._slot.number, self._sequence)
        if self._control is not self.comm:
            self._topology.release(self._control)
        self._topology.release(self.comm, self._user)

    def _rendezvous(
        self, fingerprints: memoryview, mine: int, call: DescribedCall, error: Exception | None = None
    ) -> None:
        """Wait until all ranks have reached a call; raise DisagreementError on all ranks if the calls differ."""
        # all ranks read the same table, so all of them agree here or none does
        if self._wait_for_fingerprints(fingerprints, mine & SEQUENCE_MASK).count(mine) < self._topology.size:
            agree(self._control, [zlib.crc32(mine.to_bytes(8, "little"))], str(call), error)

    def _wait_for_fingerprints(self, table: memoryview, number: int) -> list[int]:
        """Wait until every rank has written a fingerprint with this sequence number; return all fingerprints."""
        begin = checked = time.monotonic()
        self.wait.error, self.wait.raises = None, True
        try:
            while True:
                fingerprints = table.tolist()
                if all(each & SEQUENCE_MASK == number for each in fingerprints):
                    return fingerprints
                now = time.monotonic()
                if now - begin > YIELD_SECONDS:
                    time.sleep(SLEEP_SECONDS)
                elif now - begin >= self._spin:
                    os.sched_yield()
                self._topology.detector.check()
                if now - checked > CHECK_SECONDS:
                    checked = now
                    self._topology.detector.check_waits(self.wait)
        finally:
            self.wait.raises = False

    def _handle_failure(self, call: DescribedCall, error: BaseException, array: Any = None) -> None:
        """Mark the backend as broken, unless all ranks raise this error: then they are still in step.

        Raises RankLostError or CommunicationError instead if one of them names the cause.
        """
        if everywhere(error, self._topology.world):
            return
        free_later(array)  # late ranks and unfinished messages may still write there
        self.stopped = True
        if (lost := self._topology.detector.failure_behind(error)) is not None:
            self.broken = lost
            raise lost from (None if isinstance(error, RankLostError) else error)
        self.broken = without_frames(error)
        self._topology.detector.leave(f"its call failed ({type(error).__name__}: {error})", self.wait)
        if isinstance(error, MPI.Exception):
            raise CommunicationError(f"MPI reports an error in {call}: {error}") from error


def nothing(flat: Any, op: Op) -> None:
    """Do nothing: the work of a call on 0 elements or with 1 rank."""


NOTHING = DirectWork(nothing)


_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _stop_in_child() -> None:
    if children.forked():
        for engine in _engines:
            engine.stopped = True


children.guard(Engine, "refuse")
os.register_at_fork(after_in_child=_stop_in_child)
