"""CategoryNetwork: dense layers on numbers and on embedded categories. network_of: the network for a data set."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trainers.arrays.average import on_host
from trainers.data import Tree
from trainers.errors import ArgumentError, ModelFileError
from trainers.files import model_file
from trainers.files.onnx_graph import Graph
from trainers.replicas.numpy.network import FLOAT, NumpyNetwork


class CategoryNetwork(NumpyNetwork):
    """A NumpyNetwork that learns a vector for each value of some categories (an embedding).

    embedded: (rows, vector) for each embedded category: the number of its values, and the length of their vectors.
    sizes, options: as for NumpyNetwork. x: (rows, numbers + categories); the last columns are the numbers of the
        categories' values, from 0. The vectors take their places, so sizes[0] is the length of all of them together
        plus the number of the other columns.

    The vectors are parameters as all others: every trainer trains them, with their gradients sent whole. Value 0 begins
    as a vector of zeros. Raises ArgumentError.
    """

    essentials = (*NumpyNetwork.essentials, "embedded")

    def __init__(
        self, sizes: Sequence[int], *, embedded: Iterable[Sequence[int]], seed: int = 0, **options: Any
    ) -> None:
        self._own_names = {"embedded": checked(embedded)}
        super().__init__(sizes, seed=seed, **options)
        self._plain = self._columns_before(self.sizes, self.embedded)
        self.features = self._plain + len(self.embedded)
        for number, table in enumerate(self._tables(self._arrays)):
            rows, vector = table.shape
            random = np.random.default_rng([seed, number, rows])
            table[1:] = self._xp.asarray(random.standard_normal((rows - 1, vector), FLOAT))

    @property
    def embedded(self) -> list[list[int]]:
        """(rows, vector) of each embedded category."""
        return self._own_names["embedded"]

    @classmethod
    def _shapes_of(cls, sizes: list[int], names: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        embedded = checked(names["embedded"])
        cls._columns_before(sizes, embedded)
        tables = {f"category {number}": (rows, vector) for number, (rows, vector) in enumerate(embedded, 1)}
        return super()._shapes_of(sizes, names) | tables

    @staticmethod
    def _columns_before(sizes: Sequence[int], embedded: list[list[int]]) -> int:
        """Return the number of columns of x before the categories. Raises ArgumentError."""
        plain = sizes[0] - sum(vector for _, vector in embedded)
        if plain < 0:
            raise ArgumentError(f"sizes[0] is {sizes[0]}, and the vectors alone have {sizes[0] - plain} numbers")
        return plain

    # Methods of Replica

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        self._check_single(x, y)
        columns = self.features
        if x.ndim != 2 or x.shape[1] != columns or x.dtype.kind not in "iuf":
            raise ArgumentError(f"x must be numbers of shape (rows, {columns}), not {x.dtype} of shape {x.shape}")
        for number, (rows, _) in enumerate(self.embedded):
            column = x[:, self._plain + number]
            if not ((column >= 0) & (column < rows) & (column == np.floor(column))).all():
                raise ArgumentError(
                    f"column {self._plain + number} of x must be numbers of a category's values, 0 to {rows - 1}"
                )
        if y is not None:
            self._loss.check(y, self.sizes[-1])

    # Inside

    def drawn_rows(self, count: int) -> Tree:
        random = np.random.default_rng(0)
        plain = random.standard_normal((count, self._plain), FLOAT)
        values = [random.integers(0, rows, (count, 1)) for rows, _ in self.embedded]
        return np.concatenate([plain, *values], axis=1, dtype=FLOAT)

    def _graph_of_input(self, graph: Graph, given: str) -> str:
        plain = np.arange(self._plain)
        parts = [graph.add("Gather", given, plain, axis=1)] if self._plain else []
        for number, table in enumerate(self._tables(self._arrays), self._plain):
            values = graph.cast(graph.add("Gather", given, np.array(number), axis=1), np.int64)
            none = graph.add("Less", values, np.int64(0))  # Gather takes -1 for the last value: make it one to refuse
            values = graph.add("Where", none, np.int64(len(table)), values)
            parts.append(graph.add("Gather", on_host(table), values))
        return super()._graph_of_input(graph, graph.add("Concat", *parts, axis=1))

    def _tables(self, views: list[Any]) -> list[Any]:
        """Return the vectors of each category, (rows, vector), of views of flat memory."""
        return views[-len(self.embedded) :]

    def _input(self, x: np.ndarray) -> Any:
        flat, plain = self._xp.asarray(x), self._plain
        self._values_of = [flat[:, plain + number].astype(np.int64) for number in range(len(self.embedded))]
        whole = self._inputs[: len(x)]
        whole[:, :plain] = flat[:, :plain]
        for values, table in zip(self._values_of, self._tables(self._arrays), strict=True):
            whole[:, plain : plain + table.shape[1]] = table[values]
            plain += table.shape[1]
        if self._scales_input:
            whole -= self._shift
            whole *= self._scale
        return whole

    def _derive_input(self, delta: Any) -> None:
        gradients = self._xp.dot(delta, self._layers[0][0][self._plain :].T)
        gradients *= self._scale[self._plain :]
        start = 0
        for values, table in zip(self._values_of, self._tables(self._slopes), strict=True):
            table[...] = 0
            self._xp.add.at(table, values, gradients[:, start : start + table.shape[1]])
            start += table.shape[1]


NETWORKS: dict[str, type[NumpyNetwork]] = {each.__name__: each for each in (NumpyNetwork, CategoryNetwork)}


def checked(embedded: Any) -> list[list[int]]:
    """Return (rows, vector) of each category. Raises ArgumentError."""
    try:
        pairs = [[int(each) for each in pair] for pair in embedded]
        if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError("no pairs of numbers from 1 on")
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"embedded={embedded!r} must be (rows, vector) for each category: {error}") from error
    return pairs


def network_of(data: Any, hidden: Sequence[int] = (64, 32), **options: Any) -> NumpyNetwork:
    """Return a network for a data set, which takes its rows and gives its classes. Local.

    data: a Dataset or Shards. hidden: sizes of the hidden layers. options: of NumpyNetwork.

    With columns of a table, the network has them as `columns`, and saves them with the model. It is a CategoryNetwork
    if a category of the table has more than 32 values.
    """
    embedded = [] if data.columns is None else data.columns.embedded
    inputs = data.features + sum(vector - 1 for _, vector in embedded)
    sizes = [inputs, *hidden, len(data.classes)]
    network = CategoryNetwork(sizes, embedded=embedded, **options) if embedded else NumpyNetwork(sizes, **options)
    network.columns = data.columns
    if not embedded:
        network.scale_input(data.shift, data.scale)
    return network


def load_network(path: str, device: str = "cpu") -> NumpyNetwork:
    """Load a NumpyNetwork or a CategoryNetwork, as the file says. Raises ModelFileError."""
    kind, _ = model_file.read_header(path)
    if kind in NETWORKS:
        return NETWORKS[kind].load(path, device)
    raise ModelFileError(f"{path} holds a {kind}; expected a NumpyNetwork or a CategoryNetwork")
