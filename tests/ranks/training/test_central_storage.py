"""Central storage: the bits of a mirrored training that sums in the same order, for every storage rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
import allreduce.errors
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, datasets
from trainers.errors import ArgumentError
from trainers.strategies.sharded import SliceOwners
from trainers.watching.callback import Callback

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


def test_it_saves_loads_evaluates_and_predicts(
    data: Data, flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path
) -> None:
    path = world.bcast(str(tmp_path / "model.npz"))
    replica, resumed = network(), network(seed=9)
    with CentralStorageTrainer(replica, flat, storage=flat.size - 1) as trainer:
        trainer.fit(*data, 1, progress=False)
        trainer.save(path)
        trainer.fit(*data, 1, progress=False)
        scores, outputs = trainer.evaluate(*data), trainer.predict(data[0])
    with CentralStorageTrainer(resumed, flat, storage=0) as other:
        other.load(path)
        other.fit(*data, 1, progress=False)
    for name, array in replica.state().items():
        assert np.array_equal(array, resumed.state()[name]), name
    assert scores["accuracy"] == (outputs.argmax(1) == data[1]).mean()


def test_the_optimizer_works_on_one_rank_alone(data: Data, flat: allreduce.Topology) -> None:
    replica = network()
    with CentralStorageTrainer(replica, flat, storage=flat.size - 1) as trainer:
        trainer.fit(*data, 1, progress=False)
        touched = bool(replica.optimizer.state["first_moment"].any())
        assert touched == (flat.rank == flat.size - 1)


class Faulty(NumpyNetwork):
    calls, faulty = 0, False

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        self.calls += 1
        if self.faulty and self.calls == 3:
            raise ValueError("a fault of this rank")
        return super().gradients(x, y, share)


def test_no_replica_is_updated_by_a_step_that_one_rank_has_failed(data: Data, flat: allreduce.Topology) -> None:
    replica, expected = network(Faulty), network()
    replica.faulty = flat.rank == flat.size - 1  # type: ignore[attr-defined]
    with CentralStorageTrainer(replica, flat) as trainer:
        with pytest.raises(ValueError, match="a fault of this rank"):
            trainer.fit(*data, 1, 100, shuffle=False, progress=False)
        parameters = replica.parameters.copy()
    with CentralStorageTrainer(expected, flat) as trainer:
        trainer.fit(data[0][:200], data[1][:200], 1, 100, shuffle=False, progress=False)
    assert np.array_equal(parameters, expected.parameters)
    assert replica.optimizer.steps == expected.optimizer.steps == 2


def test_a_callback_on_one_rank_stops_all(data: Data, flat: allreduce.Topology) -> None:
    class Stop(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.trainer.stop_training = epoch == 1

    with CentralStorageTrainer(network(), flat) as trainer:
        stops = [Stop()] if flat.rank == flat.size - 1 else []
        assert len(trainer.fit(*data, 9, callbacks=stops, progress=False)) == 2


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
