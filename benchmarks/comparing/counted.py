"""Which rank sends how many bytes to which: a communicator that counts what passes through it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI


class Traffic:
    """Bytes that this rank has sent, by receiver. comm: of all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._group = comm.Get_group()
        self.sent = np.zeros(comm.size)

    def places(self, comm: MPI.Comm) -> Sequence[int]:
        """The ranks, in all ranks' communicator, of those of another one."""
        group = comm.Get_group()
        try:
            return MPI.Group.Translate_ranks(group, range(group.size), self._group)
        finally:
            group.Free()

    def through(self, sent: np.ndarray) -> np.ndarray:
        """The bytes through each rank, sent and received, of what all ranks have `sent`. Collective."""
        table = np.empty((self._comm.size, self._comm.size))
        self._comm.Allgather(sent, table)
        return table.sum(0) + table.sum(1)


class CountedComm(MPI.Intracomm):
    """Counts point-to-point messages; of collectives Allreduce and Bcast, as a ring and a chain would send them.

    Duplicates and parts of it count too. What ranks write into memory that they share is no message.
    """

    _traffic: Traffic | None = None
    _places: Sequence[int] = ()

    @classmethod
    def of(cls, comm: MPI.Comm, traffic: Traffic | None) -> "CountedComm":
        """A communicator, under the same handle, that adds to `traffic`."""
        made = cls(comm)
        made._traffic = traffic
        made._places = traffic.places(comm) if traffic is not None and comm != MPI.COMM_NULL else ()
        return made

    def _count(self, buffer: Any, dest: int, share: float = 1.0) -> None:
        if self._traffic is not None:
            self._traffic.sent[self._places[dest]] += share * nbytes(buffer)

    def Dup(self, *args: Any, **options: Any) -> Any:  # noqa: N802, MPI's names
        return CountedComm.of(super().Dup(*args, **options), self._traffic)

    def Split(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return CountedComm.of(super().Split(*args, **options), self._traffic)

    def Split_type(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return CountedComm.of(super().Split_type(*args, **options), self._traffic)

    def Send(self, buf: Any, dest: int, *args: Any, **options: Any) -> None:  # noqa: N802
        self._count(buf, dest)
        super().Send(buf, dest, *args, **options)

    def Isend(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        self._count(buf, dest)
        return super().Isend(buf, dest, *args, **options)

    def Issend(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        self._count(buf, dest)
        return super().Issend(buf, dest, *args, **options)

    def Send_init(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        request = _CountedRequest(super().Send_init(buf, dest, *args, **options))
        request.told = lambda: self._count(buf, dest)
        return request

    def Allreduce(self, sendbuf: Any, recvbuf: Any, *args: Any, **options: Any) -> None:  # noqa: N802
        if self.size > 1:
            self._count(recvbuf, (self.rank + 1) % self.size, 2 * (self.size - 1) / self.size)
        super().Allreduce(sendbuf, recvbuf, *args, **options)

    def Bcast(self, buf: Any, root: int = 0) -> None:  # noqa: N802
        following = (self.rank + 1) % self.size
        if following != root:
            self._count(buf, following)
        super().Bcast(buf, root)


class _CountedRequest(MPI.Prequest):
    """Counts each time that it is started."""

    told: Any = None

    def Start(self) -> None:  # noqa: N802
        self.told()
        super().Start()


def nbytes(buffer: Any) -> int:
    """The bytes of what MPI is given: an array, or (array, count, datatype) and shorter forms of it."""
    if not isinstance(buffer, tuple | list):
        return memoryview(buffer).nbytes
    if len(buffer) == 3 and isinstance(buffer[1], int):
        return buffer[1] * buffer[2].Get_size()
    return memoryview(buffer[0]).nbytes
