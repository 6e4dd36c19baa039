"""Auto: the algorithm with the lowest cost for each call.

Every algorithm has a formula of its time, `cost`. Auto evaluates them for the bytes of a call, the layout of the ranks
and the constants of the machine, which are the same on all ranks. So all ranks select the same algorithm, and it never
changes: not between two calls of a signature (length, dtype, memory), nor between two backends of a topology.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.arrays.memory_kinds import ALLOCATED, GPU
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce, NodeArrays, TwoPhase
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Work
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import Location
from allreduce.tuning import constants, measuring

ON_ONE_NODE = ("shared", "native", "ring")
ON_NODES = ("hierarchical_copy", "halving_doubling", "native", "ring")
NEAR = 1.1  # costs within this factor count as equal: then the first name above is selected, and noise does not decide


class Auto(AllReduce):
    """Selects the algorithm with the lowest cost for each call, and forwards the call to it.

    An algorithm that can't be used here is left out, with one notice. CuPy arrays are reduced by "nccl"; where it does
    not work, they are staged through the host.

    make: creates a backend from its name and a topology (given by `create`).
    table: the path of a file of constants from `python -m benchmarks.tune`; by default the one in $ALLREDUCE_TABLE,
        else this machine's in the user's cache folder. "" for none.
    measure: whether the constants are measured if there is no file. Then the selection, and with it the last bits of a
        sum of three or more ranks, may differ from run to run. False: only for two ranks, where any order of additions
        gives the same bits; otherwise built-in constants decide, and equal programs get equal bits.
    compress: options (allreduce.wrappers.options), on several nodes: the compression of the messages between them. All
        calls then go to "hierarchical_copy".
    """

    between_nodes = True

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[..., AllReduce],
        table: str | os.PathLike[str] | None = None,
        measure: bool = True,
        compress: Any = None,
        check: str = "first",
    ) -> None:
        if not isinstance(measure, bool):
            raise OptionError(f"measure must be True or False, got {measure!r}")
        self._make, self._table, self._measures, self._compress = make, table, measure, compress
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._choices: dict[tuple[int, np.dtype, int], tuple[str, str]] = {}
        self._algorithms: dict[str, AllReduce] = {}
        self._unavailable: dict[str, str] = {}
        names: tuple[str, ...] = ON_NODES if topology.nodes > 1 else ON_ONE_NODE
        self._main = names[0]  # it allocates, and alone it is compressed
        if self.size == 1 or self._compress is not None:
            names = names[:1]
        if self.size > 1:
            self._layout = measuring.layout_of(topology)
            self._constants = constants.known(topology, self._table, self._measures or self.size == 2)
            self._create("nccl")
        for name in names:
            self._create(name)
        if self._main not in self._algorithms and "ring" not in names:
            self._main = "ring"  # which needs nothing but messages
            self._create("ring")
        main = self._algorithms.get(self._main)
        if main is not None:
            self._owners = main.hooks.owners
            self._memory = main.hooks.memory  # type: ignore[method-assign, assignment]
        self._exact = self if self._compress is None else self._add_part(self._make("native", topology))

    def _create(self, name: str) -> None:
        """Create an algorithm, unless it is unavailable here. Collective."""
        try:
            part = self._make(name, self.topology, compress=None if name == "nccl" else self._compress)
            self._algorithms[name] = self._add_part(part)
        except UnavailableError as error:  # on all ranks
            self._leave_out(name, error, says=name != "nccl")

    def _leave_out(self, name: str, error: UnavailableError, says: bool = True) -> None:
        self._unavailable[name] = str(error)
        if says:
            notices.once(self.rank, f'"auto" does not use "{name}": {error}')

    # The selection

    def choice(self, length: int, dtype: DTypeLike = "float32", device: str = "cpu") -> tuple[str, str]:
        """Return (backend name, reason) for an array from `allocate`. Local, from any thread."""
        return self._choice(length, dtypes.parse(dtype), GPU if device == "cuda" else ALLOCATED)

    def chosen(self, array: Any) -> str:
        if array.size == 0 or self.size == 1:
            return self.name
        return self._choice(array.size, array.dtype, self._memory_kind(array))[0]

    def _choice(self, length: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        key = length, dtype, memory
        if key not in self._choices:
            self._choices[key] = self._cheapest(length * dtype.itemsize, dtype, memory)
        return self._choices[key]

    def _cheapest(self, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        """Return the name of the cheapest algorithm, and the reason. Local; the same on all ranks."""
        if memory == GPU and "nccl" in self._algorithms:
            return "nccl", "CuPy arrays"
        half = dtypes.is_half(dtype)
        at = replace(self._layout, allocated=memory == ALLOCATED, half=half) if self.size > 1 else None
        usable = [each for name, each in self._algorithms.items() if name != "nccl" and (each.sums_half or not half)]
        if len(usable) == 1 or at is None:
            return usable[0].name, self._only(usable[0].name)
        costs = {each.name: each.cost(nbytes, at, self._constants.machine) for each in usable}
        least = min(costs.values())
        name = next(name for name in costs if costs[name] <= NEAR * least)
        shown = ", ".join(f"{each} {1e6 * costs[each]:.3g} us" for each in sorted(costs, key=lambda each: costs[each]))
        return name, f"cost {shown}; constants {self._constants.source}"

    def _only(self, name: str) -> str:
        reasons = [
            f'"{other}" can\'t be used here: {why}' for other, why in self._unavailable.items() if other != "nccl"
        ]
        return "; ".join(reasons) or ("compression" if self._compress is not None else f"one algorithm: {name}")

    def _selected(self, length: int, dtype: np.dtype, memory: int) -> AllReduce:
        return self._algorithms[self._choice(length, dtype, memory)[0]]

    # Calls: the algorithm does the work

    def _route(self, call: Call) -> Work:
        if call.length == 0 or self.size == 1:
            return super()._route(call)
        work = self._selected(call.length, call.dtype, call.memory).hooks.route(call)
        return partial(self._on_gpu, work) if call.memory == GPU else work

    def _on_gpu(self, work: Work, buffer: Any, op: Op) -> None:
        """Do NCCL's work on a CuPy array. Where NCCL does not work, which its first call finds out, stage the array."""
        if "nccl" in self._algorithms:
            try:
                work(buffer, op)
                return
            except UnavailableError as error:  # raised on all ranks, before anything was changed
                del self._algorithms["nccl"]
                self._choices.clear()
                self._leave_out("nccl", error)
        super()._reduce_gpu(buffer, op)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._selected(buffer.size, buffer.dtype, self._memory(buffer)).hooks.reduce(buffer, op)

    def _locator_for(self, call: Call) -> Locate | None:
        if call.length == 0 or self.size == 1 or call.memory == GPU:
            return None
        return self._selected(call.length, call.dtype, call.memory).hooks.locator_for(call)

    def two_phase(self, buffer: np.ndarray) -> TwoPhase | None:
        memory = self._memory_kind(buffer)
        if memory != ALLOCATED or self.size == 1:
            return None
        part = self._selected(buffer.size, buffer.dtype, memory)
        return part if isinstance(part, TwoPhase) else None

    # Memory and compression: those of the main algorithm

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        main = self._algorithms.get(self._main)
        if device != "cuda" and main is not None:
            try:
                return main.hooks.allocate(length, dtype, device)
            except UnavailableError as error:
                notices.once(self.rank, f'"auto" allocates ordinary memory, so "{self._main}" will copy: {error}')
        return super()._allocate(length, dtype, device)

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        main = self._algorithms.get(self._main)
        return None if main is None else main.node_arrays(buffer)

    def _locate(self, buffer: np.ndarray) -> Location | None:
        main = self._algorithms.get(self._main)
        return None if main is None else main.hooks.locate(buffer)

    @property
    def exact(self) -> AllReduce:
        return self._exact

    def sent(self, dtype: np.dtype) -> np.dtype:
        return dtype if self._compress is None else self._compress.sent(dtype)

    # The state has the names that it has on one node, where this backend is compressed as a whole.

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        return {} if self._compress is None else self._algorithms[self._main].state(array)

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        if self._compress is not None:
            self._algorithms[self._main].load_state(state, array)
        else:
            super().load_state(state, array)
