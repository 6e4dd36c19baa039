"""The newest state that the ranks can assemble from their pieces."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from allreduce.topology import Closeable
from trainers import MirroredTrainer, Sharded, SpareReplicasTrainer
from trainers.arrays.average import AVERAGE
from trainers.group import RankGroup
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.state.adopt import Found, Piece, Selection, select
from trainers.state.backup import holders

REPLACED = [(7, 7, 1, 0, 5), (7, 7, 0, 0, 5)]  # one state has replaced the other, and not all ranks have got that far
THIRDS = [[(4, 4, 0, 0, 4)], [(4, 4, 0, 4, 8)], [(4, 4, 0, 8, 12)]]


@pytest.mark.parametrize(
    ("pieces", "length", "selected"),
    [
        # the newest step whose state is whole: the second rank has updated, or the first has left a step out
        ([[(7, 8, 0, 0, 5)], [(8, 9, 0, 5, 10)]], 10, Selection(8, [(0, 0), (1, 0)])),
        ([[(9, 9, 0, 0, 5), (8, 8, 0, 0, 5)], [(8, 8, 0, 5, 10)]], 10, Selection(8, [(0, 1), (1, 0)])),
        # states of one step are not mixed
        ([REPLACED, [(7, 7, 0, 5, 10)]], 10, Selection(7, [(0, 1), (1, 0)])),
        ([REPLACED, [(7, 7, 0, 5, 10), (7, 7, 1, 5, 10)]], 10, Selection(7, [(0, 0), (1, 1)])),
        # who has it whole hands it to all
        ([[(3, 3, 0, 0, 5)], [(3, 3, 0, 0, 10)], [(2, 2, 0, 0, 10)]], 10, Selection(3, [(1, 0)])),
        # a slice that nobody has is missed
        ([[(4, 4, 0, 0, 3)], [(4, 4, 0, 5, 10)]], 10, None),
        ([[(4, 4, 0, 0, 5)], [(5, 5, 0, 5, 10)]], 10, None),
        ([[], []], 10, None),
        # nodes that split at other elements: the longest piece leads to a gap, the shorter pieces do not
        ([[(4, 4, 0, 0, 6)], [], *THIRDS], 12, Selection(4, [(2, 0), (3, 0), (4, 0)])),
        # a rank is asked for its own slice before who keeps it
        ([[(4, 4, 0, 5, 10), (4, 4, 0, 0, 5)], [(4, 4, 0, 0, 5)]], 10, Selection(4, [(1, 0), (0, 0)])),
    ],
)
def test_what_is_selected(pieces: list[list[Any]], length: int, selected: Selection | None) -> None:
    assert select(pieces, length) == selected


@pytest.mark.parametrize(
    ("nodes", "apart"),
    [([0, 0, 0], 0), ([0, 1], 2), ([0, 0, 1, 1], 4), ([0, 1, 0, 1, 2], 5), ([0, 0, 0, 1], 2), ([2, 1, 1, 0, 0, 0], 6)],
)
def test_slices_are_kept_on_another_node(nodes: list[int], apart: int) -> None:
    """apart: the number of ranks whose backup can be on another node."""
    keeper = holders(nodes)
    assert sorted(keeper) == list(range(len(nodes)))  # each keeps one
    assert all(rank != other for rank, other in enumerate(keeper))
    assert sum(nodes[rank] != nodes[other] for rank, other in enumerate(keeper)) == apart


def test_one_rank_keeps_no_copy() -> None:
    """It may be the only one of a resumed job."""
    with Topology(MPI.COMM_SELF) as topology:
        MirroredTrainer(
            NumpyNetwork([3, 2]), topology=topology, update=Sharded(copies=2), on_failure="continue"
        ).close()


def test_pieces_are_joined_in_order() -> None:
    first = Piece(4, 4, 0, 3, {"parameters": np.arange(3.0)}, {"steps": np.array(4)})
    second = Piece(4, 4, 3, 5, {"parameters": np.arange(3.0, 5.0)}, {"steps": np.array(9)})
    state = Found(4, [first, second]).state
    assert state["parameters"].tolist() == [0, 1, 2, 3, 4]
    assert state["steps"] == 4


@pytest.mark.parametrize("number", [0, 1])
def test_an_average_that_not_all_pieces_have_is_left_out(number: int) -> None:
    """A rank fails after the others have begun an average, and before the next backup: its backup has none."""
    pieces = [Piece(4, 4, start, start + 1, {"parameters": np.ones(1)}, {}) for start in (0, 1)]
    pieces[number].sliced[AVERAGE] = np.ones(1)
    assert list(Found(4, pieces).state) == ["parameters"]


@pytest.mark.parametrize(("kind", "options"), [(MirroredTrainer, {}), (SpareReplicasTrainer, {"spare": 0})])
def test_a_loss_finds_a_trainer_half_made(kind: type, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topology may abandon a trainer as soon as it knows it."""
    init = RankGroup.__init__

    def lost(self: RankGroup, topology: Topology, owner: Closeable) -> None:
        init(self, topology, owner)
        owner.abandon()
        raise KeyError("lost")

    monkeypatch.setattr(RankGroup, "__init__", lost)
    with Topology(MPI.COMM_SELF) as topology, pytest.raises(KeyError, match="lost"):
        kind(NumpyNetwork([3, 2]), topology=topology, **options)
