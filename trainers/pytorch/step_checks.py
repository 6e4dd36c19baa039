"""Whether the gradients of a backward are numbers: each rank looks at its own before they are averaged."""

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.transport.control import known
from allreduce.transport.wait import wait_for
from trainers import checks
from trainers.checks import Findings, Place
from trainers.errors import NotFiniteError
from trainers.pytorch.buckets import Memory
from trainers.pytorch.hooks import Forwards
from trainers.pytorch.sparse import SparseGradients
from trainers.replicas.pytorch.tensors import numpy_dtype


class GradientCheck:
    """Of one optimizer.

    on_bad: "raise" or "skip", as of MirroredOptimizer's check_gradients.
    names: of the parameters. sparse: the parameters beside them whose gradients are. owned: the slice of
        a bucket of this length that is averaged here, start and stop given.
    sent: the dtype in which the backend sends gradients of a dtype; sparse ones go as they are.
    """

    def __init__(
        self,
        on_bad: str,
        names: Sequence[str],
        buckets: Sequence[Memory],
        sparse: SparseGradients,
        owned: Callable[[int], slice],
        sent: Callable[[np.dtype], np.dtype],
    ) -> None:
        self._on_bad, self._buckets, self._sparse, self._owned = on_bad, buckets, sparse, owned
        self._places = [
            Place(names[slot.parameter], slot.start - memory.bucket.start, slot.stop - slot.start)
            for memory in buckets
            for slot in memory.bucket.slots
        ]
        self._places += [
            Place(name, 0, each.numel()) for name, each in zip(sparse.names, sparse.parameters, strict=True)
        ]
        counts = [len(memory.bucket.slots) for memory in buckets]
        self._first = {
            (memory.bucket.dtype, memory.bucket.start): sum(counts[:at]) for at, memory in enumerate(buckets)
        }
        own = [memory.array.dtype for memory in buckets]
        self._dtypes = [(each, sent(each)) for each in own]
        self._dtypes += [(numpy_dtype(each.dtype), numpy_dtype(each.dtype)) for each in sparse.parameters]
        self._most = {each: checks.most(each, sent(each)) for each in own}
        self._largest = min(checks.largest(each) for _, each in self._dtypes)
        self._own = Findings()
        self.left_out = False  # the step of these gradients is left out on all ranks
        self.forwards: Forwards | None = None  # what is undone then

    def begin(self) -> None:
        """A backward begins. Local."""
        self._own, self.left_out = Findings(), False

    def look(self, memory: Memory) -> None:
        """Look at this rank's gradients, which are about to be averaged. Local."""
        first = self._first[memory.bucket.dtype, memory.bucket.start]
        places = self._places[first : first + len(memory.bucket.slots)]
        self._own.add(memory.fetched(), places, first, self._most[memory.array.dtype])

    def look_at_rows(self, number: int, indices: np.ndarray, values: np.ndarray) -> None:
        """As `look`, at a sparse gradient: of the parameter of this number, all of whose others are zeros. Local."""
        self._own.add_rows(self._places[number], number, indices, values)

    def settle(self, comm: MPI.Intracomm, may_leave_out: bool) -> None:
        """All buckets are averaged: raise on all ranks, or leave the step out, if any were no numbers. Collective.

        may_leave_out: whether the step is one that can be left out; with a closure it can't.
        """
        rows, norms = checks.exchange(comm, self._own)
        narrowest = min(self._dtypes, key=lambda each: checks.largest(each[1]))
        if rows is not None:
            problem = checks.told(rows, self._places, narrowest[1])
        elif norms < self._largest / 2 or not (where := self._overflow(comm)):
            return
        else:
            problem = checks.overflow_told(where, *narrowest)
        if self._on_bad == "raise" or not may_leave_out:
            raise known(NotFiniteError(f"{problem.text}: {problem.advice}"), comm)
        self.left_out = True
        if comm.rank == 0:
            notices.log.warning("allreduce: %s; no rank takes this step", problem.text)

    def _overflow(self, comm: MPI.Intracomm) -> str:
        """The first parameter whose average is no number, on any rank; "" for none. Collective."""
        first = len(self._places)
        for memory in self._buckets:
            owned = self._owned(memory.array.size)
            averages = memory.array[owned]
            host = averages.get() if gpu.is_gpu_array(averages) else averages
            bad = np.flatnonzero(~np.isfinite(host))
            if bad.size:
                at = owned.start + int(bad[0])
                begin = self._first[memory.bucket.dtype, memory.bucket.start]
                places = self._places[begin : begin + len(memory.bucket.slots)]
                inside = next(number for number, place in enumerate(places) if at < place.start + place.size)
                first = min(first, begin + inside)
        for number, (_, average) in enumerate(self._sparse.averages):
            if not np.isfinite(average).all():
                first = min(first, len(self._places) - len(self._sparse.names) + number)
        found = np.array([first])
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, found, MPI.MIN), checks.WAITS)
        return self._places[int(found[0])].name if found[0] < len(self._places) else ""
