"""A worker's side: it asks servers for parameters, and pushes gradients to them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.transport.deferred_free import free_later
from trainers.data import Batch, Batches
from trainers.strategies.servers.messages import AGAIN, ASK, BYE, PUSH, REPLY, WORK, Head, Parcel, Waits


class Client:
    """Local to make.

    comm: of servers and workers. servers: their ranks there. parts: the slice of the flat buffers that each holds.
    waits: of the thread that pushes. waits_ahead: of the thread that asks, which may be another one.
    measures, dtype, unit: of parcels, see there.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, waits_ahead: Waits, servers: Sequence[int], parts: Sequence[slice],
        measures: int, dtype: np.dtype, unit: MPI.Datatype,
    ) -> None:  # fmt: skip
        self._waits, self._waits_ahead = waits, waits_ahead
        self._parts = list(parts)
        lengths = [part.stop - part.start for part in parts]
        self._questions = [Parcel(measures, 0, dtype, unit) for _ in servers]
        self._pushes = [Parcel(measures, length, dtype, unit) for length in lengths]
        self.replies = [Parcel(measures, length, dtype, unit) for length in lengths]
        pairs = list(zip(servers, range(len(servers)), strict=True))
        self._asks = [comm.Send_init(self._questions[index].message(), rank, ASK) for rank, index in pairs]
        self._whole = [comm.Send_init(self._pushes[index].message(), rank, PUSH) for rank, index in pairs]
        self._heads = [comm.Send_init(self._pushes[index].message(whole=False), rank, PUSH) for rank, index in pairs]
        self._receives = [comm.Recv_init(self.replies[index].message(), rank, REPLY) for rank, index in pairs]
        self._expected: list[bool] = [False] * len(pairs)

    def begin(self) -> None:
        """An epoch begins."""
        for reply in self.replies:
            reply.head = Head()

    # Asking

    def fetch(self, halt: int) -> None:
        """Ask the first server what to do, and, when there is work, all others for their parameters; into `replies`.

        halt: not zero to have the epoch ended.
        """
        halt = halt or any(reply.head.halt for reply in self.replies)
        question = Head(halt=halt)
        self._ask([0], question)
        while self.replies[0].head.kind == AGAIN:
            self._ask([0], question)
        dealt = self.replies[0].head
        if dealt.kind == WORK:
            self._ask(range(1, len(self._asks)), question._replace(taken=dealt.taken))

    def _ask(self, servers: Sequence[int], question: Head) -> None:
        for server in servers:
            self.expect(server)
            self._questions[server].head = question
            self._asks[server].Start()
        self._await(servers, self._waits_ahead)
        self._waits_ahead.all_of([self._asks[server] for server in servers], "have questions received")

    def expect(self, server: int) -> None:
        """Post the receive of a server's reply, before anything makes it answer."""
        self._receives[server].Start()
        self._expected[server] = True

    def _await(self, servers: Sequence[int], waits: Waits) -> None:
        waits.all_of([self._receives[server] for server in servers], "get parameters from the servers")
        for server in servers:
            self._expected[server] = False

    def answered(self) -> None:
        """Return when all servers have replied to what was pushed to them."""
        self._await(range(len(self._receives)), self._waits)

    def take(self, parameters: np.ndarray) -> list[int]:
        """Copy what has come to its places; returns the version that each server has given."""
        for part, reply in zip(self._parts, self.replies, strict=True):
            parameters[part] = reply.body
        return [reply.head.version for reply in self.replies]

    # Pushing

    def push(self, heads: Sequence[Head], gradients: np.ndarray | None, measures: Any = ()) -> None:
        """Send each server its slice of the gradients, or none; waits only until those before have been received."""
        self._waits.all_of(self._whole + self._heads, "have gradients received")
        for index, (part, parcel) in enumerate(zip(self._parts, self._pushes, strict=True)):
            parcel.head = heads[index]
            parcel.measures[: len(measures)] = measures
            if gradients is not None:
                parcel.body[:] = gradients[part]
            (self._heads if gradients is None else self._whole)[index].Start()

    def bye(self) -> None:
        """This worker has pushed all that it will push in this epoch; waits until that was received."""
        self.push([Head(BYE)] * len(self._parts), None)
        self._waits.all_of(self._heads, "take leave of the servers")

    def close(self) -> None:
        """Give the requests back. Local."""
        for request, expected in zip(self._receives, self._expected, strict=True):
            if expected:
                request.Cancel()
                request.Wait()
        for request in [*self._asks, *self._whole, *self._heads, *self._receives]:
            request.Free()

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        free_later(self)


class Rows:
    """Those of one epoch.

    parts: how many a batch has. ahead: whether `prepare` fetches.
    """

    def __init__(self, batches: Batches, epoch: int, parts: int, ahead: bool) -> None:
        self._batches, self._visited = batches, batches.order(epoch)
        self._parts, self._ahead = parts, ahead
        self._ready: dict[int, Batch | Exception] = {}

    def prepare(self, number: int) -> None:
        """Fetch the rows of part `number` for `take`, which raises what they raise."""
        if self._ahead:
            try:
                self._ready[number] = self._share(number)
            except Exception as error:  # whatever a data set raises, it is met where the rows are needed
                self._ready[number] = error

    def take(self, number: int) -> Batch:
        """The rows of part `number` of the epoch, which is a part of batch number // parts. Raises DataError."""
        found = self._ready.pop(number, None)
        if isinstance(found, Exception):
            raise found
        return self._share(number) if found is None else found

    def _share(self, number: int) -> Batch:
        return self._batches.share(self._visited, *divmod(number, self._parts))
