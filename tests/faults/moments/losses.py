"""One rank of a job in which ranks kill themselves at named moments, and the others continue.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.losses RANKS_PER_NODE BACKEND:MOMENT ...

In each round the remaining ranks create a backend and use it, and one of them dies at the moment. The others repair the
topology, create the backend again from its config, and check its sums. Rank 0 prints a line for each round.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import allreduce
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults import points
from tests.faults.points import die

LENGTH = 300_001
KILL_SECONDS = 0.02


def sums(reduce: Any) -> None:
    """Check sums of every rank's values, in memory of the backend and in ordinary memory, in three sizes."""
    for length in (3, 1000, LENGTH):
        index = np.arange(length) % 7
        for array in (reduce.allocate(length, "float32"), np.empty(length, np.float32)):
            array[:] = reduce.rank + 1 + index
            reduce(array, "sum")
            assert np.array_equal(array, reduce.size * (reduce.size + 1) / 2 + reduce.size * index), (reduce, array)


# Moments: what all ranks do, and where the one that dies does so


def in_the_work(reduce: Any, dies: bool) -> None:
    """The rank has begun the call with the others, and dies before its part of the work."""
    if dies:
        points.at("reduce", die)
    array = reduce.allocate(LENGTH, "float32")
    array[:] = 1
    reduce(array, "max")  # the first call with this operation: its work is prepared now


def in_an_agreement(reduce: Any, dies: bool) -> None:
    """The calls differ; the rank dies when the ranks tell each other how."""
    if dies:
        points.at("agree in a call", die)
    reduce(np.ones(1000 + (reduce.rank == 0)), "sum")


def between_phases(reduce: Any, dies: bool) -> None:
    buffer = reduce.allocate(LENGTH, "float32")
    reduce.reduce_scatter(buffer, "sum")
    if dies:
        die()
    reduce.all_gather(buffer)


def at_random(reduce: Any, dies: bool) -> None:
    """The rank dies at a random instant: in reductions of an array from allocate and of ordinary ones, or in
    collectives."""
    mine, other = reduce.allocate(LENGTH, "float32"), np.empty(1000, np.float32)
    if dies:
        threading.Timer(KILL_SECONDS, die).start()
    while True:
        mine[:] = other[:] = 1
        reduce(mine, "sum")
        reduce(other, "sum")
        assert mine[-1] == other[-1] == reduce.size
        assert reduce.stack(reduce.rank).tolist() == list(range(reduce.size))


def in_a_gather(reduce: Any, dies: bool) -> None:
    """The others wait in MPI_Allgatherv for the rank's values. Open MPI's returns as if it had them."""
    if dies:
        points.at("reduce", die)
    assert reduce.stack(reduce.rank).tolist() == list(range(reduce.size))


def in_the_background(reduce: Any, dies: bool) -> None:
    """The threads of the other ranks are inside of MPI, or wait for the rank's announcement."""
    mine = reduce.allocate(LENGTH, "float32")
    if dies:
        threading.Timer(KILL_SECONDS, die).start()
    while True:
        mine[:] = 1
        pending = [reduce.submit(mine, "max") for _ in range(3)]
        for call in pending:
            call.wait()
        assert mine[0] == 1


def in_close(reduce: Any, dies: bool) -> None:
    """Closing raises nothing: a rank that learns of the failure frees its part locally."""
    if dies:
        points.at("close", die)
    reduce.close()
    assert reduce.closed
    reduce.topology.agree([], "after close()")


def in_create(reduce: Any, dies: bool) -> None:
    if dies:
        points.at("make a communicator", die)
    allreduce.create("auto", reduce.topology)


def in_a_part(reduce: Any, dies: bool) -> None:
    """Parts of the topology without a failed rank end too, because the whole topology does."""
    part = reduce.topology.split(reduce.rank % 2)
    inner = allreduce.create("ring", part)
    if dies:
        die()
    while True:
        inner(np.ones(1000), "sum")


MOMENTS: dict[str, Callable[[Any, bool], None]] = {
    moment.__name__: moment
    for moment in (
        in_the_work, in_an_agreement, between_phases, at_random, in_a_gather, in_the_background, in_close, in_create,
        in_a_part,
    )
}  # fmt: skip


def attempt(name: str, moment: str, topology: Topology, dies: bool) -> None:
    reduce = allreduce.create(name, topology)
    sums(reduce)
    MOMENTS[moment](reduce, dies)
    raise AssertionError(f"{name}:{moment}: no rank was lost")


def repaired(topology: Topology, text: str) -> Topology:
    """Run one round; return the topology of the remaining ranks after it."""
    name, moment = text.split(":")
    victim = len(text) % topology.size
    try:
        with topology.detector.translating_failures():  # a part's error has the part's numbers
            attempt(name, moment, topology, topology.rank == victim)
    except RankLostError as error:
        lost = error.lost
    assert set(lost) <= {victim}, lost
    assert not topology.finished(False)
    left = topology.survivors()
    assert topology.closed
    assert left.previous_ranks == tuple(rank for rank in range(len(left.previous_ranks) + 1) if rank != victim)
    with allreduce.create(name, left) as reduce:
        sums(reduce)
    if left.rank == 0:
        print(f"{text}: {left} go on without rank {victim}", flush=True)
    return left


def main(ranks_per_node: str, rounds: list[str]) -> None:
    topology = Topology.of_survivors(ranks_per_node=int(ranks_per_node) or None)
    for text in rounds:
        topology = repaired(topology, text)
    assert topology.finished(True)
    assert not topology.finished(topology.rank != 0)
    topology.close()
    print("this rank ends well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
