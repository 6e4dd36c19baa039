"""Algorithms for tests: "shared" as on other machines."""

from typing import Any

import numpy as np

from allreduce import Context
from allreduce.algorithms.shared import STAGES, Shared


class Staged(Shared):
    """On a system that forbids CMA."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.copies_unregistered = STAGES

    def _address(self, buffer: np.ndarray) -> int:
        return 0


def in_numa_nodes(ranks: int, base: type[Shared] = Shared) -> Any:
    """Return "shared" on NUMA nodes of so many ranks each; the last one may have fewer."""

    class InNumaNodes(base):  # type: ignore[valid-type, misc]
        def _numa_node(self) -> int:
            return int(self.context.rank // ranks)

    return InNumaNodes
