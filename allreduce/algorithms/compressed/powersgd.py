"""LowRank: sends matrices as products of two thin factors (PowerSGD)."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.algorithm import Algorithm, Context
from allreduce.algorithms.compressed.compressed import Compressed
from allreduce.arrays import low_rank
from allreduce.arrays.chunks import chunk
from allreduce.arrays.compression import PowerSGD
from allreduce.arrays.low_rank import Matrix, Plan, Tile
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.arrays.workspace import Workspace
from allreduce.memory.allocations import Slice
from allreduce.transport.control import combine

NOTICED = 1024  # elements: shorter arrays of one dimension are not worth a notice


class Item(NamedTuple):
    """A matrix in a call, and its factors.

    tiles: the elements that this rank multiplies. start: the factor that `left` is computed with.
    """

    matrix: Matrix
    tiles: list[Tile]
    start: np.ndarray
    left: np.ndarray
    right: np.ndarray


class NodeArrays(NamedTuple):
    """The buffers of a node's ranks, in memory that they share. This rank's own is `arrays[rank]`.

    fence: barrier of these ranks; needed before others' arrays are read, and after they are written. None: one rank.
    """

    arrays: Sequence[np.ndarray]
    rank: int
    fence: Callable[[], object] | None


class Factors(NamedTuple):
    """The matrices of a call. packed: its short parts. lefts: memory of all left factors, and of `packed`; rights: of
    all right factors."""

    items: list[Item]
    packed: list[np.ndarray]
    lefts: np.ndarray
    rights: np.ndarray


class LowRank(Compressed):
    """PowerSGD (T. Vogels et al.: PowerSGD: practical low-rank gradient compression for distributed optimization,
    2019).

    For every part M of two or more dimensions, first axis x the others, with the error of its last call added:
    P = sum over ranks of M Q; P is made orthonormal; Q = sum over ranks of M^T P; the result is P Q^T, and the error is
    M - P Q^T / ranks. Q of the next call is this one. `inner` reduces the factors of all matrices together: rank (rows
    + columns) elements of each, in the dtype of the array. It also reduces vectors, and matrices that would become too
    little smaller. An infinity or NaN makes its matrix NaN on all ranks, and leaves no error and no Q.

    Shapes come from `describe`, else from an array of two or more dimensions; others, and those of a tree, are not
    compressed. Errors, Q and the count of `start_powerSGD_iter` are kept for arrays from `allocate`; others begin with
    the same random Q each time. Ranks that share the arrays of a node sum and multiply a slice of the node's M each,
    and keep the error of that sum.

    All ranks end with the same bits: P is orthogonalized by elementwise operations, and both factors are rounded to
    fixed point, so their product is exact before it is rounded. Unlike in the paper, Q is not orthogonalized, rows of Q
    that are zero are drawn anew, and a result has about 25 bits.
    """

    def __init__(self, context: Context, *, inner: Algorithm, options: PowerSGD) -> None:
        super().__init__(context, inner=inner)
        self.options = options

    def place(self, buffer: Any) -> tuple[int, int] | None:
        """As in the base class. The place differs if the state was reset on some ranks only, so that all notice it."""
        place, where = super().place(buffer), self.find(buffer)
        if place is None or where is None or (where.start, where.length) not in where.entry.agreed:
            return place
        return place[0] + (1 << 64), place[1]

    def reduce_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        options = self.options
        plan = low_rank.plan(tuple(parts), buffer.size, options.matrix_approximation_rank, options.min_compression_rate)
        if not plan.matrices:
            self._say_uncompressed(where, parts)
        elif where is not None and (where.start, where.length) not in where.entry.agreed:
            self._agree(where, plan.matrices)
        calls = where.count_call() if where and plan.matrices else 0
        if not plan.matrices or (where and calls < options.start_powerSGD_iter):
            self.inner.reduce(buffer, op)
            return
        arrays = self._node_arrays(buffer)
        residual = where.residual if where and options.use_error_feedback else None
        call = self._begin(buffer, where, calls, plan, arrays)
        if arrays.fence:
            arrays.fence()
        self._multiply(call, op, residual, arrays)
        if where:
            for item in call.items:
                where.entry.factors[_key(where, item.matrix)] = item.right.copy()
        if arrays.fence:
            arrays.fence()
        for part, values in zip(plan.short, call.packed, strict=True):
            buffer[part] = values
        for part in plan.long:
            self.inner.reduce(buffer[part], op)

    def _node_arrays(self, buffer: np.ndarray) -> NodeArrays:
        found = self.context.allocations.at(buffer)
        if found is None or found[0].ranks < 2:
            return NodeArrays([buffer], 0, None)
        arrays = found[0].views(found[1], buffer)
        return NodeArrays(arrays, self.context.topology.node_rank, self.context.executor.fence)

    def _agree(self, where: Slice, matrices: Sequence[Matrix]) -> None:
        """Agree on the call count and the warm factors of a slice. Collective, at its first call since they were
        loaded.

        Ranks may have loaded different states: of a checkpoint and, on a rank that joined, none.
        """
        entry = where.entry
        entry.agreed.add((where.start, where.length))
        keys = [_key(where, each) for each in matrices]
        held = [entry.factors[key] for key in keys if key in entry.factors]
        check = zlib.crc32(b"".join(factor.tobytes() for factor in held))
        numbers = np.array([-entry.calls.get(where.start, 0), len(held), -len(held), check, -check], np.int64)
        combine(self.comm, numbers, "compare warm factors", MPI.MIN)
        calls, *ends = numbers.tolist()
        entry.calls[where.start] = -calls
        if ends[0] != -ends[1] or ends[2] != -ends[3]:
            for key in keys:
                entry.factors.pop(key, None)

    def _begin(self, buffer: np.ndarray, where: Slice | None, calls: int, plan: Plan, node: NodeArrays) -> Factors:
        """Return the factors of a call, zeros, and the packed short parts. Collective when their memory grows."""
        options, shift, dtype = self.options, where.start if where else 0, buffer.dtype
        sizes = [part.stop - part.start for part in plan.short]
        rows = sum(each.rank * each.rows for each in plan.matrices)
        first = rows + sum(sizes)
        length = first + sum(each.rank * each.columns for each in plan.matrices)
        memory = self.from_inner(length, dtype)
        memory[...] = 0
        items, left, right = [], 0, first
        for each in plan.matrices:
            last = where.entry.factors.get(_key(where, each)) if where else None
            start = low_rank.start_factor(last, each, dtype, [options.random_seed, shift + each.start, calls])
            ends = left + each.rank * each.rows, right + each.rank * each.columns
            factors = memory[left : ends[0]].reshape(each.rank, -1), memory[right : ends[1]].reshape(each.rank, -1)
            share = chunk(each.stop - each.start, len(node.arrays), node.rank)
            items.append(Item(each, list(low_rank.tiles(each, share)), start, *factors))
            left, right = ends
        packed = []
        for part, size in zip(plan.short, sizes, strict=True):
            packed.append(memory[left : left + size])
            packed[-1][:] = buffer[part]
            left += size
        return Factors(items, packed, memory[:first], memory[first:])

    def _multiply(self, call: Factors, op: Op, residual: np.ndarray | None, node: NodeArrays) -> None:
        """Replace the tiles of the node's arrays by the results; and those of `residual`, which belong to the sum of
        these arrays, by the errors."""
        arrays, own = node.arrays, node.arrays[node.rank]
        values = own if residual is None else residual
        for item in call.items:
            for tile in item.tiles:
                added = [array[tile.where] for array in arrays if array is not values]
                _add(values[tile.where], added, self.workspace)
                np.matmul(item.start[:, tile.columns], tile.of(values).T, out=item.left[:, tile.rows])
        self.inner.reduce(call.lefts, op)
        for item in call.items:
            low_rank.orthogonalize(item.left)
            for tile in item.tiles:
                item.right[:, tile.columns] += item.left[:, tile.rows] @ tile.of(values)
        self.inner.reduce(call.rights, op)
        # the part of the result that the arrays' ranks sent
        share = len(arrays) / self.size / (1.0 if op.scale is None else op.scale)
        for item in call.items:
            if np.isfinite(item.left).all() and np.isfinite(item.right).all():
                self._write(item, arrays, residual, share)
                continue
            item.right[...] = np.nan
            for tile in item.tiles:
                for array in arrays:
                    array[tile.where] = np.nan
                if residual is not None:
                    residual[tile.where] = 0

    def _write(self, item: Item, arrays: Sequence[np.ndarray], residual: np.ndarray | None, share: float) -> None:
        """Write the tiles of a result, and their errors."""
        left, right = low_rank.fixed_point(item.left), low_rank.fixed_point(item.right)
        for tile in item.tiles:
            result, *others = [array[tile.where] for array in arrays]
            exact = self.workspace.array("exact", result.size, left.dtype)
            np.matmul(left[:, tile.rows].T, right[:, tile.columns], out=tile.table(exact))
            np.copyto(result, exact, casting="same_kind")
            for other in others:
                np.copyto(other, result)
            if residual is None:
                continue
            sent = result
            if share != 1:
                sent = self.workspace.array("sent", result.size, result.dtype)
                np.multiply(result, share, out=sent)
            residual[tile.where] -= sent

    def _say_uncompressed(self, where: Slice | None, parts: Sequence[Part]) -> None:
        known = parts if where is None else where.entry.parts  # of the whole model, not of one bucket
        rank, matrices = self.options.matrix_approximation_rank, [part for part in known if len(part.shape) > 1]
        if matrices and all(rank > min(low_rank.shape(part)) for part in matrices):
            above = f'compress="{self.options}": the rank {rank} is above the rows or columns of all matrices'
            notices.once(self.rank, f"{above}, which are sent uncompressed: use a smaller rank")
        described = where is not None and where.entry.parts
        if not described and all(len(part.shape) < 2 and part.stop - part.start > NOTICED for part in parts):
            notices.once(
                self.rank,
                f'compress="{self.options}" needs shapes, so arrays of one dimension are sent uncompressed: call '
                "describe(array, parts) with the parameters of the model",
            )


def _key(where: Slice, of: Matrix) -> tuple[int, int, int]:
    return where.start + of.start, of.rows, of.columns


def _add(total: np.ndarray, arrays: Sequence[np.ndarray], workspace: Workspace) -> None:
    """Add `arrays` to `total`, in place."""
    if len(arrays) > 1:
        rest = workspace.array("sum", total.size, total.dtype)
        np.add(arrays[0], arrays[1], out=rest)
        for array in arrays[2:]:
            np.add(rest, array, out=rest)
        arrays = [rest]
    for array in arrays:
        np.add(total, array, out=total)
