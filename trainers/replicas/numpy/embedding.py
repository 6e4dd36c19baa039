"""EmbeddingNetwork: dense layers on top of an embedding table with sparse gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainers.arguments import integer_error, require
from trainers.data import Tree
from trainers.errors import ArgumentError
from trainers.files.onnx_graph import FREE, Graph
from trainers.replica import ALL, Rows, Slices, Table
from trainers.replicas.numpy.network import FLOAT, INPUT, NumpyNetwork
from trainers.transforms.average import on_host

TABLE = "table"
DRAWN_WORDS = 5  # of a row of `drawn_rows`


class EmbeddingNetwork(NumpyNetwork):
    """A NumpyNetwork whose input is the mean of the embedding vectors of a sample's words. The vectors are trained.

    words: the number of rows of the table. x: integers from 0 to words - 1, of shape (rows, any number).
    sizes, options: as for NumpyNetwork; sizes[0] is the length of a vector.
    table_lr: the learning rate of the table, the second of `learning_rates`. The table is trained by plain gradient
        descent, the dense layers by the optimizer.

    Only the rows of the table that a batch uses are updated, and only their gradients are sent. Every rank has the
    whole table and updates it, even if the ranks divide the update of the other parameters. MirroredTrainer and
    CentralStorageTrainer train it; trainers with servers or spare replicas raise an error. Raises ArgumentError.

    Attribute `table`: (words, sizes[0]) float32.
    """

    essentials = (*NumpyNetwork.essentials, "words")

    def __init__(
        self, sizes: Sequence[int], *, words: int, table_lr: float = 0.1, seed: int = 0, **options: Any
    ) -> None:
        require(integer_error("words, the number of the table's rows,", words, 1))
        super().__init__(sizes, seed=seed, **options)
        self.words, self.table_lr, self.features = int(words), table_lr, None
        self.tables = (Table(TABLE, self.words, (self.sizes[0],)),)
        drawn = np.random.default_rng([seed, self.words]).standard_normal((self.words, self.sizes[0]), FLOAT)
        self.table = self._xp.asarray(drawn)
        none: Rows = (self._xp.zeros(0, np.int64), self._xp.zeros((0, self.sizes[0]), FLOAT))
        self.sparse_gradients = self.sparse_sums = [none]

    @classmethod
    def _check_saved(cls, sizes: list[int], names: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        if state[TABLE].shape != (names["words"], sizes[0]):
            raise ArgumentError(f"the table is {state[TABLE].shape}, of {names['words']} words")

    # Methods of Replica

    @property
    def learning_rates(self) -> list[float]:
        return [self.optimizer.lr, self.table_lr]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        self.optimizer.lr, self.table_lr = rates

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float, weights: np.ndarray | None = None) -> Any:
        rows, values = self.sparse_gradients[0]
        self.sparse_gradients = [(rows[:0], values[:0])]  # in case the batch has no rows
        return super().gradients(x, y, share, weights)

    def update(self, part: Slices = ALL) -> None:
        super().update(part)
        ((rows, sums),) = self.sparse_sums
        self.table[rows] -= self.table.dtype.type(self.table_lr) * sums

    def others(self) -> dict[str, np.ndarray]:
        return super().others() | {TABLE: on_host(self.table), f"{TABLE}.lr": np.array(self.table_lr)}

    def load_others(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_others(state)
        self.table[...] = self._xp.asarray(state[TABLE])
        self.table_lr = float(state[f"{TABLE}.lr"])

    def config(self) -> dict[str, Any]:
        return {**super().config(), "words": self.words}

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        self._check_single(x, y)
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype.kind not in "iu":
            raise ArgumentError(f"x must be words, integers of shape (rows, number of words), not {x.dtype}{x.shape}")
        if x.size and not (x.min() >= 0 and x.max() < self.words):
            raise ArgumentError(f"x has words from {x.min()} to {x.max()}, and the table has 0 to {self.words - 1}")
        if y is not None:
            self._loss.check(y, self.sizes[-1])

    def drawn_rows(self, count: int) -> Tree | None:
        return np.random.default_rng(0).integers(0, self.words, (count, DRAWN_WORDS))

    # Inside

    def _onnx_input(self, graph: Graph) -> Any:
        return graph.value(INPUT, np.int64, [FREE, "words"])

    def _graph_of_input(self, graph: Graph, given: str) -> str:
        none = graph.add("Less", given, np.int64(0))  # Gather takes -1 for the last word: make it one that it refuses
        words = graph.add("Where", none, np.int64(self.words), given)
        vectors = graph.add("Gather", on_host(self.table), words)
        return super()._graph_of_input(graph, graph.add("ReduceMean", vectors, np.array([1]), keepdims=0))

    def _input(self, x: np.ndarray) -> Any:
        self._batch = self._xp.asarray(x)
        return super()._input(self.table[self._batch].mean(axis=1))

    def _derive_input(self, delta: Any) -> None:
        words = self._batch.shape[1]
        gradients = self._xp.dot(delta, self._layers[0][0].T)
        gradients *= self._scale / words
        self.sparse_gradients = [(self._batch.reshape(-1), self._xp.repeat(gradients, words, axis=0))]
