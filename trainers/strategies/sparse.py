"""The sparse gradients of a replica's tables, and their sums over the ranks."""

from collections.abc import Sequence

import numpy as np

from allreduce.backend import AllReduce
from trainers.replica import Replica, Rows, Table


class SparseGradients:
    """The sparse gradients of a replica. In each step: `take` or `take_none`, then `reduce`.

    local_rows: for each table, this rank's rows of the current step, before they are summed. sums: their sums.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.local_rows: Sequence[Rows] = []
        self.sums: list[Rows] = []

    def take(self, rows: Sequence[Rows]) -> None:
        """Take this rank's sparse gradients of this step. Local."""
        self.local_rows = rows

    def take_none(self) -> None:
        """Use empty gradients, because this rank has no batch in this step. Local."""
        self.local_rows = [_no_rows(table) for table in getattr(self._replica, "tables", ())]

    def reduce(self, backend: AllReduce) -> None:
        """Sum the rows over all ranks, and pass the sums to the replica. Collective."""
        if tables := self._replica.tables:
            local = zip(tables, self.local_rows, strict=True)
            self.sums = [backend.sparse(*rows, table.rows, "sum") for table, rows in local]
            self._replica.sparse_sums = self.sums

    def scale(self, factor: float) -> None:
        """Multiply the sums of this step. Local."""
        if self._replica.tables:
            scaled = [(rows, values * values.dtype.type(factor)) for rows, values in self.sums]
            self._replica.sparse_sums = scaled


def _no_rows(table: Table) -> Rows:
    return np.empty(0, np.int64), np.empty((0, *table.shape), table.dtype)
