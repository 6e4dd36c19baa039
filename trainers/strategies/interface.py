"""The sharded update: every rank updates only the slice of the parameters whose gradients it has finished.

reduce_scatter -> the replica's update of a slice -> all_gather of the parameters. Where ranks that together
own everything share a node, the parameters live in one window of the node, so every rank writes where all
read, and nothing is gathered. What the trainer measures lies behind the gradients, and behind the parameters
it comes back to all ranks, without a message of its own.
S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from allreduce.backend import AllReduce
from allreduce.tracing.trace import Trace
from trainers.state.pieces import Piece

if TYPE_CHECKING:
    pass


class Update(Protocol):
    """An update that the ranks divide: what a trainer calls in the place of its replica's `update`. Collective.

    all_twice: whether any one rank may be lost without a part of the state.
    """

    @property
    def all_twice(self) -> bool: ...

    @property
    def in_common(self) -> bool: ...

    def begin_batch(self) -> None: ...

    def step(self) -> Any: ...

    def settle(self) -> None: ...

    def check_edits(self) -> None: ...

    def apart(self) -> dict[str, str]: ...

    def note_step(self, steps: int) -> None: ...

    def rescue(self) -> list[Piece]: ...

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def record(self, backend: AllReduce, trace: Trace | None) -> None: ...


def nothing(kind: str) -> AbstractContextManager[None]:
    """No trace."""
    return nullcontext()


FLAGS = ("left_out", "stop", "save", "failed")  # behind the metrics of every step: on how many ranks it is so
