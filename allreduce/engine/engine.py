"""The calls of one backend: all ranks see that they are in the same one, and one that fails half-way is the last."""

import contextvars
import os
import time
import zlib
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.arrays.ops import Op
from allreduce.engine.call import AGREEING, NUMBER, NUMBER_BITS, Signature, word
from allreduce.engine.consistency import Board, Slot
from allreduce.engine.lane import without_frames
from allreduce.errors import BrokenError, CommunicationError, OptionError, RankLostError
from allreduce.health import abort
from allreduce.topology import Closeable, Topology
from allreduce.transport import ulfm
from allreduce.transport.control import Comparison, agree, combine, everywhere
from allreduce.transport.deferred_free import keep
from allreduce.transport.wait import LOOK_SECONDS, Said
from allreduce.transport.wait import Call as Shown

Reduction = Callable[[Any, Op], None]  # reduces a 1-D array in place
Place = tuple[int, int]  # in memory from `allocate`: the number of the array, alike on all ranks, and bytes from there
Find = Callable[[Any], Place | None]  # the place of a 1-D array
CONTEXTS = int(np.__version__.partition(".")[0]) >= 2  # NumPy's handling of errors belongs to a context, not a thread
TAGS = 32749  # the largest prime below the number that every MPI has at least
LOOKS = 20  # at the board, in a row; then
SPIN_SECONDS, YIELD_SECONDS, SLEEP_SECONDS = 2e-5, 1e-3, 5e-5  # how a rank waits for late ones: ever more lightly


class Tree(Protocol):
    """Arrays that are reduced as parts of one buffer: in words, and a number of 32 bits by which ranks compare them."""

    @property
    def text(self) -> str: ...

    @property
    def number(self) -> int: ...


class Call:
    """A call that all ranks have been seen to agree on.

    reduce: what does it. word: by which other ranks know it. tree: whose arrays are in the buffer, if it is one.
    find: tells where a buffer lies in memory from `allocate`, where that must be compared too. place: what it told.
    """

    __slots__ = ("find", "op", "place", "reduce", "signature", "tree", "word")

    def __init__(
        self,
        signature: Signature,
        reduce: Reduction,
        op: Op,
        tree: Tree | None = None,
        find: Find | None = None,
        place: Place | None = None,
    ) -> None:
        self.signature, self.reduce, self.op, self.tree = signature, reduce, op, tree
        self.find, self.place = find, place
        self.word = word(signature) ^ (tree.number << NUMBER_BITS if tree else 0)
        if place is not None:
            self.word ^= zlib.crc32(f"{place}".encode()) << NUMBER_BITS

    def __str__(self) -> str:
        place = f", array {self.place[0]} from allocate() at byte {self.place[1]}" if self.place else ""
        tree = f", of {self.tree.text}" if self.tree else ""
        return f"{self.signature}{place}; {self.signature.length * self.signature.dtype.itemsize} bytes{tree}"


ReductionT = TypeVar("ReductionT", bound=Callable[..., None])


def without_numpy(reduce: ReductionT) -> ReductionT:
    """Mark a reduction in which NumPy computes nothing, so that it has no need of `Calls.quiet`."""
    reduce.without_numpy = True  # type: ignore[attr-defined]
    return reduce


