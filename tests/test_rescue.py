"""The newest state that ranks can put together of what they have."""

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from trainers import MirroredTrainer, SpareReplicasTrainer
from trainers.base import Trainer
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.rescue import Choice, choose, joined


def test_the_newest_step_whose_state_is_whole_is_chosen() -> None:
    apart = [[(7, 8, 0, 5)], [(8, 9, 5, 10)]]  # the second rank has updated, or the first has left a step out
    assert choose(apart, 10) == Choice(8, [(0, 0), (1, 0)])
    twice = [[(9, 9, 0, 5), (8, 8, 0, 5)], [(8, 8, 5, 10)]]
    assert choose(twice, 10) == Choice(8, [(0, 1), (1, 0)])


def test_who_has_it_whole_hands_it_to_all() -> None:
    assert choose([[(3, 3, 0, 5)], [(3, 3, 0, 10)], [(2, 2, 0, 10)]], 10) == Choice(3, [(1, 0)])


def test_a_slice_that_nobody_has_is_missed() -> None:
    assert choose([[(4, 4, 0, 3)], [(4, 4, 5, 10)]], 10) is None
    assert choose([[(4, 4, 0, 5)], [(5, 5, 5, 10)]], 10) is None
    assert choose([[], []], 10) is None


def test_pieces_are_joined_in_order() -> None:
    first = {"parameters": np.arange(3.0)}, {"steps": np.array(4)}
    second = {"parameters": np.arange(3.0, 5.0)}, {"steps": np.array(9)}
    state = joined([first, second])
    assert state["parameters"].tolist() == [0, 1, 2, 3, 4]
    assert state["steps"] == 4


@pytest.mark.parametrize(("kind", "options"), [(MirroredTrainer, {}), (SpareReplicasTrainer, {"spare": 0})])
def test_a_loss_finds_a_trainer_half_made(kind: type, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the topology knows it, it may be abandoned."""
    init = Trainer.__init__

    def lost(self: Trainer, replica: NumpyNetwork, topology: Topology) -> None:
        init(self, replica, topology)
        self.abandon()
        raise KeyError("lost")

    monkeypatch.setattr(Trainer, "__init__", lost)
    with Topology(MPI.COMM_SELF) as topology, pytest.raises(KeyError, match="lost"):
        kind(NumpyNetwork([3, 2]), topology=topology, **options)
