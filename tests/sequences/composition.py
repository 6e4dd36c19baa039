"""Random calls on two equal backends: one is called plainly; the other is traced, or its calls are bound or submitted.

{algorithm} x {compress, exact} x {plain, traced, bound, submitted} x {dense, tree, sparse, ...} x {allocated, scratch,
unregistered, slices} x {flat, simulated nodes}. Both backends make the same calls with the same values. After each call
both have the same outcome: equal bits, or errors of one kind, and the same error feedback. All ranks have the same
bits.

judging.py judges the results by what NumPy computes of all ranks' values, which follow from rank and index.

Only public names are used.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.errors import AllReduceError, UnavailableError
from tests import random_calls
from tests.backends import ON_CPU
from tests.random_calls import LENGTHS, OPS
from tests.sequences.calls import Calls
from tests.sequences.judging import FLOATS, WIDE, Judge, Memory, Options, dtype_of, epsilon, flat, integers

COMPRESSIONS = (
    "bfloat16",
    "float16",
    "int8",
    allreduce.Quantized(seed=7),
    allreduce.Quantized(100),
    allreduce.Quantized(32 * 1024),
    allreduce.Quantized(error_feedback=False),
    "powersgd:2",
    allreduce.PowerSGD(2, start_powerSGD_iter=1),
    allreduce.PowerSGD(3, start_powerSGD_iter=0),
)
WAYS = ("traced", "bound", "submitted", "traced, bound", "traced, submitted", "again")
DTYPES = (*FLOATS, "float32", "float64", "int32", "int64", "uint8", "int8", "bool")
STRUCTURE = np.dtype([("name", "S9"), ("weights", "f4", (3,)), ("key", "u8")])
MOVED = (  # beside those that are reduced
    *("uint16", "uint64", "complex64", "complex128", "float128", "datetime64[ns]", ">f4", "U5", "V3", "V0"),
    "float8_e4m3fn",
    STRUCTURE,
)
MEMORY = ("allocated", "scratch", "slice", "slice of scratch", "unregistered", "two axes", "Fortran")
FIXED = {"auto": {"measure": False}}  # options without which equal calls may have other bits


class Pair(NamedTuple):
    left: list[np.ndarray | None]
    right: tuple[()]


class Bound(NamedTuple):
    """A call that both backends repeat on their own array; the second one's may be bound."""

    kind: str
    op: str
    memory: Memory
    calls: tuple[Callable[[], Any], Callable[[], Any]]


def draw_options(calls: Calls) -> Options:
    name, exact = calls.pick(*(each for each in allreduce.available() if each in ON_CPU)), calls.chance(0.4)
    compress = calls.pick(*COMPRESSIONS) if not exact and calls.chance(0.75) else None
    per_node = random_calls.nodes_for(calls.draw, calls.size) or None
    return Options(name, compress, exact, calls.pick(*WAYS), per_node, calls.pick(True, True, False))


