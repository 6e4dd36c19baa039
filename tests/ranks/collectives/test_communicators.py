"""The numbers of communicators that "auto" creates, all of them in its constructor. MPICH has some 2,000 in
all. The numbers of control messages of a topology and of small values. The bytes that cross the network: 16-bit floats
take half as many as float32, and halves go to neighbours."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.topology import Topology
from allreduce.transport import control
from allreduce.tuning import constants
from tests.ranks.counting import Counting
from tests.ranks.grid import numpy_dtype

JOBS = "openmpi 1 2 3 4, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")
# The ranks of a node; after the topology, and at most after `create`, and not more later. One on which no failure is
# seen is made besides where ranks may be lost.
COUNTS = {
    "flat": (None, 2, 4),  # world twice (control messages, data); of "auto" the same two
    "twos": (2, 4, 9),  # node and cross; of "auto" world twice, node and cross, and one of the leaders
    "ones": (1, 2, 6),  # a node of one rank has no communicator
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one number: the communicators that all topologies hold."""
    count, own, release = [0], Topology.own, Topology.release

    def counted_own(self: Topology, comm: MPI.Comm, watch: bool = False) -> MPI.Intracomm:
        count[0] += 1
        return own(self, comm, watch)

    def counted_release(self: Topology, *args: object) -> None:
        count[0] -= 1
        release(self, *args)

    monkeypatch.setattr(Topology, "own", counted_own)
    monkeypatch.setattr(Topology, "release", counted_release)
    return count


@several
@pytest.mark.parametrize("shape", COUNTS)
def test_communicators_of_auto(shape: str, made: list[int]) -> None:
    if shape == "twos" and SIZE < 3:
        pytest.skip("two nodes of two need more ranks")
    found, (nodes, first, most) = [], COUNTS[shape]
    with Topology(ranks_per_node=nodes) as topology:
        found.append(made[0])
        with allreduce.create("auto", topology) as reduce:
            found.append(made[0])
            array = reduce.allocate(1_000_000)
            reduce(array, "sum")
            found.append(made[0])
            few = np.ones(3)
            reduce(few, "sum")
            assert few.tolist() == [SIZE] * 3
            found.append(made[0])
    assert found[0] == first
    assert found[1] == found[2] == found[3] <= most
    assert made[0] == 0


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the control messages that this rank has waited for."""
    found: list[str] = []
    wait_for = control.wait_for

    def counted(comm: MPI.Comm, request: MPI.Request, what: str, *limits: float) -> None:
        found.append(what)
        wait_for(comm, request, what, *limits)

    monkeypatch.setattr(control, "wait_for", counted)
    return found


@pytest.mark.parametrize("nodes", [None, 2])
def test_control_messages_before_the_second_call(
    messages: list[str], nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none in a call. Each of three shared segments takes two messages, and the machine's constants one."""
    monkeypatch.setattr(constants, "table_path", lambda _: None)
    found = []
    with Topology(ranks_per_node=nodes) as topology:
        found.append(len(messages))
        with allreduce.create("auto", topology) as reduce:
            found.append(len(messages))
            array = reduce.allocate(1_000_000)
            found.append(len(messages))
            reduce(array)
            assert len(messages) == found[-1]
    assert all(made <= most for made, most in zip(found, (3, 18, 23), strict=True)), (found, messages)


@pytest.mark.parametrize("length", [0, 100, 254, 255, 256, 5000])
def test_a_short_value_takes_one_message(messages: list[str], length: int) -> None:
    """Two quotes belong to the value. The long values of a rank are read too."""
    comm, value = WORLD, "x" * length
    several = [value if rank == SIZE - 1 else f"rank {rank}" for rank in range(SIZE)]
    assert control.all_values(comm, several[comm.rank], "all") == several
    assert len(messages) == (0 if SIZE == 1 else 1 + (length > 254))
    messages.clear()
    assert control.root_value(comm, value if comm.rank == SIZE - 1 else None, "root", SIZE - 1) == value
    assert len(messages) == (0 if SIZE == 1 else 1 + (length > 254))


LENGTH = 12 * 1000  # divisible by 1 to 4 ranks


def sent(reduce: Any, dtype: str) -> Counter[int]:
    """Return the bytes that one call sends to every rank, in the backend itself, or across nodes."""
    algorithm = getattr(reduce._algorithm, "_cross", reduce._algorithm)
    if not hasattr(algorithm, "_transfer"):
        algorithm = algorithm.lossless
    reduce(np.ones(LENGTH, numpy_dtype(dtype)), "sum")
    transfer = algorithm._transfer
    transfer._comm = counting = Counting(transfer._comm)
    reduce(np.ones(LENGTH, numpy_dtype(dtype)), "sum")
    transfer._comm = counting._comm
    return counting.sent


@several
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "nodes"), [("ring", None), ("hierarchical_copy", 1)])
def test_halves_cross_as_halves(
    name: str, nodes: int | None, dtype: str, topology_of: Callable[..., allreduce.Topology]
) -> None:
    with allreduce.create(name, topology_of(nodes)) as reduce:
        wide, half = sent(reduce, "float32"), sent(reduce, dtype)
        if LENGTH % SIZE == 0:
            assert wide.total() == 2 * 4 * LENGTH * (SIZE - 1) // SIZE
        assert 2 * half.total() == pytest.approx(wide.total(), abs=16 * SIZE)


@pytest.mark.skipif(SIZE != 2, reason="counts what two ranks send")
def test_compressed_arrays_cross_with_fewer_bits(topology_of: Callable[..., allreduce.Topology]) -> None:
    make = partial(allreduce.create, "ring", topology_of(1))
    with make() as plain, make(compress="bfloat16") as half, make(compress="int8") as codes:
        assert 2 * sent(half, "float32").total() == sent(plain, "float32").total()
        assert 4 * sent(half, "float64").total() == sent(plain, "float64").total()
        assert LENGTH < sent(codes, "float32").total() <= LENGTH * (1 + 4.1 / 256)


@pytest.mark.skipif(SIZE != 4, reason="needs two nodes of two ranks")
def test_sums_of_a_node_cross_wide_and_come_back_as_halves(topology_of: Callable[..., allreduce.Topology]) -> None:
    """Rounded before they cross, they would be rounded twice; and the original values of two ranks are as many
    bytes."""
    with allreduce.create("hierarchical_copy", topology_of(2)) as reduce:
        assert 4 * sent(reduce, "bfloat16").total() == 3 * sent(reduce, "float32").total()


@several
def test_the_largest_halves_go_to_the_nearest_rank(topology_of: Callable[..., allreduce.Topology]) -> None:
    with allreduce.create("halving_doubling", topology_of(None)) as reduce:
        to = sent(reduce, "float32")
    power = 1 << (SIZE.bit_length() - 1)
    amounts = [to[dest] for dest in sorted(range(power), key=lambda dest: abs(dest - reduce.rank)) if to[dest]]
    assert amounts == sorted(amounts, reverse=True)
    assert reduce.rank >= power or to[reduce.rank ^ 1] == 4 * LENGTH
