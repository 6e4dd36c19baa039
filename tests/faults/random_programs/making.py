"""Random programs of collective calls, each with at most one injected disagreement. Pure: no MPI.

A program is the list of calls that every rank makes. An injection changes the list of one rank; `Program.of_rank`
returns the calls of a rank. Everything is drawn from the seed, so every rank knows the others' calls and the right
results: the calls of a rank on one backend are numbered, and a call matches the calls of this number on other ranks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.backends import ON_CPU, ON_NODES
from tests.random_calls import DTYPES, LENGTHS, OPS, nodes_for, op_for, reduced

TOGETHER = ("reduce", "broadcast", "collect")  # calls that give numbers
CHECKS = ("on", "off")

# What may be injected. Those of ENDINGS end a rank, or let it sleep, which ends the job.
ENDINGS = ("exception", "return", "exit", "killed", "asleep")
KINDS = ("none", "length", "dtype", "op", "memory", "array", "order", "extra", "missing", "name", *ENDINGS)


@dataclass(frozen=True)
class Call:
    """One call. what: "create", "allocate", one of TOGETHER, "close", or one of ENDINGS.

    op: of a reduction; the root of a broadcast. array: the number of an allocated array; None: ordinary memory of
    `length` elements. part: the slice of the array, as fractions of its length in eighths; by default all of it.
    """

    what: str
    backend: int = 0
    name: str = ""
    array: int | None = None
    part: tuple[int, int] = (0, 8)
    length: int = 0
    dtype: str = ""
    op: str = ""

    def __str__(self) -> str:
        memory = "foreign" if self.array is None else f"array {self.array}, eighths {self.part[0]} to {self.part[1]}"
        words = {
            "create": f"{self.name}",
            "allocate": f"array {self.array}: {self.length} {self.dtype}",
            "reduce": f"{self.op} of {self.length} {self.dtype}, {memory}",
            "broadcast": f"from {self.op} of {self.length} {self.dtype}, {memory}",
            "collect": f"{self.length} {self.dtype}, {memory}",
        }
        return f"{self.what} (backend {self.backend}) {words.get(self.what, '')}".rstrip()

    @property
    def signature(self) -> tuple[str, int, str, str]:
        """Return the properties that must be equal on all ranks for the result to have a meaning."""
        return self.what, self.length, self.dtype, self.op


@dataclass(frozen=True)
class Program:
    """calls: those of every rank but `rank`, which makes the calls `injected`. nodes: sizes of the nodes, or None for
    one node. hosts: whether the nodes pretend to share no memory."""

    seed: int
    ranks: int
    check: str
    nodes: tuple[int, ...] | None
    hosts: bool
    kind: str
    rank: int
    calls: tuple[Call, ...]
    injected: tuple[Call, ...]

    def of_rank(self, rank: int) -> tuple[Call, ...]:
        return self.injected if rank == self.rank else self.calls

    def __str__(self) -> str:
        where = f"{'hosts' if self.hosts else 'nodes'} {self.nodes}" if self.nodes else "one node"
        head = f"program {self.seed}: {self.ranks} ranks, {where}, check {self.check}, {self.kind}"
        lines = [f"  {number:3} {call}" for number, call in enumerate(self.calls)]
        first = next((number for number, pair in enumerate(zip(self.calls, self.injected, strict=False))
                      if pair[0] != pair[1]), min(len(self.calls), len(self.injected)))  # fmt: skip
        there = self.injected[first] if first < len(self.injected) else "the end"
        return "\n".join([head, *lines, f"  rank {self.rank} instead, from call {first}: {there}"])


def make(seed: int, kinds: Sequence[str] = KINDS, checks: Sequence[str] = CHECKS) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    check = checks[seed // len(kinds) % len(checks)]
    ranks = chance.choice((1, 2, 2, 2, 3, 3, 4))
    nodes = nodes_for(chance, ranks) or None
    hosts = nodes is not None and chance.random() < 0.6
    rank = chance.randrange(ranks)
    while True:  # until the kind finds something in the program to change
        calls = _calls(chance, ranks, ON_CPU if nodes is None else ON_NODES)
        injected = _inject(chance, kind, calls)
        if injected is not None:
            return Program(seed, ranks, check, nodes, hosts, kind, rank, tuple(calls), tuple(injected))


def _calls(chance: random.Random, ranks: int, names: Sequence[str]) -> list[Call]:
    """Return calls on one to three backends with two or three arrays each. Most are repeated, because there are few
    signatures."""
    calls: list[Call] = []
    choices: list[Call] = []
    backends = chance.choice((1, 1, 2, 3))
    for backend in range(backends):
        calls.append(Call("create", backend, chance.choice(names)))
        dtype, length = chance.choice(DTYPES), chance.choice(LENGTHS[1:])
        allocated = [Call("allocate", backend, array=array, length=length, dtype=dtype) for array in range(2)]
        if chance.random() < 0.3:
            allocated.append(replace(allocated[0], array=2, length=chance.choice(LENGTHS[1:])))
        calls += allocated
        for _ in range(chance.randint(1, 3)):
            choices.append(_move(chance, _reduction(chance, backend, allocated), ranks))
            if choices[-1].what == "reduce" and chance.random() < 0.4:
                choices.append(replace(choices[-1], op=op_for(chance, choices[-1].dtype)))
    calls += [chance.choice(choices) for _ in range(chance.randint(4, 12))]
    if chance.random() < 0.5:
        calls += [Call("close", backend) for backend in range(backends)]
    return calls


def _reduction(chance: random.Random, backend: int, allocated: list[Call]) -> Call:
    array = chance.choice(allocated)
    if chance.random() < 0.3:
        dtype = chance.choice(DTYPES)
        return Call("reduce", backend, length=chance.choice(LENGTHS[1:]), dtype=dtype, op=op_for(chance, dtype))
    part = chance.choice(((0, 8), (0, 8), (0, 4), (4, 8), (1, 7)))
    begin, end = ends(part, array.length)
    return Call(
        "reduce", backend, array=array.array, part=part, length=end - begin, dtype=array.dtype,
        op=op_for(chance, array.dtype),
    )  # fmt: skip


def _move(chance: random.Random, call: Call, ranks: int) -> Call:
    """Replace some reductions by collectives that compute nothing."""
    what = chance.choice(("reduce", "reduce", "reduce", "reduce", "broadcast", "collect"))
    op = {"broadcast": str(chance.randrange(ranks)), "collect": ""}.get(what, call.op)
    return replace(call, what=what, op=op)


def ends(part: tuple[int, int], length: int) -> tuple[int, int]:
    """Return the first and the last element of a part of an array."""
    return part[0] * length // 8, part[1] * length // 8


# Injections: each takes the calls of a program and gives those of one rank; None where there is nothing to change.


def _inject(chance: random.Random, kind: str, calls: list[Call]) -> list[Call] | None:
    if kind == "none":
        return list(calls)
    if kind in ENDINGS:
        cut = chance.randrange(1, len(calls) + 1)
        return [*calls[:cut], Call(kind)]
    places = [number for number, call in enumerate(calls) if (kind, call.what) in _CHANGES]
    chance.shuffle(places)
    for place in places:
        changed = _CHANGES[kind, calls[place].what](chance, list(calls), place)
        if changed is not None:
            return changed
    return None


Change = Callable[[random.Random, list[Call], int], list[Call] | None]


def _other_length(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    """Change the length of a call: another part of the allocated array if there is one, else ordinary memory."""
    call = calls[place]
    length = chance.choice([length for length in (call.length + 1, call.length * 2 + 1, 1) if length != call.length])
    memory = call.array if call.what == "allocate" else None
    calls[place] = replace(call, length=length, array=memory)
    if call.what in TOGETHER and call.array is not None and chance.random() < 0.7:
        part = chance.choice(((0, 4), (2, 8), (1, 7), (0, 8)))
        whole = next(each for each in calls if each.what == "allocate" and _same_array(each, call))
        begin, end = ends(part, whole.length)
        if end - begin != call.length:
            calls[place] = replace(call, part=part, length=end - begin)
    return calls


def _other_dtype(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    call = calls[place]
    dtype = chance.choice([dtype for dtype in sorted(set(DTYPES)) if dtype != call.dtype])
    op = "sum" if call.op == "mean" and dtype.startswith("int") else call.op
    calls[place] = replace(call, dtype=dtype, op=op, array=call.array if call.what == "allocate" else None)
    return calls


def _other_op(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    """Change the operation, if possible to one that the program uses for the same array."""
    call = calls[place]
    known = [each for each in calls if replace(each, op=call.op) == call and each.op != call.op]
    if known:
        calls[place] = chance.choice(known)
        return calls
    calls[place] = replace(
        call, op=next(op for op in chance.sample(list(OPS), len(OPS)) if op not in (call.op, "mean"))
    )
    return calls


def _other_root(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    """Change the root to the next rank, which may not exist."""
    calls[place] = replace(calls[place], op=str(int(calls[place].op) + 1))
    return calls


def _other_what(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    """Replace the call by a broadcast."""
    calls[place] = replace(calls[place], what="broadcast", op="0")
    return calls


def _other_memory(chance: random.Random, calls: list[Call], place: int) -> list[Call] | None:
    """Replace allocated memory by ordinary memory, or the reverse."""
    call = calls[place]
    if call.array is not None:
        calls[place] = replace(call, array=None)
        return calls
    fits = [each for each in calls[:place] if each.what == "allocate" and each.backend == call.backend
            and (each.length, each.dtype) == (call.length, call.dtype)]  # fmt: skip
    if not fits:
        return None
    calls[place] = replace(call, array=fits[0].array, part=(0, 8))
    return calls


def _other_array(chance: random.Random, calls: list[Call], place: int) -> list[Call] | None:
    call = calls[place]
    if call.array not in (0, 1):
        return None
    calls[place] = replace(call, array=1 - call.array)
    return calls


def _other_order(chance: random.Random, calls: list[Call], place: int) -> list[Call] | None:
    """Swap a call with the next different one."""
    what = TOGETHER if calls[place].what in TOGETHER else (calls[place].what,)
    after = next((number for number in range(place + 1, len(calls)) if calls[number].what in what), None)
    if after is None or replace(calls[after], array=calls[place].array) == calls[place]:
        return None
    if calls[place].what == "allocate" and calls[after].backend != calls[place].backend:
        return None  # which is not there yet
    calls[place], calls[after] = calls[after], calls[place]
    return calls


def _another_call(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    return [*calls[: place + 1], *calls[place:]]


def _no_call(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    return [*calls[:place], *calls[place + 1 :]]


def _other_name(chance: random.Random, calls: list[Call], place: int) -> list[Call]:
    call = calls[place]
    calls[place] = replace(call, name=chance.choice([name for name in ON_NODES if name != call.name]))
    return calls


def _same_array(one: Call, other: Call) -> bool:
    return (one.backend, one.array) == (other.backend, other.array)


_CHANGES: dict[tuple[str, str], Change] = {
    **{("length", what): _other_length for what in ("allocate", *TOGETHER)},
    **{("dtype", what): _other_dtype for what in ("allocate", *TOGETHER)},
    ("op", "reduce"): _other_op,
    ("op", "broadcast"): _other_root,
    ("op", "collect"): _other_what,
    **{("memory", what): _other_memory for what in TOGETHER},
    **{("array", what): _other_array for what in TOGETHER},
    **{("order", what): _other_order for what in ("allocate", *TOGETHER)},
    **{("extra", what): _another_call for what in ("create", "allocate", *TOGETHER)},
    **{("missing", what): _no_call for what in ("close", *TOGETHER)},
    ("name", "create"): _other_name,
}


# Values


def values(call: Call, rank: int, turn: int) -> np.ndarray:
    """Return a rank's values for its `turn`-th call of TOGETHER on a backend: small integers, so that sums are
    exact."""
    index = np.arange(call.length, dtype=np.int64)
    return ((index * 7 + rank * 3 + turn * 5 + call.backend * 11) % 5 + 1).astype(call.dtype)


def expected(program: Program, call: Call, turn: int) -> np.ndarray | None:
    """Return the right result in float64; None if the ranks' calls do not match, so that no result is right.

    The result of a broadcast depends on its root only.
    """
    sides = []
    for rank in [int(call.op)] if call.what == "broadcast" else range(program.ranks):
        there = [each for each in program.of_rank(rank) if each.what in TOGETHER and each.backend == call.backend]
        if turn >= len(there) or there[turn].signature != call.signature:
            return None
        sides.append(values(call, rank, turn))
    if call.what != "reduce":
        return (sides[0] if call.what == "broadcast" else np.stack(sides)).astype(np.float64)
    return reduced(np.stack(sides), call.op)
