"""A network on words: dense layers above a table of vectors with sparse gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import Rows, Table
from trainers.replicas.numpy.network import FLOAT, NumpyNetwork

TABLE = "table"


class EmbeddingNetwork(NumpyNetwork):
    """A NumpyNetwork whose features are the mean of the vectors of a sample's words, from a table that is trained.

    words: the rows of the table; x is (rows, any number) of integers from 0 to words - 1.
    sizes, options: a NumpyNetwork's; sizes[0] is the length of a vector.
    table_lr: the learning rate of the table, by plain gradient descent, and the second of `learning_rates`; the dense
        layers have their optimizer.

    Of the table only the rows that a batch uses are touched, and only their gradients go from rank to rank. Every rank
    has the whole table and updates it, also where ranks divide the update of the rest. MirroredTrainer and
    CentralStorageTrainer train it; the trainers with servers and spare replicas refuse it. Raises ArgumentError.

    Also an attribute: `table`, (words, sizes[0]) float32.
    """

    essentials = (*NumpyNetwork.essentials, "words")

    def __init__(
        self, sizes: Sequence[int], *, words: int, table_lr: float = 0.1, seed: int = 0, **options: Any
    ) -> None:
        if isinstance(words, bool) or not isinstance(words, int | np.integer) or words < 1:
            raise ArgumentError(f"words, the number of the table's rows, must be an integer >= 1, got {words!r}")
        super().__init__(sizes, seed=seed, **options)
        self.words, self.table_lr = int(words), table_lr
        self.tables = (Table(TABLE, self.words, (self.sizes[0],)),)
        drawn = np.random.default_rng([seed, self.words]).standard_normal((self.words, self.sizes[0]), FLOAT)
        self.table = self._xp.asarray(drawn)
        self._found: Rows = (self._xp.zeros(0, np.int64), self._xp.zeros((0, self.sizes[0]), FLOAT))
        self._sums = self._found

    @classmethod
    def _check_saved(cls, sizes: list[int], names: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        if state[TABLE].shape != (names["words"], sizes[0]):
            raise ArgumentError(f"the table is {state[TABLE].shape}, of {names['words']} words")

    # What a trainer calls

    @property
    def learning_rates(self) -> list[float]:
        return [self.optimizer.lr, self.table_lr]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        self.optimizer.lr, self.table_lr = rates

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        self._found = tuple(part[:0] for part in self._found)  # of a batch without rows
        return super().gradients(x, y, share)

    def sparse_gradients(self) -> list[Rows]:
        return [self._found]

    def take_sparse(self, sums: list[Rows]) -> None:
        (self._sums,) = sums

    def update(self, part: slice | None = None) -> None:
        super().update(part)
        rows, sums = self._sums
        self.table[rows] -= self.table.dtype.type(self.table_lr) * sums

    def state(self) -> dict[str, np.ndarray]:
        table = self.table if self._xp is np else self.table.get()
        return {**super().state(), TABLE: table, f"{TABLE}.lr": np.array(self.table_lr)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        table, rate = state.get(TABLE), state.get(f"{TABLE}.lr")
        fits = table is not None and table.shape == self.table.shape and table.dtype.kind == "f"
        if table is None or not fits or rate is None or rate.shape or rate.dtype.kind != "f":
            found = "missing" if table is None else f"{table.dtype}{table.shape}"
            raise ModelFileError(f"this is no state of an EmbeddingNetwork of {self.words} words: its table is {found}")
        super().load_state(state)
        self.table[...] = self._xp.asarray(table)
        self.table_lr = float(rate)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "words": self.words}

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype.kind not in "iu":
            raise ArgumentError(f"x must be words, integers of shape (rows, number of words), not {x.dtype}{x.shape}")
        if x.size and not (x.min() >= 0 and x.max() < self.words):
            raise ArgumentError(f"x has words from {x.min()} to {x.max()}, and the table has 0 to {self.words - 1}")
        if y is not None:
            self._loss.check(y, self.sizes[-1])

    # Inside

    def _input(self, x: np.ndarray) -> Any:
        self._batch = self._xp.asarray(x)
        return super()._input(self.table[self._batch].mean(axis=1))

    def _derive_input(self, delta: Any) -> None:
        words = self._batch.shape[1]
        slopes = self._xp.dot(delta, self._layers[0][0].T)
        slopes *= self._scale / words
        self._found = self._batch.reshape(-1), self._xp.repeat(slopes, words, axis=0)
