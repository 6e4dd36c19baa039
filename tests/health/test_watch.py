"""The watch's judgement, on notes that are made up."""

import time

import pytest
from mpi4py import MPI

from allreduce.errors import RankLeftError
from allreduce.health.stall import Watch
from allreduce.health.status import LEFT, Fact
from allreduce.transport.wait import Said


@pytest.mark.parametrize(("number", "ends"), [(7, True), (8, False), (0, True)])
def test_a_rank_leaves_one_place_or_all(number: int, ends: bool) -> None:
    """A failed call is the end of its backend, not of other backends' calls with the same rank."""
    watch = Watch(MPI.COMM_SELF, 100.0)
    watch.notes._heard[1] = {Fact(LEFT, number, text="its call failed"): {1}}
    watch.notes._merge()
    watch.notes._left = dict.fromkeys(watch.notes._left, time.monotonic() - 50)
    wait = watch.place(7, raises=True)
    wait.begin(Said("all_reduce"))
    watch._judge(wait, Said("all_reduce"), time.monotonic())
    assert wait.error is None  # of another call than the one that is under way
    assert wait.call is not None
    wait.since = time.monotonic()
    watch._judge(wait, wait.call, time.monotonic())
    assert isinstance(wait.error, RankLeftError) == ends
    watch.abandon()


def test_where_a_rank_stands_among_many_places() -> None:
    """What is waited for comes first, however many places there are where nothing is, or ever was."""
    watch = Watch(MPI.COMM_SELF, 100.0)
    waits = [watch.place(number) for number in range(40)]
    for wait in waits[:20]:
        wait.begin(Said("a call that was quick"))
        wait.new(2.0)
        wait.end()
        wait.new(3.0)
    waits[30].begin(Said("all_reduce"))
    waits[30].new(1.0)
    assert "in all_reduce, call 1 there" in watch.standing().splitlines()[0]
    assert "a call that was quick" in watch.standing().splitlines()[1]
    watch.abandon()
