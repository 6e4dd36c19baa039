"""Pure index arithmetic: how a buffer is cut into chunks (one a rank) and segments (for pipelining).

Python's integers do not overflow, so all of this holds for buffers of any length.
"""

from collections.abc import Iterator

import numpy as np


def chunk(length: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` chunks of a buffer; their sizes differ by one element at the most."""
    return slice(length * index // parts, length * (index + 1) // parts)


def chunks(length: int, parts: int, first: int, stop: int) -> slice:
    """The neighbouring chunks `first` to `stop - 1` of `parts`, as one slice."""
    return slice(length * first // parts, length * stop // parts)


def power_of_two(ranks: int) -> tuple[int, int]:
    """The largest power of two up to `ranks`, and how many ranks are left over."""
    power = 1 << (ranks.bit_length() - 1)
    return power, ranks - power


def halvings(buffer: np.ndarray, parts: int, rank: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the steps of recursive halving for `rank`: (partner, part it keeps, part it sends), nearest partner first.

    parts: the number of chunks, a power of two; one chunk is left at the end. Example: of 4 chunks, rank 1 keeps 2 and
    3 in the step with rank 0, then 2 in the step with rank 3.
    """
    low, high, distance = 0, parts, 1
    while distance < parts:
        middle = (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        kept, given = (upper, lower) if rank & distance else (lower, upper)
        mine, theirs = chunks(buffer.size, parts, *kept), chunks(buffer.size, parts, *given)
        yield rank ^ distance, buffer[mine], buffer[theirs]
        low, high = kept
        distance *= 2


def segments(span: slice, step: int) -> Iterator[slice]:
    """Cut `span` into consecutive slices of `step` elements; the last may be shorter."""
    for start in range(span.start, span.stop, step):
        yield slice(start, min(start + step, span.stop))


def binomial(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """Return this rank's parent (None for the root) and children, farthest first, in a binomial tree."""
    relative = (rank - root) % size  # the rank in a tree whose root is rank 0
    lowest = relative & -relative if relative else size
    distances = [1 << k for k in reversed(range(size.bit_length())) if 1 << k < lowest]
    children = [(relative + step + root) % size for step in distances if relative + step < size]
    parent = (relative - lowest + root) % size if relative else None
    return parent, children


def subtree(rank: int, size: int) -> range:
    """Return this rank and its descendants in the binomial tree of root 0."""
    return range(rank, min(rank + (rank & -rank), size)) if rank else range(size)
