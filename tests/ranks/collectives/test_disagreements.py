"""Ranks that differ in a call all raise the same DisagreementError, with the table of all ranks' calls, and can
continue.

On one host and on several, with every backend, for new calls and for calls that all ranks know.
"""

import itertools
import re
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.arrays.memory_kinds import ALLOCATED
from allreduce.backend import AllReduce
from allreduce.errors import DisagreementError
from allreduce.transport import control
from tests.ranks.hosts import Hosts
from tests.ranks.together import raised_everywhere, usable

JOBS = "openmpi 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
NAMES = (*allreduce.NAMES, "adasum")
HOSTS = {"one host": (0,) * SIZE, "uneven hosts": (0,) * (SIZE - 1) + (1,), "hosts of one": tuple(range(SIZE))}
pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


@pytest.fixture(scope="module", params=[hosts for hosts in HOSTS if SIZE > 2 or hosts != "uneven hosts"])
def topology(request: pytest.FixtureRequest) -> Generator[allreduce.Topology]:
    Hosts.numbers = HOSTS[request.param]
    made = allreduce.Topology(Hosts(WORLD))
    yield made
    made.close()


@pytest.fixture(scope="module", params=NAMES)
def reduce(request: pytest.FixtureRequest, topology: allreduce.Topology) -> Generator[AllReduce]:
    # by measured constants, "auto" compares places only in calls that "shared" does
    made = usable(request.param, topology, **({"measure": False} if request.param == "auto" else {}))
    yield made
    made.close()


def _op(reduce: AllReduce) -> str:
    return "adasum" if reduce.name == "adasum" else "sum"


def _call_or(other: Callable[[np.ndarray], Any], reduce: AllReduce, seed: int, odd: bool) -> Any:
    array = np.ones(10 + seed)
    return other(array) if odd else reduce(array, _op(reduce))


def _sparse(reduce: AllReduce, rows: int) -> Any:
    return reduce.sparse(np.arange(3), np.ones((3, 2), np.float32), rows, "sum")


# A call that a rank may mix up with another one, by what they differ in. odd: whether it makes the other one.
CALLS: dict[str, Callable[[AllReduce, int, bool], Any]] = {
    "length": lambda reduce, seed, odd: reduce(np.ones(100 + seed + odd, np.float32), _op(reduce)),
    "shape": lambda reduce, seed, odd: reduce(np.ones((2, 3 + seed)[:: 1 - 2 * odd], np.float32), _op(reduce)),
    "shape in a list": lambda reduce, seed, odd: reduce([np.ones((2, 3 + seed)[:: 1 - 2 * odd])], _op(reduce)),
    "broadcast": lambda reduce, seed, odd: reduce.broadcast(np.ones(10 + seed), int(odd)),
    "collect": lambda reduce, seed, odd: reduce.stack(np.ones(10 + seed + odd)),
    "all_gather": lambda reduce, seed, odd: reduce.all_gather(np.ones(10 + seed + odd)),
    "reduce_scatter": lambda reduce, seed, odd: reduce.reduce_scatter(np.ones(20 + seed + odd)),
    "sparse": lambda reduce, seed, odd: _sparse(reduce, 10 + seed + odd),
    "broadcast, not sparse": lambda reduce, seed, odd: (
        _sparse(reduce, 10 + seed) if odd else reduce.broadcast(np.ones(10 + seed))
    ),
    # MPI's broadcasts have no tags, so those of different calls could match
    "broadcast, not collect": lambda reduce, seed, odd: (
        reduce.stack(np.ones(1 + seed)) if odd else reduce.broadcast(np.ones(1 + seed))
    ),
    "a call, not broadcast": lambda reduce, seed, odd: _call_or(reduce.broadcast, reduce, seed, odd),
    "a call, not all_gather": lambda reduce, seed, odd: _call_or(reduce.all_gather, reduce, seed, odd),
    "a call, not reduce_scatter": lambda reduce, seed, odd: _call_or(reduce.reduce_scatter, reduce, seed, odd),
    "allocate": lambda reduce, seed, odd: reduce.allocate(10 + seed + odd),
    "a call, not allocate": lambda reduce, seed, odd: _call_or(
        lambda array: reduce.allocate(array.size), reduce, seed, odd
    ),
    "bound": lambda reduce, seed, odd: reduce.bind(np.ones(10 + seed + odd), _op(reduce))(),
    "a call, not bound": lambda reduce, seed, odd: _call_or(
        lambda _: reduce.bind(np.ones(9), _op(reduce))(), reduce, seed, odd
    ),
    "dtype": lambda reduce, seed, odd: reduce(np.ones(12 + seed, np.float64 if odd else np.float32), _op(reduce)),
    "dtype of what moves": lambda reduce, seed, odd: reduce.broadcast(np.ones(4 + seed, ">u4" if odd else "<u4")),
    "op": lambda reduce, seed, odd: reduce(np.ones(13 + seed), "max" if odd else "sum"),
    "order of the axes": lambda reduce, seed, odd: reduce(
        np.zeros((4, 5 + seed), order="F" if odd else "C"), _op(reduce)
    ),
}
LOSSY = ("powersgd:2", "int8", "bfloat16")  # of the first two an array's state decides which messages are sent
KNOWN = {"both new": (), "both known": (0, 1), "one known": (0,)}
seeds = itertools.count(0, 50)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("kind", CALLS)
def test_the_same_error_on_all_ranks(reduce: AllReduce, kind: str, known: str) -> None:
    if reduce.name == "adasum" and ("sparse" in kind or kind == "op"):
        pytest.skip("it makes no sums")
    if "reduce_scatter" in kind and not reduce.two_phase:
        pytest.skip("it has no phases")
    call, seed = CALLS[kind], next(seeds)
    for odd in {0, SIZE - 1}:  # with other ranks on its host, or alone there
        for number in KNOWN[known]:
            for _ in range(2):
                call(reduce, seed, bool(number))
        text = raised_everywhere(WORLD, DisagreementError, partial(call, reduce, seed, reduce.rank == odd))
        lines = text.splitlines()[1:]
        assert [line.partition(":")[0] for line in lines] == [f"  rank {rank}" for rank in range(SIZE)]
        sides = [line.partition(":")[2] for line in lines]
        assert len(set(sides)) == 2
        assert sides.count(sides[odd]) == (1 if SIZE > 2 else sides.count(sides[odd]))
        array = np.full(7, 1.0 + reduce.rank)
        if reduce.name != "adasum":
            reduce(array, "max")
            assert set(array) == {SIZE}
        seed = next(seeds)


