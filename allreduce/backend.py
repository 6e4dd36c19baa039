"""Seam 1: what a backend is. Everything that backends share is written once, here."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.arrays import chunks, dtypes, gpu, ops, rows, trees, workspace
from allreduce.arrays.memory_kinds import FOREIGN, GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.engine import call as records
from allreduce.engine.call import REDUCING, Call
from allreduce.engine.engine import CHECKS, NOTHING, Admitted, Engine, Find, Place, Trial, Work
from allreduce.engine.same_data import SameData
from allreduce.errors import (
    AllReduceError,
    ClosedError,
    CopyError,
    NotAnArrayError,
    OptionError,
    UnavailableError,
    UnsupportedDtypeError,
    UnsupportedOpError,
)
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import chunked
from allreduce.transport.deferred_free import free_later

BackendT = TypeVar("BackendT", bound="AllReduce")
PartT = TypeVar("PartT", bound="Topology | AllReduce")


class Recipe(NamedTuple):
    """What create() was asked for: `create(recipe.name, topology, **recipe.options)` makes it again."""

    name: str
    options: dict[str, Any]


class Hooks(NamedTuple):
    """What a backend does inside of a call, for backends that are made of it and wrappers around it.

    They check nothing and agree on nothing: the caller's own call has done both before. Each is a method that the
    algorithm writes, or inherits from AllReduce, where its docstring is.
    """

    allocate: Callable[[int, np.dtype, str | None], Any]
    memory: Callable[[Any], int]
    place: Callable[[Any], Place | None]
    resolve: Callable[[str, np.dtype], Op]
    route: Callable[[Call], Work | Trial]
    finding: Callable[[Call], Find | None]
    reduce: Callable[[np.ndarray, Op], None]


class Phases(NamedTuple):
    """The two phases of an algorithm inside of a call, as `Hooks`."""

    reduce_scatter: Callable[[np.ndarray, Op], None]
    all_gather: Callable[[np.ndarray], None]


class AllReduce(ABC):
    """An AllReduce algorithm on the ranks of a topology.

    topology: a `Topology`; the backend takes a communicator of its own from it.
    check: how the ranks compare shape, dtype, op and memory of their arrays. "first": in every call, on one node in
        shared memory, on several nodes by one small all-reduce; the first call of each signature costs another message.
        "always": each call costs that other message. "never": calls are not compared, and cost no message.
        Ranks that differ all raise the same DisagreementError, before anything is changed.

    Creating, `allocate`, calling and `close` are collective: every rank does them, in the same order.
    """

    sums = True  # False: it has an operation of its own and no others, so it averages no gradients
    sums_half = True  # False: float16 and bfloat16 are refused by name
    by_array = False  # True: each array of a tree is reduced by itself, not all of them as one
    copies_foreign = ""  # what happens to arrays that are not from `allocate`, when that costs a copy

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        if check not in CHECKS:
            raise OptionError(f"check={check!r} is unknown; use one of {', '.join(CHECKS)}")
        self.check, self.name = check, type(self).__name__
        self.recipe: Recipe | None = None  # set by create(): what makes this backend again, on other ranks
        self.owns_topology = False  # set by create() when it made the topology
        self.part_of: AllReduce | None = None  # set by the backend that made this one for its own calls
        self.workspace = Workspace()
        self._pinned = gpu.Pinned()
        self._known: dict[tuple, Callable[[Any], None]] = {}  # what __call__ looks up: plain arrays in C order
        self.packed: dict[Any, Any] = {}  # by dtype and device: the buffer of the arrays of trees
        self._layouts: dict[trees.Key, trees.Layout] = {}
        with topology.detector.hearing():
            self._connect(topology)

    def _connect(self, topology: Topology) -> None:
        """Make all that depends on the ranks; algorithms add theirs. Collective. `abandon` drops it."""
        self._parts: list[Topology | AllReduce] = []
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self._engine = Engine(topology, self, self.check)
        self._same_data = SameData(self._engine, self.rank, looks=self.size > 1 and self.check != "never")
        self._comm = topology.private(self, self._engine.wait)  # data
        self.closed = False

    # What users call: memory

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        """A zeroed 1-D array of `length` elements where this backend reduces without a copy. Collective.

        Of NumPy, its address is divisible by 64, so that XLA (JAX), too, works on it without copying.
        device: "cpu" for a NumPy array, "cuda" for a CuPy array; by default whichever this backend
        reduces where it is. A slice of the array is as good as the whole: it is reduced in place too.
        """
        self.check_open()
        call: Call | None = None
        array, error = None, None
        try:
            self.check_dtype(dtypes.parse(dtype))
            call = records.of_allocation(length, dtype, device)
        except AllReduceError as refused:
            error = refused
        asked = f"allocate({length!r}, {dtype!r}, device={device!r})"
        self._engine.agree(records.row(call, 0), asked, error)
        assert call is not None
        try:
            array = self._allocate(call.length, call.dtype, device)
        except MemoryError as lacking:
            error = UnavailableError(f"this rank has no memory for {length} elements of {dtype}: {lacking}")
        self._engine.agree([], f"allocate({length!r})", error)
        return array

    # What users call: sums

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        """Reduce `buffer` over all ranks, in place: afterwards all ranks hold the same bits. Collective.

        buffer: a contiguous, writable NumPy or CuPy array of any shape, the same on all ranks: (2, 3) on one and
            (3, 2) on another is a DisagreementError, alone as in a list. Arrays from `allocate` are reduced where they
            are, others at the cost of a copy where the backend needs it.
            Or a list, tuple or dict of arrays, nested as you like: they are put together and reduced as one.
        op: "sum", "mean" or "average" (of floating dtypes), "max", "min" or "prod". float16 and bfloat16 are
            summed in float32 and rounded once; sums of integers wrap round; of truth values, sum and max are
            "or", prod and min are "and".

        Raises a named AllReduceError on all ranks, before anything is changed, when an array can't be
        reduced or the ranks disagree.
        """
        run = None
        if type(buffer) is np.ndarray and buffer.flags.carray:  # the usual case, at the cost of one look-up
            memory = FOREIGN if buffer.base is None else self._memory(buffer)
            try:  # noqa: SIM105, suppress() would cost as much as the look-up
                run = self._known.get((buffer.shape, buffer.dtype, op, memory))
            except TypeError:  # an op that can't be a key; _admit refuses it by name
                pass
        if run is None:
            if isinstance(buffer, trees.KINDS):
                self.reduce_tree(buffer, op)
                return
            run = self._admit_reduction(buffer, op)[1]
            buffer = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # no subclass of it
        run(buffer if buffer.ndim == 1 else buffer.reshape(-1, order="A"))

    def bind(self, array: Any, op: str = "mean") -> Callable[[], None]:
        """A function that reduces `array` as a call does, each time in fewer steps. Collective.

        Like MPI's persistent collectives: the arguments are checked and agreed on once, here. Each call of the function
        is collective; the ranks compare it with each other's calls as they compare all calls. The function keeps the
        array's memory, and works until the backend is closed.
        """
        self.check_open()
        admitted, _ = self._admit_reduction(array, op)
        if self.check == "always":
            return partial(self, array, op)
        array = np.asarray(array) if isinstance(array, np.ndarray) else array
        return self._engine.bind(admitted, array.reshape(-1, order="A"))

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        """The sums, over all ranks, of rows of a table of `rows` rows, of which each rank brings some. Collective.

        indices: a 1-D array of integers from 0 to rows - 1: to which row of the table each of `values` belongs. In any
            order, and more than once: what has the same index is added. Each rank has its own, any number, also none.
        values: an array of shape (len(indices), ...); dtype and the shape of a row are alike on all ranks. NumPy's
            or CuPy's; neither array is changed.
        op: "sum", or "mean" ("average"): the sum divided by the number of ranks, also of those without that row.

        Returns new arrays, the same bits on all ranks: the rows that any rank has brought, int64, ascending, each once,
        and their sums, of shape (number of these, ...), of the dtype of `values`. 16-bit floats are added in float32
        and rounded once. The memory that it takes is that of the rows which were brought, never that of the table.

        How: each rank adds what it has twice; then the indices of all are gathered, and their rows, which every rank
        adds up in the order of the ranks. Where many ranks bring the same rows these are reduced by the backend
        instead, with zeros for what a rank has not: when the ranks bring at least twice as many rows as there are
        different ones, of 1 MiB and more. (2 to 4 ranks, 64 to 16384 rows of 8 to 256 elements: below 1 MiB neither
        way was faster beyond doubt; above, gathering took 0.6 to 1 times as long as reducing at 1.7 times as many
        rows, the same at 2.1, and 1.1 to 1.6 times as long where all ranks bring the same.)

        Raises on all ranks, before anything is sent: DisagreementError (another dtype, width, `rows` or op on some
        rank), OptionError (indices out of range), NotAnArrayError, UnsupportedOpError, UnsupportedDtypeError.
        """
        call, resolved, mine = self._admit_rows(indices, values, rows, op)
        results: list[tuple[np.ndarray, np.ndarray]] = []

        def add(_: np.ndarray, op: Op) -> None:
            found, sums = self._add_rows(*mine, op)
            results.append((found, sums.astype(values.dtype, copy=False).reshape(found.size, *values.shape[1:])))

        self._engine.run(call, resolved, self._engine.quiet(add), mine[1])
        found, sums = results[0]
        return (gpu.cupy().asarray(found), gpu.cupy().asarray(sums)) if gpu.is_gpu_array(values) else (found, sums)

    # What users call: arrays that go from rank to rank as they are

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite `array` on every rank with what rank `root` has in it. Collective.

        array: as for a call, of the same shape on all ranks, and of any dtype without references to Python objects.
        """
        if isinstance(array, trees.KINDS):
            arrays: list[Any] = []
            structure = trees.flatten(array, arrays)
            _overwrite(arrays, self.on_arrays("broadcast", structure, arrays, root=root, changes=True))
            return
        call, op = self._admit("broadcast", array, root=root)
        flat = array.reshape(-1, order="A")
        host = flat.get() if call.memory == GPU else flat
        self._engine.run(call, op, lambda buffer, _: chunked.overwrite(self._comm, buffer, root), host)
        if host is not flat:
            flat.set(host)

    def stack(self, array: Any) -> Any:
        """All ranks' arrays, on every rank: a new array of shape (ranks, *array.shape). Collective.

        array: an array, or a number, of the same shape and dtype on all ranks, of any dtype as in `broadcast`; or a
            tree of arrays, which gives a tree. It stays as it is. The new one is NumPy's, of CuPy's arrays too.
        """
        if isinstance(array, trees.KINDS):
            arrays: list[Any] = []
            structure = trees.flatten(array, arrays)
            return trees.rebuild(array, self.on_arrays("stack", structure, arrays))
        table = array.get() if gpu.is_gpu_array(array) else array
        if isinstance(table, np.ndarray | np.generic | int | float | complex):
            mine = np.asarray(table)
            table = np.empty((self.size, *mine.shape), mine.dtype)
            table[self.rank] = mine
        call, op = self._admit("stack", table)
        parts = [table[rank : rank + 1].reshape(-1) for rank in range(self.size)]
        self._engine.run(call, op, lambda *_: self._hand_round(parts), table)
        return table

    def all_gather(self, buffer: np.ndarray) -> None:
        """Fill `buffer` on every rank from the slices that the ranks own (see `owned`), in place. Collective.

        buffer: a contiguous 1-D array of the same length and dtype on all ranks, of any dtype as in `broadcast`; what
            is outside of this rank's own slice is overwritten.
        """
        call, op = self._admit("all_gather", buffer)
        work = NOTHING if not call.length or self.size == 1 else self._gathering(call)
        self._engine.prepare(self._prepared(call, op, work))(buffer)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """The slice of a buffer of `length` elements that `rank` finishes, this rank when none is given."""
        return chunks.chunk(length, self.size, self.rank if rank is None else rank)

    # What users call: trees of arrays

    def reduce_tree(self, tree: Any, op: str) -> None:
        """Reduce all arrays of a tree in place. Collective."""
        arrays: list[Any] = []
        structure = trees.flatten(tree, arrays)
        _overwrite(arrays, self.on_arrays("all_reduce", structure, arrays, op, changes=True))

    def reduced(self, tree: Any, op: str = "mean") -> Any:
        """A tree of the reduced arrays of `tree`, which stay as they are. Collective.

        The new arrays are views of the backend's memory, valid until its next call with a tree.
        """
        arrays: list[Any] = []
        structure = trees.flatten(tree, arrays)
        return trees.rebuild(tree, self.on_arrays("all_reduce", structure, arrays, op))

    def on_arrays(
        self, kind: str, structure: str, arrays: Sequence[Any], op: str = "sum", root: int = 0, changes: bool = False
    ) -> list[Any]:
        """What a call of this kind makes of each array: the arrays of one dtype travel in one buffer. Collective.

        kind: "all_reduce", "broadcast" or "stack". structure: of the tree, alike on all ranks as the arrays' shapes.
        changes: whether the arrays are overwritten with the results. Results of "stack" are new; others are views of
        the backend's memory, valid until its next call with a tree.
        """
        layout = self._admit_tree(kind, structure, arrays, op, changes)
        found: list[Any] = [None] * len(arrays)
        for group in layout.groups:
            parts = [part for _, part, _ in group.places] if self.by_array else [slice(None)]
            with self._engine.working_on(layout):
                buffer = self._packing(group)
                group.pack(arrays, buffer)
                if kind == "stack":
                    buffer = self.stack(buffer)
                elif kind == "broadcast":
                    self.broadcast(buffer, root)
                else:
                    for part in parts:
                        self(buffer[part], op)
            for number, part, shape in group.places:
                found[number] = buffer[..., part].reshape((*buffer.shape[:-1], *shape))
        return found

    # What users ask

    def chosen(self, array: Any) -> str:
        """The name of the backend that has reduced `array`: this one's, unless it passes calls on to others. Local."""
        return self.name

    @property
    def exact(self) -> "AllReduce":
        """What loses no digits on the way: this, or the backend inside of one that sends fewer. Local."""
        return self

    def sent(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which arrays of `dtype` reach the other ranks: another one where fewer bits are sent. Local."""
        return dtype

    @cached_property
    def hooks(self) -> Hooks:
        """For backends and wrappers around this one."""
        methods = self._allocate, self._memory, self._place, self._resolve, self._route, self._finding, self._reduce
        return Hooks(*methods)

    def tag(self) -> int:
        """The tag of the messages of the call that is under way. Local."""
        return self._engine.tag() if self.part_of is None else self.part_of.tag()

    def check_dtype(self, dtype: np.dtype) -> None:
        """Raise UnsupportedDtypeError where this backend reduces no arrays of `dtype`. Local."""
        if dtype not in dtypes.TYPES:
            raise dtypes.unsupported(dtype)
        if dtypes.is_half(dtype) and not self.sums_half:
            raise UnsupportedDtypeError(
                f"{self.name} does not reduce {dtype}: sums of 16-bit floats in MPI are not dependable; "
                'use "auto", "shared", "ring" or another backend of ours, which sum them in float32'
            )

    def check_open(self) -> None:
        """Raise the error of a backend that is closed or broken. Local."""
        if self._engine.broken is not None:
            self._engine.refuse()
        if self.closed:
            raise ClosedError(f"{self.name} is closed; create it again to go on")

    # Ends

    def close(self) -> None:
        """Free communicators, windows and scratch memory. Collective; closing twice does nothing.

        Arrays from `allocate` that are still in use stay valid. When a rank was lost, this is `abandon`.
        """
        if self.closed:
            return
        if self._engine.broken is not None:  # the other ranks may be anywhere
            self.abandon()
            return
        try:
            self._close_together()
        except Exception as error:
            if self.topology.detector.loss_of(error) is None:
                raise
            self.abandon()
        if self.owns_topology:
            self.topology.close()

    def _close_together(self) -> None:
        self._engine.agree([], f"close() of {self.name}")
        self.closed = True
        self._close()
        for part in reversed(self._parts):
            part.close()
        self._forget()
        self.topology.release(self._comm, self)
        self._engine.close()

    def abandon(self) -> None:
        """Let go of everything without the other ranks, who may be lost. Local; what they share stays to the end."""
        self.closed = True
        free_later((self.workspace, self._pinned))  # messages that are still under way write there
        self.workspace, self._pinned = Workspace(), gpu.Pinned()
        self._engine.stop()
        self._forget()
        for part in self._parts:
            part.abandon()

    def _keep(self, part: PartT) -> PartT:
        """`part`, a backend or topology that was made for this backend's own calls and ends with it."""
        self._parts.append(part)
        if isinstance(part, AllReduce):
            part.part_of = self
        return part

    def _forget(self) -> None:
        for held in (self._known, self.packed, self._layouts, self.workspace, self._pinned):
            held.clear()

    def __enter__(self: BackendT) -> BackendT:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            f"the backend {self.name!r} can't be copied or pickled: its communicators belong to this process. "
            "Keep `backend.recipe`: create(recipe.name, topology, **recipe.options) makes another, on all ranks"
        )

    def __repr__(self) -> str:
        return f"<{self.name} on {self.topology}>"

    # What an algorithm writes: `_reduce`, and what it does otherwise than here

    @abstractmethod
    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce a 1-D array in place; length and number of ranks are at least 1 and 2."""

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device != "cuda":
            return workspace.zeros(length, dtype)
        gpu.choose_device(self.topology.node_rank)
        return gpu.cupy().zeros(length, dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        """ALLOCATED for an array, or a slice of one, that `_allocate` gave and that is reduced where it is.

        Asked for each array that is a view of other memory; an array that owns its memory is FOREIGN.
        """
        return FOREIGN

    def _place(self, buffer: np.ndarray) -> Place | None:
        """Where in memory from `allocate` the array begins; None for other arrays, and where it does not matter."""
        return None

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        """The operation called `op` for arrays of `dtype`, or the error that says why there is none."""
        return ops.resolve(op, dtype, self.size)

    def _route(self, call: Call) -> Work | Trial:
        """What reduces arrays of such a call; asked once for each."""
        if call.length == 0 or self.size == 1:
            return NOTHING
        self._say_copies(call)
        return self._reduce_gpu if call.memory == GPU else self._reduce

    def _finding(self, call: Call) -> Find | None:
        """What tells the place of an array in memory from `allocate`, where `_reduce` needs the same place on all ranks
        and does not itself compare it on all of them. Asked after `_route`."""
        return None

    def _gathering(self, call: Call) -> Work:
        """What gathers the ranks' slices of such arrays."""
        return lambda buffer, _: self._hand_round([buffer[self.owned(buffer.size, rank)] for rank in range(self.size)])

    def _close(self) -> None:  # noqa: B027, most hold nothing else
        """Free what the algorithm holds besides `_comm`, `workspace` and what it has kept. Collective."""

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        """Reduce a 1-D CuPy array: by way of pinned host memory, for algorithms of the CPU."""
        host = self._pinned.like(buffer)
        buffer.get(out=host)  # waits for the current stream, so the GPU has finished writing
        self._reduce(host, op)
        buffer.set(host)
        gpu.synchronize()  # the host memory is used again in the next call

    def _hand_round(self, slices: Sequence[np.ndarray]) -> None:
        """Every rank's slice, in turn, to all others."""
        for rank, part in enumerate(slices):
            chunked.overwrite(self._comm, part, rank)

    def _say_copies(self, call: Call) -> None:
        """Say once that arrays in such memory are copied, where they are. Local."""
        if call.memory == FOREIGN and self.copies_foreign and self.part_of is None:  # "auto" knows why
            notices.once(self.rank, self.copies_foreign)

    # The way of a call to the engine: this rank's arguments are checked, then the ranks agree on them

    def _admit(self, kind: str, array: Any, op: str = "sum", root: int | None = None) -> tuple[Call, Op]:
        """The call with this array, on which all ranks have agreed, and its operation. Collective where that is due."""
        self.check_open()
        abort.communicates()
        error, call, resolved = None, None, ops.OPS["sum"]
        try:
            call = records.of_array(kind, array, op, self._where(array))
            if root is not None:
                call = call._replace(root=records.check_root(root, self.size))
            if call.reduces:
                self.check_dtype(call.dtype)
                resolved = self._resolve(op, call.dtype)
                call = call._replace(op=resolved.name)  # one name, by which all ranks know it
        except AllReduceError as refused:
            error, call = refused, None
        self._engine.agree_once(call, call, records.row(call, resolved.code), error)
        assert call is not None
        return call, resolved

    def _admit_reduction(self, buffer: Any, op: str) -> tuple[Admitted, Callable[[Any], None]]:
        """The all-reduce of `buffer`, and what runs it, which is kept where __call__ looks it up."""
        call, resolved = self._admit("all_reduce", buffer, op)
        admitted = self._prepared(call, resolved, self._route(call))
        run = self._engine.prepare(admitted)
        if self.check != "always" and call.layout == "C":
            for name in (op, resolved.name):
                self._known[call.shape, call.dtype, name, call.memory] = run
        return admitted, run

    def _prepared(self, call: Call, op: Op, work: Work | Trial) -> Admitted:
        return self._engine.admit(call, op, work, self._same_data.look_at(call, op), self._finding(call))

    def _where(self, buffer: Any) -> int:
        if gpu.is_gpu_array(buffer):
            return GPU
        view = isinstance(buffer, np.ndarray) and buffer.flags.forc and buffer.base is not None
        return self._memory(buffer) if view else FOREIGN

    def _admit_tree(self, kind: str, structure: str, arrays: Sequence[Any], op: str, changes: bool) -> trees.Layout:
        """How the arrays lie in buffers, after the ranks have agreed on it where that is due. Collective."""
        self.check_open()
        error: AllReduceError | None = None
        key = trees.key(structure, arrays)
        layout = self._layouts.get(key) or trees.layout(key)
        reduces = kind in REDUCING
        try:
            for array in arrays:
                records.refuse_other(array)
                if changes and not gpu.is_gpu_array(array) and not array.flags.writeable:
                    text = "an array of this tree is read-only, and is changed in place: pass a copy of it"
                    raise NotAnArrayError(text)
            for group in layout.groups:
                if reduces:
                    self.check_dtype(group.dtype)
                    self._resolve(op, group.dtype)
                else:
                    dtypes.refuse_references(group.dtype)
        except AllReduceError as refused:
            error = refused
        self._engine.agree_once((key, str(op) if reduces else None), layout.text, [layout.number], error)
        self._layouts[key] = layout
        return layout

    def _packing(self, group: trees.Group) -> Any:
        """Memory for a group of arrays: the backend's own for dtypes that it reduces. Collective where it grows."""
        held = self.packed.get((group.dtype, group.device))
        if held is None or held.size < group.length:
            try:
                self.check_dtype(group.dtype)
                held = self.allocate(group.length, group.dtype, group.device)
            except UnsupportedDtypeError:  # which is only moved
                held = (gpu.cupy() if group.device == "cuda" else np).empty(group.length, group.dtype)
            self.packed[group.dtype, group.device] = held
        return held[: group.length]

    def _admit_rows(self, indices: Any, values: Any, table_rows: int, op: str) -> tuple[Call, Op, rows.Rows]:
        """As `_admit`, for a sparse sum; and this rank's rows without duplicates."""
        self.check_open()
        abort.communicates()
        error, call, mine, resolved = None, None, None, ops.OPS["sum"]
        try:
            given = rows.checked(indices, values, table_rows)
            if values.dtype not in dtypes.TYPES:
                raise dtypes.unsupported(values.dtype)
            resolved = self._resolve(op, values.dtype)
            if resolved.name not in rows.OPS:
                raise UnsupportedOpError(f'sparse() takes op "sum" or "mean", not {op!r}')
            shape = (int(table_rows), *values.shape[1:])
            length = int(np.prod(shape, dtype=object))
            call = Call("sparse", length, values.dtype, resolved.name, FOREIGN, "C", shape)
            with np.errstate(all="ignore"):  # an overflow would be this rank's alone
                mine = rows.without_duplicates(*given, dtypes.TYPES[values.dtype].accumulator)
        except AllReduceError as refused:
            error, call = refused, None
        self._engine.agree_once(call, call, records.row(call, resolved.code), error)
        assert call is not None
        assert mine is not None
        return call, resolved, mine

    def _add_rows(self, indices: np.ndarray, values: np.ndarray, op: Op) -> rows.Rows:
        """The sums of all ranks' rows. indices: ascending, each once. values: 2-D, of an accumulator's dtype."""
        if self.size == 1:
            return indices.copy(), values.copy()
        counts = chunked.counts(self._comm, indices.size)
        everyone = chunked.gather(self._comm, indices, counts)
        found, places = rows.places(everyone, counts)
        sums = np.zeros((found.size, values.shape[1]), values.dtype)
        if rows.dense_is_cheaper(everyone.size, found.size, sums.nbytes):
            sums[places[self.rank]] = values
            if sums.size:
                self._reduce(sums.reshape(-1), op)
            return found, sums
        parts = np.split(chunked.gather(self._comm, values, counts), np.cumsum(counts)[:-1])
        for place, part in zip(places, parts, strict=True):
            sums[place] += part  # no index is twice in a rank's
        op.finish(sums)
        return found, sums


