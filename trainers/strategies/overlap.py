"""Sums gradients over the ranks in buckets, in a thread, while the replica still computes the other gradients.

`Submissions` submits buckets in one order on all ranks; `Overlap` does so for a Step, and trainers.pytorch.reducer for
MirroredOptimizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.backend import AllReduce
from allreduce.call.queue import Future
from allreduce.errors import UnavailableError
from trainers.errors import ArgumentError
from trainers.options.buckets import Buckets, plan_buckets
from trainers.replica import Replica, parameter_slices

TWICE = (  # the error of a parameter for which `Submissions.arrived` returns False
    "{} received its gradient twice in one backward, so it may be half reduced; use torch.utils.checkpoint "
    "with use_reentrant=False, or buckets=Buckets(overlap=False)"
)


class Submissions(ABC):
    """The reductions of the buckets of a backward, submitted in one order on all ranks: each when all of its gradients
    are complete, after all buckets before it. buckets: the parameters of each.

    bucket_of: the number of each parameter's bucket. futures: of the reductions that are submitted, in order.
    """

    def __init__(self, buckets: Iterable[Iterable[int]]) -> None:
        self._buckets = [frozenset(each) for each in buckets]
        self.bucket_of = {parameter: at for at, each in enumerate(self._buckets) for parameter in each}
        self.restart()

    def restart(self) -> None:
        """Begin another backward: no gradient is complete. Local."""
        self._missing, self.futures = list(map(set, self._buckets)), list[Future]()

    @abstractmethod
    def submit(self, bucket: int) -> Future:
        """Submit the reduction of a bucket. Local."""

    @property
    def ended(self) -> bool:
        """Whether all buckets are submitted."""
        return len(self.futures) == len(self._buckets)

    def arrived(self, parameter: int) -> bool:
        """The gradient of a parameter is complete: submit the buckets that are, too. Returns False, and submits none,
        if it has been complete before. Local."""
        missing = self._missing[self.bucket_of[parameter]]
        if parameter not in missing:
            return False
        missing.remove(parameter)
        self.launch()
        return True

    def launch(self, rest: bool = False) -> None:
        """Submit the buckets that are to be submitted now. rest: all that are left, complete or not. Local."""
        while not self.ended and (rest or not self._missing[len(self.futures)]):
            self.futures.append(self.submit(len(self.futures)))

    def finish(self) -> None:
        """Submit all other buckets, and return when all are reduced. Collective. Raises the first of their errors;
        KeyboardInterrupt at once: another call waits for the rest."""
        self.launch(rest=True)
        errors = []
        for future in self.futures:
            try:
                future.wait()
            except Exception as error:  # the other buckets are still being reduced
                errors.append(error)
        self.finished()
        if errors:
            raise errors[0]

    @abstractmethod
    def finished(self) -> None:
        """Called when all buckets are reduced, or have failed. Local."""


class Overlap(Submissions):
    """The buckets of a step: `ready` for each parameter, then `finish`.

    backend: sums the buckets. Its first call makes the thread, which is collective. gradients: 1-D, of all parameters.
    named: the slice of each parameter, by its name, in order. plan: the numbers of the parameters of each bucket, from
    the last to the first, which is about the order in which backward computes their gradients.

    Raises UnavailableError on all ranks if MPI allows no thread.
    """

    def __init__(
        self, backend: AllReduce, gradients: Any, named: Mapping[str, slice], plan: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(plan)
        self._backend, self._names, slices = backend, [*named], [*named.values()]
        self._parts = [slice(slices[each[-1]].start, slices[each[0]].stop) for each in plan]
        self._gradients = [gradients[each] for each in self._parts]
        backend.submit(gradients[:0], "sum").wait()

    @property
    def unfinished(self) -> bool:
        """Whether an error has ended a step before `finish`, so that the thread still has buckets of it. Local."""
        return bool(self.futures)

    def ready(self, parameter: int) -> None:
        """The gradients of a parameter are complete; see Replica.ready. Local."""
        if not self.arrived(parameter):
            raise ArgumentError(TWICE.format(self._names[parameter]))

    def submit(self, bucket: int) -> Future:
        return self._backend.submit(self._gradients[bucket], "sum")

    @property
    def untaken(self) -> int:
        """The number of gradients, the first ones, that the thread has not got yet."""
        taken = len(self.futures)
        return self._parts[taken - 1].start if taken else self._parts[0].stop

    def finished(self) -> None:
        self.restart()


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
