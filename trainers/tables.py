"""Tables of which a batch uses a few rows: only the gradients of these go from rank to rank."""

import numpy as np

from allreduce.backend import AllReduce
from trainers.replica import Replica, Rows, Table


class Tables:
    """The sparse gradients of a replica: `take` or `leave_out` in every step, then `reduce`.

    brought: of each table the rows that this rank has computed in this step, while they are not added up.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.brought: list[Rows] = []

    def take(self) -> None:
        """The replica has computed the gradients of a batch. Local."""
        self.brought = self._replica.sparse_gradients()

    def leave_out(self) -> None:
        """This rank has no batch in this step. Local."""
        self.brought = [_nothing(table) for table in self._replica.tables]

    def reduce(self, backend: AllReduce) -> None:
        """Give the replica the sums of all ranks' rows. Collective."""
        if tables := self._replica.tables:
            brought = zip(tables, self.brought, strict=True)
            self._replica.take_sparse([backend.sparse(*rows, table.rows, "sum") for table, rows in brought])


def _nothing(table: Table) -> Rows:
    return np.empty(0, np.int64), np.empty((0, *table.shape), table.dtype)
