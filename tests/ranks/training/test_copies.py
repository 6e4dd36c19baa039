"""copy and pickle of objects that ranks share: a named error that says what to store instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce
from allreduce.errors import CopyError
from tests.backends import ON_CPU
from trainers import MirroredTrainer, NumpyNetwork
from trainers.central_storage import CentralStorageTrainer

JOBS = "openmpi 1 2"

WAYS: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize("name", ON_CPU)
def test_backends(flat: allreduce.Topology, name: str, way: str) -> None:
    for options in ({}, {"compress": "bfloat16"} if name != "native" else {}):
        with allreduce.create(name, flat, **options) as reduce:
            with pytest.raises(CopyError, match=r"create\(config\.name, topology, \*\*config\.options\)"):
                WAYS[way](reduce)
            array = np.ones(3)
            reduce(array, "sum")
            assert set(array) == {flat.size}
            assert reduce.config is not None
            with allreduce.create(reduce.config.name, flat, **reduce.config.options) as again:
                assert again.config == reduce.config


@ways
def test_topologies(flat: allreduce.Topology, way: str) -> None:
    with pytest.raises(CopyError, match=r"split\(0\)"):
        WAYS[way](flat)
    flat.split(0).close()  # which is the way to copy one


@ways
@pytest.mark.parametrize("kind", [MirroredTrainer, CentralStorageTrainer])
def test_trainers(flat: allreduce.Topology, kind: Any, way: str) -> None:
    trainer = kind(NumpyNetwork((4, 2)), topology=flat)
    with pytest.raises(CopyError, match=rf'a {kind.__name__} can\'t be copied.*save\("model\.npz"\)'):
        WAYS[way](trainer)
    trainer.close()


@ways
def test_mirrored_optimizers(flat: allreduce.Topology, way: str) -> None:
    torch = pytest.importorskip("torch")
    from trainers.pytorch import MirroredOptimizer

    model = torch.nn.Linear(3, 2)
    with MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, topology=flat) as optimizer:
        with pytest.raises(CopyError, match="state_dict"):
            WAYS[way](optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        copy.deepcopy(schedule.state_dict())
        copied = copy.deepcopy(model)  # as averages of models and the like do
        assert torch.equal(copied.weight, model.weight)
        torch.optim.swa_utils.AveragedModel(model)
