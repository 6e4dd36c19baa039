"""TorchReplica under MirroredTrainer: several ranks train as one does, also with uneven parts."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")

from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402

import allreduce  # noqa: E402
from trainers import MirroredTrainer  # noqa: E402
from trainers.data import Batches  # noqa: E402
from trainers.errors import ArgumentError, ModelFileError  # noqa: E402
from trainers.replicas.pytorch import TorchReplica  # noqa: E402

torch.set_num_threads(1)


def replica(seed: int = 0, kind: str = "AdamW", hidden: int = 20) -> TorchReplica:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    return TorchReplica(module, nn.CrossEntropyLoss(), getattr(torch.optim, kind)(module.parameters(), lr=0.02))


def data(rows: int = 103) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :3].argmax(1)).astype(np.int64)


@pytest.mark.parametrize("backend", ["auto", "ring"])
def test_fit_as_plain_torch(world: MPI.Intracomm, flat: allreduce.Topology, backend: str) -> None:
    """103 rows in global batches of 40: uneven parts, a short last batch."""
    x, y = data()
    plain = replica()
    for epoch in range(4):
        for batch in Batches(x, y, 40, 0, 1).epoch(epoch):
            plain.optimizer.zero_grad()
            plain.loss(plain.module(torch.from_numpy(batch.x)), torch.from_numpy(batch.y)).backward()
            plain.optimizer.step()
    with MirroredTrainer(replica(seed=world.rank), allreduce=backend, topology=flat) as trainer:
        history = trainer.fit(x, y, epochs=4, batch_size=40, progress=False)
        assert len(set(trainer.parameters_sha256())) == 1
        scores = trainer.evaluate(x, y)
        outputs = trainer.predict(x)
    assert set(scores) == {"loss", "accuracy"}
    assert history[-1].loss < history[0].loss
    with torch.no_grad():
        expected = plain.module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
    assert scores["accuracy"] == pytest.approx((expected.argmax(1) == y).mean(), abs=0.02)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad", "NAdam", "ASGD"])
def test_save_and_go_on(world: MPI.Intracomm, flat: allreduce.Topology, kind: str, tmp_path: Path) -> None:
    path = world.bcast(str(tmp_path / "model.npz"))
    x, y = data(60)
    through, first, second = replica(kind=kind), replica(kind=kind), replica(seed=5, kind=kind)
    with MirroredTrainer(first, topology=flat) as trainer:
        trainer.fit(x, y, epochs=2, batch_size=20, progress=False, shuffle=False)
        first.optimizer.param_groups[0]["lr"] = 0.01
        trainer.save(path)
        trainer.fit(x, y, epochs=2, batch_size=20, progress=False, shuffle=False)
    with MirroredTrainer(second, topology=flat) as trainer:
        trainer.load(path)
        assert second.optimizer.param_groups[0]["lr"] == 0.01
        trainer.fit(x, y, epochs=2, batch_size=20, progress=False, shuffle=False)
    for here, there in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(here, there)
    assert not torch.equal(through.module[0].weight, second.module[0].weight)
    with MirroredTrainer(replica(kind=kind, hidden=21), topology=flat) as trainer:
        text = r"parameters is \(203,\) there and \(213,\) here"
        with pytest.raises(ModelFileError, match=text):
            trainer.load(path)


def test_state_of_groups_and_schedules(flat: allreduce.Topology) -> None:
    """Momentum in the second group only; a schedule has made 0.5 of lr=1, and left notes in the groups."""

    def make() -> TorchReplica:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "momentum": 0.9, "lr": 0.1}]
        return TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(groups, lr=1))

    x, y = data(24)
    first, second = make(), make()
    scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer, 1, gamma=0.5)
    with MirroredTrainer(first, topology=flat) as trainer:
        trainer.fit(x, y, epochs=2, batch_size=24, progress=False, shuffle=False)
        scheduler.step()
        second.load_state({name: array.copy() for name, array in first.state().items()})
        assert [group["lr"] for group in second.optimizer.param_groups] == [0.5, 0.05]
        trainer.fit(x, y, epochs=2, batch_size=24, progress=False, shuffle=False)
    with MirroredTrainer(second, topology=flat) as trainer:
        trainer.fit(x, y, epochs=2, batch_size=24, progress=False, shuffle=False)
    for here, there in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(here, there)


def test_batch_norm_is_averaged_by_rows(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """Every rank ends with the same running statistics: the mean of the ranks', weighted by their rows."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    x = np.random.default_rng(0).normal(2.0, size=(50, 1, 8, 8)).astype("float32")
    with MirroredTrainer(made, topology=flat) as trainer:
        trainer.fit(x, (x[:, 0, 0, 0] > 2).astype("int64"), epochs=2, batch_size=25, progress=False)
        means = world.allgather(module[1].running_mean.numpy().tobytes())
    assert len(set(means)) == 1
    assert module[1].running_mean.abs().max() > 0.01


def test_named_errors(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    module = nn.Linear(3, 2)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    for make, words in (
        (lambda: TorchReplica(module, nn.MSELoss(), other), "optimizer is of another model"),
        (lambda: TorchReplica(module, nn.MSELoss(), torch.optim.LBFGS(module.parameters())), "LBFGS can't be used"),
        (lambda: TorchReplica(module, nn.MSELoss(), torch.optim.Adafactor(module.parameters())), "Adafactor can't be"),
        (lambda: TorchReplica(module, nn.MSELoss(reduction="sum"), torch.optim.SGD(module.parameters())), 'use "mean"'),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()
    with MirroredTrainer(replica(), topology=flat) as trainer:
        for x, y in ((np.zeros((4, 7), "float32"), np.zeros(4, int)), (np.zeros((4, 6)), np.zeros((4, 9, 9)))):
            with pytest.raises(ArgumentError, match="Sequential can't be fed with"):
                trainer.fit(x, y, progress=False)
