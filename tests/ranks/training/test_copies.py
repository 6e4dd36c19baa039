"""copy and pickle of objects that ranks share: a named error that says what to store instead."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import allreduce
from allreduce.errors import CopyError
from tests.backends import ON_CPU
from trainers import MirroredTrainer, NumpyNetwork
from trainers.central_storage import CentralStorageTrainer

JOBS = "openmpi 1 2"


def refuses(shared: Any, words: str) -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match=words):
            way(shared)


@pytest.mark.parametrize("name", [*ON_CPU, "ring, compressed"])
def test_backends(flat: allreduce.Topology, name: str) -> None:
    name, _, compressed = name.partition(", ")
    with allreduce.create(name, flat, compress="bfloat16" if compressed else None) as reduce:
        refuses(reduce, r"create\(config\.name, topology, \*\*config\.options\)")
        array = np.ones(3)
        reduce(array, "sum")
        assert set(array) == {flat.size}
        assert reduce.config is not None
        with allreduce.create(reduce.config.name, flat, **reduce.config.options) as again:
            assert again.config == reduce.config


def test_topologies_and_trainers(flat: allreduce.Topology) -> None:
    refuses(flat, r"split\(0\)")
    flat.split(0).close()  # which is the way to copy one
    for kind in (MirroredTrainer, CentralStorageTrainer):
        with kind(NumpyNetwork((4, 2)), topology=flat) as trainer:
            refuses(trainer, rf'a {kind.__name__} can\'t be copied.*save\("model\.npz"\)')


def test_mirrored_optimizers(flat: allreduce.Topology) -> None:
    torch = pytest.importorskip("torch")
    from trainers.pytorch import MirroredOptimizer

    model = torch.nn.Linear(3, 2)
    with MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, topology=flat) as optimizer:
        refuses(optimizer, "state_dict")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        copy.deepcopy(schedule.state_dict())
        copied = copy.deepcopy(model)  # as averages of models and the like do
        assert torch.equal(copied.weight, model.weight)
        torch.optim.swa_utils.AveragedModel(model)
