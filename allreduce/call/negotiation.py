"""Calls that are matched by their names: ranks may make them in any order, and rank 0 decides which call is next.

The calls of a Queue are matched by their order. Here every rank announces each call to rank 0: the name, and the rank's
request. A call can run when all ranks have announced it, or have joined. A rank that has joined makes no further
calls; its join proxy takes part in the other ranks' calls. A decision carries all ranks' requests to all ranks.
Calls that became ready while others ran are decided together, and small calls with equal fusion keys run as one. (The
ideas are Horovod's: A. Sergeev, M. Del Balso, 2018.)

Messages travel along a binomial tree whose root is rank 0. A rank announces a call to its parent when all ranks of its
subtree have announced it, or have joined; equal requests are sent once. It forwards decisions to its children
unchanged. So each rank sends one announcement of a call, and at most log2 n decisions. A rank with no open call
forwards no messages. None can be waiting there: a decision needs every rank to have announced the call or joined.
"""

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import binomial, subtree
from allreduce.call.queue import Future, Queue, Worker
from allreduce.errors import AllReduceError, DisagreementError, OptionError
from allreduce.transport.control import disagreement, on_all_ranks
from allreduce.transport.wait import NamedCall

PerRank = list[Any]  # each rank's `own`; None for a rank that has joined


class Decision(NamedTuple):
    """Rank 0's decision to run or refuse a call. same, fusion_key, nbytes: see Request.

    per_rank: every rank's `own`, or None if no rank passed one.
    refusal: None if the call runs; each rank's call in words if they differ; otherwise the reason.
    """

    name: str
    same: Any
    per_rank: PerRank | None
    refusal: list[str] | str | None
    fusion_key: str
    nbytes: int


def fuse(decisions: Sequence[Decision], limit: int) -> list[list[Decision]]:
    """Group decisions that run as one call: equal fusion keys, in order, at most `limit` bytes (0: no fusion)."""
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


Work = Callable[[PerRank], object]
JoinProxy = Callable[[Any], Work]
JOIN = "join"


class Request(NamedTuple):
    """A rank's request to run a call. All fields are JSON-serializable.

    same: metadata that must be equal on all ranks. own: metadata of this rank; every rank receives all ranks'.
    joinable: a join proxy can make the call. description: the call in words. fusion_key: calls with equal keys other
    than "" may run as one: the first call's work.run_fused(others) is called with the other calls' work. nbytes: size
    of the call's data.
    """

    same: Any
    own: Any = None
    joinable: bool = False
    description: str = ""
    fusion_key: str = ""
    nbytes: int = 0


class NamedFuture(Future):
    """The future of a call of a NamedQueue. per_rank: every rank's `own`, set before the work runs."""

    def __init__(
        self,
        name: str,
        request: Request,
        work: Work,
        queue: "NamedQueue",
        ended: Callable[[BaseException | None], object] | None,
    ) -> None:
        super().__init__(self._run, queue, request.description, 0, ended)
        self.name, self.request = name, request
        self.per_rank: PerRank = [request.own]
        self.refused: AllReduceError | None = None
        self._of_user: Work | None = work

    def _run(self) -> None:
        work = self.take_work()
        if self.refused is not None:
            raise self.refused
        work(self.per_rank)

    def take_work(self) -> Any:
        """Remove and return the work, for a Fused call that does it."""
        work, self._of_user, self._work = self._of_user, None, None
        return work


class Fused(Future):
    """The future of several calls that run as one. An error of the run fails every one of them."""

    def __init__(self, calls: Sequence[NamedFuture], queue: "NamedQueue") -> None:
        first, *others = (call.take_work() for call in calls)
        super().__init__(lambda: first.run_fused(others), queue, f"{calls[0].description}, and {len(others)} more")
        self._calls = calls

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        for call in self._calls:
            call.begin = self.begin
            call.finish(self.error)


