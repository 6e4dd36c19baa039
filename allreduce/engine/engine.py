"""The engine of one backend's calls: the ranks compare each call, wait for each other, and work.

A call passes through three steps. `admit`: the ranks agree on the arguments, where that is due. `run`: they see that
all have come to the same call, and then each does its part. A call that fails half-way is the backend's last.
"""

import contextvars
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.ops import Op
from allreduce.arrays.trees import Layout
from allreduce.engine.call import AGREEING, NUMBER, NUMBER_BITS, Call, fingerprint
from allreduce.engine.consistency import FingerprintTable, Slot
from allreduce.engine.queue import without_frames
from allreduce.errors import AllReduceError, BrokenError, CommunicationError, OptionError, RankLostError
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import Comparison, agree, combine, everywhere
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import LOOK_SECONDS, NamedCall
from allreduce.transport.wait import Call as Shown

Work = Callable[[Any, Op], object]  # what a rank does with a 1-D array, in place, when all ranks have come
Place = tuple[int, int]  # in memory from `allocate`: the number of the array, alike on all ranks, and bytes from there
Find = Callable[[Any], Place | None]  # the place of a 1-D array
CHECKS = ("first", "always", "never")
CONTEXTS = int(np.__version__.partition(".")[0]) >= 2  # NumPy's handling of errors belongs to a context, not a thread
TAGS = 32749  # the largest prime below the number that every MPI has at least
LOOKS = 20  # at the fingerprint table, in a row; then
SPIN_SECONDS, YIELD_SECONDS, SLEEP_SECONDS = 2e-5, 1e-3, 5e-5  # how a rank waits for late ones: ever more lightly


@dataclass(frozen=True, slots=True)
class Quiet:
    """Work in which NumPy can raise and warn of nothing.

    argument: what `run` gets in the place of the Op, if it is given. fixed: converts a bound array, once, to the
    argument that `run` takes in its place.
    """

    run: Callable[[Any, Any], object]
    argument: Any = None
    fixed: Callable[[np.ndarray], Any] | None = None

    def __call__(self, flat: Any, op: Op) -> object:
        return self.run(flat, op if self.argument is None else self.argument)


@dataclass(frozen=True, slots=True)
class Trial:
    """Work that finds out, in the first call, how later ones are done: `run` does it, and returns the work of those."""

    run: Callable[[Any, Op], "Work | Trial"]

    def __call__(self, flat: Any, op: Op) -> object:
        return self.run(flat, op)


class Admitted:
    """A call on whose arguments all ranks have agreed.

    work: does it; its second argument is `argument`. fingerprint: of the call, the tree and the place. tree: whose
    arrays are in the buffer, if it is one. find: tells where a buffer lies in memory from `allocate`, where the ranks
    must compare that too. place: what it told. settling: functions to call once `work` is final; None afterwards.
    fixed: as that of Quiet. rounds: see Slot.
    """

    __slots__ = ("argument", "call", "find", "fingerprint", "fixed", "place", "rounds", "settling", "tree", "work")

    def __init__(
        self,
        slot: Slot | None,
        call: Call,
        argument: Any,
        work: Callable[[Any, Any], object],
        tree: Layout | None = None,
        find: Find | None = None,
        place: Place | None = None,
    ) -> None:
        self.call, self.argument, self.work = call, argument, work
        self.tree, self.find, self.place = tree, find, place
        self.fixed: Callable[[np.ndarray], Any] | None = None
        self.settling: list[Callable[[], None]] | None = []
        self.fingerprint = fingerprint(call) ^ (tree.number << NUMBER_BITS if tree else 0)
        if place is not None:
            self.fingerprint ^= zlib.crc32(f"{place}".encode()) << NUMBER_BITS
        self.rounds = () if slot is None else slot.rounds(self.fingerprint)

    def __call__(self, flat: Any, _: Any) -> object:
        """Do the work, as a part of another call."""
        return self.work(flat, self.argument)

    def __str__(self) -> str:
        place = f", array {self.place[0]} from allocate() at byte {self.place[1]}" if self.place else ""
        tree = f", of {self.tree.text}" if self.tree else ""
        return f"{self.call}{place}; {self.call.length * self.call.dtype.itemsize} bytes{tree}"


