"""Buckets and pieces: every element is in exactly one place, for all sizes."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("torch")

from allreduce.arrays.chunks import chunk
from trainers.options.buckets import plan_buckets
from trainers.pytorch.buckets import DenseBucket
from trainers.replicas.pytorch.blocks import held_by, split
from trainers.state.adopt import select
from trainers.state.dealing import Share

SINGLE, DOUBLE = ("float32", 4), ("float64", 8)
SIZES = [(5, *SINGLE), (0, *SINGLE), (100, *DOUBLE), (1000, *SINGLE), (1, *SINGLE), (7, *DOUBLE)]


@pytest.mark.parametrize("limits", [(math.inf, math.inf), (1, 1), (64, 4096)], ids=str)
def test_every_parameter_has_one_place(limits: tuple[float, float]) -> None:
    buckets, lengths = plan_buckets(SIZES, *limits)
    seen = []
    ends = dict.fromkeys(lengths, 0)
    for bucket in buckets:
        assert bucket.start >= ends[bucket.dtype]
        at = bucket.start
        for slot in bucket.slots:
            size, dtype, itemsize = SIZES[slot.parameter]
            assert (dtype, slot.stop - slot.start) == (bucket.dtype, size)
            assert slot.start >= at
            assert slot.start * itemsize % 64 == 0
            at = slot.stop
            seen.append(slot.parameter)
        assert bucket.stop == at
        ends[bucket.dtype] = bucket.stop
    assert sorted(seen) == list(range(len(SIZES)))
    assert ends == lengths


def test_first_and_last_bucket_are_small_and_order_is_reversed() -> None:
    buckets, _ = plan_buckets([(1000, "float32", 4)] * 10, 4000, 12000)
    assert [len(bucket.slots) for bucket in buckets] == [1, 3, 3, 2, 1]
    assert [slot.parameter for bucket in buckets for slot in bucket.slots] == list(range(9, -1, -1))


def test_a_large_model_needs_no_memory_to_plan() -> None:
    buckets, lengths = plan_buckets([(3 << 30, "bfloat16", 2)] * 3, 1 << 20, 25 << 20)
    assert lengths["bfloat16"] == 9 << 30 > sys.maxsize >> 40
    assert len(buckets) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 2000])
def test_pieces_cover_each_element_once(ranks: int) -> None:
    buckets, _ = plan_buckets(SIZES, 64, 4096)
    owners: dict[tuple[str, int], int] = {}
    offsets: dict[tuple[str, int], int] = {}
    places: list[int] = []
    for rank in range(ranks):
        owned = [[chunk(bucket.stop - bucket.start, ranks, rank)] for bucket in buckets]
        for held in held_by(buckets, owned, [()] * len(buckets), most=64):
            places += range(held.start, held.stop)
            for block in held.blocks:
                assert 0 < block.stop - block.start <= 64
                for at in range(block.start, block.stop):
                    assert (held.dtype, at) not in owners
                    owners[held.dtype, at] = held.parameter
                    offsets[held.dtype, at] = held.offset + at - held.blocks[0].start
    assert sorted(places) == list(range(sum(bucket.stop - bucket.start for bucket in buckets)))
    for bucket in buckets:
        for slot in bucket.slots:
            for at in range(slot.start, slot.stop):
                assert owners.pop((bucket.dtype, at)) == slot.parameter
                assert offsets[bucket.dtype, at] == at - slot.start
    assert not owners, "gaps belong to nobody"


def test_pieces_of_nodes_of_different_sizes_fit_together() -> None:
    """The pieces of two nodes that have lost a rank each, unless both have lost the same elements."""
    halves, thirds = [[slice(0, 6), slice(6, 12)], [slice(0, 4), slice(4, 8), slice(8, 12)]]
    cuts = sorted({each.start for each in halves + thirds})
    offers = lambda ranks: [[(5, 5, 0, each.start, each.stop) for each in split(mine, cuts)] for mine in ranks]  # noqa: E731
    assert split(slice(4, 4), cuts) == []
    assert select(offers(halves), 12) is not None
    found = select(offers([halves[0], *thirds[1:]]), 12)
    assert found is not None
    assert found.pieces == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert select(offers([halves[0], *thirds[2:]]), 12) is None
    assert select(offers(halves[1:]), 12) is None


@pytest.mark.parametrize("parts", [[slice(4, 9)], [slice(0, 2), slice(5, 9)], []], ids=str)
def test_an_average_that_is_not_finite_is_found_by_its_place_in_the_bucket(parts: list[slice]) -> None:
    """Only among the elements that this rank owns."""
    array = np.zeros(9)
    array[[2, 6, 8]] = np.nan
    bucket = SimpleNamespace(memory=SimpleNamespace(array=array), share=Share(parts))
    assert DenseBucket.overflowed(bucket, MPI.COMM_SELF) == (6 if parts else -1)  # type: ignore[arg-type]
