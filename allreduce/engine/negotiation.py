"""Calls that are matched by their names: ranks may make them in any order, and rank 0 decides which call is next.

The calls of a Queue are matched by their order. Here every rank announces the name of each call to rank 0, with its
side of the call. A call is next when all ranks have announced it, or have joined. A rank that has joined makes no calls
of its own any more; its join proxy takes part in the calls of the others. A decision brings the sides of all ranks to
all of them. Calls that became ready while others ran are decided together, and small calls with equal fusion keys run
as one. (The ideas are Horovod's: A. Sergeev, M. Del Balso, 2018.)

Messages take a binomial tree with rank 0 at its root. A rank announces a call to its parent when all ranks of its
subtree have announced it, or have joined; equal sides travel once. It passes decisions on to its children unchanged. So
each rank sends one announcement of a call, and log2 n decisions at most. A rank in which no call is open passes nothing
on, but no call can be decided without it.
"""

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import binomial, subtree
from allreduce.engine.queue import Future, Queue, Worker
from allreduce.errors import AllReduceError, DisagreementError, OptionError
from allreduce.transport.control import disagreement, known
from allreduce.transport.wait import NamedCall

Sides = list[Any]  # by rank; None of a rank that has joined


class Decision(NamedTuple):
    """A call that is next. same, fusion_key, nbytes: as of Side. sides: None where no rank has an `own`.

    refusal: the calls of all ranks in words, where they differ, or why the call can't run; None when it runs.
    """

    name: str
    same: Any
    sides: Sides | None
    refusal: list[str] | str | None
    fusion_key: str
    nbytes: int


def groups(decisions: Sequence[Decision], limit: int) -> list[list[Decision]]:
    """Which calls run as one: those with equal fusion keys, in their order, up to `limit` bytes; 0: none."""
    found: list[list[Decision]] = []
    begun: dict[str, tuple[list[Decision], int]] = {}  # by fusion key: the group that the next call may join, its bytes
    for decision in decisions:
        if not decision.fusion_key or decision.nbytes >= limit:
            found.append([decision])
            continue
        group, held = begun.get(decision.fusion_key, ([], limit))
        if held + decision.nbytes > limit or not group:
            group, held = [], 0
            found.append(group)
        group.append(decision)
        begun[decision.fusion_key] = group, held + decision.nbytes
    return found


Work = Callable[[Sides], object]
JoinProxy = Callable[[Any], Work]
JOIN = "join"


class Side(NamedTuple):
    """What a rank brings to a call, all of it as JSON can hold it.

    same: equal on all ranks. own: this rank's, which all ranks get. joinable: a join proxy can make the call. what: the
    call in words. fusion_key: calls with equal keys, if not "", may run as one, by the method `together` of the first
    one's work, which takes the work of the others. nbytes: that the call moves.
    """

    same: Any
    own: Any = None
    joinable: bool = False
    what: str = ""
    fusion_key: str = ""
    nbytes: int = 0


class Named(Future):
    """A call of a NamedQueue. sides: those of all ranks, when it begins."""

    def __init__(
        self,
        name: str,
        side: Side,
        work: Work,
        lane: "NamedQueue",
        ended: Callable[[BaseException | None], object] | None,
    ) -> None:
        super().__init__(self._run, lane, side.what, 0, ended)
        self.name, self.side = name, side
        self.sides: Sides = [side.own]
        self.refused: AllReduceError | None = None
        self._of_user: Work | None = work

    def _run(self) -> None:
        work = self.take_work()
        if self.refused is not None:
            raise self.refused
        work(self.sides)

    def take_work(self) -> Any:
        """The work, for a Fused call that does it."""
        work, self._of_user, self._work = self._of_user, None, None
        return work


class Fused(Future):
    """Calls that run as one; what that raises, all of them raise."""

    def __init__(self, calls: Sequence[Named], lane: "NamedQueue") -> None:
        first, *others = (call.take_work() for call in calls)
        super().__init__(lambda: first.together(others), lane, f"{calls[0].what}, and {len(others)} more")
        self._calls = calls

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        for call in self._calls:
            call.begin = self.begin
            call.finish(self.error)


