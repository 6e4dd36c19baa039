"""Central storage: the bits of a mirrored training that sums in the same order, for every storage rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce
import allreduce.errors
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, datasets
from trainers.errors import ArgumentError
from trainers.strategies.sharded import SliceOwners

JOBS = "openmpi 1 2 3 5"

Data = tuple[np.ndarray, np.ndarray]
SHAPES = {"one node": None, "nodes of one": 1, "nodes of two": 2}


@pytest.fixture(scope="module")
def data() -> Data:
    digits = datasets.load("digits")
    return digits.x_train[:330], digits.y_train[:330]


def network(kind: type[NumpyNetwork] = NumpyNetwork, seed: int = 3) -> NumpyNetwork:
    made = kind([64, 40, 10], seed=seed)
    made.scale_input(0.0, 1 / 16)
    return made


class Bare(NumpyNetwork):
    """A replica of which no slice can be updated."""

    def slice_error(self) -> str:
        return "it has no slices"


def mirrored(data: Data, topology: allreduce.Topology) -> tuple[dict[str, np.ndarray], list[float]]:
    """Return the state after a mirrored training that sums in rank order, and its losses."""
    replica = network()
    with MirroredTrainer(replica, "reduce_to_one", topology) as trainer:
        history = trainer.fit(*data, 2, 100, seed=7, progress=False)
    return replica.state(), history.column("loss")


@pytest.mark.parametrize(
    ("shape", "last"), [("one node", False), ("one node", True), ("nodes of one", False), ("nodes of two", True)]
)
def test_it_gives_the_bits_of_a_mirrored_training(
    shape: str, last: bool, data: Data, topology_of: Callable[[Any], allreduce.Topology]
) -> None:
    topology = topology_of(SHAPES[shape])
    replica = network(seed=3 + topology.rank)  # the model of rank 0 must win, wherever the storage is
    storage = topology.size - 1 if last else 0
    with CentralStorageTrainer(replica, topology, storage=storage) as trainer:
        if topology.size > 1:
            assert type(trainer.strategy.owners) is SliceOwners
        history = trainer.fit(*data, 2, 100, seed=7, progress=False)
        assert len(set(trainer.parameters_sha256())) == 1
    expected, losses = mirrored(data, topology)
    several = 1 < topology.nodes < topology.size  # nodes with sums of their own: another order
    for name, array in expected.items():  # the optimizer's too, which every replica has when the trainer is closed
        np.testing.assert_allclose(array, replica.state()[name], rtol=0, atol=several * 1e-4, err_msg=name)
    np.testing.assert_allclose(history.column("loss"), losses, rtol=several * 1e-4)


def test_the_optimizer_works_on_one_rank_alone(data: Data, flat: allreduce.Topology) -> None:
    replica = network()
    with CentralStorageTrainer(replica, flat, storage=flat.size - 1) as trainer:
        trainer.fit(*data, 1, progress=False)
        touched = bool(replica.optimizer.state["first_moment"].any())
        assert touched == (flat.rank == flat.size - 1)


@pytest.mark.parametrize("size", [None, 2])
def test_arguments_that_make_no_sense_leave_nothing_behind(
    size: int | None, topology_of: Callable[[Any], allreduce.Topology]
) -> None:
    topology = topology_of(size)
    owned = len(topology._owned)
    with pytest.raises(
        ArgumentError, match=f"storage must be a rank of this training, 0 to {topology.size - 1}, got {topology.size}"
    ):
        CentralStorageTrainer(network(), topology, storage=topology.size)
    with pytest.raises(ArgumentError, match="device='gpu' is unknown; use one of cpu, cuda, or None"):
        CentralStorageTrainer(network(), topology, device="gpu")
    with pytest.raises(ArgumentError, match='device="cuda": this NumpyNetwork is on cpu'):
        CentralStorageTrainer(network(), topology, device="cuda")
    for copies in (0, None, 3):
        with pytest.raises(ArgumentError, match=f"copies={copies}: give 1, or 2"):
            CentralStorageTrainer(network(), topology, copies=copies)  # type: ignore[arg-type]
    if topology.size > 1:
        with pytest.raises(ArgumentError, match=r"CentralStorageTrainer updates slices .*it has no slices"):
            CentralStorageTrainer(network(Bare), topology)
        with pytest.raises(allreduce.errors.DisagreementError, match=r"rank 0: .*storage=0.*\n.*rank 1: .*storage=1"):
            CentralStorageTrainer(network(), topology, storage=min(topology.rank, 1))
        with pytest.raises(allreduce.errors.DisagreementError, match="the ranks disagree"):
            CentralStorageTrainer(NumpyNetwork([64, 3 + topology.rank, 10]), topology)
    assert len(topology._owned) == owned
