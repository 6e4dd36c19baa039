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
    """How `rank` halves a buffer with ever farther partners, until one of `parts` chunks is left, a power of two.

    Yields the partner, the part that is kept and the part that is given, from the nearest partner on. Rank 1 of four
    keeps chunks 2 and 3 of what it shares with rank 0, and chunk 2 of what it shares with rank 3.
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


def segment(span: slice, step: int, index: int) -> slice:
    """The `index`-th of the slices that `segments` gives; an empty one past the last."""
    start = min(span.start + index * step, span.stop)
    return slice(start, min(start + step, span.stop))


def binomial(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """The rank that this one gets the root's data from, and those that it hands it to, farthest first."""
    place = (rank - root) % size  # the root is at place 0
    lowest = place & -place if place else size
    reach = [1 << k for k in reversed(range(size.bit_length())) if 1 << k < lowest]
    children = [(place + step + root) % size for step in reach if place + step < size]
    parent = (place - lowest + root) % size if place else None
    return parent, children


def subtree(rank: int, size: int) -> range:
    """This rank, and all to which it hands on what comes from rank 0."""
    return range(rank, min(rank + (rank & -rank), size)) if rank else range(size)
