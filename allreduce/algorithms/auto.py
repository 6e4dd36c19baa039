"""Auto: the algorithm with the lowest cost for each call.

Every algorithm has a formula of its time, `cost`. Auto evaluates them for the bytes of a call, the layout of the ranks
and the constants of the machine, which are the same on all ranks. So all ranks select the same algorithm, and it never
changes: not between two calls of a signature (length, dtype, memory), nor between two backends of a topology.
"""

import inspect
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from allreduce import algorithms, kernels, notices
from allreduce.algorithm import Algorithm, Context, TwoPhase, Work
from allreduce.arrays import dtypes, ops
from allreduce.arrays.arguments import is_flag
from allreduce.arrays.memory_kinds import ALLOCATED, GPU
from allreduce.arrays.ops import Op
from allreduce.call.call import Call
from allreduce.errors import OptionError, UnavailableError
from allreduce.transport.control import agree, on_all
from allreduce.transport.cost import Machine
from allreduce.transport.layout import NodeLayout
from allreduce.tuning import constants, measuring

# Costs within the factor NEAR count as equal. Then the first of these names is selected, so noise does not decide.
NEAR = 1.1
ON_ONE_NODE, ON_NODES = ("shared", "native"), ("hierarchical_copy", "halving_doubling", "native")


def candidates(layout: NodeLayout) -> list[str]:
    """Return the names of the algorithms with a cost that work on these nodes, the preferred ones first. Local."""
    first = ON_ONE_NODE if layout.nodes == 1 else ON_NODES
    names = [name for name in algorithms.with_cost() if _works(algorithms.class_of(name), layout.nodes)]
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def _works(kind: type[Algorithm], nodes: int) -> bool:
    # an algorithm for messages between nodes is of no use on one node
    needs = kind.one_node if nodes > 1 else kind.between_nodes
    return not (needs or kind.needs_gpu or kind.by_array) and kind.sums and _needs_context_alone(kind)


def _needs_context_alone(kind: type[Algorithm]) -> bool:
    """Whether an algorithm can be made without options of its own. Local."""
    try:
        inspect.signature(kind).bind("context")
    except TypeError:
        return False
    return True


