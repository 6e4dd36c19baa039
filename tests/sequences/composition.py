"""Random calls on two equal backends: one is called plainly; the other is traced, or its calls are bound or submitted.

{algorithm} x {compress, exact} x {plain, traced, bound, submitted} x {dense, tree, sparse, ...} x {allocated, scratch,
unregistered, slices} x {flat, simulated nodes}. Both backends make the same calls with the same values. After each call
both have the same outcome: equal bits, or errors of one kind, and the same error feedback. All ranks have the same
bits. Sums are near NumPy's; exact sums have the bits of "ring" on one node.

Only public names are used.
"""

import os
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.errors import AllReduceError, UnavailableError
from tests import random_calls
from tests.backends import ON_CPU
from tests.random_calls import LENGTHS, OPS
from tests.sequences.calls import Calls

COMPRESSIONS = ("bfloat16", "float16", "int8", "float8", "powersgd:2", allreduce.PowerSGD(2, start_powerSGD_iter=1))
WAYS = ("traced", "bound", "submitted", "traced, bound", "traced, submitted", "again")
FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "float32", "float64", "int32", "int64", "uint8", "int8", "bool")
MEMORY = ("allocated", "scratch", "slice", "slice of scratch", "unregistered", "two axes", "Fortran")
FIXED = {"auto": {"measure": False}}  # options without which equal calls may have other bits
# how far a sum may be from NumPy's: of the sum of the magnitudes; of codes of 8 bits, of the largest element
NEAR = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "int8": 0.1, "float8": 0.3}


class Options(NamedTuple):
    """How both backends are made, and how the second one differs. per_node: see Topology."""

    name: str
    compress: Any = None
    exact: bool = False
    way: str = "traced"
    per_node: Any = None
    check: bool = True


class Bound(NamedTuple):
    """A call that both backends repeat on their own array; the second one's may be bound."""

    kind: str
    op: str
    arrays: tuple[np.ndarray, np.ndarray]
    calls: tuple[Callable[[], Any], Callable[[], Any]]


def draw_options(calls: Calls) -> Options:
    name, compress, exact = (
        calls.pick(*(each for each in allreduce.available() if each in ON_CPU)),
        None,
        calls.chance(0.4),
    )
    if not exact and calls.chance(0.75):
        compress = calls.pick(*COMPRESSIONS)
    per_node = random_calls.nodes_for(calls.draw, calls.size) or None
    return Options(name, compress, exact, calls.pick(*WAYS), per_node, calls.pick(True, True, False))


