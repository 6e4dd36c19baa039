"""Trees: lists, tuples and dicts of arrays in the place of one array. Their arrays are packed into one buffer a dtype.

The buffer is the backend's own memory (`allocate`), kept for the next tree; where each array lies in it is worked out
once for each structure, shapes and dtypes, and compared by the ranks then.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from allreduce.arrays import dtypes, gpu
from allreduce.arrays.ops import Op
from allreduce.engine.call import refuse_other
from allreduce.errors import AllReduceError, NotAnArrayError, UnsupportedDtypeError

KINDS = (list, tuple, dict)
LONGEST = 400  # characters of a tree in an error


class Backend(Protocol):
    """What is needed of a backend here."""

    by_array: bool
    packed: "dict[tuple[np.dtype, str], Any]"
    layouts: "dict[Any, Layout]"

    _calls: Any

    def allocate(self, length: int, dtype: Any = ..., device: str | None = ...) -> Any: ...

    def _agree_once(self, key: Any, text: object, values: list[int], error: AllReduceError | None) -> None: ...

    def _check_dtype(self, dtype: np.dtype) -> None: ...

    def _check_open(self) -> None: ...

    def _resolve(self, op: str, dtype: np.dtype) -> Op: ...


class Group(NamedTuple):
    """The arrays of one dtype: their numbers in the tree, and where each of them lies in the buffer."""

    dtype: np.dtype
    device: str
    length: int
    places: list[tuple[int, slice, tuple[int, ...]]]

    def buffer(self, backend: Backend) -> Any:
        """Memory for all of them. Collective where it has to grow."""
        held = backend.packed.get((self.dtype, self.device))
        if held is None or held.size < self.length:
            held = self._memory(backend)
            backend.packed[self.dtype, self.device] = held
        return held[: self.length]

    def _memory(self, backend: Backend) -> Any:
        """The backend's own for dtypes that it reduces; others are only moved."""
        try:
            backend._check_dtype(self.dtype)
        except UnsupportedDtypeError:
            return (
                gpu.cupy().empty(self.length, self.dtype)
                if self.device == "cuda"
                else np.empty(self.length, self.dtype)
            )
        return backend.allocate(self.length, self.dtype, self.device)

    def pack(self, backend: Backend, arrays: Sequence[Any]) -> Any:
        """The arrays, copied one after the other into the backend's memory. Collective where that has to grow."""
        buffer = self.buffer(backend)
        for number, part, shape in self.places:
            buffer[part].reshape(shape)[...] = arrays[number]
        return buffer


class Layout(NamedTuple):
    """Where the arrays of a tree lie in buffers; the tree in words, and a number by which ranks compare it."""

    groups: list[Group]
    text: str
    number: int


def flatten(tree: Any, arrays: list[Any]) -> str:
    """Append the arrays of a tree to `arrays`, of dicts in the order of their sorted keys; returns the structure."""
    if isinstance(tree, dict):
        inside = ", ".join(f"{key!r}: {flatten(tree[key], arrays)}" for key in _sorted(tree))
        return f"{{{inside}}}"
    if isinstance(tree, list | tuple):
        inside = ", ".join([flatten(part, arrays) for part in tree])
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    if tree is None:
        return "None"
    arrays.append(tree)
    return "*"


def rebuild(tree: Any, arrays: list[Any]) -> Any:
    """A tree of the same structure that holds `arrays`, which are taken out of the list from its end: reversed."""
    if isinstance(tree, dict):
        made = {key: rebuild(tree[key], arrays) for key in _sorted(tree)}
        return {key: made[key] for key in tree}
    if isinstance(tree, list | tuple):
        parts = [rebuild(part, arrays) for part in tree]
        if isinstance(tree, list):
            return parts
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return None if tree is None else arrays.pop()


def reduce(backend: Any, tree: Any, op: str) -> None:
    """Reduce all arrays of a tree in place. Collective."""
    arrays: list[Any] = []
    layout = admit(backend, flatten(tree, arrays), arrays, op, changes=True)
    _through(layout, backend, arrays, lambda buffer: backend(buffer, op), apart=backend.by_array)


def reduced(backend: Any, tree: Any, op: str) -> Any:
    """What the arrays of a tree come to, which stay as they are: views of the backend's memory, in a tree of the same
    structure, valid until the next tree. Collective."""
    arrays: list[Any] = []
    layout = admit(backend, flatten(tree, arrays), arrays, op, changes=False)
    found = packed(layout, backend, arrays, lambda buffer: backend(buffer, op), apart=backend.by_array)
    return rebuild(tree, found[::-1])


