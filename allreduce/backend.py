"""Seam 1: what a backend is. Everything that backends share is written once, here."""

from abc import abstractmethod
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices, trees
from allreduce.arrays import dtypes, gpu, ops, workspace
from allreduce.arrays.memory_kinds import FOREIGN, GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.engine.call import Signature, allocation_row, inspect, numbers
from allreduce.engine.engine import Call, Calls, Find, Place, Reduction
from allreduce.engine.same_data import SameData
from allreduce.errors import AllReduceError, ClosedError, CopyError, OptionError, UnavailableError
from allreduce.health import abort
from allreduce.moves import nothing_to_do
from allreduce.process import children
from allreduce.sparse import Sparse
from allreduce.topology import Topology
from allreduce.transport.deferred_free import keep

BackendT = TypeVar("BackendT", bound="AllReduce")
CHECKS = ("first", "always", "never")
LARGEST = 2**40 - 1  # elements; no machine has the memory


class Recipe(NamedTuple):
    """What create() was asked for: `create(recipe.name, topology, **recipe.options)` makes it again."""

    name: str
    options: dict[str, Any]


class AllReduce(Sparse):
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
        self._agreed: set[Any] = set()  # what calls are known by: their signatures
        self._known: dict[tuple, Call] = {}  # what __call__ looks up: plain arrays in C order
        self.packed: dict[Any, Any] = {}  # where the arrays of trees are put together
        self.layouts: dict[Any, trees.Layout] = {}
        with topology.watch.hearing():
            self._connect(topology)

    def _connect(self, topology: Topology) -> None:
        """Make all that depends on the ranks; algorithms add theirs. Collective. `abandon` drops it."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self._calls = Calls(topology, self, compare=self.check != "never")
        self._same_data = SameData(self._calls, self.rank, looks=self.size > 1 and self.check != "never")
        self._comm = topology.private(self, self._calls.wait)  # data
        self.closed = False

    # What users call

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        """A zeroed 1-D array of `length` elements where this backend reduces without a copy. Collective.

        Of NumPy, its address is divisible by 64, so that XLA (JAX), too, works on it without copying.
        device: "cpu" for a NumPy array, "cuda" for a CuPy array; by default whichever this backend
        reduces where it is. A slice of the array is as good as the whole: it is reduced in place too.
        """
        self._check_allocation(length, dtype, device)
        array, error = None, None
        try:
            array = self._allocate(int(length), dtypes.parse(dtype), device)
        except MemoryError as lacking:
            error = UnavailableError(f"this rank has no memory for {length} elements of {dtype}: {lacking}")
        self._calls.agree([], f"allocate({length!r})", error)
        return array

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
        call = None
        if type(buffer) is np.ndarray and buffer.flags.carray:  # the usual case, at the cost of one look-up
            try:  # noqa: SIM105, suppress() would cost as much as the look-up
                call = self._known.get((buffer.shape, buffer.dtype, op, self._memory(buffer)))
            except TypeError:  # an op that can't be a key; _admit refuses it by name
                pass
        if call is None:
            if isinstance(buffer, trees.KINDS):
                trees.reduce(self, buffer, op)
                return
            call = self._admit(buffer, op)
            buffer = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # no subclass of it
        self._calls.run(call, call.reduce, buffer if buffer.ndim == 1 else buffer.reshape(-1, order="A"))

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

    def close(self) -> None:
        """Free communicators, windows and scratch memory. Collective; closing twice does nothing.

        Arrays from `allocate` that are still in use stay valid. When a rank was lost, this is `abandon`.
        """
        if self.closed:
            return
        if self._calls.broken is not None:  # the other ranks may be anywhere
            self.abandon()
            return
        try:
            self._close_together()
        except Exception as error:
            if self.topology.watch.loss_of(error) is None:
                raise
            self.abandon()
        if self.owns_topology:
            self.topology.close()

    def _close_together(self) -> None:
        self._calls.agree([], f"close() of {self.name}")
        self.closed = True
        self._close()
        self._forget()
        self.topology.release(self._comm, self)
        self._calls.close()

    def abandon(self) -> None:
        """Let go of everything without the other ranks, who may be lost. Local; what they share stays to the end."""
        self.closed = True
        keep((self.workspace, self._pinned))  # messages that are still under way write there
        self.workspace, self._pinned = Workspace(), gpu.Pinned()
        self._forget()

    def _forget(self) -> None:
        self._agreed.clear()
        self._known.clear()
        self.packed.clear()
        self.layouts.clear()
        self.workspace.clear()
        self._pinned.clear()

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

    # What an algorithm writes

    @abstractmethod
    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce a 1-D array in place; length and number of ranks are at least 1 and 2."""

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device != "cuda":
            return workspace.zeros(length, dtype)
        gpu.choose_device(self.topology.node_rank)
        return gpu.cupy().zeros(length, dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        """ALLOCATED for an array, or a slice of one, that `_allocate` gave and that is reduced where it is."""
        return FOREIGN

    def _place(self, buffer: np.ndarray) -> Place | None:
        """Where in memory from `allocate` the array begins; None for other arrays, and where it does not matter."""
        return None

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        """The operation called `op` for arrays of `dtype`, or the error that says why there is none."""
        return ops.resolve(op, dtype, self.size)

    def _route(self, signature: Signature) -> Reduction:
        """What reduces arrays of this signature; asked once for each."""
        if signature.length == 0 or self.size == 1:
            return nothing_to_do
        self._say_copies(signature)
        return self._reduce_gpu if signature.memory == GPU else self._reduce

    def _finding(self, signature: Signature) -> Find | None:
        """What tells the place of an array in memory from `allocate`, where `_reduce` needs the same place on all ranks
        and does not itself compare it on all of them. Asked after `_route`."""
        return None

    def _say_copies(self, signature: Signature) -> None:
        """Say once that arrays in such memory are copied, where they are. Local."""
        if signature.memory == FOREIGN and self.copies_foreign and self.part_of is None:  # "auto" knows why
            notices.once(self.rank, self.copies_foreign)

    def _tag(self) -> int:
        """Of the messages of the call that is under way."""
        return self._calls.tag() if self.part_of is None else self.part_of._tag()

    def _close(self) -> None:
        """Free what the algorithm holds besides `_comm` and `workspace`. Collective."""

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        """Reduce a 1-D CuPy array: by way of pinned host memory, for algorithms of the CPU."""
        host = self._pinned.like(buffer)
        buffer.get(out=host)  # waits for the current stream, so the GPU has finished writing
        self._reduce(host, op)
        buffer.set(host)
        gpu.synchronize()  # the host memory is used again in the next call

    # Checks

    def _admit(self, buffer: Any, op: str, call: str = "all_reduce") -> Call:
        """Check this rank's arguments, and agree about them with the other ranks where that is due.

        Whether an agreement is due depends on nothing but the signatures seen so far, which are the same
        on all ranks as long as they have agreed; so all ranks come to it, or none.
        """
        self._check_open()
        abort.communicates()
        error, signature, resolved = None, None, None
        try:
            signature = inspect(buffer, op, self._where(buffer), call)
            self._check_dtype(signature.dtype)
            resolved = self._resolve(op, signature.dtype)
            signature = signature._replace(op=resolved.name)  # one name, by which all ranks know it
        except AllReduceError as refused:
            error = refused
        self._agree_once(signature, signature, numbers(signature, resolved), error)
        assert signature is not None
        assert resolved is not None
        reduction = self._calls.quiet(self._route(signature))
        admitted = self._calls.admit(Call(signature, reduction, resolved, find=self._finding(signature)))
        admitted.reduce = self._same_data.first(admitted, admitted.reduce)
        if self.check != "always" and (signature.layout, signature.call) == ("C", "all_reduce"):
            self._known[signature.key()] = self._known[signature._replace(op=op).key()] = admitted  # by all names
        return admitted

    def _agree_once(self, key: Any, text: object, values: list[int], error: AllReduceError | None) -> None:
        """Agree on `values` with the other ranks, where that is due for a call that is known by `key`."""
        if self.check == "always" or (self.check == "first" and (error or key not in self._agreed)):
            text = f"refused, {type(error).__name__}: {error}" if error else text
            self._calls.agree(values, str(text), error)
        if error is not None:
            raise error
        self._agreed.add(key)

    def _where(self, buffer: Any) -> int:
        if gpu.is_gpu_array(buffer):
            return GPU
        contiguous = isinstance(buffer, np.ndarray) and buffer.flags.forc
        return self._memory(buffer) if contiguous else FOREIGN

    def _check_open(self) -> None:
        if self._calls.broken is not None:
            self._calls.refuse()
        if self.closed:
            raise ClosedError(f"{self.name} is closed; create it again to go on")

    def _check_dtype(self, dtype: np.dtype) -> None:
        if dtype not in dtypes.TYPES:
            raise dtypes.unsupported(dtype)
        if dtypes.is_half(dtype) and not self.sums_half:
            raise dtypes.UnsupportedDtypeError(
                f"{self.name} does not reduce {dtype}: sums of 16-bit floats in MPI are not dependable; "
                'use "auto", "shared", "ring" or another backend of ours, which sum them in float32'
            )

    def _check_allocation(self, length: int, dtype: DTypeLike, device: str | None) -> None:
        self._check_open()
        error, code = None, 0
        try:
            code = dtypes.TYPES[dtypes.parse(dtype)].code
            self._check_dtype(dtypes.parse(dtype))
            if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length <= LARGEST:
                raise OptionError(f"length must be an integer from 0 to {LARGEST}, got {length!r}")
            if device not in (None, "cpu", "cuda"):
                raise OptionError(f'device={device!r} is unknown; use "cpu", "cuda" or None')
        except AllReduceError as refused:
            error = refused
        size = int(length) if error is None else 0
        asked = f"allocate({length!r}, {dtype!r}, device={device!r})"
        self._calls.agree(allocation_row(size, code, device == "cuda"), asked, error)


children.guard(AllReduce, "__call__", "_check_open", "close")
