"""AllReduce, the base class of all backends: the methods that users call, and those that an algorithm writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.arrays import chunks, dtypes, gpu, ops, rows, trees, workspace
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part
from allreduce.arrays.workspace import Workspace
from allreduce.engine import call as records
from allreduce.engine.call import REDUCING, Call
from allreduce.engine.engine import CHECKS, NOTHING, AdmittedCall, Engine, Locate, Work
from allreduce.errors import (
    AllReduceError,
    ClosedError,
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
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport import chunked
from allreduce.transport.control import everywhere
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.deferred_free import free_later
from allreduce.transport.shared_segment import Location

BackendT = TypeVar("BackendT", bound="AllReduce")
PartT = TypeVar("PartT", bound="Topology | AllReduce")
OUT_OF_STEP = (CollectiveTimeoutError, RankLeftError, RankLostError)  # after these errors the ranks can't agree


class Config(NamedTuple):
    """The arguments of create(): `create(config.name, topology, **config.options)` creates an equal backend."""

    name: str
    options: dict[str, Any]


class Hooks(NamedTuple):
    """A backend's hooks, for composed backends and wrappers, which call them inside their own calls.

    Hooks neither check arguments nor compare them between ranks: the outer call has done both. AllReduce documents
    the methods.

    owners: by id, the arrays that own memory in which the algorithm reduces without a copy. An entry is removed when
        its array is freed.
    """

    owners: dict[int, Any]
    allocate: Callable[[int, np.dtype, str | None], Any]
    memory: Callable[[Any], int]
    locate: Callable[[Any], Location | None]
    resolve: Callable[[str, np.dtype], Op]
    route: Callable[[Call], Work]
    locator_for: Callable[[Call], Locate | None]
    reduce: Callable[[np.ndarray, Op], None]
    tree_buffer: Callable[[trees.Group], Any]


class Phases(NamedTuple):
    """The two phases of a TwoPhase backend, unchecked like `Hooks`."""

    reduce_scatter: Callable[[np.ndarray, Op], None]
    all_gather: Callable[[np.ndarray], None]


class NodeArrays(NamedTuple):
    """The arrays of a node's ranks at one place of memory from `allocate`, this rank's is `arrays[rank]`.

    fence: barrier of these ranks; needed before others' arrays are read, and after they are written. None: one rank.
    """

    arrays: Sequence[np.ndarray]
    rank: int
    fence: Callable[[], None] | None


class AllReduce(ABC):
    """An AllReduce algorithm on the ranks of a topology.

    topology: a `Topology`; the backend creates its own communicator from it.
    check: how the ranks compare shape, dtype, op and memory of their arrays. "first": in every call, in shared memory
        on one node, by one small all-reduce on several; the first call of each signature costs one more message.
        "always": every call costs this additional message. "never": calls are not compared, and cost no message.
        If the ranks differ, all raise the same DisagreementError, before anything is changed.

    Creating, `allocate`, calling and `close` are collective: every rank does them, in the same order.
    """

    sums = True  # False: the backend has only its own operation (adasum) and can't average gradients
    sums_half = True  # False: float16 and bfloat16 raise UnsupportedDtypeError
    by_array = False  # True: each array of a tree is reduced separately, not all in one buffer
    one_node = False  # True: all ranks must be on one node
    needs_gpu = False  # True: a GPU for each rank is needed
    between_nodes = False  # True: takes `compress`, and compresses only messages between nodes (on several nodes)
    copies_unregistered = ""  # the notice for arrays not from `allocate`, if they are copied; "" if they are not

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        if check not in CHECKS:
            raise OptionError(f"check={check!r} is unknown; use one of {', '.join(CHECKS)}")
        self.check, self.name = check, type(self).__name__
        self.config: Config | None = None  # set by create(): recreates this backend on other ranks
        self.owns_topology = False  # set by create() if it has created the topology
        self.part_of: AllReduce | None = None  # set by the backend that has created this one for its own calls
        self.workspace = Workspace()
        self._pinned = Workspace(gpu.pinned)
        # (shape, dtype, op, memory) -> function that runs the call, for NumPy arrays in C order
        self._known: dict[tuple, Callable[[Any], None]] = {}
        self.packed: dict[Any, Any] = {}  # (dtype, device) -> buffer into which the arrays of trees are packed
        self._layouts: dict[trees.Key, trees.Layout] = {}
        self._parts: list[Topology | AllReduce] = []
        try:
            self._connect_together(topology)
        except Exception as error:
            topology.unregister(self)  # a topology must not close or abandon an incomplete user
            if everywhere(error, topology.world):
                self._release()
            raise

    def _connect_together(self, topology: Topology) -> None:
        """Do `_connect`; an error of one rank is raised on all: a backend exists on all its ranks or on none.

        The ranks agree after the last step. If a rank fails while others wait for it in a later step of `_connect`, it
        waits LONE_SECONDS for them (they may only be slow), and raises its error alone.
        """
        error: Exception | None = None
        try:
            with topology.detector.translating_failures():
                self._connect(topology)
        except OUT_OF_STEP:
            raise
        except Exception as met:
            if topology.closed or everywhere(met, topology.world):
                raise
            error = met
        topology.agree([], f"create {type(self).__name__}", error)

    def _connect(self, topology: Topology) -> None:
        """Create everything that depends on the ranks; subclasses extend this. Collective. `abandon` drops it."""
        self._owners: dict[int, Any] = {}  # see Hooks; read in every call, because `_memory` is slower
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self._engine = Engine(topology, self, self.check)
        self._comm = self._engine.comm
        self.closed = False

    # What users call: memory

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        """Return a zeroed 1-D array of `length` elements that this backend reduces without a copy. Collective.

        A contiguous slice of the array is reduced without a copy, too. NumPy arrays are 64-byte aligned, so XLA (JAX)
        uses them without a copy. device: "cpu" for a NumPy array, "cuda" for a CuPy array; by default the one that
        this backend reduces without a copy.
        """
        array = self.allocate_scratch(length, dtype, device)
        if length:
            self.describe(array)
        return array

    def allocate_scratch(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        """As `allocate`, for arrays that hold other values in each call: a compression keeps no error feedback for
        them. Collective.
        """
        self.check_open()
        call: Call | None = None
        array, error = None, None
        try:
            self.check_dtype(dtypes.parse(dtype))
            call = records.allocation_call(length, dtype, device)
        except AllReduceError as refused:
            error = refused
        asked = f"allocate({length!r}, {dtype!r}, device={device!r})"
        self._engine.agree(records.agreement_values(call, 0), asked, error)
        assert call is not None
        try:
            array = self._allocate(call.length, call.dtype, device)
        except MemoryError as lacking:
            error = UnavailableError(f"this rank has no memory for {length} elements of {dtype}: {lacking}")
        self._engine.agree([], f"allocate({length!r})", error)
        return array

    # What users call: the state of a compression; without one there is none

    def describe(self, array: Any, parts: Sequence[Part] = (), whole: bool = True) -> None:
        """Say which slices of an array from `allocate` are which parameters of a model. Local; the same on all ranks.

        array: 1-D. parts: `allreduce.Part(name, start, shape)`: elements from `start` are an array of `shape` in C
        order. A compression treats matrices and biases differently ("powersgd:4" needs the shapes); other backends
        ignore it. whole: False: other arrays have other parts of the model, so a parameter that the compression names
        may be there. Raises OptionError for parts that overlap or lie outside of the array.
        """
        for part in _by_name(self._parts).values():
            part.describe(array, parts, whole)

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        """Return a copy of this rank's state: the error feedback of a compression. {} without one. Local.

        array: the state of this array from `allocate` only. The state belongs to the training state: other ranks have
        other values, and training continues differently without it.
        """
        parts = _by_name(self._parts)
        return {f"{name}/{key}": held for name, part in parts.items() for key, held in part.state(array).items()}

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        """Load a result of `state` of an equal backend with equal arrays; state that it lacks becomes zero. Local; on
        all ranks before their next call.

        array: load the state of this array only. Raises OptionError for another backend's, and changes nothing.
        """
        parts = _by_name(self._parts)
        found: dict[str, dict[str, np.ndarray]] = {name: {} for name in parts}
        for key, held in state.items():
            name, _, rest = key.partition("/")
            if name not in parts:
                raise OptionError(f"{self!r} has no state {key!r}: it is of another backend or compression")
            found[name][rest] = held
        before: dict[str, dict[str, np.ndarray]] = {}
        try:
            for name, part in parts.items():
                kept = part.state(array)
                part.load_state(found[name], array)
                before[name] = kept
        except OptionError:
            for name, kept in before.items():
                parts[name].load_state(kept, array)
            raise

    def reset(self, array: Any = None) -> None:
        """Set the error feedback of a compression, of one array or of all, to zero, as in a new backend. Local; on all
        ranks before their next call."""
        for part in _by_name(self._parts).values():
            part.reset(array)

    def hand_over(self, buffer: np.ndarray, kept: slice) -> None:
        """Add the error feedback of the elements of `buffer` outside of `kept` to it, in its first call since
        `load_state`. Local.

        For a backend that contains this one, before it sums `buffer` with other ranks that send these elements.
        """
        for part in _by_name(self._parts).values():
            part.hand_over(buffer, kept)

    # What users call: sums

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        """Reduce `buffer` over all ranks, in place: afterwards all ranks hold the same bits. Collective.

        buffer: a contiguous, writable NumPy or CuPy array, or a nested list, tuple or dict of such arrays, which are
            packed by dtype and reduced together. Shapes and dtypes must be equal on all ranks. Arrays from `allocate`
            are reduced without a copy; others are copied if the backend needs it.
        op: "sum", "mean" or "average" (of floating dtypes), "max", "min" or "prod". float16 and bfloat16 are
            summed in float32 and rounded once. Integer sums wrap around. For bool, sum and max are "logical or", prod
            and min "logical and".

        Raises a named AllReduceError on all ranks, before anything is changed, when an array can't be reduced or the
        ranks disagree.
        """
        run = None
        if type(buffer) is np.ndarray and buffer.flags.carray:  # the usual case, at the cost of one look-up
            base = buffer.base
            memory = UNREGISTERED if base is None else ALLOCATED if id(base) in self._owners else self._memory(buffer)
            try:  # noqa: SIM105, suppress() would cost as much as the look-up
                run = self._known.get((buffer.shape, buffer.dtype, op, memory))
            except TypeError:  # an op that is not hashable; _admit raises its error
                pass
        if run is None:
            if isinstance(buffer, trees.KINDS):
                self.reduce_tree(buffer, op)
                return
            run = self._function("all_reduce", buffer, op)[1]
            buffer = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # not a subclass of ndarray
        run(buffer if buffer.ndim == 1 else buffer.reshape(-1, order="A"))

    def bind(self, array: Any, op: str = "mean", kind: str = "all_reduce") -> Callable[[], None]:
        """Return a function that reduces `array` in place, with less overhead than a call. Collective.

        Like MPI's persistent collectives: the arguments are checked and agreed on once, here. Calling the function is
        collective, and the ranks compare it like any other call. The function holds a reference to the array, and works
        until the backend is closed.

        kind: "all_reduce"; "reduce_scatter" of a TwoPhase, which leaves this rank's part of the result in
            `array[reduce.owned(array.size)]`; or "all_gather", which has no op.
        """
        self.check_open()
        admitted, _ = self._function(kind, array, op)
        if self.check == "always":
            return partial(self, array, op) if kind == "all_reduce" else partial(self._run_phase, kind, array, op)
        array = np.asarray(array) if isinstance(array, np.ndarray) else array
        return self._engine.bind(admitted, array.reshape(-1, order="A"))

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

        Algorithm: each rank adds its duplicate rows. Indices and rows are all-gathered, and every rank adds them in
        rank order. If the ranks pass at least twice as many rows as there are distinct indices, and the sums have at
        least 1 MiB, the backend reduces the distinct rows as one dense array instead (zeros for rows that a rank
        lacks). (2 to 4 ranks, 64 to 16384 rows of 8 to 256 elements: below 1 MiB neither way was clearly faster. Above,
        gathering took 0.6 to 1 times as long as reducing at 1.7 rows for each distinct index, the same time at 2.1, and
        1.1 to 1.6 times as long when all ranks passed the same indices.)

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

    # What users call: arrays that are copied between ranks

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite `array` on every rank with rank `root`'s array. Collective.

        array: an array or tree as in `__call__`, with the same shapes and dtypes on all ranks; any dtype without
            references to Python objects.
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
        """Return all ranks' arrays stacked: a new NumPy array of shape (size, *array.shape), on every rank. Collective.

        array: an array, or a number, of the same shape and dtype on all ranks, of any dtype as in `broadcast`; or a
            tree of arrays, which gives a tree. It is not changed. The result is a NumPy array also for a CuPy array.
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
        rows, row = table.reshape(-1), table[0].size
        slices = [slice(row * rank, row * (rank + 1)) for rank in range(self.size)]
        self._engine.run(call, op, lambda *_: chunked.spread(self._comm, rows, slices), table)
        return table

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """Reduce `buffer` over all ranks; return this rank's `owned` slice of the result, a view. Collective.

        buffer: a contiguous 1-D array, as for a call. Elements outside the view are undefined afterwards. 16-bit floats
        are summed in float32 and rounded once. Raises OptionError on all ranks if the backend is not a TwoPhase.
        """
        self._run_phase("reduce_scatter", buffer, op)
        return buffer[self.owned(buffer.size)]

    def all_gather(self, buffer: np.ndarray) -> None:
        """Fill `buffer` on every rank from the slices that the ranks own (see `owned`), in place. Collective.

        buffer: a contiguous 1-D array of the same length and dtype on all ranks, of any dtype as in `broadcast`;
        elements outside this rank's `owned` slice are overwritten.
        """
        self._run_phase("all_gather", buffer)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return the slice of a buffer of `length` elements that `rank` owns (default: this rank). Local."""
        return chunks.chunk(length, self.size, self.rank if rank is None else rank)

    # What users call: trees of arrays

    def reduce_tree(self, tree: Any, op: str) -> None:
        """Reduce all arrays of a tree in place. Collective."""
        arrays: list[Any] = []
        structure = trees.flatten(tree, arrays)
        _overwrite(arrays, self.on_arrays("all_reduce", structure, arrays, op, changes=True))

    def reduced(self, tree: Any, op: str = "mean") -> Any:
        """Return a tree of reduced arrays; `tree` is not changed. Collective.

        The new arrays are views of the backend's memory, valid until its next call with a tree.
        """
        arrays: list[Any] = []
        structure = trees.flatten(tree, arrays)
        return trees.rebuild(tree, self.on_arrays("all_reduce", structure, arrays, op))

    def on_arrays(
        self, kind: str, structure: str, arrays: Sequence[Any], op: str = "sum", root: int = 0, changes: bool = False
    ) -> list[Any]:
        """Run a collective on a list of arrays, packed into one buffer per dtype; return each result. Collective.

        kind: "all_reduce", "broadcast" or "stack". structure: from trees.flatten; equal on all ranks, as the arrays'
        shapes and dtypes. changes: the caller overwrites the arrays with the results, so they must be writable. Results
        of "stack" are new arrays; others are views of the backend's memory, valid until its next call with a tree.
        """
        layout = self._admit_tree(kind, structure, arrays, op, changes)
        found: list[Any] = [None] * len(arrays)
        for group in layout.groups:
            parts = [part for _, part, _ in group.places] if self.by_array else [slice(None)]
            with self._engine.working_on(layout):
                buffer = self._tree_buffer(group)
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

    # Queries

    def chosen(self, array: Any) -> str:
        """Return the name of the backend that reduces `array`: this backend, or the one that "auto" selects. Local."""
        return self.name

    @property
    def exact(self) -> "AllReduce":
        """The backend for values that must not be rounded: this one, or an uncompressed one inside of it. Local."""
        return self

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        """Return the arrays of all ranks of this node like `buffer`, a 1-D array from `allocate`; None if they share no
        memory. Local."""
        return None

    def two_phase(self, buffer: np.ndarray) -> "TwoPhase | None":
        """Return the backend that reduces `buffer` in two phases: this one, or the one that "auto" selects; or None.
        Collective."""
        return None

    def sent(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in which arrays of `dtype` are sent: another one only under compression. Local."""
        return dtype

    @cached_property
    def hooks(self) -> Hooks:
        """This backend's hooks, for backends and wrappers that contain it."""
        memory = self._owners, self._allocate, self._memory, self._locate
        return Hooks(*memory, self._resolve, self._route, self._locator_for, self._reduce, self._tree_buffer)

    def tag(self) -> int:
        """Return the message tag of the running call. Local."""
        return self._engine.tag() if self.part_of is None else self.part_of.tag()

    def check_dtype(self, dtype: np.dtype) -> None:
        """Raise UnsupportedDtypeError if this backend can't reduce arrays of `dtype`. Local."""
        if dtype not in dtypes.TYPES:
            raise dtypes.unsupported(dtype)
        if dtypes.is_half(dtype) and not self.sums_half:
            raise UnsupportedDtypeError(
                f"{self.name} does not reduce {dtype}: MPI libraries' sums of 16-bit floats are unreliable; "
                'use "auto", "shared" or "ring", which sum them in float32'
            )

    def check_open(self) -> None:
        """Raise the error of a backend that is closed or broken. Local."""
        if self._engine.broken is not None:
            self._engine.refuse()
        if self.closed:
            raise ClosedError(f"{self.name} is closed; create a new one")

    # Ends

    def close(self) -> None:
        """Free communicators and scratch memory. Collective; closing twice does nothing.

        Arrays from `allocate` that are still in use stay valid. After a failed rank or a broken call, `close` does
        `abandon` instead.
        """
        if self.closed:
            return
        if self._engine.broken is not None:  # the other ranks may be in any call
            self.abandon()
            return
        try:
            self._close_together()
        except Exception as error:
            if self.topology.detector.failure_behind(error) is None:
                raise
            self.abandon()
        if self.owns_topology:
            self.topology.close()

    def _close_together(self) -> None:
        self._engine.agree([], f"close() of {self.name}")
        self.closed = True
        self._close()
        self._release()

    def _release(self) -> None:
        """Close the parts, and free the communicators. Collective."""
        for part in reversed(self._parts):
            part.close()
        self._forget()
        if "_engine" in vars(self):  # else `_connect` has failed before
            self._engine.close()

    def abandon(self) -> None:
        """Drop all resources without communicating, because ranks may have failed. Local.

        Memory that MPI or a late rank may still write to is freed later.
        """
        self.closed = True
        free_later((self.workspace, self._pinned))  # unfinished messages may still write there
        self.workspace, self._pinned = Workspace(), Workspace(gpu.pinned)
        self._engine.stop()
        self._forget()
        for part in self._parts:
            part.abandon()

    def _add_part(self, part: PartT) -> PartT:
        """Return `part`, a backend or topology created for this backend's own calls, and close it with this one."""
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
        if kind is None:  # after an exception the other ranks may not reach a collective close
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            f"the backend {self.name!r} can't be copied or pickled: its communicators belong to this process. "
            "Keep `backend.config`: create(config.name, topology, **config.options) makes another, on all ranks"
        )

    def __repr__(self) -> str:
        return f"<{self.name} on {self.topology}>"

    # Hooks that an algorithm implements: `_reduce` is required, the others have defaults

    @abstractmethod
    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce a 1-D array in place. There are at least 1 element and 2 ranks. Collective."""

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device != "cuda":
            return workspace.zeros(length, dtype)
        gpu.choose_device(self.topology.node_rank)
        return gpu.cupy().zeros(length, dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        """Return ALLOCATED if `buffer` lies in memory from `_allocate`, else UNREGISTERED. Local.

        Called only for views; an array that owns its memory is UNREGISTERED.
        """
        return UNREGISTERED

    def _locate(self, buffer: np.ndarray) -> Location | None:
        """Return the location of an array in memory from `allocate`; None for other arrays, and for backends that do
        not use locations. Local.
        """
        return None

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        """Return the Op named `op` for `dtype`. Raises UnsupportedOpError. Local."""
        return ops.resolve(op, dtype, self.size)

    def _route(self, call: Call) -> Work:
        """Return the function that does all_reduce for calls like `call`. Called once per signature, on all ranks."""
        if call.length == 0 or self.size == 1:
            return NOTHING
        self._say_copies(call)
        return self._reduce_gpu if call.memory == GPU else self._reduce

    def _locator_for(self, call: Call) -> Locate | None:
        """Return `_locate` if the engine must compare locations between ranks: `_reduce` needs equal locations and does
        not compare them on all ranks itself. Otherwise None. Called after `_route`.
        """
        return None

    def _gather_work_for(self, call: Call) -> Work:
        """Return the function that does all_gather for calls like `call`."""
        slices = self._owned_slices(call.length)
        return lambda buffer, _: chunked.spread(self._comm, buffer, slices)

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """Return the seconds of a call by a formula, which the docstring gives with its source. "auto" selects the
        cheapest algorithm. By default the cost is not known, and the algorithm is not selected.
        """
        return float("inf")

    def _close(self) -> None:  # noqa: B027, most hold nothing else
        """Free the algorithm's own resources. Collective.

        `close` frees `_comm`, `workspace` and the parts registered by `_add_part`.
        """

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        """Reduce a 1-D CuPy array in place, staged through pinned host memory."""
        everything = slice(None)
        self._stage(buffer, everything, lambda host: self._reduce(host, op), everything)

    def _stage(self, buffer: Any, read: slice, work: Callable[[np.ndarray], object], written: slice) -> None:
        """Do `work` on a copy of a 1-D CuPy array in pinned host memory, for algorithms of the CPU.

        read, written: the parts of the array that are copied to the host before, and to the GPU after.
        """
        host = self._pinned.array("staged", buffer.size, buffer.dtype)
        buffer[read].get(out=host[read])  # waits for the current stream, so the GPU has finished writing
        work(host)
        buffer[written].set(host[written])
        gpu.synchronize()  # the host memory is used again in the next call

    def _spread_owned(self, buffer: np.ndarray) -> None:
        """Overwrite the slices of `buffer` that other ranks own with theirs, by MPI: an all-gather."""
        chunked.spread(self._comm, buffer, self._owned_slices(buffer.size))

    def _owned_slices(self, length: int) -> list[slice]:
        return [self.owned(length, rank) for rank in range(self.size)]

    def _say_copies(self, call: Call) -> None:
        """Log once that arrays not from `allocate` are copied, if this backend copies them. Local."""
        # a part of another backend does not report
        if call.memory == UNREGISTERED and self.copies_unregistered and self.part_of is None:
            notices.once(self.rank, self.copies_unregistered)

    # From a call to the engine: this rank's arguments are checked, then the ranks agree on them

    def _admit(self, kind: str, array: Any, op: str = "sum", root: int | None = None) -> tuple[Call, Op]:
        """Return the Call and the Op, after checking them and, for a new signature, agreeing on them. Collective."""

        def describe() -> tuple[Call, Op]:
            if kind == "reduce_scatter" and not isinstance(self, TwoPhase):
                raise OptionError(f'{self.name!r} has no reduce_scatter; use a TwoPhase backend, such as "ring"')
            call = records.array_call(kind, array, op, self._memory_kind(array))
            if root is not None:
                call = call._replace(root=records.check_root(root, self.size))
            if not call.reduces:
                return call, ops.OPS["sum"]
            self.check_dtype(call.dtype)
            resolved = self._resolve(op, call.dtype)
            return call._replace(op=resolved.name), resolved  # no alias: all ranks compare one name

        return self._agree_on(describe)

    def _agree_on(self, describe: Callable[[], tuple[Call, Op]]) -> tuple[Call, Op]:
        """Return the Call and the Op that `describe` returns, after all ranks have agreed on them.

        Collective for a new signature. If `describe` raises an AllReduceError on one rank, all ranks raise it.
        """
        self.check_open()
        abort.register_thread()
        error, call, resolved = None, None, ops.OPS["sum"]
        try:
            call, resolved = describe()
        except AllReduceError as refused:
            error = refused
        self._engine.agree_once(call, call, records.agreement_values(call, resolved.code), error)
        assert call is not None
        return call, resolved

    def _function(self, kind: str, buffer: Any, op: str) -> tuple[AdmittedCall, Callable[[Any], None]]:
        """Return the record of a call of this kind with `buffer`, and the function that runs it.

        Collective for a new signature. The function is cached in `_known`.
        """
        call, resolved = self._admit(kind, buffer, op)
        work = self._work(call)
        admitted = self._engine.admit(call, resolved, work, self._locator_for(call))
        run = self._engine.prepare(admitted)
        if self.check != "always" and call.layout == "C":
            for name in (op, resolved.name):
                key = call.shape, call.dtype, name, call.memory
                self._known[key if kind == "all_reduce" else (*key, kind)] = run
        return admitted, run

    def _run_phase(self, kind: str, buffer: Any, op: str = "sum") -> None:
        """Run a call of one phase, as __call__ does for an all_reduce."""
        run = None
        if type(buffer) is np.ndarray and buffer.flags.carray and isinstance(op, str):
            run = self._known.get((buffer.shape, buffer.dtype, op, self._memory_kind(buffer), kind))
        if run is None:
            run = self._function(kind, buffer, op)[1]
        run(buffer)

    def _work(self, call: Call) -> Work:
        """Return the function that does calls like `call`. Errors are raised on all ranks: they have agreed on it."""
        if call.kind == "all_reduce":
            return self._route(call)
        if call.kind not in ("reduce_scatter", "all_gather"):
            raise OptionError(f'{call.kind} is not for bind(); use "all_reduce", "reduce_scatter" or "all_gather"')
        if isinstance(self, TwoPhase) and call.kind == "reduce_scatter":  # `_admit` has refused it for others
            work = self._scatter_work_for(call)
        else:
            work = self._gather_work_for(call)
        return work if call.length and call.dtype.itemsize and self.size > 1 else NOTHING

    def _memory_kind(self, buffer: Any) -> int:
        if gpu.is_gpu_array(buffer):
            return GPU
        view = isinstance(buffer, np.ndarray) and buffer.flags.forc and buffer.base is not None
        return self._memory(buffer) if view else UNREGISTERED

    def _admit_tree(self, kind: str, structure: str, arrays: Sequence[Any], op: str, changes: bool) -> trees.Layout:
        """Return a tree's layout, after checking its arrays and, for a new tree, agreeing on them. Collective."""
        self.check_open()
        error: AllReduceError | None = None
        key = trees.key(structure, arrays)
        layout = self._layouts.get(key) or trees.layout(key)
        reduces = kind in REDUCING
        try:
            for array in arrays:
                records.check_array(array)
                if changes and not gpu.is_gpu_array(array) and not array.flags.writeable:
                    text = "an array of this tree is read-only, but would be changed in place; pass a copy"
                    raise NotAnArrayError(text)
            for group in layout.groups:
                if reduces:
                    self.check_dtype(group.dtype)
                    self._resolve(op, group.dtype)
                else:
                    dtypes.check_no_references(group.dtype)
        except AllReduceError as refused:
            error = refused
        self._engine.agree_once((key, str(op) if reduces else None), layout.text, [layout.number], error)
        self._layouts[key] = layout
        return layout

    def _tree_buffer(self, group: trees.Group) -> Any:
        """Return a buffer for a group of a tree's arrays. Collective when it grows.

        It is allocated memory if the backend reduces the dtype. A compression keeps no error feedback for it: the next
        call may have another tree.
        """
        held = self.packed.get((group.dtype, group.device))
        if held is None or held.size < group.length:
            try:
                self.check_dtype(group.dtype)
                held = self.allocate_scratch(group.length, group.dtype, group.device)
            except UnsupportedDtypeError:  # such arrays are only copied between ranks
                held = (gpu.cupy() if group.device == "cuda" else np).empty(group.length, group.dtype)
            self.packed[group.dtype, group.device] = held
        return held[: group.length]

    def _admit_rows(self, indices: Any, values: Any, table_rows: int, op: str) -> tuple[Call, Op, rows.Rows]:
        """As `_admit`, for a sparse sum; also return this rank's rows without duplicates."""
        found: list[rows.Rows] = []

        def describe() -> tuple[Call, Op]:
            given = rows.checked(indices, values, table_rows)
            if values.dtype not in dtypes.TYPES:
                raise dtypes.unsupported(values.dtype)
            resolved = self._resolve(op, values.dtype)
            if resolved.name not in rows.OPS:
                raise UnsupportedOpError(f'sparse() takes op "sum" or "mean", not {op!r}')
            with np.errstate(all="ignore"):  # an overflow could raise on this rank alone
                found.append(rows.without_duplicates(*given, dtypes.TYPES[values.dtype].accumulator))
            shape = (int(table_rows), *values.shape[1:])
            length = int(np.prod(shape, dtype=object))
            return Call("sparse", length, values.dtype, resolved.name, UNREGISTERED, "C", shape), resolved

        return *self._agree_on(describe), found[0]

    def _add_rows(self, indices: np.ndarray, values: np.ndarray, op: Op) -> rows.Rows:
        """Return the sums of all ranks' rows. indices: ascending, distinct. values: 2-D, of an accumulator's dtype."""
        if self.size == 1:
            return indices.copy(), values.copy()
        counts = chunked.counts(self._comm, indices.size)
        everyone = chunked.gather(self._comm, indices, counts)
        found, places = rows.merge_indices(everyone, counts)
        sums = np.zeros((found.size, values.shape[1]), values.dtype)
        if rows.dense_is_cheaper(everyone.size, found.size, sums.nbytes):
            sums[places[self.rank]] = values
            if sums.size:
                exact = self.exact  # rows are not compressed
                (self._reduce if exact is self else exact.hooks.reduce)(sums.reshape(-1), op)
            return found, sums
        parts = np.split(chunked.gather(self._comm, values, counts), np.cumsum(counts)[:-1])
        for place, part in zip(places, parts, strict=True):
            sums[place] += part  # the indices of one rank are distinct
        op.finish(sums)
        return found, sums