def broadcast(backend: Any, tree: Any, root: int) -> None:
    """Overwrite all arrays of a tree with those of rank `root`. Collective."""
    arrays: list[Any] = []
    layout = admit(backend, flatten(tree, arrays), arrays, None, changes=True)
    _through(layout, backend, arrays, lambda buffer: backend.broadcast(buffer, root))


def collect(backend: Any, tree: Any) -> Any:
    """A tree of the same structure, whose arrays hold those of all ranks: (ranks, *shape), on the host. Collective."""
    arrays: list[Any] = []
    layout = admit(backend, flatten(tree, arrays), arrays, None, changes=False)
    found = collected(layout, backend, arrays)
    return rebuild(tree, found[::-1])


def collected(layout: Layout, backend: Any, arrays: Sequence[Any]) -> list[Any]:
    """For each array those of all ranks, (ranks, *shape), views of new memory. Collective."""
    found: list[Any] = [None] * len(arrays)
    for group in layout.groups:
        buffer = group.pack(backend, arrays)
        backend._calls.begin_tree(layout)
        try:
            table = backend.collect(buffer)
        finally:
            backend._calls.end_tree()
        for number, part, shape in group.places:
            found[number] = table[:, part].reshape(len(table), *shape)
    return found


def packed(
    layout: Layout, backend: Any, arrays: Sequence[Any], call: Callable[[Any], object], apart: bool = False
) -> list[Any]:
    """What `call`, which changes a buffer, makes of the arrays: views of the buffer, valid until the next tree.

    apart: it is called with each array's part of the buffer, and not with all of it.
    """
    found: list[Any] = [None] * len(arrays)
    calls = backend._calls
    for group in layout.groups:
        buffer = group.pack(backend, arrays)
        calls.begin_tree(layout)
        try:
            for part in [part for _, part, _ in group.places] if apart else [slice(None)]:
                call(buffer[part])
        finally:
            calls.end_tree()
        for number, part, shape in group.places:
            found[number] = buffer[part].reshape(shape)
    return found


def admit(backend: Backend, structure: str, arrays: Sequence[Any], op: str | None, changes: bool) -> Layout:
    """How the arrays lie in buffers, after the ranks have agreed about it where that is due. Collective.

    op: None for calls that only move. changes: whether the arrays are written to. Raises what a call with one array
    does, on all ranks.
    """
    backend._check_open()
    error: AllReduceError | None = None
    kinds = tuple([(np.shape(array), getattr(array, "dtype", None), gpu.is_gpu_array(array)) for array in arrays])
    layout = backend.layouts.get((structure, kinds)) or _layout(structure, kinds)
    try:
        for array in arrays:
            refuse_other(array)
            if changes and not gpu.is_gpu_array(array) and not array.flags.writeable:
                raise NotAnArrayError("an array of this tree is read-only, and is changed in place: pass a copy of it")
        for group in layout.groups:
            if op is None:
                dtypes.refuse_references(group.dtype)
            else:
                backend._check_dtype(group.dtype)
                backend._resolve(op, group.dtype)
    except AllReduceError as refused:
        error = refused
    backend._agree_once(("tree", structure, kinds, str(op)), layout.text, [layout.number], error)
    backend.layouts[structure, kinds] = layout
    return layout


def _layout(structure: str, kinds: Sequence[tuple[tuple[int, ...], Any, bool]]) -> Layout:
    groups: dict[tuple[Any, str], list[tuple[int, slice, tuple[int, ...]]]] = {}
    ends: dict[tuple[Any, str], int] = {}
    for number, (shape, dtype, on_gpu) in enumerate(kinds):
        key = dtype, "cuda" if on_gpu else "cpu"
        start = ends.get(key, 0)
        ends[key] = start + math.prod(shape)
        groups.setdefault(key, []).append((number, slice(start, ends[key]), shape))
    arrays = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in kinds)
    text = f"a tree {structure} of {arrays or 'no arrays'}"
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    order = [Group(*key, ends[key], places) for key, places in groups.items()]
    return Layout(order, shown, zlib.crc32(text.encode()))


def _through(
    layout: Layout, backend: Backend, arrays: Sequence[Any], call: Callable[[Any], object], apart: bool = False
) -> None:
    """Have `call` change the arrays, by way of the backend's memory; see `packed`."""
    for array, changed in zip(arrays, packed(layout, backend, arrays, call, apart), strict=True):
        array[...] = changed


def _sorted(tree: dict[Any, Any]) -> list[Any]:
    return sorted(tree, key=lambda key: (type(key).__name__, key if isinstance(key, str | int) else repr(key)))
