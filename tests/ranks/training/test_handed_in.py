"""Modules, replicas and callbacks of users that keep, change or differ in what they are given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import Once, stop
from trainers import Accumulate, MirroredTrainer, NumpyNetwork, Schedule
from trainers.callbacks import Callback
from trainers.errors import ArgumentError
from trainers.options.buckets import Buckets

JOBS = "quick 1 2, openmpi 1 2"

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


@pytest.fixture(name="torch")
def imported() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed in this environment")


def replica(module: Any = None, **options: Any) -> Any:
    import torch

    from trainers.replicas.pytorch import TorchReplica

    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2) if module is None else module
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], **({"lr": 0.1} | options))
    return TorchReplica(module, torch.nn.CrossEntropyLoss(), optimizer)


def fit(trainer: Any, epochs: int = 1, **options: Any) -> Any:
    return trainer.fit(X, Y, epochs, 12, shuffle=False, progress=False, **options)


def test_rows_of_the_user_stay_when_a_module_changes_its_input(torch: Any, flat: allreduce.Topology) -> None:
    class Scales(torch.nn.Linear):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x.sub_(1.0))

    x = X.copy()
    with MirroredTrainer(replica(Scales(3, 2), lr=0.0), topology=flat) as trainer:
        history = fit(trainer, 2, validation_data=(x, Y))
        losses = [*history.column("loss"), *history.column("validation_loss"), trainer.evaluate(x, Y)["loss"]]
        trainer.predict(x)
    assert (x == X).all()
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)


def test_a_module_may_keep_its_batches(torch: Any, flat: allreduce.Topology) -> None:
    kept = []

    class Keeps(torch.nn.Linear):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            if self.training:
                kept.append(x)
            return super().forward(x)

    with MirroredTrainer(replica(Keeps(3, 2)), topology=flat) as trainer:
        fit(trainer)
        mine = [slice(12 * trainer.rank // trainer.size, 12 * (trainer.rank + 1) // trainer.size)] * 4
    found = np.concatenate([each.numpy() for each in kept])
    assert (found == np.concatenate([X[at * 12 : at * 12 + 12][part] for at, part in enumerate(mine)])).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_see_the_gradients_of_the_rows(overlap: bool, torch: Any, flat: allreduce.Topology) -> None:
    """All rows are equal, so the hooks of each rank and of each half see the gradient of one process."""
    seen = []
    made = replica(lr=0.0)
    made.module.bias.register_hook(lambda gradient: seen.append(gradient.tolist()))
    buckets, transforms = (Buckets(True, mb=1e-6, first_mb=1e-6), []) if overlap else (None, [Accumulate(2)])
    with MirroredTrainer(made, topology=flat, buckets=buckets) as trainer:
        x, y = np.repeat(X[:1], 12, axis=0), np.repeat(Y[:1], 12)
        trainer.fit(x, y, 1, 12, progress=False, transforms=transforms)
        one = replica(lr=0.0)
        one.loss(one.module(torch.from_numpy(X[:1])), torch.from_numpy(Y[:1])).backward()
        assert np.allclose(made.module.bias.grad.tolist(), one.module.bias.grad.tolist())  # the average
    assert np.allclose(seen, one.module.bias.grad.tolist())
    assert len(seen) == (1 if overlap else 2)


def test_frozen_batch_norm_stays_frozen(torch: Any, flat: allreduce.Topology) -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    module[0].eval().requires_grad_(False)
    with MirroredTrainer(replica(module), topology=flat) as trainer:
        fit(trainer, 2, validation_data=(X, Y))
    assert not module[0].training
    assert module[0].running_mean.tolist() == [0, 0, 0]
    with MirroredTrainer(replica(module.eval()), topology=flat) as trainer:  # which has not frozen a part
        fit(trainer)
        trainer.evaluate(X, Y)
        assert module.training
        assert module[0].training
        before = module[0].running_mean.clone()
        assert before.abs().min() > 0
        module[0].eval()
        fit(trainer)
        assert torch.allclose(module[0].running_mean, before, rtol=1e-5)


@pytest.mark.parametrize("option", ["nesterov", "maximize", "lr"])
def test_flags_of_the_optimizer_that_differ(
    option: str, torch: Any, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    values = {"lr": [torch.tensor(0.1), torch.tensor(0.2)]}.get(option, [True, False])
    mine = replica(**{"momentum": 0.9, option: values[flat.rank > 0]})
    if flat.size == 1:
        MirroredTrainer(mine, topology=flat).close()
    else:
        assert "flags" in raised_everywhere(world, DisagreementError, lambda: MirroredTrainer(mine, topology=flat))


def test_a_fit_in_a_fit_is_refused(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    class Nested(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            fit(trainer)

    with MirroredTrainer(NumpyNetwork([3, 2]), topology=flat) as trainer:
        text = raised_everywhere(world, ArgumentError, lambda: fit(trainer, callbacks=[Nested()]))
        assert "fit: a callback has called fit" in text
        fit(trainer)


def test_the_first_metric_is_the_loss(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    for metrics in ((), ("mse",)):
        made = NumpyNetwork([3, 2])
        made.metrics = metrics
        text = raised_everywhere(world, ArgumentError, lambda made=made: MirroredTrainer(made, topology=flat))
        assert "the first one must be the loss" in text


def test_a_metric_that_was_nan_is_nan_after_a_resume(
    flat: allreduce.Topology, folder: Path, world: MPI.Intracomm
) -> None:
    class Odd(NumpyNetwork):
        def gradients(self, x: Any, y: Any, share: float, weights: Any = None) -> Any:
            loss, accuracy = super().gradients(x, y, share, weights)
            return [loss, np.nan if (x == X[0]).all(axis=1).any() else accuracy]

    found = []
    for callbacks in ([Once("on_train_batch_end", stop, epoch=0)], []):
        with MirroredTrainer(Odd([3, 2], seed=1), topology=flat) as trainer:
            history = fit(trainer, checkpoint=str(folder), resume=True, callbacks=callbacks)
            found.append(history[0].metrics["accuracy"])
    assert np.isnan(found).all()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_is_refused(torch: Any, flat: allreduce.Topology) -> None:
    from trainers.pytorch import GradientError, MirroredOptimizer

    model = torch.nn.Linear(3, 1)
    optimizer = MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, topology=flat)
    with pytest.raises(GradientError, match="has a graph"):
        model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    optimizer.close()


def test_a_save_in_a_callback_leaves_the_schedule_as_it_is(flat: allreduce.Topology, folder: Path) -> None:
    """The model that it writes has the rates from before the fit, and so has a checkpoint."""
    path, losses = f"{folder}.npz", []
    for event in ("", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
        saving = Once(event, lambda trainer: trainer.save(path), epoch=0)
        with MirroredTrainer(NumpyNetwork([3, 2], lr=0.5, seed=1), topology=flat) as trainer:
            options: Any = {"transforms": [Schedule("linear")], "callbacks": [saving]}
            history = fit(trainer, 2, checkpoint=str(folder / event), **options)
        losses.append(history.column("loss"))
        paths = [*([path] if event else []), max(map(str, (folder / event).glob("*.npz")))]
        assert [NumpyNetwork.load(each).learning_rates for each in paths] == [[0.5]] * len(paths)
    assert losses[1:] == losses[:1] * 3