class NamedQueue(Queue):
    """A queue that matches calls by name: a call runs once every rank has submitted a call of that name or has joined.

    comm: used for announcements only. join_proxy: computes a joined rank's work from a Request's `same`. fuse_bytes:
    largest total size of fused calls; rank 0's value applies. If the ranks' `same` differ, that call alone fails, with
    the same DisagreementError on all ranks.
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
        self._waiting: dict[str, NamedFuture] = {}  # announced, and not decided
        self._open: set[str] = set()  # names of calls that have not ended
        self._first: NamedFuture | None = None  # the call that has waited longest
        self._parent, self._children = binomial(comm.rank, 0, comm.size)
        self._subtree = subtree(comm.rank, comm.size)  # this rank, and the ranks that announce through it
        self._announced: dict[str, Announced] = {}  # name -> announcements not yet passed to the parent, nor decided
        self._joined: list[int] = []  # ranks of the subtree that have joined, in that order
        self._decided: list[Decision] = []  # rank 0: decisions not yet sent
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # sends that have not ended

    def call(
        self,
        name: str,
        request: Request,
        work: Work,
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> NamedFuture:
        """Submit a call: `work(per_rank)` runs once every rank has submitted a call of this name or has joined. Local;
        returns at once.

        Raises OptionError while an earlier call of the name has not ended. ended: as Queue.submit.
        """
        if name in self._open:
            raise OptionError(f"a call named {name} has not ended yet; give calls that overlap different names")

        def end(error: BaseException | None) -> None:
            self._open.discard(name)
            if ended is not None:
                ended(error)

        self._open.add(name)
        call = NamedFuture(name, request, work, self, end)
        try:
            self.worker.submit(self, call)
        except BaseException:
            self._open.discard(name)
            raise
        return call

    def join(self, ended: Callable[[int], object]) -> Future:
        """Announce that this rank submits no calls until all ranks have joined. Local. ended: called with the rank that
        joined last.
        """
        request = Request(None, self._comm.rank, description=f"join of {self.name}")
        return self.call(JOIN, request, lambda per_rank: ended(per_rank[-1]))

    # Called by the worker with its lock held, except `poll` and `receive`

    def announce(self, call: Future) -> None:
        """Record this rank's announcement, and send it towards rank 0 once the subtree's announcements are complete."""
        assert isinstance(call, NamedFuture)
        self._waiting[call.name] = call
        self._watch_first()
        request = call.request
        announced = Announced()
        announced.add(
            request._replace(same=json.dumps(request.same, sort_keys=True), own=None), [self._comm.rank], [request.own]
        )
        self._record(call.name, announced)

    def cancel_waiting(self) -> list[Future]:
        """Remove and return the calls that wait for a decision."""
        cancelled: list[Future] = list(self._waiting.values())
        self._waiting.clear()
        self._watch_first()
        return cancelled

    def send_decisions(self) -> None:
        """Rank 0: send the new decisions to all ranks, and hand the calls to the worker."""
        decided, self._decided = self._decided, []
        if not decided or self.broken is not None:
            return
        together = fuse(decided, self._fuse_bytes)
        self._send(together, self._children)
        self._enqueue(together)

    def poll(self, lock: threading.Lock) -> None:
        for rank, message in self.receive():
            with lock:
                self.handle(rank, message)
        with lock:
            self.send_decisions()

    def receive(self) -> list[tuple[int, np.ndarray]]:
        """Receive all pending messages: (source rank, bytes). Called without the lock."""
        received, status = [], MPI.Status()
        while self._comm.Iprobe(status=status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(text, status.source, status.tag)
            received.append((status.source, text))
        return received

    def handle(self, rank: int, text: np.ndarray) -> None:
        """Handle a message: decisions if it comes from the parent, otherwise a child's announcement."""
        message = json.loads(text.tobytes())
        if rank == self._parent:
            self._send_text(text, self._children)
            self._enqueue([[Decision(*decision) for decision in group] for group in message])
        else:
            name, requests = message
            announced = Announced()
            for request, ranks, owns in requests:
                announced.add(Request(*request), ranks, owns)
            self._record(name, announced)

    # Announcements are merged on the way to rank 0, which decides

    def _record(self, name: str, announced: "Announced") -> None:
        if name == JOIN:
            self._joined += announced.ranks
            if self._parent is not None:
                self._send([JOIN, announced.requests], [self._parent])
            for waiting in list(self._announced):
                self._complete(waiting)
            if self._parent is None and len(self._joined) == self._comm.size:
                self._decided.append(Decision(JOIN, None, [self._joined[-1]], None, "", 0))
        else:
            self._announced.setdefault(name, Announced()).merge(announced)
            self._complete(name)

    def _complete(self, name: str) -> None:
        """Announce a call to the parent, or decide it on rank 0, if no rank of the subtree is missing."""
        announced = self._announced[name]
        absent = len(self._subtree) - len(announced.ranks)
        if absent and absent > sum(rank not in announced.ranks for rank in self._joined):
            return
        del self._announced[name]
        if self._parent is None:
            self._decided.append(self._decision(name, announced))
        else:
            self._send([name, announced.requests], [self._parent])

    def _decision(self, name: str, announced: "Announced") -> Decision:
        """Return the decision to run or refuse a call that all ranks, except those that have joined, have announced."""
        requests = announced.by_rank()
        first = requests[min(requests)]
        everyone = range(self._comm.size)
        fusion_key = first.fusion_key if len({request.fusion_key for request in requests.values()}) == 1 else ""
        refusal: list[str] | str | None = None
        if len({request.same for request in requests.values()}) > 1:
            refusal = [requests[rank].description if rank in requests else "has joined" for rank in everyone]
        elif len(requests) < self._comm.size and not first.joinable:
            joined = sorted({*everyone} - {*requests})
            refusal = f"{first.description}: ranks {joined} have joined, and no join proxy can make this call"
        if refusal is not None:
            fusion_key = ""
        owns = announced.owns
        per_rank = [owns.get(rank) for rank in everyone] if any(own is not None for own in owns.values()) else None
        return Decision(name, json.loads(first.same), per_rank, refusal, fusion_key, first.nbytes)

    # All ranks run the decided calls

    def _enqueue(self, together: list[list[Decision]]) -> None:
        """Hand decided calls to the worker. The calls of an inner list run as one."""
        if self.broken is not None:
            return
        for decisions in together:
            submitted = sum(decision.name in self._waiting for decision in decisions)
            calls = [call for call in map(self._call_of, decisions) if call is not None]
            if calls:
                self.worker.decide(self, calls[0] if len(calls) == 1 else Fused(calls, self), 1 - submitted)
        self._watch_first()

    def _call_of(self, decision: Decision) -> NamedFuture | None:
        """Return this rank's call for a decision, or its join proxy's. None if the call is refused and this rank has
        not submitted it.
        """
        name, same, per_rank, refusal, *_ = decision
        if name == JOIN:
            self._joined.clear()
        call = self._waiting.pop(name, None)
        if call is None:
            if refusal is not None:
                return None
            call = NamedFuture(name, Request(same, description=name), self._join_proxy(same), self, self._proxy_ended)
        call.per_rank = [None] * self._comm.size if per_rank is None else per_rank
        call.refused = self._refusal_error(refusal)
        return call

    def _refusal_error(self, refusal: list[str] | str | None) -> AllReduceError | None:
        if isinstance(refusal, list):
            return disagreement(self._comm, refusal)
        return None if refusal is None else on_all_ranks(DisagreementError(refusal), self._comm)

    def _proxy_ended(self, error: BaseException | None) -> None:
        """Fail the queue with the error of a join proxy's work: no caller waits for that work."""
        if error is not None:
            self.worker.fail(self, error)

    def _watch_first(self) -> None:
        """Make the wait record show the call that has waited longest."""
        first = next(iter(self._waiting.values()), None)
        if first is not self._first:
            self._first = first
            if first is None:
                self.wait.end()
            else:
                self.wait.begin(NamedCall(first.description))

    def _send(self, message: list[Any], ranks: Sequence[int]) -> None:
        """Start non-blocking sends of a JSON message to these ranks."""
        if ranks:
            self._send_text(np.frombuffer(json.dumps(message).encode(), np.uint8), ranks)

    def _send_text(self, text: np.ndarray, ranks: Sequence[int]) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent += [(self._comm.Isend(text, rank), text) for rank in ranks]