class Engine:
    """What a backend does together with the other ranks. Creating it and `close` are collective.

    In each call the ranks compare what they were called with, before anything is changed. Where all ranks share a node
    they compare fingerprints in shared memory, which costs next to nothing; elsewhere by one small all-reduce. Ranks
    that differ all raise the same error, and can go on. Nobody begins a call before all have come to it.

    user: the backend. check: one of CHECKS, as a backend's. "never": messages of a call have a tag of its own.
    """

    stopped: bool = False  # the backend is closed, or `broken`, or a copy in a forked child

    def __init__(self, topology: Topology, user: Any, check: str) -> None:
        compare = check != "never"
        self.check = check
        self._topology, self._user = topology, user
        self.broken: BaseException | None = None  # what ended a call half-way
        self.wait = topology.wait_record()
        self._control = topology.private(wait=self.wait)
        self._compares = compare and topology.size > 1
        self._slot = topology.once(FingerprintTable).take() if compare else None
        self._comparison = Comparison(self._control) if self._compares and self._slot is None else None
        oversubscribed = topology.sharing > topology.cores  # then a late rank needs the core on which this one looks
        self._looks, self._spin = range(1 if oversubscribed else LOOKS), 0.0 if oversubscribed else SPIN_SECONDS
        self._agreed: set[Any] = set()  # keys of calls on which the ranks have agreed
        self._thread = 0  # the one that called last
        self._met = self._slot.met if self._slot else 0  # how often the ranks have met
        self._silent = contextvars.Context()
        self._silent.run(np.seterr, all="ignore")
        self._tree: Layout | None = None  # whose arrays the calls of one thread work on,
        self._tree_thread = 0  # this one
        self._finds = False  # whether any call has `find`; then `run` looks for it, as for a tree
        self._of_trees: dict[tuple[int, int], Admitted] = {}  # records of the calls that have worked on trees
        self._agreeing = () if self._slot is None else self._slot.rounds(AGREEING)

    # Admission

    def agree_once(self, key: Any, text: object, values: list[int], error: AllReduceError | None) -> None:
        """Agree on `values` with the other ranks, where that is due for a call that is known by `key`.

        Whether it is due depends on nothing but the keys seen so far, which are the same on all ranks as long as they
        have agreed; so all ranks come to it, or none. error: why this rank refuses the call; all ranks raise it.
        """
        if self.check == "always" or (self.check == "first" and (error or key not in self._agreed)):
            text = f"refused, {type(error).__name__}: {error}" if error else text
            self.agree(values, str(text), error)
        if error is not None:
            raise error
        self._agreed.add(key)

    def admit(
        self, call: Call, op: Op, work: Work | Trial, look: Callable[[Any], bool] | None, find: Find | None
    ) -> Admitted:
        """A call that is done by `work` from now on. Local.

        look: called with the array in each call, until it returns False: it is not due any more. find: as of Admitted.
        """

        def begin(flat: Any, op: Op) -> None:
            """The first calls: they look at the array, and settle how later ones are done."""
            nonlocal work, look
            if look is not None and not look(flat):
                look = None
            if isinstance(work, Trial):
                work = work.run(flat, op)
            else:
                work(flat, op)
            if look is None and not isinstance(work, Trial):
                self._settle(admitted, work)

        admitted = Admitted(self._slot, call, op, self.quiet(begin), find=find)
        if find is not None:
            self._finds, self._thread = True, 0
        if look is None and not isinstance(work, Trial):
            self._settle(admitted, work)
        return admitted

    def _settle(self, admitted: Admitted, work: Work) -> None:
        if isinstance(work, Quiet):
            admitted.work, admitted.fixed = work.run, work.fixed
            admitted.argument = admitted.argument if work.argument is None else work.argument
        else:
            admitted.work = self.quiet(work)
        settling, admitted.settling = admitted.settling or [], None
        for settled in settling:
            settled()

    def quiet(self, work: Callable[..., object]) -> Callable[..., Any]:
        """`work`, which raises and warns of nothing, whatever np.seterr and the filters of warnings say in any call.

        An overflow in the sum would be an error of one rank alone.
        """
        if CONTEXTS:
            return partial(self._silent.copy().run, work)  # a context can't be entered twice

        def quietly(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                return work(*args)

        return quietly

    # Calls

    def run(self, call: Call, op: Op, work: Work, flat: Any) -> None:
        """Have `work` done on `flat`, when all ranks have come to the same call."""
        self.prepare(Admitted(self._slot, call, op, work))(flat)

    def prepare(self, admitted: Admitted, bound: list[Any] | None = None) -> Callable[..., None]:
        """A function that does a call's work on a 1-D array, when all ranks have come to the same call. Local.

        bound: holds the array on which it works; its caller gives none then. The function reads as few attributes as it
        can: a small call spends its time here.
        """
        wait, slot, comparison, looks, ident = self.wait, self._slot, self._comparison, self._looks, get_ident
        place = 0 if slot is None else slot.place

        def run(flat: Any = None) -> None:
            call = admitted if ident() == self._thread else self._specific(admitted, flat)
            if wait.call is not None or self.stopped:
                self.refuse()
            try:
                wait.count += 1
                wait.call = call  # threads change where functions are called, so none comes between the check and this
                if slot is not None:
                    met = self._met = self._met + 1
                    words, mine, alike = call.rounds[met & NUMBER]
                    words[place] = mine
                    for _ in looks:
                        if words.tobytes() == alike:
                            break
                    else:
                        self._rendezvous(words, mine, call)
                elif comparison is not None:
                    comparison.agree(call)
                admitted.work(flat if bound is None else bound[0], admitted.argument)
            except BaseException as error:
                self._break_off(call, error, flat if bound is None else bound[0])
                raise
            finally:
                wait.call = None

        return run

    def bind(self, admitted: Admitted, flat: Any) -> Callable[[], None]:
        """A function without arguments that does a call's work on this array, as `prepare`. Local."""
        bound = [flat]

        def fix() -> None:
            if admitted.fixed is not None:
                bound[0] = admitted.fixed(flat)

        if admitted.find is not None:  # the array stays where it is
            place = admitted.find(flat)
            standing = Admitted(self._slot, admitted.call, admitted.argument, admitted, place=place)
            return self.prepare(standing, bound)
        if admitted.settling is None:
            fix()
        else:
            admitted.settling.append(fix)
        return self.prepare(admitted, bound)

    @contextmanager
    def working_on(self, tree: Layout) -> Iterator[None]:
        """Inside, this thread's calls work on arrays of `tree`, which has to be alike on all ranks too. Local.

        Plain calls don't look for it: it is found as another thread is. Raises OptionError while another thread calls.
        """
        if self.wait.call is not None:
            self.refuse()
        self._tree, self._tree_thread, self._thread = tree, get_ident(), 0
        try:
            yield
        finally:
            self._tree = None

    def _notice_thread(self) -> None:
        self._thread = get_ident() if self._tree is None and not self._finds else 0
        abort.communicates()

    def _specific(self, admitted: Admitted, flat: Any) -> Admitted:
        """The record to compare: `admitted`, or of the tree on which this thread works, or of the place of `flat`.

        It says what the call is; its work stays that of `admitted`.
        """
        self._notice_thread()
        tree = self._tree if self._tree_thread == get_ident() else None
        if admitted.find is not None:
            place = admitted.find(flat)
            return Admitted(self._slot, admitted.call, admitted.argument, nothing, tree, place=place)
        if tree is None:
            return admitted
        key = admitted.fingerprint, tree.number
        if key not in self._of_trees:
            self._of_trees[key] = Admitted(self._slot, admitted.call, None, nothing, tree)
        return self._of_trees[key]

    def tag(self) -> int:
        """The tag of messages of the call that is under way.

        Where calls are not compared, ranks in different ones wait, until the stall detector tells them. Elsewhere all
        messages have the same tag.
        """
        call = self.wait.call
        return 0 if call is None or self._compares else ((call.fingerprint >> NUMBER_BITS) + self.wait.count) % TAGS

    def agree(self, values: list[int], text: str, error: Exception | None = None) -> None:
        """Return when all ranks bring equal `values` and no error; otherwise raise on all of them.

        text: this rank's side in words.
        """
        wait, said = self.wait, NamedCall(text, AGREEING)
        if get_ident() != self._thread:
            self._notice_thread()
        if wait.call is not None or self.broken is not None:
            self.refuse()
        try:
            wait.call = said
            wait.begin(said)
            if self._slot is not None:
                self._met += 1
                words, mine, _ = self._agreeing[self._met & NUMBER]
                words[self._slot.place] = mine
                self._rendezvous(words, mine, said, error)
            agree(self._control, values, text, error)
        except BaseException as refused:
            self._break_off(said, refused)
            raise
        finally:
            wait.end()

    def lowest(self, numbers: np.ndarray) -> np.ndarray:
        """Overwrite a few numbers with the lowest of all ranks. Collective; inside of a call that they agree on."""
        return combine(self._control, numbers, "compare arrays", MPI.MIN)

    # Ends

    def refuse(self) -> None:
        """Raise the error of a backend that is closed or broken, or that another thread is calling. Local."""
        if isinstance(self.broken, RankLostError):
            raise ulfm.again(self.broken)
        if self.broken is not None:
            raise BrokenError(
                f"{self._user!r} can't go on, since a call has failed half-way ({type(self.broken).__name__}: "
                f"{self.broken}); the ranks may be in different calls. Make a new Topology and backend on all of them"
            ) from self.broken
        if self.stopped:
            self._user.check_open()
        raise OptionError(
            f"{self._user!r} is called while another thread of this rank is in {self.wait.call}; give each thread "
            "a backend on a Topology of its own, or let one thread make all calls"
        )

    def stop(self) -> None:
        """Refuse all calls from now on. Local."""
        self.stopped = True
        self._agreed.clear()
        self._of_trees.clear()

    def close(self) -> None:
        """Give the communicator and the part of the fingerprint table back. Collective."""
        self.stop()
        if self._slot is not None:
            self._topology.once(FingerprintTable).give_back(self._slot.part, self._met)
        self._topology.release(self._control)

    def _rendezvous(self, words: memoryview, mine: int, call: Shown, error: Exception | None = None) -> None:
        """Wait until all ranks have come, and see that they came to the same call."""
        if self._all_words(words, mine & NUMBER).count(mine) < self._topology.size:  # all ranks see the same words
            agree(self._control, [zlib.crc32(mine.to_bytes(8, "little"))], str(call), error)

    def _all_words(self, table: memoryview, number: int) -> list[int]:
        """The fingerprints of all ranks, when all have come."""
        begin = looked = time.monotonic()
        self.wait.error, self.wait.raises = None, True
        try:
            while True:
                words = table.tolist()
                if all(each & NUMBER == number for each in words):
                    return words
                now = time.monotonic()
                if now - begin > YIELD_SECONDS:
                    time.sleep(SLEEP_SECONDS)
                elif now - begin >= self._spin:
                    os.sched_yield()
                self._topology.detector.check()
                if now - looked > LOOK_SECONDS:
                    looked = now
                    self._topology.detector.look(self.wait)
        finally:
            self.wait.raises = False

    def _break_off(self, call: Shown, error: BaseException, array: Any = None) -> None:
        """A call has failed: what all ranks raise leaves them in step, anything else (a node's error) does not."""
        if everywhere(error, self._topology.world):
            return
        free_later(array)  # late ranks, and messages that are under way, may still write there
        self.stopped = True
        if (lost := self._topology.detector.loss_of(error)) is not None:
            self.broken = lost
            raise lost from (None if isinstance(error, RankLostError) else error)
        self.broken = without_frames(error)
        self._topology.detector.leave(f"its call failed ({type(error).__name__}: {error})", self.wait)
        if isinstance(error, MPI.Exception):
            raise CommunicationError(f"MPI reports an error in {call}: {error}") from error


def nothing(flat: Any, op: Op) -> None:
    """The work of a call on no element, or of one rank alone, or that only moves."""


NOTHING = Quiet(nothing)


def _stop_in_child() -> None:
    if children.forked():
        Engine.stopped = True


children.guard(Engine, "refuse")
os.register_at_fork(after_in_child=_stop_in_child)