class Composition(Judge):
    """One sequence. Collective. options: None: drawn."""

    def __init__(
        self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool = False, options: Options | None = None
    ) -> None:
        super().__init__(comm, seed, folder, verbose)
        self.options = options or draw_options(self)
        self.numbers = np.random.default_rng(seed)
        self.next = (self.rank + 1) % self.size
        self.arrays: list[tuple[bool, np.ndarray, np.ndarray]] = []  # scratch or not, and each backend's array
        self.bounds: list[Bound] = []
        self.futures: list[tuple[Any, np.ndarray, np.ndarray, np.ndarray, str]] = []

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.options}"

    # The whole sequence

    def run(self, calls: int) -> None:
        """Make random calls."""
        if not self._open():
            return
        actions = self._actions()
        for _ in range(calls * 3):
            ((action, _),) = self.draw.choices(actions, [weight for _, weight in actions])
            action()
        self._close()

    def run_each(self) -> bool:
        """Make calls of every kind. Returns whether such backends can be made here."""
        if not self._open():
            return False
        for scratch in (False, True):
            self._allocate(self.pick(1000, 4099), self.pick(*WIDE), scratch)
        for action, _ in self._actions():
            action()
        self._close()
        return True

    def _actions(self) -> list[tuple[Callable[[], None], int]]:
        found: list[tuple[Callable[[], None], int]] = [
            (self.allocate, 3), (self.dense, 10), (self.bound, 3), (self.repeat, 6), (self.tree, 4), (self.reduced, 4),
            (self.sparse, 3), (self.stack, 2), (self.broadcast, 2), (self.scatter, 3), (self.gather, 2),
            (self.describe, 1), (self.state, 1), (self.reset, 1), (self.drop, 1), (self.refuse, 1),
        ]  # fmt: skip
        if self.options.exact:
            found.append((self.terms, 5))
        if self.options.compress is not None:
            found.insert(1, (self.again, 5))  # before `state`, which loads what it has left
        if "submitted" in self.options.way:
            found.append((self.submit, 4))
        return found

    def _open(self) -> bool:
        """Create both backends. Returns False if they can't be made on these ranks."""
        given = self.options
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if "submitted" in given.way and not threads:
            self.options = given = given._replace(way="traced")
        self.note(str(given))
        self.topology = self.well("Topology", lambda: allreduce.Topology(self.comm, given.per_node))
        options: dict[str, Any] = {**FIXED.get(given.name, {}), "check": given.check}
        options |= {"exact": True} if given.exact else {}
        options |= {} if given.compress is None else {"compress": given.compress}
        create = partial(allreduce.create, given.name, self.topology, **options)
        plain, error = self.call("create", create)
        if error is not None:
            expected = isinstance(error, UnavailableError) or given.compress is not None
            self.check(expected and isinstance(error, AllReduceError), f"create: {error!r}")
            self.well("Topology.close", self.topology.close)
            return False
        self.plain = plain
        trace = os.path.join(self.folder, f"trace {time.monotonic_ns()}.json")
        traced = {"trace": trace} if "traced" in given.way else {}
        self.inner: Any = self.well("create", lambda: create(**traced))
        self.other: Any = self.inner
        if given.exact:
            self.flat = self.well("Topology", lambda: allreduce.Topology(self.comm))
            self.reference = self.well("create", lambda: allreduce.create("ring", self.flat, exact=True))
        return True

    def _close(self) -> None:
        self._wait()
        self.arrays.clear()
        self.bounds.clear()
        for backend in dict.fromkeys((self.other, self.inner, self.plain)):
            self.well("close", backend.close)
        self.well("Topology.close", self.topology.close)
        if self.reference is not None:
            self.well("close", self.reference.close)
            self.well("Topology.close", self.flat.close)

    # Both backends make a call

    def both(self, name: str, plain: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Return the results of both; None if both raise an error, of one kind."""
        self._wait()
        (one, refused), (two, refused_too) = self.call(name, plain), self.call(name, other)
        kinds = type(refused).__name__, type(refused_too).__name__
        self.check(kinds[0] == kinds[1], f"{name}: {refused!r}, and {self.options.way}: {refused_too!r}")
        if refused is not None:
            self.check(isinstance(refused, AllReduceError), f"{name}: {refused!r}")
            return None
        return one, two

    # Values

    def rows(self, shape: Any, dtype: str) -> np.ndarray:
        """Return the arrays of all ranks. Their magnitudes differ, so that the bits of sums depend on their order."""
        full = (self.size, *np.atleast_1d(shape))
        if dtype in MOVED:
            kind = dtype_of(dtype)
            several = self.numbers.bytes(int(np.prod(full)) * kind.itemsize)
            return np.ndarray(full, kind, several) if kind.itemsize else np.empty(full, kind)
        if dtype == "bool":
            return self.numbers.integers(0, 2, full).astype(bool)
        if dtype not in FLOATS:
            return self.numbers.integers(1, 100, full).astype(dtype)
        spread = 2 if dtype in ("float16", "bfloat16") or self.options.compress is not None else 8
        return np.ldexp(self.numbers.normal(size=full), self.numbers.integers(-spread, 1, full)).astype(dtype_of(dtype))

    def op(self, dtype: str) -> str:
        return self.pick("sum", "mean", "sum", "mean", "max", "min", "prod")

    def memory(self, dtype: str, moved: bool = False) -> Memory | None:
        """Return arrays of both backends. moved: of any dtype, which is not reduced."""
        kind = self.pick(*MEMORY)
        if moved and self.chance(0.3):
            length, dtype = self.pick(*LENGTHS[:-1]), self.pick(*MOVED)
            return Memory("moved", True, *(np.zeros(length, dtype_of(dtype)) for _ in range(2)))
        if kind in ("two axes", "Fortran"):
            shape, order = self.pick((3, 7), (40, 50), (1, 5), (64, 600)), "F" if kind == "Fortran" else "C"
            one, two = (np.zeros(shape, dtype_of(dtype), order=order) for _ in range(2))  # type: ignore[call-overload]
            return Memory(kind, True, one, two)
        if kind == "unregistered":
            length = self.pick(*LENGTHS)
            return Memory(kind, True, *(np.zeros(length, dtype_of(dtype)) for _ in range(2)))
        usable = [each for each in self.arrays if each[0] == ("scratch" in kind)]
        if not usable:
            return None
        scratch, one, two = self.pick(*usable)
        whole = None if scratch else (one, two)
        if "slice" in kind and one.size > 2:
            start = self.draw.randrange(one.size)
            stop = start + self.draw.randrange(one.size - start) + 1
            one, two = one[start:stop], two[start:stop]
            if self.chance(0.3) and one.size % 2 == 0:
                one, two = one.reshape(2, -1), two.reshape(2, -1)
        return Memory(kind, kind == "scratch", one, two, whole)

    # Memory and its state

    def allocate(self) -> None:
        self._allocate(self.pick(*LENGTHS), self.pick(*DTYPES), self.chance(0.4))

    def _allocate(self, length: int, dtype: str, scratch: bool) -> None:
        self.note(f"allocate {length} {dtype}{', scratch' * scratch}")
        made = self.both(
            "allocate",
            lambda: self.plain.allocate(length, dtype_of(dtype), scratch=scratch),
            lambda: self.other.allocate(length, dtype_of(dtype), scratch=scratch),
        )
        if made is not None:
            self.equal("allocate", *made)
            self.arrays.append((scratch, *made))

    def drop(self) -> None:
        """Drop an array: its memory may be allocated again."""
        self._wait()
        if len(self.arrays) > 4:
            self.arrays.pop(self.draw.randrange(len(self.arrays)))
            self.bounds.clear()

    def describe(self) -> None:
        """Say which slices of an array are which parameters."""
        usable = [each for each in self.arrays if not each[0] and each[1].size > 40]
        if not usable:
            return
        self._wait()
        self._describe(*self.pick(*usable)[1:])

    def _describe(self, one: np.ndarray, two: np.ndarray) -> None:
        middle = self.draw.randrange(1, one.size - 12)
        parts = [allreduce.Part("first", 0, (middle,)), allreduce.Part("table", middle, (3, 4))]
        if one.size > 2000:
            parts = [allreduce.Part("table", 4, (30, 40)), allreduce.Part("rest", 1204, (one.size - 1204,))]
        self.note(f"describe {one.size} {one.dtype} {parts}")
        for backend, array in ((self.plain, one), (self.other, two)):
            self.well("describe", partial(backend.describe, array, parts))
            self.well("reset", partial(backend.reset, array))  # errors of matrices are none of vectors

    def state(self) -> None:
        """Both have the same error feedback; load it again, in both."""
        self._wait()
        one, two = (self.well("state", backend.state) for backend in (self.plain, self.other))
        self.check(one.keys() == two.keys(), f"state: {sorted(one)}, {self.options.way}: {sorted(two)}")
        names = set[str]().union(*self.comm.allgather([*one]))  # on nodes of other sizes the leaders have some
        for name in sorted(names):
            held = (state.get(name, np.zeros(0)) for state in (one, two))
            self.equal(f"state, {name}", *held, everywhere=False)
        how = self.pick("of the next rank", "none on one rank", "the same")
        self.note(f"load_state, {how}")
        if how == "of the next rank":  # as after a start on other ranks or nodes
            one, two = (self.comm.sendrecv(state, (self.rank - 1) % self.size, source=self.next)
                        for state in (one, two))  # fmt: skip
        elif how == "none on one rank" and self.rank == self.size - 1:  # as one that joined
            one = two = {}
        for backend, state in ((self.plain, one), (self.other, two)):
            self.well("load_state", partial(backend.load_state, state))
        if self.options.compress is not None:
            self.again()

    def reset(self) -> None:
        self._wait()
        self.note("reset")
        for backend in (self.plain, self.other):
            self.well("reset", backend.reset)

    # Sums of arrays

    def again(self) -> None:
        """Reduce an array, or a slice of it, again and again: each call sends what the ones before have not sent."""
        usable = [each for each in self.arrays if not each[0] and each[1].size > 4096 and each[1].dtype in WIDE]
        if not usable:
            self._allocate(self.pick(4099, 70_001), self.pick(*WIDE), False)
            self._describe(*self.arrays[-1][1:])
            usable = self.arrays[-1:]
        _, one, two = self.pick(*usable)
        part = self.pick(slice(None), slice(None), slice(one.size // 5, None))
        memory = Memory("the same memory", False, one[part], two[part], (one, two))
        op = self.pick("sum", "mean")
        self.note(f"{op} of {one.dtype}[{one.size}] at {part}, three times")
        for _ in range(3):
            self.reduce_both(memory, self.rows(memory.one.shape, one.dtype.name), op)
            if self.chance(0.3):
                self._scatter(memory)

    def dense(self) -> None:
        dtype = self.pick(*DTYPES)
        taken = self.memory(dtype)
        if taken is None:
            return
        dtype = taken.one.dtype.name
        op, lossless = self.op(dtype), self.chance(0.15)
        rows = self.rows(taken.one.shape, dtype)
        self.note(f"{op} of {taken.one.shape} {dtype}, {taken.kind}{', lossless' * lossless}")
        self.reduce_both(taken, rows, op, lossless)

    def reduce_both(self, memory: Memory, rows: np.ndarray, op: str, lossless: bool = False) -> None:
        what, one, two = f"{op} of {memory.kind}", memory.one, memory.two
        self._wait()
        before = None if lossless else self.unsent(memory, op)
        one[...] = two[...] = rows[self.rank]
        call = partial(self.other, two, op, lossless)
        if "bound" in self.options.way and not lossless:
            bind = self.other.bind
            call = lambda: bind(two, op)()  # noqa: E731
        if self.both(what, partial(self.plain, one, op, lossless), call) is None:
            return
        self.equal(what, one, two)
        self.near(what, one, rows, op, lossy=not lossless)
        self.kept(what, one.ravel("K"), rows if one.flags.c_contiguous else rows.transpose(0, 2, 1), op, memory, before)
        if memory.blocks:
            self.alone(what, one, np.array(rows[self.next], order="F" if not one.flags.c_contiguous else "C"), op)

    def bound(self) -> None:
        """Bind a call; `repeat` calls it, between other calls."""
        kind = self.pick("all_reduce", "all_reduce", "reduce_scatter", "all_gather")
        taken = self.memory(self.pick(*DTYPES))
        if taken is None or (kind != "all_reduce" and taken.one.ndim != 1):
            return
        one, two = taken.one, taken.two
        op = self.op(one.dtype.name)
        self.note(f"bind {kind}, {op} of {one.shape} {one.dtype}, {taken.kind}")
        options = {"kind": kind} if kind == "all_gather" else {"kind": kind, "op": op}
        made = self.both("bind", partial(self.plain.bind, one, **options), partial(self.other.bind, two, **options))
        if made is None:
            return
        calls = made
        if "bound" in self.options.way:  # beside plain calls
            methods = {"reduce_scatter": lambda: self.plain.reduce_scatter(one, op)}
            methods |= {"all_reduce": lambda: self.plain(one, op), "all_gather": lambda: self.plain.all_gather(one)}
            calls = methods[kind], made[1]
        self.bounds.append(Bound(kind, op, taken, calls))

    def repeat(self) -> None:
        if not self.bounds:
            return
        kind, op, memory, calls = self.pick(*self.bounds)
        one, two = memory.one, memory.two
        self.note(f"repeat {kind}, {op} of {one.shape} {one.dtype}")
        for _ in range(self.pick(1, 2)):
            rows = self.rows(one.shape, one.dtype.name)
            self._wait()
            before = self.unsent(memory, op) if kind == "all_reduce" else None
            one[...] = two[...] = rows[self.rank]
            if self.both(f"bound {kind}", *calls) is None:
                return
            own = self.plain.owned(one.size) if kind == "reduce_scatter" else slice(None)
            self.equal(f"bound {kind}", one[own], two[own], everywhere=kind == "all_reduce")
            if kind == "all_reduce":
                self.near("bound", one, rows, op)
                ordered = rows if one.flags.c_contiguous else rows.transpose(0, 2, 1)
                self.kept("bound", one.ravel("K"), ordered, op, memory, before)

    def submit(self) -> None:
        """Submit calls that end later, while the plain backend makes them now."""
        shape, op = self.pick(*LENGTHS), self.pick("sum", "mean", "max")
        rows = self.rows(shape, self.pick(*WIDE))
        one, two = np.array(rows[self.rank]), np.array(rows[self.rank])
        self.note(f"submit {op} of {shape} {rows.dtype}")
        future = self.well("submit", lambda: self.other.submit(two, op))
        self.futures.append((future, one, two, rows, op))
        self.well("a plain call beside a submitted one", partial(self.plain, one, op))

    def _wait(self) -> None:
        futures, self.futures = self.futures, []
        for future, one, two, rows, op in futures:
            self.well("wait", future.wait)
            self.equal("submitted", one, two)
            self.near("submitted", two, rows, op)

    # Trees, rows, moves

    def leaves(self, moved: bool = False) -> list[np.ndarray]:
        """Return the rows of the arrays of a tree. moved: of any dtype, which is not reduced."""
        shapes = self.pick([(3,), (2, 2)], [(5,), (0,), (1000,)], [(4,)], [(), (40, 50), (300,)], [(70_001,), (7,)])
        one, found = self.pick(*WIDE), []
        for shape in shapes:
            dtype = one if self.chance(0.7) else self.pick(*DTYPES, *MOVED * moved)
            rows = self.rows(shape, dtype).reshape(self.size, *shape)
            if dtype in WIDE and self.options.compress is None:
                rows *= 2.0 ** self.pick(-60, 0, 40)  # arrays of a tree do not share exponents
            found.append(rows)
        return found

    def grown(self, rows: Sequence[np.ndarray]) -> Any:
        """Return a new tree of this rank's arrays."""
        first, *rest = (np.array(each[self.rank, ...]) for each in rows)
        if first.ndim and first.itemsize and self.chance(0.3):  # with gaps
            wide = np.zeros((*first.shape[:-1], 2 * first.shape[-1]), first.dtype)
            wide[..., ::2], first = first, wide[..., ::2]
        tree = {"first": first, "rest": Pair([*rest, None], ())}
        return dict(reversed(tree.items())) if self.rank % 2 else tree  # the order in which keys came is no matter

    def compare_trees(self, what: str, one: Any, two: Any, rows: Sequence[np.ndarray], op: str) -> None:
        for a, b, each in zip(flat(one), flat(two), rows, strict=True):
            self.equal(what, a, b)
            self.near(what, a, each, op)
            self.alone(what, a, np.asarray(each[self.next]), op)

    def tree(self) -> None:
        rows, op = self.leaves(), self.pick("sum", "mean", "max")
        one, two = self.grown(rows), self.grown(rows)
        self.note(f"{op} of a tree of {[(each.shape[1:], str(each.dtype)) for each in rows]}")
        if self.both("tree", partial(self.plain, one, op), partial(self.other, two, op)) is not None:
            self.compare_trees("tree", one, two, rows, op)

    def reduced(self) -> None:
        rows, op = self.leaves(), self.pick("sum", "mean", "min")
        given = self.grown(rows)
        self.note(f"reduced, {op}, of a tree of {[(each.shape[1:], str(each.dtype)) for each in rows]}")
        made = self.both(
            "reduced", partial(self.plain.reduced, given, op), lambda: copied(self.other.reduced(self.grown(rows), op))
        )
        if made is not None:
            self.compare_trees("reduced", *made, rows, op)

    def sparse(self) -> None:
        dtype, table, op = self.pick(*DTYPES), self.pick(0, 1, 7, 100, 10**9), self.pick("sum", "sum", "mean")
        widths = self.pick((), (1,), (3,), (2, 3))
        counts = [self.draw.randrange(0, 6) if table else 0 for _ in range(self.size)]
        if self.chance(0.1):
            table, widths, counts = 1000, (256,), [1000 - rank for rank in range(self.size)]  # as one dense array
        spread = table if self.chance(0.5) else min(table, 4)  # so that ranks have the same rows, and one twice
        indices = [self.numbers.integers(0, spread, count) if table else np.zeros(0, int) for count in counts]
        values = [self.rows((max(count, 1), *widths), dtype)[0][:count] for count in counts]
        if self.chance(0.3):
            values = [np.repeat(each, 2, axis=0)[::2] for each in values]  # with gaps, which MPI does not take
        self.note(f"sparse, {op}: {counts} rows {widths} {dtype} of {table}")
        given = indices[self.rank], values[self.rank], table, op
        made = self.both("sparse", partial(self.plain.sparse, *given), partial(self.other.sparse, *given))
        if made is None:
            return
        for one, two in zip(*made, strict=True):
            self.equal("sparse", one, two)
        found, sums = made[0]
        if self.reference is not None and dtype in FLOATS:
            given = indices[self.next], values[self.next], table, op
            _, right = self.well("the reference", lambda: self.reference.sparse(*given))
            self.equal("sparse, beside the ring", right, sums)
        there, places = np.unique(np.concatenate(indices), return_inverse=True)
        self.check(np.array_equal(found, there), f"sparse: {found}, not {there}")
        full = np.zeros((there.size, *widths), "float64" if dtype in FLOATS else dtype)
        size, rows = np.zeros_like(full), np.concatenate(values).astype(full.dtype)
        with np.errstate(over="ignore"):
            np.add.at(full, places, rows)
            np.add.at(size, places, np.abs(rows))
        if dtype not in FLOATS:
            self.check(np.array_equal(sums, full), lambda: f"sparse {dtype}: {sums[:3]}, not {full[:3]}")
            return
        share = self.size if op == "mean" else 1
        most = 8 * self.size * epsilon(dtype_of(dtype)) * size / share + 1e-7
        off = np.abs(sums.astype("float64") - full / share)
        self.check(bool((off <= most).all()), lambda: f"sparse: {off.max(initial=0)}")

    def stack(self) -> None:
        rows = self.leaves(moved=True)
        self.note(f"stack {[(each.shape[1:], str(each.dtype)) for each in rows]}")
        for given in (self.grown(rows), np.array(rows[0][self.rank, ...]), self.rank):
            made = self.both("stack", partial(self.plain.stack, given), partial(self.other.stack, given))
            assert made is not None
            for one, two in zip(flat(made[0]), flat(made[1]), strict=True):
                self.equal("stack", one, two)
            if isinstance(given, dict):
                stacked = [each.tobytes() for each in flat(made[0])]
                self.check(stacked == [each.tobytes() for each in rows], f"stack of {len(rows)} arrays")
        self.check(np.array_equal(made[0], np.arange(self.size)), f"stack: {made[0]}")

    def broadcast(self) -> None:
        rows, root = self.leaves(moved=True), self.draw.randrange(self.size)
        self.note(f"broadcast {[(each.shape[1:], str(each.dtype)) for each in rows]} from {root}")
        for of_tree in (True, False):
            one, two = (self.grown(rows) if of_tree else np.array(rows[0][self.rank, ...]) for _ in range(2))
            self.both("broadcast", partial(self.plain.broadcast, one, root), partial(self.other.broadcast, two, root))
            for a, b, each in zip(flat(one), flat(two), rows, strict=False):
                self.equal("broadcast", a, b)
                self.check(a.tobytes() == each[root, ...].tobytes(), lambda: f"broadcast: {a.ravel()[:6]}")  # noqa: B023

    def scatter(self) -> None:
        taken = self.memory(self.pick(*DTYPES))
        if taken is not None and taken.one.ndim == 1:
            self._scatter(taken)

    def _scatter(self, taken: Memory) -> None:
        one, two = taken.one, taken.two
        op, rows = self.op(one.dtype.name), self.rows(one.shape, one.dtype.name)
        self.note(f"reduce_scatter, {op} of {one.shape} {one.dtype}, {taken.kind}")
        self._wait()
        before = self.unsent(taken, op)
        one[...] = two[...] = rows[self.rank]
        scatter = partial(self.other.reduce_scatter, two, op)
        if "bound" in self.options.way:
            bind, own = self.other.bind, self.plain.owned(one.size)

            def scatter() -> Any:
                bind(two, op, "reduce_scatter")()
                return two[own]

        made = self.both("reduce_scatter", partial(self.plain.reduce_scatter, one, op), scatter)
        if made is not None:
            self.equal("reduce_scatter", *made, everywhere=False)
            own = self.plain.owned(one.size)
            part = rows[:, own] if self.options.compress is None else rows
            self.kept("reduce_scatter", made[0], rows, op, taken, before)
            self.near("reduce_scatter", made[0] if part is not rows else self._padded(rows, own, made[0], op), part, op)

    def _padded(self, rows: np.ndarray, own: slice, part: np.ndarray, op: str) -> np.ndarray:
        """Return the right result with `part` at its place: a block's scale may come from its neighbours."""
        whole = OPS[op](rows.astype("float64")) if rows.dtype.kind not in "iub" else integers(rows, op)
        whole[own] = part
        return whole

    def gather(self) -> None:
        taken = self.memory(self.pick(*DTYPES), moved=True)
        if taken is None or taken.one.ndim != 1:
            return
        one, two = taken.one, taken.two
        rows = self.rows(one.shape, name_of(one.dtype))
        self.note(f"all_gather {one.shape} {one.dtype}, {taken.kind}")
        self._wait()
        one[...] = two[...] = rows[self.rank]
        own = self.plain.owned(one.size)
        one[own] = two[own] = rows[0][own]
        if self.both("all_gather", partial(self.plain.all_gather, one), partial(self.other.all_gather, two)) is None:
            return
        self.equal("all_gather", one, two)
        self.check(one.tobytes() == rows[0].tobytes(), lambda: f"all_gather: {one[:6]}, not {rows[0][:6]}")

    # Exact sums of several terms

    def terms(self) -> None:
        dtype, length, op = self.pick(*FLOATS), self.pick(*LENGTHS), self.pick("sum", "mean")
        counts = [self.draw.randrange(0, 4) for _ in range(self.size)]
        count, kind = max(1, sum(counts)) + self.pick(0, 2), self.pick("all_reduce", "reduce_scatter")
        drawn = self.rows((max(1, *counts, 1), length), dtype)
        terms = drawn[self.rank][: counts[self.rank]]
        self.note(f"sum_terms, {op}: {counts} terms of {length} {dtype}, count {count}, {kind}")
        one, two = np.zeros(length, dtype_of(dtype)), np.zeros(length, dtype_of(dtype))
        options = {"op": op, "count": count, "kind": kind}
        made = self.both(
            "sum_terms",
            partial(self.plain.sum_terms, list(terms), one, **options),
            partial(self.other.sum_terms, list(terms), two, **options),
        )
        assert made is not None
        self.equal("sum_terms", *made, everywhere=kind == "all_reduce")
        all_terms = np.concatenate([each[:count] for each, count in zip(drawn, counts, strict=True)]).astype("float64")
        wanted = all_terms.sum(0) / (count if op == "mean" else 1)
        most = (2 + len(all_terms)) * epsilon(drawn.dtype) * np.abs(all_terms).sum(0).max(initial=0)
        own = self.plain.owned(length) if kind == "reduce_scatter" else slice(None)
        off = np.abs(made[0].astype("float64") - wanted[own]).max(initial=0)
        self.check(bool(off <= most), lambda: f"sum_terms: {off} of {most} from NumPy's")
        if kind == "all_reduce":
            right = np.zeros_like(one)
            self.well("the reference", lambda: self.reference.sum_terms(list(terms), right, op, count))
            self.equal("sum_terms, beside the ring", right, one)

    # Errors

    def refuse(self) -> None:
        """One rank makes another call, or an invalid one; all raise the same error, and later calls work."""
        odd = self.draw.randrange(self.size) == self.rank
        length, number = self.pick(5, 1000), self.draw.randrange(5)
        if not self.options.check and self.topology.nodes > 1:
            number = 3  # only `allocate` is compared
        self.note(f"refused call {number}")

        def tries(backend: Any) -> Callable[[], Any]:
            array = np.ones(length, "float32")
            return [
                lambda: backend(np.ones(length, "complex64") if odd else array, "sum"),
                lambda: backend(array, "no such op" if odd else "sum"),
                lambda: backend(np.ones(2 * length, "float32")[::2] if odd else array, "sum"),
                lambda: backend.allocate(-1 if odd else 4),
                lambda: backend.broadcast(array, 99 if odd else 0),
            ][number]

        self.check(self.both("refused", tries(self.plain), tries(self.other)) is None, "nothing was refused")
        rows = self.rows(length, "float64")
        one, two = np.array(rows[self.rank]), np.array(rows[self.rank])
        self.reduce_both(Memory("max after a refusal", False, one, two), rows, "max")


def name_of(dtype: np.dtype) -> Any:
    """Return the name of a dtype in DTYPES or MOVED."""
    return next(name for name in (*DTYPES, *MOVED) if dtype_of(name) == dtype)


def copied(tree: Any) -> Any:
    """Return the arrays of a tree, copied."""
    return [np.array(array) for array in flat(tree)]