class Announced:
    """The announcements of one call. Equal requests are stored once, with their ranks; `same` is kept as JSON text."""

    def __init__(self) -> None:
        self._alike: dict[Request, list[int]] = {}
        self.owns: dict[int, Any] = {}  # by rank

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that have announced the call."""
        return self.owns.keys()

    @property
    def requests(self) -> list[Any]:
        """For JSON: a list of [request without `own`, ranks, their `own` values or None if all are None]."""
        found = []
        for request, ranks in self._alike.items():
            owns = [self.owns[rank] for rank in ranks]
            found.append([request, ranks, None if owns.count(None) == len(owns) else owns])
        return found

    def add(self, request: Request, ranks: Sequence[int], owns: Sequence[Any] | None) -> None:
        """Add the announcements of `ranks`, all with the same request. owns: their `own` values, or None."""
        self._alike.setdefault(request, []).extend(ranks)
        self.owns.update(zip(ranks, owns or [None] * len(ranks), strict=True))

    def merge(self, other: "Announced") -> None:
        """Add the announcements of `other`."""
        for request, ranks, owns in other.requests:
            self.add(request, ranks, owns)

    def by_rank(self) -> dict[int, Request]:
        """Return each rank's request, without its `own`."""
        return {rank: request for request, ranks in self._alike.items() for rank in ranks}
