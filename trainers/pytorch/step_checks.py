"""The checks of a step: whether gradients are numbers, before they are averaged; whether replicas are still equal."""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.errors import DivergenceError
from allreduce.transport.control import known, together
from allreduce.transport.wait import wait_for
from trainers import checks
from trainers.checks import Findings, Place, compare
from trainers.errors import NotFiniteError
from trainers.pytorch.buckets import Memory
from trainers.pytorch.sparse import SparseGradients
from trainers.pytorch.state import broadcast_state, broadcast_tensors
from trainers.replicas.pytorch.optimizer import hyperparameters
from trainers.replicas.pytorch.state import Buffers
from trainers.replicas.pytorch.tensors import as_bytes, numpy_dtype


class GradientCheck:
    """Whether the gradients of an optimizer are numbers. Each rank looks at its own before they are averaged.

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
        self._places = [  # of each bucket's parameters, then the sparse ones
            Place(names[slot.parameter], slot.start - memory.bucket.start, slot.stop - slot.start)
            for memory in buckets
            for slot in memory.bucket.slots
        ]
        self._dense = len(self._places)
        tables = zip(sparse.names, sparse.parameters, strict=True)
        self._places += [Place(name, 0, each.numel()) for name, each in tables]
        self._firsts = list(itertools.accumulate((len(memory.bucket.slots) for memory in buckets), initial=0))
        own = [memory.array.dtype for memory in buckets]
        self._dtypes = [(each, sent(each)) for each in own]
        self._dtypes += [(numpy_dtype(each.dtype), numpy_dtype(each.dtype)) for each in sparse.parameters]
        self._most = [checks.most(each, sent(each)) for each in own]
        self._largest = min(checks.largest(each) for _, each in self._dtypes)
        self._own = Findings()
        self.left_out = False  # the step of these gradients is left out on all ranks

    def begin(self) -> None:
        """A backward begins. Local."""
        self._own, self.left_out = Findings(), False

    def look(self, bucket: int) -> None:
        """Look at this rank's gradients of a bucket, which are about to be averaged. Local."""
        places = self._places_in(bucket)
        self._own.add(self._buckets[bucket].fetched(), places, self._firsts[bucket], self._most[bucket])

    def look_at_rows(self, number: int, indices: np.ndarray, values: np.ndarray) -> None:
        """Look at a sparse gradient: of the parameter of this number, all of whose other rows are zeros. Local."""
        number += self._dense
        self._own.add_rows(self._places[number], number, indices, values)

    def finish(self, comm: MPI.Intracomm, may_leave_out: bool) -> None:
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

    def _places_in(self, bucket: int) -> list[Place]:
        return self._places[self._firsts[bucket] : self._firsts[bucket + 1]]

    def _overflow(self, comm: MPI.Intracomm) -> str:
        """The first parameter whose average is no number, on any rank; "" for none. Collective."""
        first = len(self._places)
        for bucket, memory in enumerate(self._buckets):
            owned = self._owned(memory.array.size)
            averages = memory.array[owned]
            host = averages.get() if gpu.is_gpu_array(averages) else averages
            bad = np.flatnonzero(~np.isfinite(host))
            if bad.size:
                at = owned.start + int(bad[0])
                places = self._places_in(bucket)
                inside = next(number for number, place in enumerate(places) if at < place.start + place.size)
                first = min(first, self._firsts[bucket] + inside)
        for number, (_, average) in enumerate(self._sparse.averages):
            if not np.isfinite(average).all():
                first = min(first, self._dense + number)
        found = np.array([first])
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, found, MPI.MIN), checks.WAITS)
        return self._places[int(found[0])].name if found[0] < len(self._places) else ""


class Forwards:
    """The forwards of a model since the last step: a step that all ranks leave out undoes what they did to buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before, self._begun = Buffers(model), False

    def begin(self, module: torch.nn.Module, *_: object) -> None:
        """A forward begins. Local; a hook of the model."""
        if module.training and not self._begun:
            self._begun = True
            self._before.keep()

    def stepped(self, left_out: bool) -> None:
        """A step has ended; left_out: the buffers become what they were before its first forward. Local."""
        self._begun = False
        if left_out:
            self._before.restore()
        else:
            self._before.forget()


def compare_replicas(
    comm: MPI.Intracomm,
    optimizer: Optimizer,
    trained: Mapping[str, Parameter],
    compared: Mapping[str, Parameter],
    stateful: Mapping[str, Parameter],
    on_divergence: str,
    source: str | int,
) -> bool:
    """Compare parameters, hyperparameters and the optimizer's state over all ranks. Collective.

    trained: all parameters. compared: those that may differ: ranks that share one memory can't. stateful: those whose
        state each rank has; of a sharded update a rank has the state of its slice alone.
    on_divergence, source: as of MirroredOptimizer.
    Returns True when ranks differed and all have taken on the source's replica; the caller then places it again.
    Raises DivergenceError. Costs one reading of all that, and a message of 16 bytes.
    """
    found = compare(comm, together(comm, lambda: _held(optimizer, compared, stateful)))
    if found is None:
        return False
    if on_divergence == "raise":
        raise known(DivergenceError(str(found)), comm)
    root = found.root(source)
    broadcast_tensors(comm, trained.values(), root)
    broadcast_state(comm, optimizer, root)
    if comm.rank == 0:
        ranks = ", ".join(map(str, found.differing(root)))
        notices.log.warning("allreduce: %s\n  copied again to rank %s: the replica of rank %d", found, ranks, root)
    return True


def _held(
    optimizer: Optimizer, compared: Mapping[str, Parameter], stateful: Mapping[str, Parameter]
) -> dict[str, np.ndarray | str]:
    """What must be equal on all ranks, by name."""
    held: dict[str, np.ndarray | str] = {f"group {at}": _text(group) for at, group in enumerate(optimizer.param_groups)}
    held |= {name: _array(each) for name, each in compared.items()}
    states = ((name, optimizer.state.get(each, {})) for name, each in stateful.items())
    return held | {f"the state of {name}": _state_text(state) for name, state in states}


def _array(parameter: Parameter) -> np.ndarray:
    whole = parameter.detach().cpu().contiguous()
    return as_bytes(whole) if whole.dtype == torch.bfloat16 else whole.numpy()


def _text(group: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(hyperparameters(group).items()))


def _state_text(state: Mapping[str, Any]) -> str:
    """An optimizer's state of one parameter, its tensors by their CRC."""
    return ", ".join(f"{key}={_digest(value)}" for key, value in sorted(state.items(), key=lambda pair: str(pair[0])))


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"crc {zlib.crc32(as_bytes(value.detach().contiguous()).data):08x}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__