class Composition(Calls):
    """One sequence. Collective. options: None: drawn."""

    def __init__(
        self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool = False, options: Options | None = None
    ) -> None:
        super().__init__(comm, seed, folder, verbose)
        self.options = options or draw_options(self)
        self.numbers = np.random.default_rng(seed)
        self.arrays: list[tuple[bool, np.ndarray, np.ndarray]] = []  # scratch or not, and each backend's array
        self.bounds: list[Bound] = []
        self.futures: list[tuple[Any, np.ndarray, np.ndarray]] = []

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

    def run_each(self, rounds: int = 1) -> bool:
        """Make calls of every kind. Returns whether such backends can be made here."""
        if not self._open():
            return False
        for _ in range(rounds):
            for action, _ in self._actions():
                action()
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
        if "submitted" in self.options.way:
            found += [(self.submit, 4)]
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
        self.plain: Any = plain
        trace = os.path.join(self.folder, f"trace {time.monotonic_ns()}.json")
        traced = {"trace": trace} if "traced" in given.way else {}
        self.inner: Any = self.well("create", lambda: create(**traced))
        self.other: Any = self.inner
        self.reference: Any = None
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

    def equal(self, what: str, plain: Any, other: Any, everywhere: bool = True) -> None:
        """Check that two arrays have the same bits. everywhere: also on all ranks."""
        one, two = (np.ascontiguousarray(array) for array in (plain, other))
        same = (one.shape, one.dtype, one.tobytes()) == (two.shape, two.dtype, two.tobytes())
        self.check(
            same, f"{what}: plain {one.dtype}{one.shape} {one.ravel()[:6]}, {self.options.way} {two.ravel()[:6]}"
        )
        if everywhere:
            sides = self.comm.allgather(hash_of(one))
            self.check(len(set(sides)) == 1, f"{what}: the ranks have different bits, {one.ravel()[:6]}")

    def near(self, what: str, found: Any, rows: np.ndarray, op: str) -> None:
        """Check a reduction of all ranks' arrays against NumPy's in float64."""
        self.check(self._is_near(np.asarray(found), rows, op), f"{what} of {rows.dtype}: {np.ravel(found)[:6]}")

    def _is_near(self, found: np.ndarray, rows: np.ndarray, op: str) -> bool:
        if not rows.size:
            return True
        if rows.dtype.kind in "iub":
            return np.array_equal(found, integers(rows, op))
        wide, compress = rows.astype("float64"), self.options.compress
        right, short = OPS[op](wide), rows.dtype.itemsize == 2
        if op in ("max", "min"):
            return np.array_equal(found.astype("float64"), right)
        share = np.abs(right) if op == "prod" else np.abs(wide).sum(0) / (self.size if op == "mean" else 1)
        unit = epsilon(rows.dtype)
        allowed = 2 * self.size * unit * share + 1e-7 * (unit > 1e-10)
        if self.options.exact:  # the elements of a block share an exponent
            allowed = allowed + 2 * self.size * unit * np.abs(wide).max()
        if compress is not None and op in ("sum", "mean") and not short:
            if compress not in NEAR:
                return True  # by low rank: a sum may be far off
            of_block = compress in ("int8", "float8")
            allowed = allowed + NEAR[compress] * ((1 + self.size) * np.abs(wide).max() if of_block else share)
        return bool((np.abs(found.astype("float64") - right) <= allowed).all())

    def alone(self, what: str, found: Any, mine: np.ndarray, op: str) -> None:
        """Check that an exact sum has the bits that the array has on one node in a plain call."""
        if self.reference is None or mine.dtype.name not in FLOATS or op not in ("sum", "mean") or self.size == 1:
            return
        right = np.array(mine)
        self.well("the reference", lambda: self.reference(right, op))
        self.equal(f"{what}, beside the ring", right, found)

    # Values

    def rows(self, shape: Any, dtype: str) -> np.ndarray:
        """Return the arrays of all ranks. Their magnitudes differ, so that the bits of sums depend on their order."""
        full = (self.size, *np.atleast_1d(shape))
        if dtype == "bool":
            return self.numbers.integers(0, 2, full).astype(bool)
        if dtype not in FLOATS:
            return self.numbers.integers(1, 100, full).astype(dtype)
        spread = 2 if dtype in ("float16", "bfloat16") or self.options.compress is not None else 8
        return np.ldexp(self.numbers.normal(size=full), self.numbers.integers(-spread, 1, full)).astype(dtype_of(dtype))

    def op(self, dtype: str) -> str:
        return self.pick("sum", "mean", "sum", "mean", "max", "min", "prod")

    def memory(self, dtype: str) -> tuple[str, bool, np.ndarray, np.ndarray] | None:
        """Return a kind of memory, whether blocks of exact sums begin at its start, and both backends' arrays."""
        kind = self.pick(*MEMORY)
        if kind in ("two axes", "Fortran"):
            shape, order = self.pick((3, 7), (40, 50), (1, 5), (64, 600)), "F" if kind == "Fortran" else "C"
            one, two = (np.zeros(shape, dtype_of(dtype), order=order) for _ in range(2))  # type: ignore[call-overload]
            return kind, True, one, two
        if kind == "unregistered":
            length = self.pick(*LENGTHS)
            return kind, True, np.zeros(length, dtype_of(dtype)), np.zeros(length, dtype_of(dtype))
        usable = [each for each in self.arrays if each[0] == ("scratch" in kind)]
        if not usable:
            return None
        _, one, two = self.pick(*usable)
        if "slice" in kind and one.size > 2:
            start = self.draw.randrange(one.size)
            stop = start + self.draw.randrange(one.size - start) + 1
            one, two = one[start:stop], two[start:stop]
            if self.chance(0.3) and one.size % 2 == 0:
                one, two = one.reshape(2, -1), two.reshape(2, -1)
        return kind, "scratch" in kind, one, two

    # Memory and its state

    def allocate(self) -> None:
        length, dtype, scratch = self.pick(*LENGTHS), self.pick(*DTYPES), self.chance(0.4)
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
        _, one, two = self.pick(*usable)
        middle = self.draw.randrange(1, one.size - 12)
        parts = [allreduce.Part("first", 0, (middle,)), allreduce.Part("table", middle, (3, 4))]
        if one.size > 2000:
            parts = [allreduce.Part("table", 4, (30, 40)), allreduce.Part("rest", 1204, (one.size - 1204,))]
        self.note(f"describe {one.size} {one.dtype} {parts}")
        for backend, array in ((self.plain, one), (self.other, two)):
            self.well("describe", partial(backend.describe, array, parts))

    def state(self) -> None:
        """Both have the same error feedback; load it again, in both."""
        self._wait()
        one, two = (self.well("state", backend.state) for backend in (self.plain, self.other))
        self.check(one.keys() == two.keys(), f"state: {sorted(one)}, {self.options.way}: {sorted(two)}")
        for name in sorted(one):
            self.equal(f"state, {name}", one[name], two[name], everywhere=False)
        if self.chance(0.5):
            self.note("load_state")
            for backend, state in ((self.plain, one), (self.other, two)):
                self.well("load_state", partial(backend.load_state, state))

    def reset(self) -> None:
        self._wait()
        self.note("reset")
        for backend in (self.plain, self.other):
            self.well("reset", backend.reset)

    # Sums of arrays

    def dense(self) -> None:
        dtype = self.pick(*DTYPES)
        taken = self.memory(dtype)
        if taken is None:
            return
        kind, blocks, one, two = taken
        dtype = one.dtype.name
        op = self.op(dtype)
        rows = self.rows(one.shape, dtype)
        self.note(f"{op} of {one.shape} {dtype}, {kind}")
        self.reduce_both(f"{op} of {kind}", one, two, rows, op, blocks)

    def reduce_both(
        self, what: str, one: np.ndarray, two: np.ndarray, rows: np.ndarray, op: str, blocks: bool = False
    ) -> None:
        one[...] = two[...] = rows[self.rank]
        call = partial(self.other, two, op)
        if "bound" in self.options.way:
            bind = self.other.bind
            call = lambda: bind(two, op)()  # noqa: E731
        if self.both(what, partial(self.plain, one, op), call) is None:
            return
        self.equal(what, one, two)
        self.near(what, one, rows, op)
        if blocks:
            self.alone(what, one, np.array(rows[self.rank], order="F" if not one.flags.c_contiguous else "C"), op)

    def bound(self) -> None:
        """Bind a call; `repeat` calls it, between other calls."""
        kind = self.pick("all_reduce", "all_reduce", "reduce_scatter", "all_gather")
        taken = self.memory(self.pick(*DTYPES))
        if taken is None or (kind != "all_reduce" and taken[2].ndim != 1):
            return
        _, _, one, two = taken
        op = self.op(one.dtype.name)
        self.note(f"bind {kind}, {op} of {one.shape} {one.dtype}, {taken[0]}")
        options = {"kind": kind} if kind == "all_gather" else {"kind": kind, "op": op}
        made = self.both("bind", partial(self.plain.bind, one, **options), partial(self.other.bind, two, **options))
        if made is None:
            return
        calls = made
        if "bound" in self.options.way:  # beside plain calls
            methods = {"reduce_scatter": lambda: self.plain.reduce_scatter(one, op)}
            methods |= {"all_reduce": lambda: self.plain(one, op), "all_gather": lambda: self.plain.all_gather(one)}
            calls = methods[kind], made[1]
        self.bounds.append(Bound(kind, op, (one, two), calls))

    def repeat(self) -> None:
        if not self.bounds:
            return
        kind, op, (one, two), calls = self.pick(*self.bounds)
        self.note(f"repeat {kind}, {op} of {one.shape} {one.dtype}")
        for _ in range(self.pick(1, 2)):
            rows = self.rows(one.shape, one.dtype.name)
            self._wait()
            one[...] = two[...] = rows[self.rank]
            if self.both(f"bound {kind}", *calls) is None:
                return
            own = self.plain.owned(one.size) if kind == "reduce_scatter" else slice(None)
            self.equal(f"bound {kind}", one[own], two[own], everywhere=kind == "all_reduce")
            if kind == "all_reduce":
                self.near("bound", one, rows, op)

    def submit(self) -> None:
        """Submit calls that end later, while the plain backend makes them now."""
        shape, op = self.pick(*LENGTHS), self.pick("sum", "mean", "max")
        rows = self.rows(shape, self.pick("float32", "float64"))
        one, two = np.array(rows[self.rank]), np.array(rows[self.rank])
        self.note(f"submit {op} of {shape} {rows.dtype}")
        future = self.well("submit", lambda: self.other.submit(two, op))
        self.futures.append((future, one, two))
        self.well("a plain call beside a submitted one", partial(self.plain, one, op))

    def _wait(self) -> None:
        futures, self.futures = self.futures, []
        for future, one, two in futures:
            self.well("wait", future.wait)
            self.equal("submitted", one, two)

    # Trees, rows, moves

    def leaves(self) -> list[np.ndarray]:
        """Return the rows of the arrays of a tree."""
        shapes = self.pick([(3,), (2, 2)], [(5,), (0,), (1000,)], [(4,)], [(), (40, 50), (300,)], [(70_001,), (7,)])
        one, found = self.pick("float32", "float64"), []
        for shape in shapes:
            dtype = one if self.chance(0.7) else self.pick(*DTYPES)
            rows = self.rows(shape, dtype).reshape(self.size, *shape)
            if dtype in ("float32", "float64") and self.options.compress is None:
                rows *= 2.0 ** self.pick(-60, 0, 40)  # arrays of a tree do not share exponents
            found.append(rows)
        return found

    def grown(self, rows: Sequence[np.ndarray]) -> Any:
        """Return a new tree of this rank's arrays."""
        first, *rest = (np.array(each[self.rank]) for each in rows)
        return {"first": first, "rest": [*rest, None], "none": ()}

    def compare_trees(self, what: str, one: Any, two: Any, rows: Sequence[np.ndarray], op: str) -> None:
        for a, b, each in zip(flat(one), flat(two), rows, strict=True):
            self.equal(what, a, b)
            self.near(what, a, each, op)
            self.alone(what, a, np.asarray(each[self.rank]), op)

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
        dtype, table, op = self.pick(*DTYPES), self.pick(1, 7, 100), self.pick("sum", "sum", "mean")
        widths = self.pick((), (1,), (3,), (2, 3))
        counts = [self.draw.randrange(0, 6) for _ in range(self.size)]
        if self.chance(0.1):
            table, widths, counts = 1000, (256,), [1000 - rank for rank in range(self.size)]  # as one dense array
        indices = [self.numbers.integers(0, table, count) for count in counts]
        values = [self.rows((max(count, 1), *widths), dtype)[0][:count] for count in counts]
        self.note(f"sparse, {op}: {counts} rows {widths} {dtype} of {table}")
        given = indices[self.rank], values[self.rank], table, op
        made = self.both("sparse", partial(self.plain.sparse, *given), partial(self.other.sparse, *given))
        if made is None:
            return
        for one, two in zip(*made, strict=True):
            self.equal("sparse", one, two)
        found, sums = made[0]
        there = np.unique(np.concatenate(indices))
        self.check(np.array_equal(found, there), f"sparse: {found}, not {there}")
        full = np.zeros((table, *widths), "float64" if dtype in FLOATS else dtype)
        size = np.zeros_like(full)
        with np.errstate(over="ignore"):
            for index, value in zip(indices, values, strict=True):
                np.add.at(full, index, value.astype(full.dtype))
                np.add.at(size, index, np.abs(value).astype(full.dtype))
        if dtype not in FLOATS:
            self.check(np.array_equal(sums, full[found]), f"sparse {dtype}: {sums[:3]}, not {full[found][:3]}")
            return
        share = self.size if op == "mean" else 1
        unit = epsilon(dtype_of(dtype))
        off = np.abs(sums.astype("float64") - full[found] / share)
        self.check(
            bool((off <= 8 * self.size * unit * size[found] / share + 1e-7).all()), f"sparse: {off.max(initial=0)}"
        )

    def stack(self) -> None:
        rows = self.leaves()
        self.note(f"stack {[(each.shape[1:], str(each.dtype)) for each in rows]}")
        for given in (self.grown(rows), np.array(rows[0][self.rank]), self.rank):
            made = self.both("stack", partial(self.plain.stack, given), partial(self.other.stack, given))
            assert made is not None
            for one, two in zip(flat(made[0]), flat(made[1]), strict=True):
                self.equal("stack", one, two)
        self.check(np.array_equal(made[0], np.arange(self.size)), f"stack: {made[0]}")

    def broadcast(self) -> None:
        rows, root = self.leaves(), self.draw.randrange(self.size)
        self.note(f"broadcast {[(each.shape[1:], str(each.dtype)) for each in rows]} from {root}")
        for of_tree in (True, False):
            one, two = (self.grown(rows) if of_tree else np.array(rows[0][self.rank]) for _ in range(2))
            self.both("broadcast", partial(self.plain.broadcast, one, root), partial(self.other.broadcast, two, root))
            for a, b, each in zip(flat(one), flat(two), rows, strict=False):
                self.equal("broadcast", a, b)
                self.check(a.tobytes() == each[root].tobytes(), f"broadcast: {a.ravel()[:6]}")

    def scatter(self) -> None:
        taken = self.memory(self.pick(*DTYPES))
        if taken is None or taken[2].ndim != 1:
            return
        kind, _, one, two = taken
        op, rows = self.op(one.dtype.name), self.rows(one.shape, one.dtype.name)
        self.note(f"reduce_scatter, {op} of {one.shape} {one.dtype}, {kind}")
        self._wait()
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
            part = rows[:, own] if self.options.compress not in ("int8", "float8") else rows
            self.near("reduce_scatter", made[0] if part is not rows else self._padded(rows, own, made[0], op), part, op)

    def _padded(self, rows: np.ndarray, own: slice, part: np.ndarray, op: str) -> np.ndarray:
        """Return the right result with `part` at its place: a block's scale may come from its neighbours."""
        whole = OPS[op](rows.astype("float64")) if rows.dtype.kind not in "iub" else integers(rows, op)
        whole[own] = part
        return whole

    def gather(self) -> None:
        taken = self.memory(self.pick(*DTYPES))
        if taken is None or taken[2].ndim != 1:
            return
        kind, _, one, two = taken
        rows = self.rows(one.shape, one.dtype.name)
        self.note(f"all_gather {one.shape} {one.dtype}, {kind}")
        self._wait()
        one[...] = two[...] = rows[self.rank]
        if self.both("all_gather", partial(self.plain.all_gather, one), partial(self.other.all_gather, two)) is None:
            return
        everywhere = self.topology.nodes == 1  # nodes divide a buffer alike, and this test gives them other slices
        self.equal("all_gather", one, two, everywhere)
        own = self.plain.owned(one.size)
        self.check(one[own].tobytes() == rows[self.rank][own].tobytes(), "all_gather changed the own slice")

    # Exact sums of several terms

    def terms(self) -> None:
        dtype, length, op = self.pick(*FLOATS), self.pick(*LENGTHS), self.pick("sum", "mean")
        counts = [self.draw.randrange(0, 4) for _ in range(self.size)]
        count, kind = max(1, sum(counts)) + self.pick(0, 2), self.pick("all_reduce", "reduce_scatter")
        terms = self.rows((max(1, *counts, 1), length), dtype)[self.rank][: counts[self.rank]]
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
        self.reduce_both("max after a refusal", one, two, rows, "max")


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def epsilon(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def hash_of(array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


def integers(rows: np.ndarray, op: str) -> np.ndarray:
    """Return a reduction of integers or flags; sums and products wrap around."""
    if rows.dtype == bool:
        return rows.any(0) if op in ("sum", "max") else rows.all(0)
    reduce: dict[str, Callable[..., Any]] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    with np.errstate(over="ignore"):
        return reduce[op].reduce(rows, axis=0, dtype=rows.dtype)  # type: ignore[attr-defined, no-any-return]


def flat(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree, in order."""
    if isinstance(tree, dict):
        return [array for key in tree for array in flat(tree[key])]
    if isinstance(tree, list | tuple):
        return [array for part in tree for array in flat(part)]
    return [] if tree is None else [np.asarray(tree)]


def copied(tree: Any) -> Any:
    """Return the arrays of a tree, copied."""
    return [np.array(array) for array in flat(tree)]
