"""Auto: picks a backend for each call, by one rule."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce import dtypes, notices
from allreduce.base import AllReduce
from allreduce.errors import UnavailableError
from allreduce.ops import Op
from allreduce.signature import ALLOCATED, GPU
from allreduce.topology import Topology

SMALL_BYTES = 64 * 1024  # below this the MPI library's latency wins
LAST_RESORT = "ring"  # needs nothing but messages

Rule = Callable[[Topology, int, np.dtype, int], tuple[str, str]]


def rule(topology: Topology, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
    """The backend for one call, and why. All ranks pass the same, so all choose the same."""
    if memory == GPU:
        return "nccl", "CuPy arrays"
    if nbytes < SMALL_BYTES and not dtypes.is_half(dtype):
        return "native", f"below {SMALL_BYTES // 1024} KiB the MPI library's latency wins"
    if topology.nodes > 1:
        return "hierarchical_copy", f"{topology.nodes} nodes"
    return "shared", "one node: the ranks reduce in the memory that they share"


class Auto(AllReduce):
    """Creates the backends that its rule names when they are first needed, and passes calls on to them.

    A backend that turns out not to work here is replaced, which is said once: on the GPU by staging
    through the host, elsewhere by LAST_RESORT.

    make: creates a backend from its name and a topology (given by `create`).
    choose: the rule.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[[str, Topology], AllReduce],
        choose: Rule = rule,
        check: str = "first",
    ) -> None:
        super().__init__(topology, check=check)
        self._make = make
        self._choose = choose
        self._parts: dict[str, AllReduce] = {}
        self._lacking: dict[str, str] = {}
        self._chosen: dict[tuple[int, np.dtype, int], AllReduce] = {}
        self._home: AllReduce | None = None  # the part whose memory `allocate` gives

    def choice(self, length: int, dtype: DTypeLike = "float32", device: str = "cpu") -> tuple[str, str]:
        """The name of the backend for an array from `allocate`, and why. Collective at its first use."""
        parsed = dtypes.parse(dtype)
        return self._decide(length * parsed.itemsize, parsed, GPU if device == "cuda" else ALLOCATED)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda":
            return super()._allocate(length, dtype, device)
        name = "hierarchical_copy" if self.topology.nodes > 1 else "shared"
        home = self._part(name)
        if home is not None:
            try:
                array = home._allocate(length, dtype, device)
                self._home = home
                return array
            except UnavailableError as error:
                notices.once(self.rank, f'"auto" allocates ordinary memory, so "{name}" will copy: {error}')
        return super()._allocate(length, dtype, device)

    def _memory(self, buffer: Any) -> int:
        return super()._memory(buffer) if self._home is None else self._home._memory(buffer)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._pass_on(buffer, op, self._memory(buffer))

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        if "nccl" in self._lacking or not self._pass_on(buffer, op, GPU):
            super()._reduce_gpu(buffer, op)

    def _pass_on(self, buffer: Any, op: Op, memory: int) -> bool:
        """Have the chosen backend reduce the array. False: a GPU array that nothing could take as it is."""
        key = (buffer.size, buffer.dtype, memory)
        while True:
            part = self._chosen.get(key)
            if part is None:
                name, _ = self._decide(buffer.nbytes, buffer.dtype, memory)
                if memory == GPU and name == LAST_RESORT:
                    return False
                part = self._chosen[key] = self._parts[name]
            try:
                (part._reduce_gpu if memory == GPU else part._reduce)(buffer, op)
                return True
            except UnavailableError as error:  # raised on all ranks, before anything was changed
                self._give_up(part, error)

    def _decide(self, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        name, why = self._choose(self.topology, nbytes, dtype, memory)
        if self._part(name) is None:
            name, why = LAST_RESORT, f'"{name}" can\'t be used here: {self._lacking[name]}'
            self._part(name)
        return name, why

    def _part(self, name: str) -> AllReduce | None:
        """The backend called `name`, made at its first use; None when it can't work here. Collective then."""
        if name not in self._parts and name not in self._lacking:
            try:
                self._parts[name] = self._make(name, self.topology)
            except UnavailableError as error:
                self._lack(name, error)
        return None if name in self._lacking else self._parts[name]

    def _give_up(self, part: AllReduce, error: UnavailableError) -> None:
        name = next(name for name, each in self._parts.items() if each is part)
        self._lack(name, error)
        self._chosen.clear()

    def _lack(self, name: str, error: UnavailableError) -> None:
        self._lacking[name] = str(error)
        notices.once(self.rank, f'"auto" does without "{name}": {error}')

    def _close(self) -> None:
        for part in self._parts.values():
            part.close()