class Auto(TwoPhase):
    """Holds all algorithms with a cost, also those of `register`; the cheapest one does each call. The first one that
    has two phases allocates memory, and does calls of a single phase.

    An algorithm that can't be used here is left out, with one notice. CuPy arrays are reduced by "nccl"; where it does
    not work, they are staged through the host.

    table: the path of a file of constants from `python -m benchmarks.tune`; by default the one in $ALLREDUCE_TABLE,
        else this machine's in the user's cache folder. "" for none.
    measure: whether the constants are measured if there is no file. Then the selection, and with it the last bits of a
        sum of three or more ranks, may differ from run to run. False: they are measured only on two ranks, where any
        order of additions gives the same bits. Otherwise built-in constants decide, and equal programs get equal bits.
    compress: options (allreduce.Half, Quantized), on several nodes: the compression of the messages between them. All
        calls then go to "hierarchical_copy".
    """

    between_nodes = True

    def __init__(
        self,
        context: Context,
        *,
        table: str | os.PathLike[str] | None = None,
        measure: bool = True,
        compress: Any = None,
    ) -> None:
        super().__init__(context)
        if not is_flag(measure):
            raise OptionError(f"measure must be True or False, got {measure!r}")
        self._compress = compress
        self._choices: dict[tuple[int, np.dtype, int, bool], tuple[str, str]] = {}
        self._algorithms: dict[str, Algorithm] = {}
        names = candidates(context.layout)
        classes = ", ".join(f"{name}: {algorithms.class_of(name).__qualname__}" for name in names)
        agree(self.comm, [zlib.crc32(classes.encode())], f'"auto" among {classes}', None)
        if self.size == 1 or compress is not None:
            names = names[:1]
        if self.size > 1:
            self._layout = measuring.layout_of(context.topology, context.layout.node_sizes)
            self._constants = constants.Known(Machine(), "by default")
            if self.size == context.topology.size:  # else some ranks of the topology are not here
                self._constants = constants.known(context.topology, table, measure or self.size == 2)
        for name in names:
            self._make(name)
        if not any(each.two_phase for each in self._algorithms.values()):
            self._make("ring")  # it needs nothing but messages
        self._main = next(each for each in self._algorithms.values() if isinstance(each, TwoPhase))
        if compress is not None:
            self.lossless = context.make("native")
        if on_all(self.comm, "cupy" in sys.modules, "look for CuPy"):  # its import takes a second
            self._make("nccl")

    def _make(self, name: str) -> None:
        """Make an algorithm, unless it is unavailable here. Collective."""
        try:
            made = self.context.make(name, compress=None if name == "nccl" else self._compress)
        except UnavailableError as error:  # on all ranks
            self._leave_out(name, error)
            return
        self.holds.append(made)
        if self._compress is None and made.lossless is not made:
            self._leave_out(name, UnavailableError("it rounds"))
        else:
            self._algorithms[name] = made

    def _leave_out(self, name: str, error: UnavailableError) -> None:
        if name != "nccl" or name in self._algorithms:
            notices.once(self.rank, f'"auto" does not use "{name}": {error}')

    # The selection

    def choice(self, call: Call) -> tuple[str, str]:
        return self._choice(call.length, call.dtype, call.memory, kernels.sums(call.dtype, ops.OPS[call.op].adds))

    def _choice(self, length: int, dtype: np.dtype, memory: int, by_c: bool) -> tuple[str, str]:
        """Return the choice. by_c: the ranks have just met, so "shared" may do the call by C."""
        key = length, dtype, memory, by_c
        if key not in self._choices:
            self._choices[key] = self._cheapest(length * dtype.itemsize, dtype, memory, by_c)
        return self._choices[key]

    def _cheapest(self, nbytes: int, dtype: np.dtype, memory: int, by_c: bool = False) -> tuple[str, str]:
        if memory == GPU and "nccl" in self._algorithms:
            return "nccl", "CuPy arrays"
        half = dtypes.is_half(dtype)
        usable = {
            name: each for name, each in self._algorithms.items() if name != "nccl" and (each.sums_half or not half)
        }
        if len(usable) == 1 or self.size == 1:
            return next(iter(usable)), "compression" if self._compress is not None else "the only algorithm here"
        at = replace(self._layout, allocated=memory == ALLOCATED, half=half, by_c=by_c and self._layout.by_c)
        costs = {name: each.cost(nbytes, at, self._constants.machine) for name, each in usable.items()}
        for name, seconds in costs.items():
            if not seconds >= 0:  # NaN too
                raise OptionError(f"the cost of {name!r} is {seconds!r} s for {nbytes} bytes; it must be 0 or more")
        least = min(costs.values())
        name = next(name for name in costs if costs[name] <= NEAR * least)
        shown = ", ".join(f"{each} {1e6 * costs[each]:.3g} us" for each in sorted(costs, key=lambda each: costs[each]))
        rule = "" if costs[name] == least else f"; {name} is within {NEAR - 1:.0%} of the lowest, and preferred"
        return name, f"cost {shown}{rule}; constants {self._constants.source}"

    # Calls

    def work(self, call: Call, op: Op) -> Work:
        if call.kind != "all_reduce":
            return self._main.work(call, op)
        name, _ = self.choice(call)
        work = self._algorithms[name].work(call, op)
        return work if name != "nccl" else Work(lambda buffer: self._on_gpu(work, buffer, op))

    def _on_gpu(self, work: Work, buffer: Any, op: Op) -> None:
        """Do NCCL's work on a CuPy array. Where NCCL does not work, which its first call finds out, stage the array."""
        if "nccl" in self._algorithms:
            try:
                work.run(buffer)
                return
            except UnavailableError as error:  # raised on all ranks, before anything was changed
                self._leave_out("nccl", error)
                del self._algorithms["nccl"]
                self._choices.clear()
        self.context.stage(buffer, slice(None), lambda host: self.reduce(host, op), slice(None))

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        name, _ = self._choice(buffer.size, buffer.dtype, self.context.allocations.memory_of(buffer), False)
        self._algorithms[name].reduce(buffer, op)

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._main.reduce_scatter(buffer, op)

    scatter = reduce_scatter

    def all_gather(self, buffer: np.ndarray) -> None:
        self._main.all_gather(buffer)

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self._main.owned(length, rank)

    def in_everyones_array(self, buffer: np.ndarray, run: Callable[[list[np.ndarray]], object]) -> bool:
        return self._main.in_everyones_array(buffer, run)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda":
            if "nccl" not in self._algorithms:
                self._make("nccl")
            return super().allocate(length, dtype, device)
        try:
            return self._main.allocate(length, dtype, device)
        except UnavailableError as error:  # on all ranks: shared memory is full
            notices.once(self.rank, f'"auto" allocates ordinary memory, which will be copied: {error}')
            return super().allocate(length, dtype, device)
