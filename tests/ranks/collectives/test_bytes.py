"""Counts the bytes that cross the network: 16-bit floats take half as many as float32, and halves go to neighbours."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.counting import Counting
from tests.ranks.grid import numpy_dtype

SIZE = MPI.COMM_WORLD.size
LENGTH = 12 * 1000  # divisible by 1 to 4 ranks
several = pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")


def sent(reduce: Any, dtype: str) -> Counter[int]:
    """Return the bytes that one call sends to every rank, in the backend itself, or across nodes."""
    transfer = getattr(reduce._algorithm, "_cross", reduce._algorithm)._transfer
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
