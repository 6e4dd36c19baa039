"""Sums gradients over the ranks in buckets, in a thread, while the replica still computes the other gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.backend import AllReduce
from allreduce.call.queue import Future
from allreduce.errors import UnavailableError
from trainers.errors import ArgumentError
from trainers.options.buckets import Buckets, InOrder, plan_buckets
from trainers.replica import Replica, parameter_slices

TWICE = (
    "{} received its gradient twice in one backward, so it may be half summed; use torch.utils.checkpoint "
    "with use_reentrant=False, or buckets=Buckets(overlap=False)"
)


class Overlap:
    """The buckets of a step: `ready` for each parameter, then `finish`.

    backend: sums the buckets. Its first call makes the thread, which is collective. gradients: 1-D, of all parameters.
    named: the slice of each parameter, by its name, in order. plan: the numbers of the parameters of each bucket, from
    the last to the first, which is about the order in which backward computes their gradients.

    Raises UnavailableError on all ranks if MPI allows no thread.
    """

    def __init__(
        self, backend: AllReduce, gradients: Any, named: Mapping[str, slice], plan: Sequence[Sequence[int]]
    ) -> None:
        self._backend, self._plan = backend, plan
        self._names, slices = [*named], [*named.values()]
        self._starts = [slices[each[-1]].start for each in plan]
        ends = [slices[each[0]].stop for each in plan]
        self._buckets = [gradients[start:end] for start, end in zip(self._starts, ends, strict=True)]
        self._order, self._futures = InOrder(plan), list[Future]()
        backend.submit(gradients[:0], "sum").wait()

    @property
    def unfinished(self) -> bool:
        """Whether an error has ended a step before `finish`, so that the thread still has buckets of it. Local."""
        return bool(self._futures)

    def ready(self, parameter: int) -> None:
        """The gradients of a parameter are complete; see Replica.ready. Local."""
        if not self._order.arrived(parameter):
            raise ArgumentError(TWICE.format(self._names[parameter]))
        self._submit()

    def _submit(self, rest: bool = False) -> None:
        for bucket in self._order.next_buckets(rest):
            self._futures.append(self._backend.submit(self._buckets[bucket], "sum"))

    @property
    def untaken(self) -> int:
        """The number of gradients, the first ones, that the thread has not got yet."""
        taken = self._order.submitted
        return self._starts[taken - 1] if taken else self._buckets[0].size + self._starts[0]

    def finish(self) -> None:
        """Submit all other buckets, and return when all are summed. Collective."""
        errors = []
        self._submit(rest=True)
        while self._futures:
            try:
                self._futures[0].wait()
            except Exception as error:  # the other buckets are still being summed
                errors.append(error)
            del self._futures[0]
        self._order = InOrder(self._plan)
        if errors:
            raise errors[0]


def overlap_of(backend: AllReduce, gradients: Any, replica: Replica, buckets: Buckets) -> Overlap | None:
    """Return the Overlap of these gradients; None if they are summed in one call. Collective."""
    topology = backend.topology
    # Any two values have one sum. With more ranks the order of the additions, and so the bits, may depend on an
    # element's place in a bucket.
    pays = topology.nodes > 1 and topology.size == 2 if buckets.overlap == "auto" else buckets.overlap
    if not pays or topology.size == 1:
        return None
    slices, dtype = parameter_slices(replica), replica.gradient_dtype
    sizes = [(each.stop - each.start, dtype, dtypes.parse(dtype).itemsize) for each in slices]
    plan = [[slot.parameter for slot in bucket.slots] for bucket in plan_buckets(sizes, *buckets.limits)[0]]
    if len(plan) < 2:
        return None
    try:
        return Overlap(backend, gradients, dict(zip(replica.shapes, slices, strict=True)), plan)
    except UnavailableError as error:  # on all ranks
        notices.once(topology.rank, f"gradients are summed after backward, not during it: {error}")
        return None
