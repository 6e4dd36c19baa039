"""Adasum: adds vectors as far as they are orthogonal, and averages them as far as they are parallel.

S. Maleki, M. Musuvathi, T. Mytkowicz, O. Saarikivi and others: Scaling distributed training with adaptive summation,
2021 (arXiv 2006.02924). It combines two vectors a and b to

    (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

which is a + b if a.b = 0, and a if a = b; a vector of zeros leaves the other one unchanged. More vectors are combined
in pairs, pairs of pairs and so on, by recursive halving and doubling with p the largest power of two up to n.
Steps: 2 log2 p, log2 p (log2 p + 1) / 2 small ones for the dot products, and 2 more when n > p. Bytes sent per rank:
2 S (p - 1) / p; each of the n - p extra ranks hands its buffer to a partner and gets the result back.
"""

import math
import sys

import numpy as np

from allreduce.algorithm import Algorithm, Context
from allreduce.arrays import casts, chunks, ops
from allreduce.arrays.ops import Op
from allreduce.errors import UnsupportedOpError
from allreduce.transport.point_to_point import Transfer

TINY = math.sqrt(sys.float_info.min)  # a smaller squared norm has lost digits; such a vector counts as zero


class Adasum(Algorithm):
    """One operation, "adasum", of floating dtypes: `create("adasum", topology)`, then `reduce(array, "adasum")`.

    It does not sum, so it can't replace another backend: it is not in `allreduce.NAMES`, "auto" never selects it, no
    backend contains it, and any other op raises UnsupportedOpError. All ranks get the same bits. In a list, tuple or
    dict each array is a separate vector, as the layers of a model are in the paper.

    The result depends on which ranks are paired. Horovod needs a power of two of ranks; here any number works: the
    vectors of extra ranks are first combined with those of ranks 0, 1, ... Of five ranks: ((0 4) 1) (2 3). Dot products
    are formed in float64; 16-bit floats are combined in float32 and rounded once.
    """

    sums = False
    by_array = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._transfer = Transfer(self.comm, self.workspace, context.tag)
        self._power, self._extras = chunks.power_of_two(self.size)

    def resolve(self, op: str, dtype: np.dtype) -> Op:
        if not (isinstance(op, str) and op == ops.ADASUM.name):
            raise UnsupportedOpError(
                f'the backend "adasum" has no op {op!r}, because it makes no sums: call it with op="adasum", or create '
                "another backend"
            )
        if dtype.kind in "iub":
            raise UnsupportedOpError(f'op "adasum" is not defined for {dtype}: use a floating dtype')
        return ops.ADASUM

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        wide = casts.widened(buffer, self.workspace)
        if self.rank >= self._power:
            self._transfer.send(wide, self.rank - self._power)
            self._transfer.receive(buffer, self.rank - self._power)
            return
        if self.rank < self._extras:
            arrived = self._arrived(wide)
            self._transfer.receive(arrived, self.rank + self._power)
            _combine(wide, arrived, _scales(self._dots(wide, arrived)))
        mine = wide
        for partner, mine, given in chunks.halvings(wide, self._power, self.rank):
            self._pair(mine, given, partner)
        self._copy_back(buffer, wide, mine)

    def _pair(self, kept: np.ndarray, given: np.ndarray, partner: int) -> None:
        """Combine `kept`, this rank's part of one vector, with the partner's of the other one, in place."""
        arrived = self._arrived(kept)
        self._transfer.swap(given, partner, arrived, partner)
        lower = self.rank < partner
        dots = self._dots(kept, arrived) if lower else self._dots(arrived, kept)
        self._add_up(dots, abs(partner - self.rank))
        first, second = _scales(dots)
        _combine(kept, arrived, (first, second) if lower else (second, first))

    def _add_up(self, dots: np.ndarray, distance: int) -> None:
        """Sum the parts' dot products over a block of 2 * `distance` ranks, in place.

        Ranks exchange in pairs, so that all ranks of the block get the same bits.
        """
        theirs = np.empty_like(dots)
        near = 1
        while near <= distance:
            self._transfer.swap(dots, self.rank ^ near, theirs, self.rank ^ near)
            dots += theirs
            near *= 2

    def _dots(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return first.second, first.first and second.second in float64."""
        dots = np.zeros(3)
        for pair in zip(self._transfer.segments(first), self._transfer.segments(second), strict=True):
            one, other = (part.astype(np.float64, copy=False) for part in pair)
            dots += np.dot(one, other), np.dot(one, one), np.dot(other, other)
        return dots

    def _copy_back(self, buffer: np.ndarray, wide: np.ndarray, mine: np.ndarray) -> None:
        """Copy every rank's finished part into all ranks' `buffer`. mine: this rank's part, a view of `wide`."""
        steps = list(chunks.halvings(buffer, self._power, self.rank))
        if wide is not buffer:
            np.copyto(steps[-1][1], mine, casting="unsafe")
        for partner, kept, given in reversed(steps):
            self._transfer.swap(kept, partner, given, partner)
        if self.rank < self._extras:
            self._transfer.send(buffer, self.rank + self._power)

    def _arrived(self, like: np.ndarray) -> np.ndarray:
        """Return scratch memory for another rank's vector."""
        return self.workspace.array("arrived", like.size, like.dtype)


def _scales(dots: np.ndarray) -> tuple[float, float]:
    """Return the factors of the two vectors. dots: see `_dots`."""
    product, *squares = dots.tolist()
    first, second = (1.0 if square < TINY else 1.0 - product / (2.0 * square) for square in squares)
    return first, second


def _combine(kept: np.ndarray, arrived: np.ndarray, scales: tuple[float, float]) -> None:
    """Write scales[0] * kept + scales[1] * arrived to `kept`; `arrived` is overwritten."""
    np.multiply(kept, scales[0], out=kept)
    np.multiply(arrived, scales[1], out=arrived)
    np.add(kept, arrived, out=kept)
