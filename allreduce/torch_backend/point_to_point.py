"""send and recv: messages between two ranks, which are started at once and completed in `wait`."""

import atexit
import time
from datetime import timedelta
from functools import partial

import torch
from mpi4py import MPI

from allreduce import notices
from allreduce.errors import RankLeftError
from allreduce.health.stall import LEFT_SECONDS
from allreduce.topology import Topology
from allreduce.torch_backend.move import mpi_buffer
from allreduce.torch_backend.tensors import as_bytes, is_plain, readable
from allreduce.torch_backend.work import Operation, TimedOut, not_compiled, timeout_seconds
from allreduce.transport import ulfm
from allreduce.transport.wait import NamedCall, wait_until, waiting

SHORT_SECONDS = 0.5  # longer waits are shown in the stall report
EXIT_SECONDS = 10.0  # how long the program's exit waits for unfinished sends


class GroupMessages:
    """The messages of one group, on a communicator of their own. Creating it is collective.

    group: the group's name. The stall report shows one wait at a time; waits of further threads end in the same errors.
    largest_tag: of users' messages in this MPI; monitored_barrier has the next one.
    """

    def __init__(self, topology: Topology, group: str) -> None:
        self.comm = topology.private()
        self.statuses, self.group = topology.detector.messages, group
        largest = self.comm.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int)
        self.largest_tag = largest - 1
        self._barriers = 0  # the number of the last barrier, which is sent in its messages

    def fail(self, error: BaseException) -> None:
        """End the unfinished messages with `error`. Local."""
        for message in list(_in_flight):
            if message.messages is self:
                message.fail(error)

    # monitored_barrier: every rank reports to rank 0 and waits for its answer

    def monitored_barrier(self, limit: float, wait_all_ranks: bool) -> None:
        """Wait for all ranks; raise TimedOut after `limit` seconds, on rank 0 with the missing rank. Collective.

        wait_all_ranks: name all missing ranks, not only the first. The errors contain gloo's wording, which programs
        may match.
        """
        self._barriers += 1
        deadline = time.monotonic() + limit
        if self.comm.rank:
            self._token("reporting to rank 0", 0, limit, receives=False).wait_for(limit)
            try:
                self._await("waiting for rank 0", 0, deadline, limit)
            except (TimedOut, RankLeftError) as error:
                raise TimedOut(
                    f"Rank {self.comm.rank} successfully reached monitoredBarrier, but received errors while waiting "
                    f"for send/recv from rank 0: {error}"
                ) from None
            return
        missing = []
        for rank in range(1, self.comm.size):
            try:
                self._await(f"rank {rank}", rank, deadline, limit)
            except (TimedOut, RankLeftError):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise TimedOut(
                f"Rank 0 timed out in monitoredBarrier after {limit:g} s: {ranks} failed to pass monitoredBarrier"
                + (" (wait_all_ranks=True names all that did)" if not wait_all_ranks else "")
            )
        for rank in range(1, self.comm.size):
            self._token("answering", rank, limit, receives=False).wait_for(limit)

    def _await(self, step: str, rank: int, deadline: float, limit: float) -> None:
        """Wait for the message of this barrier; older ones are of barriers that timed out."""
        while True:
            message = self._token(step, rank, limit, receives=True)
            try:
                message.wait_for(max(deadline - time.monotonic(), 0))
            except (TimedOut, RankLeftError):
                message.cancel()
                raise
            if int(message.result()[0]) >= self._barriers:
                return

    def _token(self, step: str, rank: int, limit: float, receives: bool) -> "SentMessage":
        """Send the number of this barrier to a rank, or receive one from there."""
        token, name = torch.tensor([self._barriers], dtype=torch.int64, device="cpu"), f"monitored_barrier ({step})"
        return SentMessage("monitored_barrier", name, token, limit, self, rank, self.largest_tag + 1, receives)