class Calls:
    """What a backend does together with the other ranks. Creating it and `close` are collective.

    In each call the ranks compare what they were called with, before anything is changed. Where all ranks share a node
    they compare it on the topology's board, which costs next to nothing; elsewhere by one small all-reduce. Ranks that
    differ all raise the same error, and can go on. Nobody begins a call before all have come to it.

    compare: False: the ranks compare nothing; the messages of a call have a tag of its own then.
    """

    def __init__(self, topology: Topology, backend: Closeable, compare: bool) -> None:
        self._topology, self._backend = topology, backend
        self.broken: BaseException | None = None  # what ended a call half-way
        self.wait = topology.place()
        self._control = topology.private(wait=self.wait)
        self._compares = compare and topology.size > 1
        self._slot = topology.once(Board).take() if compare else None
        self._comparison = Comparison(self._control) if self._compares and self._slot is None else None
        crowded = topology.sharing > topology.cores  # then a late rank needs the core on which this one looks
        self._looks, self._spin = range(1 if crowded else LOOKS), 0.0 if crowded else SPIN_SECONDS
        self._thread = 0  # the one that called last
        self._met = self._slot.met if self._slot else 0  # how often the ranks have met
        self._silent = contextvars.Context()
        self._silent.run(np.seterr, all="ignore")
        self._tree: Tree | None = None  # whose arrays the calls of one thread work on,
        self._tree_thread = 0  # this one
        self._finds = False  # whether any call has `find`; then `run` looks for it, as for a tree
        self._parts: dict[tuple[int, int], Call] = {}  # the calls that have worked on trees

    def run(self, call: Call, reduce: Reduction, flat: Any) -> None:
        """Have `reduce` work on `flat`, when all ranks have come to the same call."""
        wait = self.wait
        if get_ident() != self._thread:
            self._notice_thread()
            call = self._part(call, flat)
        if wait.call is not None or self.broken is not None:
            self.refuse()
        try:
            wait.count += 1
            wait.call = call  # threads change where functions are called, so none comes between the check and this
            if (slot := self._slot) is not None:
                met = self._met = self._met + 1
                words = slot.turns[met & 1]
                words[slot.place] = mine = call.word | (met & NUMBER)
                for _ in self._looks:
                    if words.tolist().count(mine) == slot.size:
                        break
                else:
                    self._meet(slot, words, mine, call)
            elif self._comparison is not None:
                self._comparison.agree(call)
            reduce(flat, call.op)
        except BaseException as error:
            self._break_off(call, error, flat)
            raise
        finally:
            wait.call = None

    def _notice_thread(self) -> None:
        self._thread = get_ident() if self._tree is None and not self._finds else 0
        abort.communicates()

    def begin_tree(self, tree: Tree) -> None:
        """Until `end_tree` this thread's calls work on arrays of `tree`, which has to be alike on all ranks too. Local.

        Plain calls don't look for it: it is found as another thread is.
        """
        self._tree, self._tree_thread, self._thread = tree, get_ident(), 0

    def end_tree(self) -> None:
        self._tree = None

    def admit(self, call: Call) -> Call:
        """`call`, which `run` will be given. Local."""
        if call.find is not None:
            self._finds, self._thread = True, 0
        return call

    def _part(self, call: Call, flat: Any) -> Call:
        """`call`, or the one that works on the tree of this thread, or at the place of `flat`."""
        tree = self._tree if self._tree_thread == get_ident() else None
        if call.find is not None:
            return Call(call.signature, call.reduce, call.op, tree, place=call.find(flat))
        if tree is None:
            return call
        key = call.word, tree.number
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = Call(call.signature, call.reduce, call.op, tree)
        return part

    def quiet(self, reduce: Reduction) -> Reduction:
        """`reduce`, which raises and warns of nothing, whatever np.seterr and the filters of warnings say in any call.

        An overflow in the sum would be an error of one rank alone.
        """
        if getattr(reduce, "without_numpy", False):
            return reduce
        if CONTEXTS:
            return partial(self._silent.run, reduce)  # type: ignore[call-arg]

        def quietly(buffer: Any, op: Op) -> None:
            with np.errstate(all="ignore"):
                reduce(buffer, op)

        return quietly

    def tag(self) -> int:
        """For messages of the call that is under way.

        Where calls are not compared, ranks in different ones wait, until the watch tells them. Elsewhere all messages
        have the same tag.
        """
        call = self.wait.call
        return 0 if call is None or self._compares else ((call.word >> NUMBER_BITS) + self.wait.count) % TAGS

    def agree(self, values: list[int], text: str, error: Exception | None = None) -> None:
        """Return when all ranks bring equal `values` and no error; otherwise raise on all of them.

        text: this rank's side in words.
        """
        wait, said = self.wait, Said(text, AGREEING)
        if get_ident() != self._thread:
            self._notice_thread()
        if wait.call is not None or self.broken is not None:
            self.refuse()
        try:
            wait.call = said
            wait.begin(said)
            if self._slot is not None:
                self._met += 1
                words = self._slot.turns[self._met & 1]
                words[self._slot.place] = mine = AGREEING | (self._met & NUMBER)
                self._meet(self._slot, words, mine, said, error)
            agree(self._control, values, text, error)
        except BaseException as refused:
            self._break_off(said, refused)
            raise
        finally:
            wait.end()

    def lowest(self, numbers: np.ndarray) -> np.ndarray:
        """Overwrite a few numbers with the lowest of all ranks. Collective; inside of a call that they agree on."""
        return combine(self._control, numbers, "compare arrays", MPI.MIN)

    def refuse(self) -> None:
        """Raise BrokenError after a call that failed half-way, OptionError while another thread is in a call."""
        if isinstance(self.broken, RankLostError):
            raise ulfm.again(self.broken)
        if self.broken is not None:
            raise BrokenError(
                f"{self._backend!r} can't go on, since a call has failed half-way ({type(self.broken).__name__}: "
                f"{self.broken}); the ranks may be in different calls. Make a new Topology and backend on all of them"
            ) from self.broken
        raise OptionError(
            f"{self._backend!r} is called while another thread of this rank is in {self.wait.call}; give each thread "
            "a backend on a Topology of its own, or let one thread make all calls"
        )

    def close(self) -> None:
        """Give communicator and place back. Collective."""
        if self._slot is not None:
            self._topology.once(Board).give_back(self._slot.part, self._met)
        self._topology.release(self._control)

    def _meet(self, slot: Slot, board: memoryview, mine: int, call: Shown, error: Exception | None = None) -> None:
        """Wait until all ranks have come, and see that they came to the same call."""
        if self._come(board, mine & NUMBER).count(mine) < slot.size:  # all ranks see the same words
            agree(self._control, [zlib.crc32(mine.to_bytes(8, "little"))], str(call), error)

    def _come(self, board: memoryview, number: int) -> list[int]:
        """The words of all ranks, when all have come."""
        begin = looked = time.monotonic()
        self.wait.error, self.wait.raises = None, True
        try:
            while True:
                words = board.tolist()
                if all(each & NUMBER == number for each in words):
                    return words
                now = time.monotonic()
                if now - begin > YIELD_SECONDS:
                    time.sleep(SLEEP_SECONDS)
                elif now - begin >= self._spin:
                    os.sched_yield()
                self._topology.watch.check()
                if now - looked > LOOK_SECONDS:
                    looked = now
                    self._topology.watch.look(self.wait)
        finally:
            self.wait.raises = False

    def _break_off(self, call: Shown, error: BaseException, array: Any = None) -> None:
        """A call has failed: what all ranks raise leaves them in step, anything else (a node's error) does not."""
        if everywhere(error, self._topology.world):
            return
        keep(array)  # late ranks, and messages that are under way, may still write there
        if (lost := self._topology.watch.loss_of(error)) is not None:
            self.broken = lost
            raise lost from (None if isinstance(error, RankLostError) else error)
        self.broken = without_frames(error)
        self._topology.watch.leave(f"its call failed ({type(error).__name__}: {error})", self.wait)
        if isinstance(error, MPI.Exception):
            raise CommunicationError(f"MPI reports an error in {call}: {error}") from error
