"""One rank of a job of several, in which ranks kill themselves at named points and the others go on.

    mpirun --with-ft ulfm -n 4 python losses.py BACKEND:MOMENT[:OPTION=VALUE...] ...

In each round all ranks that are left make a topology and the backend, reduce, and one of them dies at the moment; the
others repair, make the backend again by its recipe and see that its sums are right. Rank 0 prints a line a round.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.errors import RankLostError
from allreduce.topology import Topology

LENGTH = 300_001


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def first(call: Callable) -> Callable:
    """Die instead of `call`."""

    def instead(*_: Any, **__: Any) -> None:
        die()

    return instead


def check(reduce: Any) -> None:
    """Sums of what every rank brings, in memory of the backend's and in ordinary memory, in three sizes."""
    for length in (3, 1000, LENGTH):
        for array in (reduce.allocate(length, "float32"), np.empty(length, np.float32)):
            array[:] = reduce.rank + 1 + np.arange(length) % 7
            reduce(array, "sum")
            size = reduce.size
            right = size * (size + 1) / 2 + size * (np.arange(length) % 7)
            assert np.array_equal(array, right), (reduce, length, array[:5], right[:5])


def run(name: str, moment: str, options: dict[str, Any], topology: Topology, dies: bool) -> None:
    """One attempt: whoever `dies` does at `moment`; on the others it goes on until they hear of it."""
    if moment == "create" and dies:
        Topology.private = first(Topology.private)  # type: ignore[method-assign]
    reduce = allreduce.create(name, topology, **options)
    kept = reduce.allocate(LENGTH, "float32")
    kept[:] = 1
    reduce(kept, "sum")
    assert kept[0] == topology.size
    if dies and moment == "before":
        die()
    if dies and moment == "inside":
        reduce._calls.run = first(die)
    if dies and moment == "agree":
        reduce._calls.agree = first(die)
    check(reduce)
    if dies and moment == "middle":
        threading.Timer(0.01, die).start()
    if moment == "middle":
        for _ in range(2000):
            reduce(kept, "sum")
    if dies and moment == "close":
        reduce._close = die
    reduce.close()
    if moment == "close":
        topology.world.Barrier()
    raise AssertionError(f"no rank was lost in {name}:{moment}")


def main(rounds: list[str]) -> None:
    topology = Topology.of_survivors()
    for text in rounds:
        name, moment, *given = text.split(":")
        options = dict(option.split("=") for option in given)
        victim = len(text) % topology.size
        try:
            with topology.watch.hearing():
                run(name, moment, options, topology, topology.rank == victim)
            ok = True
        except RankLostError as error:
            ok, lost = False, error.lost
        heard = time.perf_counter()
        assert set(lost) <= {victim}, lost
        assert not topology.finished(ok)
        topology = topology.survivors()
        repaired = time.perf_counter()
        with allreduce.create(name, topology, **options) as reduce:
            check(reduce)
        if topology.rank == 0:
            print(f"{text}: {topology.size} left, repaired in {repaired - heard:.3f} s", flush=True)
    topology.close()
    print(f"rank {MPI.COMM_WORLD.rank} ends", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
