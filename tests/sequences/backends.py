"""Random sequences of calls on backends: several backends on several topologies, one after the other and in turn."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.backend import AllReduce
from tests import random_calls
from tests.random_calls import LENGTHS, op_for, reduced
from tests.sequences.calls import Calls
from tests.sequences.making import names

DTYPES = (*random_calls.DTYPES, "float16")
AGREED = (4, 6)  # refused calls about which ranks agree wherever calls are compared


class Group:
    """A topology, and the ranks of the job in this rank's part of it."""

    def __init__(self, name: str, topology: allreduce.Topology, ranks: list[int]) -> None:
        self.name, self.topology, self.ranks = name, topology, ranks


class Used:
    """A backend, the arrays that it has allocated, and its background calls, each with a check of its result."""

    def __init__(self, name: str, backend: AllReduce, group: Group, compressed: bool) -> None:
        self.name, self.backend, self.group, self.compressed = name, backend, group, compressed
        self.arrays: list[np.ndarray] = []
        self.pending: list[tuple[Any, Callable[[], None]]] = []


class Backends(Calls):
    """One sequence. Collective."""

    def __init__(self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool) -> None:
        super().__init__(comm, seed, folder, verbose)
        self.groups: list[Group] = []
        self.used: list[Used] = []
        self.numbers = np.random.default_rng(seed)

    def run(self, calls: int) -> None:
        actions: list[tuple[Callable[[Used], None], int]] = [
            (self.reduce, 10), (self.allocate, 3), (self.tree, 2), (self.broadcast, 2), (self.collect, 2),
            (self.gather, 2), (self.scatter, 2), (self.sparse, 2), (self.refuse, 4), (self.submit, 3), (self.close, 2),
            (self.close_group, 1), (self.drop, 1),
        ]  # fmt: skip
        for _ in range(calls * 3):
            if not self.used or (len(self.used) < 5 and self.chance(0.12)):
                self.create()
                continue
            used = self.pick(*self.used)
            ((action, _),) = self.draw.choices(actions, [weight for _, weight in actions])
            if action not in (self.submit, self.allocate):
                self.wait(used)
            action(used)
        while self.used:
            self.close(self.pick(*self.used))
        for group in self.groups:
            self.well("Topology.close", group.topology.close)

    # Making

    def group(self) -> Group:
        if self.groups and self.chance(0.75):
            return self.pick(*self.groups)
        kind = self.pick("flat", "nodes of 2", "nodes of 1", "split", "duplicate")
        everyone = list(range(self.size))
        if kind == "split" and self.groups:
            half, base = self.rank % 2, self.groups[0].topology
            ranks = [rank for rank in everyone if rank % 2 == half]
            if len(self.groups[0].ranks) == self.size:
                made = Group(kind, self.well("split", lambda: base.split(half)), ranks)
                self.groups.append(made)
                return made
        if kind == "duplicate" and self.groups:
            base = self.pick(*self.groups)
            made = Group(
                kind, self.well("duplicate", lambda: base.topology.split(0, base.topology.ranks_per_node)), base.ranks
            )
            self.groups.append(made)
            return made
        nodes = {"nodes of 2": 2, "nodes of 1": 1}.get(kind)
        made = Group(kind, self.well("Topology", lambda: allreduce.Topology(ranks_per_node=nodes)), everyone)
        self.groups.append(made)
        return made

    def create(self) -> None:
        group, name = self.group(), self.pick(*names())
        options: dict[str, Any] = {"check": self.pick(True, True, False)}
        if name != "native" and self.chance(0.15):
            options["compress"] = self.pick("bfloat16", "float16")
        self.note(f"create {name} on {group.name} of {len(group.ranks)}, {options}")
        backend, error = self.call("create", lambda: allreduce.create(name, group.topology, **options))
        if error is not None:
            wanted = name == "shared" or "compress" in options
            self.check(wanted and isinstance(error, allreduce.errors.AllReduceError), f"create {name}: {error!r}")
            return
        self.used.append(Used(f"{name} on {group.name}", backend, group, "compress" in options))

    # Values

    def rows(self, used: Used, shape: Any, dtype: str) -> np.ndarray:
        """Return the arrays of all ranks of the job; those of this part are reduced."""
        full = self.numbers.integers(1, 4, size=(self.size, *np.atleast_1d(shape))).astype(dtype)
        return full[used.group.ranks]

    def mine(self, used: Used, rows: np.ndarray) -> np.ndarray:
        return rows[used.group.ranks.index(self.rank)]

    def near(self, used: Used, what: str, found: Any, wanted: np.ndarray) -> None:
        loose = 0.02 if used.compressed or np.asarray(found).dtype == np.float16 else 1e-5
        near = np.shape(found) == wanted.shape and np.allclose(np.asarray(found, "float64"), wanted, rtol=loose)
        text = f"{what} of {used.name}: {np.asarray(found).ravel()[:8]}, not {wanted.ravel()[:8]}"
        self.check(near, text)
        crc = zlib.crc32(np.ascontiguousarray(found).tobytes())
        everyone = dict(enumerate(self.comm.allgather(crc)))
        self.check(len({everyone[rank] for rank in used.group.ranks}) == 1, f"{what} of {used.name}: bits differ")

    # Calls

    def takes(self, used: Used, dtype: str) -> bool:
        return dtype != "float16" or "native" not in used.name

    def allocate(self, used: Used) -> None:
        length, dtype = self.pick(*LENGTHS), self.pick(*DTYPES)
        if not self.takes(used, dtype):
            return
        self.note(f"allocate {length} {dtype} by {used.name}")
        array = self.well("allocate", lambda: used.backend.allocate(length, dtype))
        self.check(not array.any(), f"{used.name} gave an array that is not zeros")
        used.arrays.append(array)

    def reduce(self, used: Used) -> None:
        """Reduce an allocated array, a slice of one, or another array of any shape; sometimes twice."""
        kind = self.pick("allocated", "allocated", "slice", "foreign", "two axes", "Fortran")
        dtype = self.pick(*DTYPES)
        if kind in ("allocated", "slice") and used.arrays:
            array = self.pick(*used.arrays)
            if kind == "slice" and array.size > 2:
                start = self.draw.randrange(array.size)
                array = array[start : start + self.draw.randrange(array.size - start) + 1]
            dtype = str(array.dtype)
        elif kind == "Fortran":
            array = np.zeros((self.pick(3, 40), 5), dtype, order="F")
        else:
            array = np.zeros((self.pick(2, 30), 7) if kind == "two axes" else self.pick(*LENGTHS), dtype)
        if not self.takes(used, dtype):
            return
        op = op_for(self.draw, dtype)
        self.note(f"{op} of {array.shape} {dtype}, {kind}, by {used.name}")
        for _ in range(self.pick(1, 1, 2)):
            rows = self.rows(used, array.shape, dtype)
            array[...] = self.mine(used, rows)
            self.well("reduce", lambda: used.backend(array, op))
            self.near(used, op, array, reduced(rows, op))

    def tree(self, used: Used) -> None:
        shapes = self.pick([(3,), (2, 2)], [(5,), (0,), (1000,)], [(4,)])
        rows = [self.rows(used, shape, "float32") for shape in shapes]
        tree = {f"leaf {number}": np.array(self.mine(used, each)) for number, each in enumerate(rows)}
        self.note(f"a tree of {shapes} by {used.name}")
        self.well("tree", lambda: used.backend(tree, "sum"))
        for leaf, each in zip(tree.values(), rows, strict=True):
            self.near(used, "a tree", leaf, reduced(each, "sum"))

    def broadcast(self, used: Used) -> None:
        root = self.draw.randrange(self.size)
        root = min(root, (self.size // 2) - 1) if used.group.name == "split" else root
        root = max(0, min(root, min(self.comm.allgather(len(used.group.ranks))) - 1))
        dtype, length = self.pick(*DTYPES), self.pick(*LENGTHS)
        self.note(f"broadcast {length} {dtype} from {root} by {used.name}")
        rows = self.rows(used, length, dtype)
        array = np.array(self.mine(used, rows))
        self.well("broadcast", lambda: used.backend.broadcast(array, root))
        self.near(used, "broadcast", array, rows[root].astype("float64"))

    def collect(self, used: Used) -> None:
        dtype, length = self.pick(*DTYPES), self.pick(*LENGTHS)
        self.note(f"collect {length} {dtype} by {used.name}")
        rows = self.rows(used, length, dtype)
        found = self.well("collect", lambda: used.backend.stack(np.array(self.mine(used, rows))))
        self.near(used, "collect", found, rows.astype("float64"))

    def gather(self, used: Used) -> None:
        spans = [used.backend.owned(1000, rank) for rank in range(len(used.group.ranks))]
        if sum(span.stop - span.start for span in spans) > 1000:  # nodes must have the same slices
            return
        length = self.pick(*LENGTHS)
        self.note(f"all_gather {length} by {used.name}")
        rows = self.rows(used, length, "float32")
        array, owner = np.array(self.mine(used, rows)), used.backend
        wanted = np.empty(length)
        for rank, row in enumerate(rows):
            wanted[owner.owned(length, rank)] = row[owner.owned(length, rank)]
        self.well("all_gather", lambda: used.backend.all_gather(array))
        self.near(used, "all_gather", array, wanted)

    def scatter(self, used: Used) -> None:
        if not used.backend.two_phase:
            return
        length = self.pick(*LENGTHS)
        self.note(f"reduce_scatter {length} by {used.name}")
        rows = self.rows(used, length, "float32")
        array = np.array(self.mine(used, rows))
        found = self.well("reduce_scatter", lambda: used.backend.reduce_scatter(array, "sum"))  # type: ignore[attr-defined]
        part = used.backend.owned(length)
        loose = 0.02 if used.compressed else 1e-5
        near = np.allclose(found, reduced(rows, "sum")[part], rtol=loose)
        self.check(near, f"reduce_scatter of {used.name}: {found[:8]}")

    def sparse(self, used: Used) -> None:
        table, width = self.pick(1, 7, 100), self.pick(1, 3)
        counts = [self.draw.randrange(0, 6) for _ in range(self.size)]
        self.note(f"sparse {counts} rows of {table} by {used.name}")
        indices = [self.numbers.integers(0, table, count) for count in counts]
        values = [self.numbers.integers(1, 4, (count, width)).astype("float32") for count in counts]
        wanted = np.zeros((table, width))
        for rank in used.group.ranks:
            np.add.at(wanted, indices[rank], values[rank])
        there = sorted({int(each) for rank in used.group.ranks for each in indices[rank]})
        mine = indices[self.rank], values[self.rank]
        found, sums = self.well("sparse", lambda: used.backend.sparse(*mine, table, "sum"))
        self.check(found.tolist() == there, f"sparse of {used.name}: {found}, not {there}")
        self.near(used, "sparse", sums, wanted[there])

    def submit(self, used: Used) -> None:
        """Submit a call in the background; it is waited for later, after other calls."""
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return
        rows = self.rows(used, self.pick(1, 17, 4099), "float32")
        array = np.array(self.mine(used, rows))
        self.note(f"submit {array.size} to {used.name}")
        pending = self.well("submit", lambda: used.backend.submit(array, "sum"))
        used.pending.append((pending, lambda: self.near(used, "background", array, reduced(rows, "sum"))))

    def wait(self, used: Used) -> None:
        for pending, check in used.pending:
            self.well("wait", pending.wait)
            check()
        used.pending.clear()

    def refuse(self, used: Used) -> None:
        """One rank of a part passes an invalid argument, or another one than the others; later calls work."""
        size = len(used.group.ranks)
        bad = used.group.ranks[self.draw.randrange(10) % size] == self.rank
        backend, length = used.backend, self.pick(5, 1000)
        one, other = np.ones(length, "float32"), np.ones(length + 1, "float32")
        dtype = np.ones(length, "float64")
        tries: list[Callable[[], Any]] = [
            lambda: backend(np.ones(length, "complex64") if bad else one, "sum"),
            lambda: backend(one, "no such op" if bad else "sum"),
            lambda: backend(np.ones(2 * length, "float32")[::2] if bad else one, "sum"),
            lambda: backend("no array" if bad else one, "sum"),
            lambda: backend.allocate(-1 if bad else 4),
            lambda: backend.broadcast(one, 99 if bad else 0),
            lambda: backend.sparse(np.array([9]) if bad else np.array([0]), np.ones((1, 2), "float32"), 3),
            lambda: backend(other if bad else one, "sum"),
            lambda: backend(dtype if bad else one, "sum"),
            lambda: backend(one, "max" if bad else "sum"),
            lambda: backend.broadcast(one, int(bad)),
            lambda: backend.stack(one) if bad else backend(one, "sum"),
            lambda: backend.stack(other if bad else one),
            lambda: backend({"a": one} if bad else [one], "sum"),
        ]
        # Ranks without a fingerprint table compare no call that some of them know already, unless check=True.
        group = used.group
        meet = group.topology.nodes == 1
        differ = all(self.comm.allgather(meet and size > 1))
        agreed = AGREED if backend.config.options.get("check", True) else AGREED[:1]  # an allocation is always agreed
        number = self.draw.choice(range(len(tries)) if differ else agreed)
        self.note(f"refused call {number} of {used.name}")
        for _ in range(self.pick(0, 1)):  # ranks know it already
            rows = self.rows(used, length, "float32")
            array = np.array(self.mine(used, rows))
            self.well("reduce", lambda array=array: backend(array, "sum"))
        _, error = self.call("refused", tries[number])
        self.check(isinstance(error, allreduce.errors.AllReduceError), f"refused call {number}: {error!r}")
        rows = self.rows(used, length, "float32")
        array = np.array(self.mine(used, rows))
        self.well("reduce", lambda: backend(array, "sum"))
        self.near(used, "sum after a refusal", array, reduced(rows, "sum"))

    # Ends

    def close(self, used: Used) -> None:
        self.wait(used)
        self.note(f"close {used.name}")
        self.used.remove(used)
        self.well("close", used.backend.close)
        self.closed(used)

    def closed(self, used: Used) -> None:
        for array in used.arrays:
            array[...] = 1  # what a backend gave outlives it
        if self.chance(0.5):
            self.refused("after close", lambda: used.backend(np.ones(5, "float32"), "sum"), "ClosedError")
            self.well("close again", used.backend.close)

    def close_group(self, used: Used) -> None:
        """Close a topology, and with it its backends."""
        group = used.group
        children = [each for each in self.groups if each.name in ("split", "duplicate")]
        if group is self.groups[0] or group in children or self.chance(0.5):
            return
        self.note(f"close the topology of {used.name}")
        gone = [each for each in self.used if each.group is group]
        for each in gone:
            self.wait(each)
        if any(each.name == "duplicate" for each in children):  # of which one, nobody has noted
            return
        self.groups.remove(group)
        self.well("Topology.close", group.topology.close)
        self.used = [each for each in self.used if each not in gone]
        for each in gone:
            self.closed(each)

    def drop(self, used: Used) -> None:
        """Drop an array: its memory may be allocated again."""
        if used.arrays:
            used.arrays.pop(self.draw.randrange(len(used.arrays)))
