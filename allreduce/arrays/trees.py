"""Trees (nested lists, tuples and dicts) of arrays, and their layout in flat buffers. No communication.

The arrays of one dtype lie one after the other in one buffer. A layout is computed once for each structure, shapes and
dtypes, and the ranks compare it by a number.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import gpu

KINDS = (list, tuple, dict)
LONGEST = 400  # characters of a tree in an error

# structure; shape, dtype and "on the GPU" of each array
Key = tuple[str, tuple[tuple[tuple[int, ...], Any, bool], ...]]


class Group(NamedTuple):
    """The arrays of one dtype: for each, its number in the tree, its slice of the buffer, and its shape."""

    dtype: np.dtype
    device: str
    length: int
    places: list[tuple[int, slice, tuple[int, ...]]]

    def pack(self, arrays: Sequence[Any], buffer: Any) -> None:
        """Copy this group's arrays into `buffer`, one after the other."""
        for number, part, shape in self.places:
            buffer[part].reshape(shape)[...] = arrays[number]


class TreeLayout(NamedTuple):
    """Where the arrays of a tree lie in buffers; the tree as text, and a number by which ranks compare it."""

    groups: list[Group]
    text: str
    number: int


class Named(NamedTuple):
    """A tree of another library, as a list of its arrays. structure: in words."""

    structure: str
    arrays: list[Any]


def flatten(tree: Any, arrays: list[Any]) -> str:
    """Append the arrays of a tree to `arrays`, a dict's in the order of its sorted keys; return the structure."""
    if isinstance(tree, dict):
        inside = ", ".join(f"{key!r}: {flatten(tree[key], arrays)}" for key in _sorted(tree))
        return f"{{{inside}}}"
    if isinstance(tree, Named):
        arrays.extend(tree.arrays)
        return tree.structure
    if isinstance(tree, list | tuple):
        inside = ", ".join([flatten(part, arrays) for part in tree])
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    if tree is None:
        return "None"
    arrays.append(tree)
    return "*"


def rebuild(tree: Any, arrays: Iterable[Any]) -> Any:
    """Return a tree of the same structure that holds the next of these arrays, in the order of `flatten`."""
    left = iter(arrays)
    if isinstance(tree, dict):
        made = {key: rebuild(tree[key], left) for key in _sorted(tree)}
        return {key: made[key] for key in tree}
    if isinstance(tree, Named):
        return Named(tree.structure, [next(left) for _ in tree.arrays])
    if isinstance(tree, list | tuple):
        parts = [rebuild(part, left) for part in tree]
        if isinstance(tree, list):
            return parts
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return None if tree is None else next(left)


def key(structure: str, arrays: Sequence[Any]) -> Key:
    """Return the key of a tree's layout: the structure, and each array's shape, dtype and device."""
    return structure, tuple([(np.shape(each), getattr(each, "dtype", None), gpu.is_gpu_array(each)) for each in arrays])


def layout(key: Key) -> TreeLayout:
    """Compute the layout: arrays of one dtype and device lie one after the other in one buffer."""
    structure, kinds = key
    places: dict[tuple[Any, str], list[tuple[int, slice, tuple[int, ...]]]] = {}
    ends: dict[tuple[Any, str], int] = {}
    for number, (shape, dtype, on_gpu) in enumerate(kinds):
        group = dtype, "cuda" if on_gpu else "cpu"
        start = ends.get(group, 0)
        ends[group] = start + math.prod(shape)
        places.setdefault(group, []).append((number, slice(start, ends[group]), shape))
    arrays = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in kinds)
    text = f"a tree {structure} of {arrays or 'no arrays'}"
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return TreeLayout(
        [Group(*group, ends[group], placed) for group, placed in places.items()], shown, zlib.crc32(text.encode())
    )


def _sorted(tree: dict[Any, Any]) -> list[Any]:
    return sorted(tree, key=lambda key: (type(key).__name__, key if isinstance(key, str | int) else repr(key)))
