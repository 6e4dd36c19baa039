"""The trainings that cuda_job.py runs on a stand-in for a GPU and gpu_job.py on GPUs: their results must be those of
the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allreduce import Topology
from trainers import Loader, MirroredTrainer, NumpyNetwork
from trainers.pytorch import Buckets, MirroredOptimizer
from trainers.replicas.pytorch import TorchReplica

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 48)


class Net(torch.nn.Module):
    """A model with several buckets, a 16-bit dtype, a sparse table, and parameters that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(20, 8, sparse=True)
        self.first, self.short = torch.nn.Linear(8, 33), torch.nn.Linear(33, 7, dtype=torch.bfloat16)
        self.unused = torch.nn.Linear(3, 3)
        self.out = torch.nn.Linear(7, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.short(torch.tanh(self.first(self.words(words))).bfloat16()).float())


def optimized(
    topology: Topology,
    device: torch.device,
    made: Callable[[MirroredOptimizer, torch.nn.Module], object] = lambda *_: None,
    steps: int = 3,
    overlap: bool | str = "auto",
    **options: Any,
) -> list[torch.Tensor]:
    """Return the parameters after some steps, on the host. Rows differ between ranks; gradients are accumulated and
    clipped.

    made: called with the optimizer and its model before the first step.
    """
    model = Net().to(device)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with MirroredOptimizer(plain, model, buckets=Buckets(overlap, 0.0001), topology=topology, **options) as optimizer:
        made(optimizer, model)
        for step in range(steps):
            words = (torch.arange(4 + topology.rank) + 3 * step).to(device)
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(words % 20).square().mean().backward()
            optimizer.rows(len(words))
            model((words + 1) % 20).square().mean().backward()
            if step == 1:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.first.parameters(), 0.1)
            optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return [each.detach().cpu().clone() for each in model.parameters()]


def fitted(
    topology: Topology,
    device: torch.device,
    made: Callable[[MirroredTrainer], object] = lambda _: None,
    adam: dict[str, Any] | None = None,
    kind: Callable[..., Any] = MirroredTrainer,
    **options: Any,
) -> tuple[np.ndarray, list[float], Any]:
    """Return the parameters, the last scores and the type of the array that a trainer has reduced in two fits.

    kind: of the trainer. made: called with it before it trains. adam: use Adam with these options, instead of SGD with
        momentum.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.ReLU(), torch.nn.Linear(9, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if adam is not None:
        plain = torch.optim.Adam(model.parameters(), lr=0.01, **adam)
    replica = TorchReplica(model, torch.nn.CrossEntropyLoss(), plain)
    with kind(replica, topology=topology, **options) as trainer:
        made(trainer)
        for ahead in (False, True):  # the second one begins with rank 0's state, which all ranks load
            trainer.fit(Loader((X, Y), prefetch=ahead), epochs=1, batch_size=16, progress=False)
        array, scores = type(trainer.buffer), trainer.evaluate(X, Y)
        trainer.predict(X)
        local = replica.local_state()
        replica.load_local_state(local)
        return replica.state()["parameters"].copy(), list(scores.values()), array


def networks(topology: Topology, device: str, **options: Any) -> np.ndarray:
    """Return the parameters of a NumpyNetwork that a MirroredTrainer has trained."""
    network = NumpyNetwork([6, 9, 4], device=device)
    with MirroredTrainer(network, topology=topology, **options) as trainer:
        trainer.fit(X, Y, epochs=2, batch_size=16, progress=False)
        return network.state()["parameters"].copy()


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor], **tolerance: float) -> None:
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, **tolerance)
