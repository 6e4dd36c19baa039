"""Auto: selects a backend for each call, by a measured table if this machine has one, else by a built-in rule.

With the built-in rule it tries other backends in the first calls (trials.py).
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.arrays import dtypes, ops
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Registry
from allreduce.backend import AllReduce, NodeArrays, TwoPhase
from allreduce.backends import trials
from allreduce.backends.decision_table import Rule, rule_for
from allreduce.backends.trials import Selection
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Trial, Work
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import STAGING_BYTES, Location

# Measured with Open MPI 5 and MPICH 5 on a 2-core EPYC, 2 to 4 ranks; used in `rule`.
SMALL_BYTES = 64 * 1024
SHARED_BYTES_PER_RANK = {ALLOCATED: 16 * 1024, UNREGISTERED: 64 * 1024}
SMALL = "native"  # for arrays below SMALL_BYTES
NUMBER = re.compile(r"(?<![^/])[0-9]+(?=/)")  # of an array, in the names of a state
LAST_RESORT = "ring"  # needs nothing but messages


def rule(topology: Topology, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
    """Return (backend name, reason) for a call. Depends on the arguments only, so all ranks select the same. Local."""
    if memory == GPU:
        return "nccl", "CuPy arrays"
    half = dtypes.is_half(dtype)
    if topology.nodes > 1:
        if nbytes < SMALL_BYTES and not half:
            return "native", f"below {_size(SMALL_BYTES)} the MPI library's latency wins"
        return "hierarchical_copy", f"{topology.nodes} nodes"
    if half:
        return "shared", "16-bit floats are summed in float32 while they are in the cache"
    least, most = SHARED_BYTES_PER_RANK[memory] * topology.size, STAGING_BYTES // topology.size
    if nbytes < least:
        return "native", f"below {_size(least)} the MPI library's latency wins"
    if memory == ALLOCATED:
        return "shared", "one node: the ranks reduce in the memory that they share"
    if topology.cma.works:
        return "shared", "one node: the ranks reduce in each other's memory"
    if nbytes <= most:
        return "shared", f"arrays not from allocate(), up to {_size(most)}: staged in memory that the ranks share"
    return "ring", f"arrays not from allocate(), above {_size(most)}: no staging, each byte is copied once"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def candidates(topology: Topology, dtype: np.dtype, memory: int) -> list[str]:
    """Return the names of the backends that a trial compares, for NumPy arrays. The same on all ranks. Local."""
    names = ["hierarchical_copy" if topology.nodes > 1 else "shared"]
    if not dtypes.is_half(dtype):
        names.append("native")
    if topology.nodes == 1 and memory == UNREGISTERED and not topology.cma.works:
        names.append("ring")
    return names


def allocator(topology: Topology) -> str:
    """Return the name of the backend that allocates. Local."""
    return "hierarchical_copy" if topology.nodes > 1 else "shared"


class Auto(AllReduce):
    """Selects a backend for each call, creates it at its first use, and forwards the call to it.

    Without a table or `choose`, the first calls of a signature (length, dtype, op, memory) of LEAST_BYTES (trials.py)
    or more try the backends that may be the fastest, in turn. The ranks agree on the fastest one, and compare them
    again from time to time. Other arrays go to the backend that the built-in rule names.

    A backend that does not work here is replaced, with one notice: on the GPU by staging through the host, elsewhere by
    LAST_RESORT.

    make: creates a backend from its name and a topology; names: of all backends (both from `create`).
    table: the path of a decision table from `python -m benchmarks.tune`; by default the one in
        $ALLREDUCE_TABLE, else this machine's in the user's cache folder. "" for none.
    choose: a rule to use instead of any table.
    trial: whether backends are tried. They add floats in different orders, so the last bits of a result may differ from
        call to call, and from run to run. "same_bits": only where all orders give the same bits: integers, and sums of
        two ranks; trainers use this. False: never; then equal programs get equal bits, on any number of ranks.
    compress: options (allreduce.wrappers.options), on several nodes: the compression of the messages between them.
        Arrays that go to the MPI library (the small ones) are not compressed.
    """

    between_nodes = True

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[..., AllReduce],
        names: Collection[str],
        table: str | os.PathLike[str] | None = None,
        choose: Rule | None = None,
        trial: bool | str = True,
        compress: Any = None,
        check: str = "first",
    ) -> None:
        if choose is not None and not callable(choose):
            raise OptionError(f"choose must be a function of (topology, nbytes, dtype, memory), got {choose!r}")
        trials.check(trial)
        self._make, self._names, self._rule, self._table, self._trial = make, names, choose, table, trial
        self._compress = compress
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        # Parts are created during calls, in any thread, so they have a separate topology.
        self._parts_topology = self._add_part(topology.duplicate())
        self._choose = self._rule or rule_for(self._comm, topology, self._table, rule, self._names)
        # under compression the backends differ by more than the last bits
        self._tries = self._trial if self._choose is rule and self._compress is None else False
        # By length, dtype, op and memory; None if the calls are not tried
        self._selections: dict[tuple, Selection | None] = {}
        self._decisions: dict[tuple, str] = {}  # see Selection
        self.changes = 0  # the number of times that a trial has changed the result of `chosen`
        self._made: dict[str, AllReduce] = {}
        # for parts that a later call creates: the arrays from `allocate`, and their loaded state: by the part's name
        # and the array's number in the registry, with the names of a state of this array only
        self._registered = Registry()
        self._loaded: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self._unavailable: dict[str, str] = {}
        self._allocator: AllReduce | None = None  # the part whose memory `allocate` gives
        self._exact = self if self._compress is None else self._add_part(self._make(SMALL, topology, check=self.check))

    @property
    def exact(self) -> AllReduce:
        return self._exact

    def describe(self, array: Any, parts: Sequence[Part] = (), whole: bool = True) -> None:
        if self._compress is not None:
            array = self._registered.register(array, parts)
        super().describe(array, parts, whole)

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for at, (memory, _) in enumerate(self._registered.arrays(array)):
            for (name, number), state in self._loaded.items():
                if number == memory.number:
                    keys = {f"{name}/{NUMBER.sub(str(at), key, count=1)}": key for key in state}
                    found |= {key: state[old].copy() for key, old in keys.items()}
        main = f"{allocator(self.topology)}/"  # without this: the names on one node, see HierarchicalCopy.state
        return {name.removeprefix(main): held for name, held in (found | super().state(array)).items()}

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        main, now = allocator(self.topology), {}
        later: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for key, held in state.items():
            name, _, rest = (key if key.partition("/")[0] in self._names else f"{main}/{key}").partition("/")
            start = NUMBER.search(rest)
            if self._compress is None or name in self._made or start is None:
                now[f"{name}/{rest}"] = held
                continue
            # a part that a later call may create
            of_array = rest[start.start() :]
            (entry, *_) = self._registered.check_state({of_array: held}, array)[of_array]
            later.setdefault((name, entry.number), {})[NUMBER.sub("0", rest, count=1)] = held.copy()
        super().load_state(now, array)
        self._forget_loaded(array)
        self._loaded |= later

    def reset(self, array: Any = None) -> None:
        self._forget_loaded(array)
        super().reset(array)

    def _forget_loaded(self, array: Any) -> None:
        numbers = [memory.number for memory, _ in self._registered.arrays(array)]
        self._loaded = (
            {} if array is None else {key: self._loaded[key] for key in self._loaded if key[1] not in numbers}
        )

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        return None if self._allocator is None else self._allocator.node_arrays(buffer)

    def _locate(self, buffer: np.ndarray) -> Location | None:
        return None if self._allocator is None else self._allocator.hooks.locate(buffer)

    def two_phase(self, buffer: np.ndarray) -> TwoPhase | None:
        part, memory = self._allocator, self._memory(buffer)
        if part is None or memory != ALLOCATED:  # then a part may turn out to be unavailable in the call
            return None
        if self._decide(buffer.nbytes, buffer.dtype, memory, self._part)[0] != part.name:
            return None
        return part if isinstance(part, TwoPhase) else None

    def sent(self, dtype: np.dtype) -> np.dtype:
        return dtype if self._compress is None else self._compress.sent(dtype)

    def choice(self, length: int, dtype: DTypeLike = "float32", device: str = "cpu") -> tuple[str, str]:
        """Return (backend name, reason) for an array from `allocate`. Local, from any thread.

        During a trial it is the backend of the latest call. A backend that no call has used yet may still turn out to
        be unavailable.
        """
        return self._selected(length, dtypes.parse(dtype), GPU if device == "cuda" else ALLOCATED)

    def chosen(self, array: Any) -> str:
        if array.size == 0 or self.size == 1:
            return self.name
        return self._selected(array.size, array.dtype, self._memory_kind(array))[0]

    def _selected(self, length: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        for op in ops.OPS:
            if (selection := self._selections.get((length, dtype, op, memory))) is not None:
                return selection.name, selection.why
        return self._decide(length * dtype.itemsize, dtype, memory, self._made.get)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda":
            if self.size > 1:  # `choice` then knows whether the backend works
                self._decide(length * dtype.itemsize, dtype, GPU, self._part)
            return super()._allocate(length, dtype, device)
        name = allocator(self.topology)
        part = self._part(name)
        if part is not None:
            try:
                array = part.hooks.allocate(length, dtype, device)
                self._allocator = part
                self._owners = part.hooks.owners
                self._memory = part.hooks.memory  # type: ignore[method-assign, assignment]
                self.__dict__.pop("hooks", None)  # drop the cached Hooks, which have the previous owners
                return array
            except UnavailableError as error:
                notices.once(self.rank, f'"auto" allocates ordinary memory, so "{name}" will copy: {error}')
        return super()._allocate(length, dtype, device)

    def _route(self, call: Call) -> Work | Trial:
        if call.length == 0 or self.size == 1:
            return super()._route(call)
        if (selection := self._selection(call)) is not None:
            return selection.work()
        name, _ = self._decide(call.length * call.dtype.itemsize, call.dtype, call.memory, self._part)
        if call.memory == GPU and name == LAST_RESORT:
            return super()._reduce_gpu  # copies to the host, where _reduce decides again
        part = self._made[name]
        return Trial(partial(self._try, part, part.hooks.route(call), call))

    def _selection(self, call: Call) -> Selection | None:
        """Return the Selection of this signature, or None if it is not tried. Collective for a new signature."""
        key = call.length, call.dtype, call.op, call.memory
        if key not in self._selections:
            self._selections[key] = self._new_selection(call)
        return self._selections[key]

    def _new_selection(self, call: Call) -> Selection | None:
        if call.memory == GPU or not trials.applies(self._tries, call, self.size):
            return None
        first, _ = self._decide(call.length * call.dtype.itemsize, call.dtype, call.memory, self._part)
        names = dict.fromkeys((first, *candidates(self.topology, call.dtype, call.memory)))
        usable = [name for name in names if self._part(name) is not None]
        if len(usable) < 2:
            return None
        return Selection(
            call,
            self._resolve(call.op, call.dtype),
            usable,
            work_of=partial(self._work_of, call),
            agree=lambda times: -self._engine.minimum(-times),
            drop=self._drop,
            ready=self._engine.quiet,
            decisions=self._decisions,
        )

    def _work_of(self, call: Call, name: str) -> Work | Trial:
        self.changes += 1
        return self._made[name].hooks.route(call)

    def _try(self, part: AllReduce, work: Work | Trial, call: Call, buffer: Any, op: Op) -> Work | Trial:
        """Do `work`. If it raises UnavailableError, mark `part` as unavailable, and use another backend.

        Returns the work for later calls.
        """
        try:
            work(buffer, op)
        except UnavailableError as error:  # raised on all ranks, before anything was changed
            self._drop(part.name, error)
            work = self._route(call)
            work(buffer, op)
        return work

    def _locator_for(self, call: Call) -> Locate | None:
        if call.length == 0 or self.size == 1 or call.memory == GPU:
            return None
        if self._selection(call) is not None and (part := self._made.get(allocator(self.topology))) is not None:
            return part.hooks.locator_for(call)  # a candidate, and the only one that may locate arrays
        name, _ = self._decide(call.length * call.dtype.itemsize, call.dtype, call.memory, self._part)
        return self._made[name].hooks.locator_for(call)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        memory = self._memory(buffer)
        if op.scale == self._resolve(op.name, buffer.dtype).scale:
            self._route(Call("all_reduce", buffer.size, buffer.dtype, op.name, memory))(buffer, op)
        else:  # a part of a backend with more ranks, whose mean divides by another number
            name, _ = self._decide(buffer.nbytes, buffer.dtype, memory, self._part)
            self._made[name].hooks.reduce(buffer, op)

    def _decide(
        self, nbytes: int, dtype: np.dtype, memory: int, find: Callable[[str], AllReduce | None]
    ) -> tuple[str, str]:
        """Return (backend name, reason). find: `_part`, which creates a backend, or a local look-up of created ones."""
        name, why = self._choose(self.topology, nbytes, dtype, memory)
        part = find(name)
        if part is not None and dtypes.is_half(dtype) and not part.sums_half:
            name, why = rule(self.topology, nbytes, dtype, memory)  # from a table that was edited by hand
            find(name)
        if name in self._unavailable:
            name, why = LAST_RESORT, f'"{name}" can\'t be used here: {self._unavailable[name]}'
            find(name)
        return name, why

    def _part(self, name: str) -> AllReduce | None:
        """Return the backend `name`, created at its first use (collective then); None if it is unavailable."""
        if name not in self._made and name not in self._unavailable:
            try:
                compress = None if name == SMALL else self._compress
                self._made[name] = self._add_part(self._make(name, self._parts_topology, compress=compress))
            except UnavailableError as error:
                self._mark_unavailable(name, error)
            else:
                self._hand_arrays_to(name)
        return None if name in self._unavailable else self._made[name]

    def _hand_arrays_to(self, name: str) -> None:
        """Tell a new part of the arrays from `allocate`, and give it their loaded state. Collective under compression;
        all ranks raise the OptionError of a rank whose state does not fit."""
        error = None
        for array, parts in self._registered.arrays():
            self._made[name].describe(array, parts, whole=False)
            try:
                self._made[name].load_state(self._loaded.pop((name, array.number), {}), array)
            except OptionError as wrong:
                error = wrong
        if self._compress is not None:
            self._parts_topology.agree([], f'load the state of "{name}"', error)

    def _drop(self, name: str, error: UnavailableError) -> None:
        """A part has raised `error` in a call: other calls that use it must be routed again."""
        self._mark_unavailable(name, error)
        self._known.clear()

    def _mark_unavailable(self, name: str, error: UnavailableError) -> None:
        self._unavailable[name] = str(error)
        notices.once(self.rank, f'"auto" does not use "{name}": {error}')