def test_places_in_allocated_memory(reduce: AllReduce) -> None:
    """In one array from `allocate`, and in two; also in an array so large that "auto" uses the node's shared memory."""
    length = 100_000
    arrays = [reduce.allocate(2 * length, "float32") for _ in range(2)]
    alone = reduce.topology.nodes == SIZE
    shares = {reduce.name, reduce.chosen(arrays[0][:length])} & {"shared", "hierarchical_copy"}
    # "auto" has one algorithm for the phases, whatever it selects for a call
    phases_share = shares or (reduce.name == "auto" and reduce._allocations.memory_of(arrays[0]) == ALLOCATED)
    calls: dict[str, Callable[[np.ndarray], object]] = {"a call": lambda array: reduce(array, _op(reduce))}
    if reduce.two_phase:
        calls |= {"reduce_scatter": reduce.reduce_scatter, "all_gather": reduce.all_gather}
    for (kind, call), odd in itertools.product(calls.items(), {0, SIZE - 1}):
        mine = reduce.rank == odd
        places = (arrays[0][:length], arrays[0][length:]), (arrays[0][:length], arrays[1][:length])
        for same, other in places:
            call(same)
            call(other)
            if (shares if kind == "a call" else phases_share) and not alone:
                text = raised_everywhere(WORLD, DisagreementError, partial(call, other if mine else same))
                assert re.search(r"array \d+ at byte", text)
            else:  # each rank reduces in memory of its own
                call(other if mine else same)
            call(same)


@pytest.mark.parametrize("options", [*({"compress": each} for each in LOSSY), {"exact": True}], ids=str)
@pytest.mark.parametrize("name", ["ring", "shared", "hierarchical_copy", "auto"])
def test_slices_of_scratch_memory_at_different_places(
    name: str, options: dict[str, Any], topology: allreduce.Topology
) -> None:
    """Where ranks share the memory, all refuse them; elsewhere the sums are right. No rank gets other values."""
    with usable(name, topology, **options) as reduce:
        scratch, mine, other = reduce.allocate(4000, scratch=True), reduce.allocate(4000), reduce.allocate(4000)
        odd, base = reduce.rank == SIZE - 1, np.arange(2400.0).reshape(40, 60) % 59
        pairs = (scratch[:2400], scratch[300:2700]), (mine[:2400], other[:2400]), (mine[:2400], scratch[:2400])
        for pair, op in itertools.product(pairs, ("max", "sum", "all_gather")):
            table = pair[odd].reshape((40, 60) if op != "all_gather" else -1)
            table[...] = base.reshape(table.shape) + reduce.rank
            before = table.copy()
            text = ""
            try:
                reduce.all_gather(table) if op == "all_gather" else reduce(table, op)
            except DisagreementError as error:
                text = str(error)
            everyone = WORLD.allgather((text, table.tobytes()))
            assert len({text for text, _ in everyone}) == 1, (op, everyone[0][0], everyone[-1][0])
            if not text:
                if op != "all_gather" or topology.nodes == 1:  # elsewhere a rank may own the whole array
                    assert len({bits for _, bits in everyone}) == 1, op
                assert op != "max" or np.array_equal(table, base + SIZE - 1)
                if op == "sum" and pair is pairs[1] and name in ("ring", "shared"):
                    assert options.get("compress") not in LOSSY[:2]
            else:
                assert np.array_equal(table, before)
        array = np.full(9, 1.0)
        reduce(array, "sum")
        assert np.allclose(array, SIZE, rtol=0.02)


@pytest.mark.parametrize("hosts", ["one host", "hosts of one"])
def test_a_slow_rank_in_the_exchange_of_a_disagreement(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stall detector sees the ranks in different calls meanwhile, and must not end the wait of some ranks alone."""
    monkeypatch.setenv("ALLREDUCE_STALL_SECONDS", "0.4")  # so that a wait is announced after 0.2 seconds
    Hosts.numbers = HOSTS[hosts]
    portable = control._portable

    def slow(*given: Any) -> Any:
        time.sleep(1.5 * (WORLD.rank == 0))
        return portable(*given)

    with allreduce.Topology(Hosts(WORLD)) as topology, allreduce.create("ring", topology) as reduce:
        for length in (100, 101):
            reduce(np.ones(length))
        monkeypatch.setattr(control, "_portable", slow)
        raised_everywhere(WORLD, DisagreementError, lambda: reduce(np.ones(100 + (WORLD.rank == 0))))
        monkeypatch.undo()
        array = np.ones(10)
        reduce(array, "sum")
        assert (array == SIZE).all()