class TwoPhase(AllReduce):
    """Base class of algorithms that do a reduce_scatter, then an all_gather. Each phase can also be called alone.

    Between the phases each rank holds the result of one slice of the buffer, `owned(length)`.
    """

    @cached_property
    def phases(self) -> Phases:
        """The two phases as hooks, for backends that contain this one."""
        return Phases(self._reduce_scatter, self._all_gather)

    def two_phase(self, buffer: np.ndarray) -> "TwoPhase | None":
        return self

    def _scatter_work_for(self, call: Call) -> Work:
        """Return the function that does reduce_scatter for calls like `call`."""
        return self._scatter_gpu if call.memory == GPU else self._scatter_rounded

    def _gather_work_for(self, call: Call) -> Work:
        self._say_copies(call)
        gather = self._gather_gpu if call.memory == GPU else self._all_gather
        return lambda buffer, _: gather(buffer)

    @abstractmethod
    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce this rank's `owned` slice of a 1-D array in place; other elements may be overwritten.

        Never called with 16-bit floats unless the algorithm overrides `_scatter_rounded`.
        """

    @abstractmethod
    def _all_gather(self, buffer: np.ndarray) -> None:
        """Copy every rank's `owned` slice to all ranks; any dtype."""

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._scatter_rounded(buffer, op)
        self._all_gather(buffer)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        """reduce_scatter of any dtype: 16-bit floats are sent as float32 sums, and rounded by their owner."""
        accumulator = dtypes.TYPES[buffer.dtype].accumulator
        if accumulator == buffer.dtype:
            self._reduce_scatter(buffer, op)
            return
        wide = self.workspace.array("wide", buffer.size, accumulator)
        np.copyto(wide, buffer)
        self._reduce_scatter(wide, op)
        mine = self.owned(buffer.size)
        np.copyto(buffer[mine], wide[mine], casting="unsafe")

    def _scatter_gpu(self, buffer: Any, op: Op) -> None:
        mine = self.owned(buffer.size)
        self._stage(buffer, slice(None), lambda host: self._scatter_rounded(host, op), mine)

    def _gather_gpu(self, buffer: Any) -> None:
        self._stage(buffer, self.owned(buffer.size), self._all_gather, slice(None))


def _by_name(parts: "Sequence[Topology | AllReduce]") -> dict[str, AllReduce]:
    """Return the backends among the parts of a backend, by name; a second "ring" is "ring 2". Local."""
    found: dict[str, AllReduce] = {}
    for part in parts:
        if isinstance(part, AllReduce):
            same = sum(name.split(" ")[0] == part.name for name in found)
            found[f"{part.name} {same + 1}" if same else part.name] = part
    return found


def _overwrite(arrays: Sequence[Any], changed: Sequence[Any]) -> None:
    for array, new in zip(arrays, changed, strict=True):
        array[...] = new


children.guard(AllReduce, "__call__", "check_open", "close")
