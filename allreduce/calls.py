"""The calls of one backend: other ranks see what this one is in, and one that fails half-way is the last."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import ending
from allreduce.arrays.ops import Op
from allreduce.arrays.signature import NUMBER, NUMBER_BITS, Signature, unpacked, word
from allreduce.errors import BrokenError, CommunicationError, DisagreementError, OptionError
from allreduce.messages.agreement import agree
from allreduce.messages.notes import Said
from allreduce.topology import Closeable, Topology

Reduction = Callable[[Any, Op], None]  # reduces a 1-D array in place
TAGS = 32749  # the largest prime below the number that every MPI has at least
AGREEING = 1  # the word of all agreements, which find by themselves what differs


class Call:
    """A call that all ranks have been seen to agree on.

    reduce: what does it. word: by which other ranks know it. shown: on the board; not so where ranks don't wait for
    each other, because there is nothing to do.
    """

    __slots__ = ("op", "reduce", "shown", "signature", "word")

    def __init__(self, signature: Signature, reduce: Reduction, op: Op, shown: bool = True) -> None:
        self.signature, self.reduce, self.op, self.shown = signature, reduce, op, shown
        self.word = word(signature, op)

    def __str__(self) -> str:
        return str(self.signature)


class Calls:
    """What a backend does together with the other ranks. Creating it and `close` are collective.

    shown: compare each call's word with those of the other ranks of the node.
    """

    def __init__(self, topology: Topology, backend: Closeable, shown: bool) -> None:
        self._topology, self._backend = topology, backend
        self.broken: BaseException | None = None  # what ended a call half-way
        self.wait = topology.place()
        self._control = topology.private(wait=self.wait)
        self._slot = topology.board.take() if shown else None
        self._shown = 0  # calls that were shown; no rank leaves such a call before all have come to it
        self._sees_all = self._slot is not None and len(self._slot.ranks) == topology.size

    def run(self, call: Call, flat: Any) -> None:
        """Reduce `flat`. Raises DisagreementError when ranks of this node were in other calls."""
        wait = self.wait
        if wait.call is not None or self.broken is not None:
            self.refuse()
        wait.count += 1
        wait.call = call
        slot = self._slot if call.shown else None
        if slot is not None:
            shown = self._shown = self._shown + 1
            start = slot.starts[shown & 1]
            mine = call.word | (shown & NUMBER)
            slot.words[start + slot.place] = mine
        try:
            call.reduce(flat, call.op)
        except BaseException as error:
            self._break_off(call, error)
            raise
        finally:
            wait.call = None
        if slot is not None:
            ranks = len(slot.ranks)
            if slot.words[start : start + ranks].tolist().count(mine) != ranks:
                self._tell_difference()

    def tag(self) -> int:
        """For messages of the call that is under way: ranks in different ones wait, until the watch tells them.

        Where all ranks see the board, which tells them at once, all messages have the same.
        """
        call = self.wait.call
        return 0 if call is None or self._sees_all else ((call.word >> NUMBER_BITS) + self.wait.count) % TAGS

    def run_unseen(self, call: Call, reduction: Reduction, flat: np.ndarray) -> None:
        """One phase of a reduction, in which a rank need not wait for all others."""
        if self.wait.call is not None or self.broken is not None:
            self.refuse()
        self.wait.begin(call)
        try:
            reduction(flat, call.op)
        except BaseException as error:
            self._break_off(call, error)
            raise
        finally:
            self.wait.end()

    def agree(self, values: list[int], text: str, error: Exception | None = None) -> None:
        """Agree with the other ranks, as a call that they can tell from other calls."""
        if self.wait.call is not None or self.broken is not None:
            self.refuse()
        self.wait.begin(Said(text, AGREEING))
        try:
            agree(self._control, values, text, error)
        except BaseException as refused:
            if getattr(refused, "ranks", None) is None:
                self.broken = refused
            raise
        finally:
            self.wait.end()

    def refuse(self) -> None:
        """Raise BrokenError after a call that failed half-way, OptionError while another thread is in a call."""
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
            self._topology.board.give_back(self._slot)
        self._topology.release(self._control)

    def _break_off(self, call: Call, error: BaseException) -> None:
        """A call has failed: what all ranks raise leaves them in step, anything else (a node's error) does not."""
        if set(ending.world_ranks(self._topology.world)) <= set(getattr(error, "ranks", None) or ()):
            return
        self.broken = error
        if isinstance(error, MPI.Exception):
            self._tell_difference(error)
            raise CommunicationError(f"MPI reports an error in {call}: {error}") from error

    def _tell_difference(self, cause: BaseException | None = None) -> None:
        """Raise a DisagreementError when the board shows that ranks of this node were in other calls."""
        slot = self._slot
        if slot is None:
            return
        start = slot.starts[self._shown & 1]
        words = slot.words[start : start + len(slot.ranks)].tolist()
        if len(set(words)) == 1:
            return
        sides = [f"  rank {rank}: {unpacked(each)}" for rank, each in zip(slot.ranks, words, strict=True)]
        error = DisagreementError(
            "the ranks disagree about this call; it must be the same on all of them. Its result is void:\n"
            + "\n".join(sides)
        )
        self.broken = error
        if len(slot.ranks) == self._topology.size:  # all ranks see the same board
            error.ranks = ending.world_ranks(self._topology.world)
        raise error from cause