class TwoPhase(AllReduce):
    """Algorithms that are a reduce_scatter followed by an all_gather. Both can be called on their own.

    Between the phases each rank owns one slice of the buffer, `owned(length)`, and holds its result.
    """

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """Reduce `buffer`, leaving each rank only its own slice of the result, which is returned. Collective.

        buffer: a contiguous 1-D array, as for a call; what is outside of the returned view is undefined afterwards.
        16-bit floats are summed in float32 and rounded once.
        """
        call, resolved = self._admit("reduce_scatter", buffer, op)
        work: Work = self._scatter_gpu if call.memory == GPU else self._scatter_rounded
        work = work if call.length and self.size > 1 else NOTHING
        self._engine.prepare(self._prepared(call, resolved, work))(buffer)
        return buffer[self.owned(buffer.size)]

    @cached_property
    def phases(self) -> Phases:
        """For backends around this one."""
        return Phases(self._reduce_scatter, self._all_gather)

    def _gathering(self, call: Call) -> Work:
        self._say_copies(call)
        gather = self._gather_gpu if call.memory == GPU else self._all_gather
        return lambda buffer, _: gather(buffer)

    @abstractmethod
    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        """Finish `owned` of a 1-D array of 32 or 64-bit elements in place; the rest may be spoilt."""

    @abstractmethod
    def _all_gather(self, buffer: np.ndarray) -> None:
        """Copy every rank's `owned` slice to all ranks; any dtype."""

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._scatter_rounded(buffer, op)
        self._all_gather(buffer)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        """reduce_scatter of any dtype: 16-bit floats travel as float32 sums and are rounded by their owner."""
        accumulator = dtypes.TYPES[buffer.dtype].accumulator
        if accumulator == buffer.dtype:
            self._reduce_scatter(buffer, op)
            return
        wide = self.workspace.array("wide", buffer.size, accumulator)
        np.copyto(wide, buffer)
        self._reduce_scatter(wide, op)
        mine = self.owned(buffer.size)
        np.copyto(buffer[mine], wide[mine], casting="unsafe")

    # Of CuPy arrays: by way of pinned host memory, for algorithms of the CPU

    def _scatter_gpu(self, buffer: Any, op: Op) -> None:
        host, mine = self._pinned.like(buffer), self.owned(buffer.size)
        buffer.get(out=host)  # waits for the current stream, so the GPU has finished writing
        self._scatter_rounded(host, op)
        self._to_gpu(host, buffer, mine)

    def _gather_gpu(self, buffer: Any) -> None:
        host, mine = self._pinned.like(buffer), self.owned(buffer.size)
        buffer[mine].get(out=host[mine])
        self._all_gather(host)
        self._to_gpu(host, buffer, slice(None))

    @staticmethod
    def _to_gpu(host: np.ndarray, buffer: Any, part: slice) -> None:
        buffer[part].set(host[part])
        gpu.synchronize()  # the host memory is used again in the next call


def _overwrite(arrays: Sequence[Any], changed: Sequence[Any]) -> None:
    for array, new in zip(arrays, changed, strict=True):
        array[...] = new


children.guard(AllReduce, "__call__", "check_open", "close")
