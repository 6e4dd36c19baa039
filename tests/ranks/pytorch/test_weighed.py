"""Losses that weigh or ignore rows, and parameters without gradients: all strategies against plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import allreduce
from tests.ranks.training import fits
from trainers import (
    Accumulate,
    ClipNorm,
    Exact,
    Loader,
    LocalSGD,
    MirroredTrainer,
)
from trainers.errors import ArgumentError
from trainers.replicas.pytorch import TorchReplica

JOBS = "openmpi 1 2"


torch.set_num_threads(1)

STRATEGIES: dict[str, Callable[..., Any]] = {
    **fits.STRATEGIES,
    "compressed": partial(MirroredTrainer, allreduce="ring", compress="float16"),
    "exact": partial(MirroredTrainer, average=Exact()),
}
LOSSES: dict[str, Callable[[], Any]] = {
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]), label_smoothing=0.1),
    "ignored": nn.CrossEntropyLoss,
    "nll": lambda: nn.NLLLoss(weight=torch.tensor([0.2, 1.0, 5.0]), ignore_index=1),
    "function": lambda: functional.cross_entropy,
}


class Layers(nn.Module):
    """A model with a layer that forward does not use, and one that it uses for some rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.spare, self.sometimes = nn.Linear(3, 3), nn.Linear(6, 3)
        nn.init.ones_(self.spare.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.last(self.first(x).relu())
        marked = x[:, :1] > 2
        return output + marked * self.sometimes(x) if bool(marked.any()) else output


def made(loss: Any, kind: Any = torch.optim.AdamW, **options: Any) -> TorchReplica:
    torch.manual_seed(0)
    module = Layers()
    optimizer = kind(module.parameters(), lr=0.02, weight_decay=0.1, **options)
    return TorchReplica(module, loss, optimizer)


def rows(ignored: bool) -> tuple[np.ndarray, np.ndarray]:
    """103 rows; of those that are ignored, many follow each other: all of a rank's share of a batch."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(103, 6)).clip(-1.9, 1.9).astype("float32")
    x[50, 0] = 3.0
    y = x[:, :3].argmax(1).astype(np.int64)
    if ignored:
        y[40:58] = y[::5] = y[-12:] = -100
        y[41] = y[100] = 2
    return x, y


def trained(replica: TorchReplica, x: np.ndarray, y: np.ndarray, epochs: int = 2) -> list[float]:
    """Train as plain PyTorch does; return the mean losses of the epochs."""
    losses = []
    for _ in range(epochs):
        sums = 0.0
        for batch in batches(x, y):
            replica.optimizer.zero_grad()
            loss = replica.loss(replica.module(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))
            loss.backward()
            replica.optimizer.step()
            sums += float(loss.detach()) * len(batch[0])
        losses.append(sums / len(x))
    return losses


def skip_if_unfit(name: str, flat: allreduce.Topology) -> None:
    if name in ("async", "sync") and flat.size == 1:
        pytest.skip("a server and a worker are two ranks")
    if name == "async" and flat.size > 2:
        pytest.skip("asynchronous workers are not one rank")


def batches(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(x[start : start + 40], y[start : start + 40]) for start in range(0, len(x), 40)]


def compare(plain: TorchReplica, replica: TorchReplica, tolerance: float = 2e-5) -> None:
    for (name, here), there in zip(replica.module.named_parameters(), plain.module.parameters(), strict=True):
        np.testing.assert_allclose(here.detach().numpy(), there.detach().numpy(), rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", ["replicated", "compressed", "async"])  # the matrix has the others
@pytest.mark.parametrize("kind", [*LOSSES])
def test_weighed_as_plain_torch(name: str, kind: str, flat: allreduce.Topology) -> None:
    skip_if_unfit(name, flat)
    x, y = rows(kind in ("ignored", "function"))
    plain, replica = made(LOSSES[kind]()), made(LOSSES[kind]())
    losses = trained(plain, x, y)
    with torch.no_grad():
        expected = float(plain.loss(plain.module(torch.from_numpy(x)), torch.from_numpy(y)))
    with STRATEGIES[name](replica, topology=flat) as trainer:
        steps = [Accumulate(3), *[ClipNorm(1e6)] * (name != "async")]
        history = trainer.fit(x, y, epochs=2, batch_size=40, shuffle=False, transforms=steps, progress=False)
        scores = trainer.evaluate(x, y)
    tolerance = 5e-3 if name == "compressed" else 2e-5
    compare(plain, replica, tolerance)
    assert scores["loss"] == pytest.approx(expected, abs=tolerance)
    assert [each.loss for each in history] == pytest.approx(losses, abs=tolerance)


@pytest.mark.parametrize("name", [*STRATEGIES, "local"])
def test_a_batch_that_is_ignored_whole_is_zero(name: str, flat: allreduce.Topology) -> None:
    if name != "async" or flat.size == 1:
        skip_if_unfit(name, flat)
    x, _ = rows(False)
    local = partial(MirroredTrainer, allreduce="ring", average=LocalSGD(2))
    replica = made(nn.CrossEntropyLoss(), torch.optim.SGD)
    with (STRATEGIES | {"local": local})[name](replica, topology=flat) as trainer:
        y = np.full(len(x), -100)
        history = trainer.fit(x, y, 1, 40, progress=False)
        assert history[0].loss == 0
        assert trainer.evaluate(x, y)["loss"] == 0
        y[60:] = 1
        assert np.isfinite(trainer.fit(x, y, 1, 40, shuffle=False, progress=False)[0].loss)


@pytest.mark.parametrize("name", [*STRATEGIES])
@pytest.mark.parametrize("momentum", [False, True])
def test_frozen_and_unused_parameters_do_not_move(name: str, momentum: bool, flat: allreduce.Topology) -> None:
    """`first` is frozen after the first fit, and trained again in the third."""
    skip_if_unfit(name, flat)
    x, y = rows(False)
    options: dict[str, Any] = {"kind": torch.optim.SGD, "momentum": 0.9} if momentum else {}
    plain, replica = made(nn.CrossEntropyLoss(), **options), made(nn.CrossEntropyLoss(), **options)
    with STRATEGIES[name](replica, topology=flat) as trainer:
        for needed in (True, False, True):
            for each in (plain, replica):
                each.module.first.requires_grad_(needed)
            trained(plain, x, y, 1)
            trainer.fit(x, y, 1, 40, shuffle=False, progress=False)
    assert bool((replica.module.spare.weight == 1).all())
    compare(plain, replica, 2e-2 if name == "compressed" else 5e-5)


def test_a_parameter_that_was_frozen_before_is_refused(flat: allreduce.Topology) -> None:
    x, y = rows(False)
    torch.manual_seed(0)
    module = Layers()
    module.first.requires_grad_(False)
    replica = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    with MirroredTrainer(replica, "ring", flat) as trainer:
        trainer.fit(x, y, 1, 40, progress=False)
        module.first.requires_grad_(True)
        with pytest.raises(ArgumentError, match=r"first\.weight was frozen .* when this TorchReplica was made"):
            trainer.fit(x, y, 1, 40, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_outside_of_the_classes_names_its_row(label: int, dtype: torch.dtype, flat: allreduce.Topology) -> None:
    """In the second of three batches, which changes no replica; the flag is sent beside the 16-bit gradients."""
    x, y = rows(False)
    y[50] = label
    module = nn.Linear(6, 3).to(dtype)
    replica = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters()))
    seen: list[np.ndarray] = []
    keep = fits.Once("on_train_batch_begin", lambda _: seen.append(replica.state()["parameters"].copy()), epoch=0)
    with MirroredTrainer(replica, "ring", flat) as trainer:
        text = f"row 50 of y has the label {label}, and the model's output has 3 classes"
        loader = Loader(batches(x, y), rows="whole")
        for call, words in (
            (partial(trainer.fit, x, y, 1, 40, progress=False), text),
            (partial(trainer.evaluate, x, y), text),
            (partial(trainer.fit, loader, epochs=1, callbacks=[keep], progress=False), text.removeprefix("row 50 ")),
        ):
            with pytest.raises(ArgumentError, match=words) as caught:
                call()
            assert caught.value.ranks == tuple(range(flat.size))
    np.testing.assert_array_equal(replica.state()["parameters"], seen[0])


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[target >= 0], target[target >= 0])


def rooted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, functional.one_hot(target.clamp(0), 3).float()).sqrt()


@pytest.mark.parametrize("loss", [masked, rooted, lambda output, target: output.sum()])
@pytest.mark.parametrize("loader", [False, True])
def test_a_loss_that_is_no_mean_over_rows_is_refused(loss: Any, loader: bool, flat: allreduce.Topology) -> None:
    x, y = rows(True)
    batches = Loader([(x[:40], y[:40])], rows="whole")
    given: dict[str, Any] = {"x": batches} if loader else {"x": x, "y": y, "batch_size": 40}
    replica = made(nn.MSELoss())  # a mean, which is not compared
    if loader:
        replica = made(loss)
    else:
        replica.loss = loss  # set later
    with MirroredTrainer(replica, "ring", flat) as trainer:
        for options in ({"transforms": [Accumulate(2)]}, {}):
            if flat.size > 1 or options:
                with pytest.raises(ArgumentError, match=r"the loss \S+ is no mean over the rows: of 16 rows it is"):
                    trainer.fit(**given, epochs=1, progress=False, **options)


def test_a_replica_without_a_loss_predicts(flat: allreduce.Topology) -> None:
    x, _ = rows(False)
    with MirroredTrainer(made(None), "ring", flat) as trainer:
        assert trainer.predict(x).shape == (len(x), 3)
