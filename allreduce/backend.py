"""AllReduce, a user's backend. It checks the arguments of a call, and runs the call by an algorithm (algorithm.py)."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.algorithm import Algorithm, Context
from allreduce.arrays import dtypes, gpu, ops, trees
from allreduce.arrays import rows as sparse_rows
from allreduce.arrays.compression import Compression
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.call import call as records
from allreduce.call.call import REDUCING, Call, fingerprint
from allreduce.call.executor import Executor, Observer, PreparedCall, Work, do_nothing
from allreduce.call.queue import Future
from allreduce.errors import (
    AllReduceError,
    CollectiveTimeoutError,
    CopyError,
    NotAnArrayError,
    OptionError,
    RankLeftError,
    RankLostError,
    UnavailableError,
    UnsupportedDtypeError,
    UnsupportedOpError,
)
from allreduce.health import abort
from allreduce.memory.allocations import Allocations
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import chunked
from allreduce.transport.control import everywhere

SelfT = TypeVar("SelfT", bound="AllReduce")
ResultT = TypeVar("ResultT")
NDARRAY = np.ndarray  # one look-up in each call, not two
PLACE = "place"  # in the state of a compression, beside the arrays
OTHER_PLACE = (
    "the error feedback of the compression (the part of the gradients that it had not sent yet) is of other ranks or "
    "nodes, or of another backend or version: it begins at zero"
)
SLOW_HALF = "sums of 16-bit floats take 2 to 10 times as long: a rank lacks the C library (see allreduce doctor)"
MOST_KNOWN = 4096  # signatures, and trees, that are kept
OUT_OF_STEP = (CollectiveTimeoutError, RankLeftError, RankLostError)  # after these errors the ranks can't agree


class Config(NamedTuple):
    """The arguments of create(): `create(config.name, topology, **config.options)` creates an equal backend."""

    name: Any  # a str, or the class of an algorithm
    options: dict[str, Any]


class AllReduce:
    """A backend: all-reduces and other collectives on the ranks of a topology, by one algorithm. `create` makes it.

    Creating, `allocate`, calling and `close` are collective: every rank does them, in the same order. The ranks compare
    their calls. If they differ, all raise the same DisagreementError, before anything is changed.

    observers: functions that get `(user, count, call, begin, end)` of each call when it has ended: the number of the
        user and of its call, the Call, and two times of time.perf_counter(); end is 0.0 if the call failed. They run in
        the thread of the call, and must neither raise nor communicate. `reduce.observers.append(f)`.
    """

    def __init__(
        self,
        topology: Topology,
        config: Config,
        make: Callable[[Context], Algorithm],
        create: Callable[..., Algorithm],
    ) -> None:
        """Used by allreduce.create. Collective.

        make: makes the algorithm. create: makes the algorithms inside of it, see Context.make.
        """
        self.name = config.name if isinstance(config.name, str) else config.name.__name__.lower()
        self.config = config
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self.closed = False
        self.cleanup: list[Callable[[bool], object]] = []  # `close` calls them with True, `abandon` with False
        # (shape, dtype, op, memory) -> function that runs the call, for NumPy arrays in C order
        self._known: dict[tuple, Callable[..., None]] = {}
        self._packed: dict[Any, Any] = {}  # (dtype, device) -> buffer into which the arrays of trees are packed
        self._trees: dict[trees.Key, trees.TreeLayout] = {}
        self._allocations = Allocations()
        self._shared = self._allocations.shared  # read in every call
        try:
            self._algorithm = self._connect(make, create)
        except Exception as error:
            topology.unregister(self)  # a topology must not close or abandon an incomplete user
            if everywhere(error, topology.world) and "executor" in vars(self):
                self.executor.close()
            raise
        algorithm, compress = self._algorithm, config.options.get("compress")
        self.sums, self.sums_half, self.by_array = algorithm.sums, algorithm.sums_half, algorithm.by_array
        self.two_phase, self.sums_terms = algorithm.two_phase, algorithm.sums_terms
        self.lossy = algorithm.lossless is not algorithm
        self.compression: Compression = compress if compress is not None and self.size > 1 else Compression()
        self.observers: list[Observer] = self.executor.observers

    def _connect(self, make: Callable[[Context], Algorithm], create: Callable[..., Algorithm]) -> Algorithm:
        """Make the executor, and return the algorithm. All ranks raise the error of one rank, so that a backend exists
        on all its ranks or on none.

        The ranks agree after the last step. If a rank fails while others wait for it in a later step, it waits
        LONE_SECONDS for them (they may only be slow), and raises its error alone.
        """
        topology, error, algorithm = self.topology, None, None
        try:
            with topology.detector.translating_failures():
                executor = self.executor = Executor(topology, self, bool(self.config.options.get("check", True)))
                algorithm = make(Context(topology, executor.comm, topology.layout, executor, self._allocations, create))
        except OUT_OF_STEP:
            raise
        except Exception as met:
            if topology.closed or everywhere(met, topology.world):
                raise
            error = met
        topology.agree([], f"create {self.name!r}", error)
        assert algorithm is not None
        return algorithm

    # Memory

    def allocate(
        self, length: int, dtype: DTypeLike = "float32", device: str | None = None, scratch: bool = False
    ) -> Any:
        """Return a zeroed 1-D array of `length` elements that this backend reduces without a copy. Collective.

        A contiguous slice of the array is reduced without a copy, too. NumPy arrays are 64-byte aligned, so XLA (JAX)
        uses them without a copy. device: "cpu" for a NumPy array, "cuda" for a CuPy array; by default the one that
        this backend reduces without a copy. scratch: True for an array that holds other values in each call: a
        compression keeps no error feedback for it.
        """
        error: AllReduceError | None = None
        call, array = None, None
        self.executor.check_open()
        try:
            self.check_dtype(dtypes.parse(dtype))
            call = records.allocation_call(length, dtype, device)
        except AllReduceError as refused:
            error = refused
        text = f"allocate({length!r}, {dtype!r}, device={device!r})"
        self.executor.agree([] if call is None else [fingerprint(call) >> records.SEQUENCE_BITS], text, error)
        assert call is not None
        try:
            array = self._algorithm.allocate(call.length, call.dtype, device)
        except MemoryError as lacking:
            error = UnavailableError(f"this rank has no memory for {length} elements of {dtype}: {lacking}")
        self.executor.agree([], f"allocate({length!r})", error)
        if call.length:
            found = self._allocations.at(array)
            entry = found[0] if found else self._allocations.add(array)
            entry.keeps = not scratch
        return array

    def describe(self, array: Any, parts: Sequence[Part] = ()) -> None:
        """Tell where the parameters of a model are in an array from `allocate`. Local; the same on all ranks.

        array: 1-D. parts: `allreduce.Part(name, start, shape)`: elements from `start` are an array of `shape` in C
        order. A compression treats matrices and biases differently ("powersgd:4" needs the shapes), and exact=True
        begins blocks at parameters; other backends ignore it. Raises OptionError for parts that overlap or lie outside
        of the array.
        """
        self._allocations.describe(array, parts)

    # The state of a compression; without one there is none

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        """Return a copy of this rank's state: the error feedback of a compression. {} without one. Local.

        array: the state of this array from `allocate` only. The state belongs to the training state: other ranks have
        other values, and training continues differently without it.
        """
        state = self._allocations.state(array)
        return state | {PLACE: np.array(self._place())} if state else {}

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        """Load a result of `state` of an equal backend with equal arrays; state that it lacks becomes zero. Local; on
        all ranks before their next call.

        Each rank compresses other elements, so the error feedback of another rank or backend, or of a job with other
        ranks or nodes, is not loaded: it becomes zero, which rank 0 says once.

        array: load the state of this array only. Raises OptionError for another backend's, and changes nothing.
        """
        if state and self.config.options.get("compress") is None:
            name = next(iter(state))
            raise OptionError(f"{self!r} has no state {name!r}: it is of another backend or compression")
        loaded = {name: held for name, held in state.items() if name != PLACE}
        if loaded and not np.array_equal(state.get(PLACE, -1), self._place()):
            loaded = {name: held for name, held in loaded.items() if not name.endswith("/residual")}
            notices.once(self.rank, OTHER_PLACE)
        self._allocations.load_state(loaded, array)

    def _place(self) -> int:
        """Return a number of what decides the elements that this rank compresses. Local."""
        return zlib.crc32(repr((self.name, str(self.compression), self.rank, self.topology.layout.members)).encode())

    def reset(self, array: Any = None) -> None:
        """Set the error feedback of a compression, of one array or of all, to zero, as in a new backend. Local; on all
        ranks before their next call."""
        self._allocations.reset(array)

    # Sums

    def __call__(self, buffer: Any, op: str = "mean", lossless: bool = False) -> None:
        """Reduce `buffer` over all ranks, in place: afterwards all ranks hold the same bits. Collective.

        buffer: a contiguous, writable NumPy or CuPy array, or a nested list, tuple or dict of such arrays, which are
            packed by dtype and reduced together. Shapes and dtypes must be equal on all ranks. Arrays from `allocate`
            are reduced without a copy; others are copied if the backend needs it.
        op: "sum", "mean" or "average" (of floating dtypes), "max", "min" or "prod". float16 and bfloat16 are
            summed in float32 and rounded once. Integer sums wrap around. For bool, sum and max are "logical or", prod
            and min "logical and".
        lossless: True for values that a compression must not round: losses, counts.

        Raises a named AllReduceError on all ranks, before anything is changed, when an array can't be reduced or the
        ranks disagree.
        """
        run = None
        if type(buffer) is NDARRAY and not lossless and buffer.flags.carray:  # the usual case: one look-up
            base, memory = buffer.base, UNREGISTERED
            if base is not None and self._shared:
                memory = ALLOCATED if id(base) in self._shared else self._allocations.memory_of(buffer)
            try:  # noqa: SIM105, suppress() would cost as much as the look-up
                run = self._known.get((buffer.shape, buffer.dtype, op, memory))
            except TypeError:  # an op that is not hashable; _described raises its error
                pass
        if run is None:
            if isinstance(buffer, trees.KINDS):
                self._on_tree("all_reduce", buffer, op, changes=True)
                return
            call, resolved = self._checked(self._described, "all_reduce", buffer, op)
            run = self._function(call, resolved, lossless=lossless)
            buffer = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # not a subclass of ndarray
            if buffer.ndim != 1:
                run = partial(_run_flat, run)
            if call.layout == "C" and not lossless:
                _keep(self._known, (call.shape, call.dtype, op, call.memory), run)
        run(buffer)

    def bind(
        self, array: Any, op: str = "mean", kind: str = "all_reduce", lossless: bool = False
    ) -> Callable[[], None]:
        """Return a function that reduces `array` in place, with less overhead than a call. Local.

        The arguments are checked once, here. Calling the function is collective, until the backend is closed. It holds
        a reference to the array.

        kind: "all_reduce"; "reduce_scatter" of a backend with two phases, whose result is
            `array[reduce.owned(array.size)]`; or "all_gather", which has no op. lossless: see `__call__`.
        """
        if kind not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise OptionError(f'{kind!r} is not for bind(); use "all_reduce", "reduce_scatter" or "all_gather"')
        return self._checked(self._bound, kind, array, op, lossless, waits=False)

    def _bound(self, kind: str, array: Any, op: str, lossless: bool = False) -> Callable[[], None]:
        """As `bind`, but an error is raised on this rank only. Local."""
        call, resolved = self._described(kind, array, op)
        array = np.asarray(array) if isinstance(array, np.ndarray) else array
        flat = array.reshape(-1, order="A")
        prepared = self._prepared(call, resolved, lossless=lossless)
        if prepared.work.place is not None:
            prepared = prepared.at(prepared.work.place(flat))  # the array does not move
        return self.executor.prepare(prepared, flat)

    def submit(self, array: Any, op: str = "mean", kind: str = "all_reduce") -> Future:
        """Reduce `array` in a thread, which runs the submitted calls one after the other. Returns at once: a future,
        whose `wait()` raises the error of the call. kind: see `bind`.

        All ranks submit the same calls in the same order. Do not touch the array before its call has ended. Other calls
        wait until the submitted ones have ended. The first call creates the thread, and is collective; it raises
        UnavailableError on all ranks if MPI lacks MPI_THREAD_MULTIPLE on any rank.
        """
        self.executor.check_open(waits=False)
        work: Callable[[], object]
        try:
            run = self._bound(kind, array, op)
            work = gpu.on_current_stream(run) if gpu.is_gpu_array(array) else run
            text = f"{kind}, length {array.size}, {array.dtype}, op {op!r}"
        except AllReduceError as refused:  # the other ranks learn of the error when they run this call
            text = f"refused, {type(refused).__name__}: {refused}"
            work = partial(self.executor.agree, [], text, refused)
        return self.executor.submit(work, text)

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        """Sum sparse rows over all ranks: each rank passes some rows of a table of `rows` rows. Collective.

        indices: 1-D integer array, values 0 to rows - 1: the table row of each row of `values`. Any order; rows with
            equal indices are added. Length and values may differ between ranks; may be empty.
        values: an array of shape (len(indices), ...); NumPy or CuPy; dtype and row shape must be equal on all ranks.
            Neither array is changed.
        op: "sum", or "mean" ("average"): the sum divided by the number of all ranks, with or without that row.

        Returns (indices, sums), new arrays with the same bits on all ranks. indices: the distinct indices of all ranks,
        int64, ascending. sums: shape (len(indices), ...), the dtype of `values`; 16-bit floats are added in float32 and
        rounded once. Memory is proportional to the rows passed, not to the table.

        A compression does not change rows. With exact=True each rank's rows are one term.

        Raises on all ranks, before anything is sent: DisagreementError (another dtype, width, `rows` or op on some
        rank), OptionError (indices out of range), NotAnArrayError, UnsupportedOpError, UnsupportedDtypeError.
        """

        def describe() -> tuple[Call, Op, sparse_rows.Rows]:
            given = sparse_rows.checked(indices, values, rows)
            if values.dtype not in dtypes.TYPES:
                raise dtypes.unsupported(values.dtype)
            resolved = self._algorithm.resolve(op, values.dtype)
            if resolved.name not in sparse_rows.OPS:
                raise UnsupportedOpError(f'sparse() takes op "sum" or "mean", not {op!r}')
            shape = (int(rows), *values.shape[1:])
            length = int(np.prod(shape, dtype=object))
            call = Call("sparse", length, values.dtype, resolved.name, UNREGISTERED, "C", shape)
            with np.errstate(all="ignore"):  # an overflow could raise on this rank alone
                return call, resolved, sparse_rows.without_duplicates(*given, dtypes.TYPES[values.dtype].accumulator)

        call, resolved, mine = self._checked(describe)
        results: list[sparse_rows.Rows] = []

        def add(_: np.ndarray) -> None:
            found, sums = _sum_rows(self._algorithm.lossless, *mine, resolved)
            results.append((found, sums.astype(values.dtype, copy=False).reshape(found.size, *values.shape[1:])))

        self.executor.run(call, add, mine[1])
        found, sums = results[0]
        return (gpu.cupy().asarray(found), gpu.cupy().asarray(sums)) if gpu.is_gpu_array(values) else (found, sums)

    def sum_terms(self, terms: Any, out: Any, op: str = "sum", count: int = 1, kind: str = "all_reduce") -> Any:
        """Reduce several terms of each rank: each is rounded alone, so it does not matter which rank has which term.
        Only with exact=True.

        terms: this rank's terms: an array (k, length), or a sequence of k arrays of `length` elements, 1-D and
            contiguous; k may differ between ranks, and be 0. Not changed, unless `out` is one of them.
        out: 1-D, contiguous, `length` elements of the terms' dtype; overwritten by the result.
        op: "sum", or "mean": the sum divided by `count`.
        count: the number of all terms of all ranks, or more: then the others are zeros. The same on all ranks; it
            decides how terms are rounded (see fixed_point). Also on one rank, terms are rounded so.
        kind: "reduce_scatter": only this rank's `owned` slice of `out` is defined afterwards.

        Collective. Returns `out`, or the owned slice, a view. Raises OptionError, on all ranks, if they pass more than
        `count` terms, and the errors of a call.
        """
        exact: Any = self._algorithm

        def describe() -> tuple[Call, Op]:
            if not self.sums_terms:
                raise OptionError(f"sum_terms() is for exact sums: create({self.name!r}, topology, exact=True)")
            call = records.array_call("sum_terms", out, op, self._allocations.memory_of(out))
            resolved = exact.resolve(op, call.dtype)
            return exact.describe_sum(call._replace(op=resolved.name), resolved, terms, count, kind), resolved

        run = self._function(*self._checked(describe))
        exact.terms = terms
        try:
            run(out)
        finally:
            exact.terms = ()
        return out if kind == "all_reduce" else out[self.owned(out.size)]

    # Arrays that are copied between ranks

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite `array` on every rank with rank `root`'s array. Collective.

        array: an array or tree as in `__call__`, with the same shapes and dtypes on all ranks; any dtype without
            references to Python objects.
        """
        if isinstance(array, trees.KINDS):
            self._on_tree("broadcast", array, root=root, changes=True)
        else:
            self._broadcast(array, root)

    def _broadcast(self, array: Any, root: int, tree: str = "") -> None:
        call, _ = self._checked(self._described, "broadcast", array, "sum", root)
        flat = array.reshape(-1, order="A")
        host = flat.get() if call.memory == GPU else flat
        comm = self.executor.comm
        self.executor.run(call, lambda buffer: chunked.overwrite(comm, buffer, root), host, tree)
        if host is not flat:
            flat.set(host)

    def stack(self, array: Any) -> Any:
        """Return all ranks' arrays stacked: a new NumPy array of shape (size, *array.shape), on every rank. Collective.

        array: an array, or a number, of the same shape and dtype on all ranks, of any dtype as in `broadcast`; or a
            tree of arrays, which gives a tree. It is not changed. The result is a NumPy array also for a CuPy array.
        """
        return self._on_tree("stack", array) if isinstance(array, trees.KINDS) else self._stack(array)

    def _stack(self, array: Any, tree: str = "") -> Any:
        table = gpu.on_host(array)
        masked = isinstance(table, np.ma.MaskedArray)  # which is refused, as in other calls
        if isinstance(table, np.ndarray | np.generic | int | float | complex) and not masked:
            mine = np.asarray(table)
            table = np.empty((self.size, *mine.shape), mine.dtype)
            table[self.rank] = mine
        call, _ = self._checked(self._described, "stack", table)
        flat, length, comm = table.reshape(-1), table[0].size, self.executor.comm
        spans = [slice(rank * length, (rank + 1) * length) for rank in range(self.size)]
        self.executor.run(call, lambda _: chunked.spread(comm, flat, spans), table, tree)
        return table

    # The two phases

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """Reduce `buffer` over all ranks; return this rank's `owned` slice of the result, a view. Collective.

        buffer: a contiguous 1-D array, as for a call. Elements outside the view are undefined afterwards. 16-bit floats
        are summed in float32 and rounded once. Raises OptionError on all ranks if the backend has not `two_phase`.
        """
        self._run_phase("reduce_scatter", buffer, op)
        return buffer[self.owned(buffer.size)]

    def all_gather(self, buffer: np.ndarray) -> None:
        """Fill `buffer` on every rank from the slices that the ranks own (see `owned`), in place. Collective.

        buffer: a contiguous 1-D array of the same length and dtype on all ranks, of any dtype as in `broadcast`;
        elements outside this rank's `owned` slice are overwritten.
        """
        self._run_phase("all_gather", buffer)

    def _run_phase(self, kind: str, buffer: Any, op: str = "sum") -> None:
        run = None
        if type(buffer) is np.ndarray and buffer.flags.carray and isinstance(op, str):
            run = self._known.get((buffer.shape, buffer.dtype, op, self._allocations.memory_of(buffer), kind))
        if run is None:
            call, resolved = self._checked(self._described, kind, buffer, op)
            run = self._function(call, resolved)
            _keep(self._known, (call.shape, call.dtype, op, call.memory, kind), run)
        run(buffer)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return the slice of a buffer of `length` elements that `rank` owns (default: this rank). Local."""
        return self._algorithm.owned(length, rank)

    # Trees of arrays

    def reduced(self, tree: Any, op: str = "mean") -> Any:
        """Return a tree of reduced arrays; `tree` is not changed. Collective.

        The new arrays are views of the backend's memory, valid until its next call with a tree.
        """
        return self._on_tree("all_reduce", tree, op)

    def _on_tree(self, kind: str, tree: Any, op: str = "sum", root: int = 0, changes: bool = False) -> Any:
        """Run a collective on the arrays of a tree, packed into one buffer per dtype. Collective.

        kind: "all_reduce", "broadcast" or "stack". changes: overwrite the arrays with the results. Otherwise return a
        tree of results: new arrays of "stack", views of the backend's memory of others.
        """
        arrays: list[Any] = []
        layout = self._tree_layout(kind, trees.flatten(tree, arrays), arrays, op, changes)
        found: list[Any] = [None] * len(arrays)
        for group in layout.groups:
            buffer = self._tree_buffer(group)
            group.pack(arrays, buffer)
            if kind == "stack":
                buffer = self._stack(buffer, layout.text)
            elif kind == "broadcast":
                self._broadcast(buffer, root, layout.text)
            else:
                for span in [part for _, part, _ in group.places] if self.by_array else [slice(None)]:
                    call, resolved = self._checked(self._described, kind, buffer[span], op)
                    self._function(call, resolved, layout.text)(buffer[span])
            for number, part, shape in group.places:
                found[number] = buffer[..., part].reshape((*buffer.shape[:-1], *shape))
        if not changes:
            return trees.rebuild(tree, found)
        for array, new in zip(arrays, found, strict=True):
            array[...] = new
        return None

    def _tree_layout(
        self, kind: str, structure: str, arrays: Sequence[Any], op: str, changes: bool
    ) -> trees.TreeLayout:
        """Return a tree's layout, after checking its arrays and, for a new tree, agreeing on them. Collective."""
        key = trees.key(structure, arrays)
        layout = self._trees.get(key) or trees.layout(key)

        def check() -> None:
            for array in arrays:
                records.check_array(array)
                if changes and not gpu.is_gpu_array(array) and not array.flags.writeable:
                    text = "an array of this tree is read-only, but would be changed in place; pass a copy"
                    raise NotAnArrayError(text)
            for group in layout.groups:
                if kind in REDUCING:
                    self.check_dtype(group.dtype)
                    self._algorithm.resolve(op, group.dtype)
                else:
                    dtypes.check_no_references(group.dtype)

        self._checked(check)
        if key not in self._trees:
            self.executor.agree([layout.number], layout.text)
            _keep(self._trees, key, layout)
        return layout

    def _tree_buffer(self, group: trees.Group) -> Any:
        """Return a buffer for a group of a tree's arrays. Collective when it grows.

        It is allocated memory if the backend reduces the dtype. A compression keeps no error feedback for it: the next
        call may have another tree.
        """
        held = self._packed.get((group.dtype, group.device))
        if held is None or held.size < group.length:
            try:
                self.check_dtype(group.dtype)
                held = self.allocate(group.length, group.dtype, group.device, scratch=True)
            except UnsupportedDtypeError:  # such arrays are only copied between ranks
                held = (gpu.cupy() if group.device == "cuda" else np).empty(group.length, group.dtype)
            self._packed[group.dtype, group.device] = held
        found = self._allocations.at(held) if held.size else None
        if found is not None:  # in an exact sum each array of the tree gets the bits of a call of its own
            parts = [Part(str(number), part.start, shape) for number, part, shape in group.places]
            found[0].describe(0, found[0].length, parts)
        return held[: group.length]

    # Queries

    def chosen(self, array: Any, reason: bool = False) -> str:
        """Return the name of the algorithm that reduces `array`: this backend's, or the one that "auto" selects.
        Local.

        array: an array, or a Call, as observers get it. reason: return why "auto" has selected it instead, "" for
        other backends.
        """
        call = array
        if not isinstance(array, Call):
            call = Call("all_reduce", array.size, array.dtype, "sum", self._allocations.memory_of(array))
        name, why = self._algorithm.choice(call) if call.length and self.size > 1 else ("", "")
        return why if reason else name or self.name

    def waits_inside_mpi(self, call: Call) -> bool:
        """Return whether calls like this one wait inside MPI, where no time-out ends the wait. Local."""
        return self.size > 1 and self._algorithm.work(call, ops.OPS[call.op]).waits_inside_mpi

    def check_dtype(self, dtype: np.dtype) -> None:
        """Raise UnsupportedDtypeError if this backend can't reduce arrays of `dtype`. Local."""
        if dtype not in dtypes.TYPES:
            raise dtypes.unsupported(dtype)
        if dtypes.is_half(dtype) and not self.sums_half:
            raise UnsupportedDtypeError(
                f"{self.name} does not reduce {dtype}: MPI libraries' sums of 16-bit floats are unreliable; "
                'use "auto", "shared" or "ring", which sum them in float32'
            )
        if dtypes.is_half(dtype) and self.size > 1 and not self.topology.by_c:
            notices.once(self.rank, SLOW_HALF)

    # Ends

    def close(self) -> None:
        """Free communicators and scratch memory. Collective; closing twice does nothing.

        Arrays from `allocate` that are still in use stay valid. After a failed rank or a broken call, `close` does
        `abandon` instead.
        """
        if self.closed:
            return
        if self.executor.broken is not None:  # the other ranks may be in any call
            self.abandon()
            return
        try:
            self.executor.agree([], f"close() of {self.name}")
            self.closed = True
            self._algorithm.close()
            self.executor.close()
            self._forget(True)
        except Exception as error:
            if self.topology.detector.failure_behind(error) is None:
                raise
            self.abandon()

    def abandon(self) -> None:
        """Drop all resources without communicating, because ranks may have failed. Local.

        Memory that MPI or a late rank may still write to is freed later.
        """
        self.closed = True
        self.executor.abandon()
        self._algorithm.abandon()
        self._forget(False)

    def _forget(self, together: bool) -> None:
        for held in (self._known, self._packed, self._trees):
            held.clear()
        self._allocations.close()
        cleanup, self.cleanup = self.cleanup, []
        for each in cleanup:
            each(together)

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not reach a collective close
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            f"the backend {self.name!r} can't be copied or pickled: its communicators belong to this process. "
            "Keep `backend.config`: create(config.name, topology, **config.options) makes another, on all ranks"
        )

    def __repr__(self) -> str:
        return f"<{self.name} on {self.topology}>"

    # From a call to the executor: this rank's arguments are checked, then the ranks compare them

    def _checked(self, describe: Callable[..., ResultT], *arguments: Any, waits: bool = True) -> ResultT:
        """Return `describe(*arguments)`, which checks a call on this rank. If it raises an AllReduceError, all ranks
        raise this error. Where calls are not compared, this rank alone raises it.

        waits: see Executor.check_open.
        """
        executor = self.executor
        executor.check_open(waits)
        abort.register_thread()
        try:
            return describe(*arguments)
        except AllReduceError as error:
            if executor.compares:
                executor.agree([], f"refused, {type(error).__name__}: {error}", error)
            raise

    def _described(self, kind: str, array: Any, op: str = "sum", root: int | None = None) -> tuple[Call, Op]:
        """Return the Call and the Op of a call with `array`, or raise the error of invalid arguments. Local."""
        if kind == "reduce_scatter" and not self.two_phase:
            raise OptionError(f'{self.name!r} has no reduce_scatter; use a backend with two phases, such as "ring"')
        call = records.array_call(kind, array, op, self._allocations.memory_of(array))
        if root is not None:
            call = call._replace(root=records.check_root(root, self.size))
        if not call.reduces:
            return call, ops.OPS["sum"]
        self.check_dtype(call.dtype)
        resolved = self._algorithm.resolve(op, call.dtype)
        return call._replace(op=resolved.name), resolved  # no alias: all ranks compare one name

    def _function(self, call: Call, op: Op, tree: str = "", lossless: bool = False) -> Callable[..., None]:
        """Return the function that runs calls like `call`, and keep it. tree: in words, if a buffer holds its arrays.
        Local."""
        key = call, tree, lossless
        if key not in self._known:
            _keep(self._known, key, self.executor.prepare(self._prepared(call, op, tree, lossless)))
        return self._known[key]

    def _prepared(self, call: Call, op: Op, tree: str = "", lossless: bool = False) -> PreparedCall:
        """Return a call as the executor takes it, with its work. Local."""
        algorithm = self._algorithm
        if lossless and self.lossy:
            algorithm, tree = algorithm.lossless, tree or "values that are not rounded"
        if not call.length or not call.dtype.itemsize or (self.size == 1 and call.kind != "sum_terms"):
            work = Work(do_nothing, quiet=True)
        else:
            work = algorithm.work(call, op)
            if call.memory == UNREGISTERED and algorithm.copies_unregistered:
                notices.once(self.rank, algorithm.copies_unregistered)
        return PreparedCall(call, work, fingerprint(call, tree), tree)