@not_compiled
class SentMessage(Operation):
    """A message between two ranks. Any thread may wait for it; one thread at a time calls MPI.

    The constructor starts it: from rank `peer`, which may be MPI.ANY_SOURCE, if it `receives`, else to that rank.
    kind: "send" or "recv", the name of its event in a profile. name: of the message, for errors.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        limit: float,
        messages: GroupMessages,
        peer: int,
        tag: int,
        receives: bool,
    ) -> None:
        super().__init__(kind, [tensor], limit)
        self.name, self.messages = name, messages
        self._tensor, self._status = tensor.detach(), MPI.Status()
        self._peer, self._receives = peer, receives
        for message in list(_in_flight):
            message.is_completed()  # removes it from _in_flight once complete
        if not receives:
            self._memory = readable(self._tensor)
        else:
            given = self._tensor
            self._memory = given if is_plain(given) else torch.empty(given.shape, dtype=given.dtype, device="cpu")
        begin = messages.comm.Irecv if receives else messages.comm.Isend
        self._request: MPI.Request | None = begin(mpi_buffer(as_bytes(self._memory)), peer, tag)
        _in_flight.add(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:  # type: ignore[override]
        """Wait until the message has arrived, or until a sent tensor may be changed again."""
        return self.wait_for(timeout_seconds(timeout, self.limit))

    def wait_for(self, limit: float) -> bool:
        """Wait as `wait` does, for `limit` seconds; 0 checks once.

        Raises RankLeftError if the other rank has left, TimedOut after `limit` (with a table of all ranks' waits if
        `limit` exceeds SHORT_SECONDS).
        """
        deadline, messages, table = time.monotonic() + limit, self.messages, ""
        ended = wait_until(self._has_ended, min(limit, SHORT_SECONDS))
        if not ended and limit > SHORT_SECONDS:
            what = f"{self.name} of process group {messages.group}"
            check_peer = partial(messages.statuses.check_present, [self._peer], LEFT_SECONDS, self.name)
            with waiting(messages.comm, what, raises=True):
                ended = wait_until(self._has_ended, deadline - time.monotonic(), check_peer)
            table = f"\n{messages.statuses.table(NamedCall(what))}"
        if not ended:
            text = f"{self.name} was not done within {limit:g} s: the other rank did not send or receive it{table}"
            raise TimedOut(text)
        return super().wait()

    def _has_ended(self) -> bool:
        """Return whether a wait ends: the message is complete, or `fail` was called, perhaps in another thread."""
        return self.done() or self.is_completed()

    def is_completed(self) -> bool:
        with self._lock:
            request = self._request
            if request is None:
                return True
            try:
                if not request.Test(self._status):
                    return False
                error = self._take() if self._receives else None
            except MPI.Exception as raised:
                error = ulfm.lost(raised) or RuntimeError(f"{self.name} failed: {raised}")
            self._request = None
        _in_flight.discard(self)
        self.finish(error)
        return True

    def cancel(self) -> None:
        """Cancel a receive. Does nothing for a send."""
        with self._lock:
            if self._request is None or not self._receives:
                return
            self._request.Cancel()
            self._request.Wait()  # at once, after Cancel; until then MPI may write the tensor
            self._request = None
        _in_flight.discard(self)

    def fail(self, error: BaseException) -> None:
        """End all waits for the message with `error`. A receive is cancelled; a sent message may still arrive."""
        self.cancel()
        self.finish(error)

    def source_rank(self) -> int:
        """The rank in the group that a received message came from."""
        return self._status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        raise NotImplementedError('messages of backend "allreduce" have no futures: call wait()')

    def _take(self) -> Exception | None:
        """Fill the tensor from the message that has arrived."""
        arrived = self._status.Get_elements(MPI.BYTE)
        if arrived != self._tensor.nbytes:
            return RuntimeError(f"{self.name}: {arrived} bytes arrived and the tensor has {self._tensor.nbytes}")
        if self._memory.data_ptr() != self._tensor.data_ptr():
            try:
                self._tensor.copy_(self._memory)
            except RuntimeError as error:  # elements of the tensor share memory
                return error
        return None


_in_flight: set[SentMessage] = set()  # keeps tensors that MPI reads or writes, also after the program has dropped them


@atexit.register
def _finish_sends() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for message in list(_in_flight):
        message.cancel()
        wait_until(message.is_completed, deadline - time.monotonic())
    if _in_flight:
        names = ", ".join(sorted({message.name for message in _in_flight}))
        notices.log.warning("allreduce: the program ended before these messages were received: %s", names)