class NamedQueue(Queue):
    """The calls of one user, which run when all ranks have submitted one of this name.

    comm: for announcements alone. join_proxy: makes, from a Side's `same`, the work of a rank that has joined.
    fuse_bytes: the most bytes of calls that run as one; rank 0's counts. Calls that differ are refused, each by itself,
    with the same error on all ranks.
    """

    def __init__(
        self,
        worker: Worker,
        comm: MPI.Intracomm,
        number: int,
        name: str,
        join_proxy: JoinProxy,
        fuse_bytes: int,
    ) -> None:
        super().__init__(worker, number, name, alone=False)
        self._comm, self._join_proxy, self._fuse_bytes = comm, join_proxy, fuse_bytes
        self._waiting: dict[str, Named] = {}  # announced, and not decided
        self._open: set[str] = set()  # names of calls that have not ended
        self._first: Named | None = None  # which has waited longest
        self._parent, self._children = binomial(comm.rank, 0, comm.size)
        self._subtree = subtree(comm.rank, comm.size)  # this rank, and those that announce through it
        self._announced: dict[str, Announced] = {}  # by name; not told to the parent, or decided
        self._joined: list[int] = []  # of the subtree, in the order in which they came
        self._decided: list[Decision] = []  # rank 0: and not told
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # messages on their way

    def call(
        self,
        name: str,
        side: Side,
        work: Work,
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> Named:
        """Have `work` called, with the sides of all ranks, when all have come to a call of this name. Local.

        Raises OptionError while an earlier call of the name has not ended. ended: as Queue.submit.
        """
        if name in self._open:
            raise OptionError(f"{name} is under way already; give calls that may overlap names of their own")

        def end(error: BaseException | None) -> None:
            self._open.discard(name)
            if ended is not None:
                ended(error)

        self._open.add(name)
        call = Named(name, side, work, self, end)
        try:
            self.worker.submit(self, call)
        except BaseException:
            self._open.discard(name)
            raise
        return call

    def join(self, ended: Callable[[int], object]) -> Future:
        """No more calls of this rank until all have joined; `ended` is told which one came last. Local."""
        side = Side(None, self._comm.rank, what=f"join of {self.name}")
        return self.call(JOIN, side, lambda sides: ended(sides[-1]))

    # What the worker calls, with its lock held

    def announce(self, call: Future) -> None:
        """Tell rank 0 of a call, by way of this rank's parent."""
        assert isinstance(call, Named)
        self._waiting[call.name] = call
        self._mind()
        side = call.side
        announced = Announced()
        announced.add(
            side._replace(same=json.dumps(side.same, sort_keys=True), own=None), [self._comm.rank], [side.own]
        )
        self._note(call.name, announced)

    def take_back(self) -> list[Future]:
        """The calls that wait, which are given up."""
        given_up: list[Future] = list(self._waiting.values())
        self._waiting.clear()
        self._mind()
        return given_up

    def tell(self) -> None:
        """Rank 0: say which calls are next."""
        decided, self._decided = self._decided, []
        if not decided or self.broken is not None:
            return
        together = groups(decided, self._fuse_bytes)
        self._send(together, self._children)
        self._follow(together)

    def listen(self, lock: threading.Lock) -> None:
        for rank, told in self.hear():
            with lock:
                self.take_in(rank, told)
        with lock:
            self.tell()

    def hear(self) -> list[tuple[int, np.ndarray]]:
        """What has come since: of whom, and what. Without the lock."""
        heard, status = [], MPI.Status()
        while self._comm.Iprobe(status=status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(text, status.source, status.tag)
            heard.append((status.source, text))
        return heard

    def take_in(self, rank: int, text: np.ndarray) -> None:
        """What a child has announced, or rank 0 has decided."""
        message = json.loads(text.tobytes())
        if rank == self._parent:
            self._send_text(text, self._children)
            self._follow([[Decision(*decision) for decision in group] for group in message])
        else:
            name, sides = message
            announced = Announced()
            for side, ranks, owns in sides:
                announced.add(Side(*side), ranks, owns)
            self._note(name, announced)

    # Announcements gather on the way to rank 0, which decides

    def _note(self, name: str, announced: "Announced") -> None:
        if name == JOIN:
            self._joined += announced.ranks
            if self._parent is not None:
                self._send([JOIN, announced.sides], [self._parent])
            for waiting in list(self._announced):
                self._complete(waiting)
            if self._parent is None and len(self._joined) == self._comm.size:
                self._decided.append(Decision(JOIN, None, [self._joined[-1]], None, "", 0))
        else:
            self._announced.setdefault(name, Announced()).merge(announced)
            self._complete(name)

    def _complete(self, name: str) -> None:
        """Announce a call to the parent, or decide it, when all ranks of the subtree have come to it or joined."""
        announced = self._announced[name]
        absent = len(self._subtree) - len(announced.ranks)
        if absent and absent > sum(rank not in announced.ranks for rank in self._joined):
            return
        del self._announced[name]
        if self._parent is None:
            self._decided.append(self._decision(name, announced))
        else:
            self._send([name, announced.sides], [self._parent])

    def _decision(self, name: str, announced: "Announced") -> Decision:
        """Let a call run, or refuse it."""
        sides = announced.by_rank()
        first = sides[min(sides)]
        everyone = range(self._comm.size)
        fusion_key = first.fusion_key if len({side.fusion_key for side in sides.values()}) == 1 else ""
        refusal: list[str] | str | None = None
        if len({side.same for side in sides.values()}) > 1:
            refusal = [sides[rank].what if rank in sides else "has joined" for rank in everyone]
        elif len(sides) < self._comm.size and not first.joinable:
            joined = sorted({*everyone} - {*sides})
            refusal = f"{first.what}: ranks {joined} have joined, and no join proxy can make this call"
        if refusal is not None:
            fusion_key = ""
        owns = announced.owns
        said = [owns.get(rank) for rank in everyone] if any(own is not None for own in owns.values()) else None
        return Decision(name, json.loads(first.same), said, refusal, fusion_key, first.nbytes)

    # All ranks follow

    def _follow(self, together: list[list[Decision]]) -> None:
        """These calls are next, those of each list as one."""
        if self.broken is not None:
            return
        for decisions in together:
            submitted = sum(decision.name in self._waiting for decision in decisions)
            calls = [call for call in map(self._called, decisions) if call is not None]
            if calls:
                self.worker.decide(self, calls[0] if len(calls) == 1 else Fused(calls, self), 1 - submitted)
        self._mind()

    def _called(self, decision: Decision) -> Named | None:
        """This rank's call that was decided, or its join proxy; None where the call is refused and another rank's."""
        name, same, sides, refusal, *_ = decision
        if name == JOIN:
            self._joined.clear()
        call = self._waiting.pop(name, None)
        if call is None:
            if refusal is not None:
                return None
            call = Named(name, Side(same, what=name), self._join_proxy(same), self, self._proxy_ended)
        call.sides = [None] * self._comm.size if sides is None else sides
        call.refused = self._refused(refusal)
        return call

    def _refused(self, refusal: list[str] | str | None) -> AllReduceError | None:
        if isinstance(refusal, list):
            return disagreement(self._comm, refusal)
        return None if refusal is None else known(DisagreementError(refusal), self._comm)

    def _proxy_ended(self, error: BaseException | None) -> None:
        """No caller waits for a join proxy's work, so its error ends the join of this rank."""
        if error is not None:
            self.worker.fail(self, error)

    def _mind(self) -> None:
        """The stall detector looks at the call that has waited longest."""
        first = next(iter(self._waiting.values()), None)
        if first is not self._first:
            self._first = first
            if first is None:
                self.wait.end()
            else:
                self.wait.begin(NamedCall(first.what))

    def _send(self, message: list[Any], ranks: Sequence[int]) -> None:
        """Begin to send to all of these ranks, and wait for nobody."""
        if ranks:
            self._send_text(np.frombuffer(json.dumps(message).encode(), np.uint8), ranks)

    def _send_text(self, text: np.ndarray, ranks: Sequence[int]) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent += [(self._comm.Isend(text, rank), text) for rank in ranks]


class Announced:
    """The sides of the ranks that have come to a call, grouped by those that are alike. Their `same` is a JSON text."""

    def __init__(self) -> None:
        self._alike: dict[Side, list[int]] = {}
        self.owns: dict[int, Any] = {}  # by rank

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that have come."""
        return self.owns.keys()

    @property
    def sides(self) -> list[Any]:
        """As JSON: [side without own, ranks, their owns or None where none has any] of those that are alike."""
        found = []
        for side, ranks in self._alike.items():
            owns = [self.owns[rank] for rank in ranks]
            found.append([side, ranks, None if owns.count(None) == len(owns) else owns])
        return found

    def add(self, side: Side, ranks: Sequence[int], owns: Sequence[Any] | None) -> None:
        """These ranks have come with this side, whose `own` is left out."""
        self._alike.setdefault(side, []).extend(ranks)
        self.owns.update(zip(ranks, owns or [None] * len(ranks), strict=True))

    def merge(self, other: "Announced") -> None:
        """The ranks of `other` have come too."""
        for side, ranks, owns in other.sides:
            self.add(side, ranks, owns)

    def by_rank(self) -> dict[int, Side]:
        """Each rank's side."""
        return {rank: side for side, ranks in self._alike.items() for rank in ranks}