def _sum_rows(algorithm: Algorithm, indices: np.ndarray, values: np.ndarray, op: Op) -> sparse_rows.Rows:
    """Return the sums of all ranks' rows. indices: ascending, distinct. values: 2-D, of an accumulator's dtype."""
    comm = algorithm.comm
    if comm.size == 1:
        return indices.copy(), values.copy()
    counts = chunked.counts(comm, indices.size)
    everyone = chunked.gather(comm, indices, counts)
    found, places = sparse_rows.merge_indices(everyone, counts)
    sums = np.zeros((found.size, values.shape[1]), values.dtype)
    if algorithm.dense_rows or sparse_rows.dense_is_cheaper(everyone.size, found.size, sums.nbytes):
        sums[places[comm.rank]] = values
        if sums.size:
            algorithm.reduce(sums.reshape(-1), op)
        return found, sums
    parts = np.split(chunked.gather(comm, values, counts), np.cumsum(counts)[:-1])
    for place, part in zip(places, parts, strict=True):
        sums[place] += part  # the indices of one rank are distinct
    op.finish(sums)
    return found, sums


def _run_flat(run: Callable[[Any], None], buffer: Any) -> None:
    run(buffer.reshape(-1, order="A"))


def _keep(held: dict[Any, Any], key: Any, value: Any) -> None:
    if len(held) > MOST_KNOWN:  # a job with ever new shapes
        held.clear()
    held[key] = value


children.guard(AllReduce, "__call__", "close")
