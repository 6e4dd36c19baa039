"""Pure index arithmetic: how a buffer is cut into chunks (one a rank) and segments (for pipelining).

Python's integers do not overflow, so all of this holds for buffers of any length.
"""

from collections.abc import Iterator


def chunk(length: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` chunks of a buffer; their sizes differ by one element at the most."""
    return slice(length * index // parts, length * (index + 1) // parts)


def chunks(length: int, parts: int, first: int, stop: int) -> slice:
    """The neighbouring chunks `first` to `stop - 1` of `parts`, as one slice."""
    return slice(length * first // parts, length * stop // parts)


def halvings(parts: int, rank: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """How `rank` halves what it has with ever farther partners, until one of `parts` chunks is left, a power of two.

    Yields the partner and which chunks are kept and given, as first and stop; of four, rank 1 has (0, (2, 4), (0, 2))
    and (3, (2, 3), (3, 4)).
    """
    low, high, distance = 0, parts, 1
    while distance < parts:
        middle = (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        kept, given = (upper, lower) if rank & distance else (lower, upper)
        yield rank ^ distance, kept, given
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
