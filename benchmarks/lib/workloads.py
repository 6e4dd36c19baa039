"""The PyTorch models that benchmarks train: each with a batch to train it on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model, its loss, and batches: batch(size, generator) -> (x, y)."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    what: str
    momentum: float = 0.9


def mlp() -> nn.Module:
    """784-2048-2048-2048-10, 10.0 M parameters: much memory, little arithmetic."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """An encoder of 4 layers, width 256, on 32 tokens, 3.4 M parameters; classifies the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def convolutional() -> nn.Module:
    """Five 3x3 convolutions on 3x32x32, 1.5 M parameters: little memory, much arithmetic."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def embedding() -> nn.Module:
    """A table of 1,000,000 words of 64 elements with sparse gradients, of which a batch uses one word a row."""
    return nn.Sequential(nn.Embedding(1_000_000, 64, sparse=True), nn.Linear(64, 10))


def _labels(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 10, (size,), generator=generator)


WORKLOADS = {
    "mlp": Workload(
        mlp,
        lambda size, generator: (torch.randn(size, 784, generator=generator), _labels(size, generator)),
        "MLP 784-2048-2048-2048-10",
    ),
    "transformer": Workload(
        Transformer,
        lambda size, generator: (torch.randint(0, 1000, (size, 32), generator=generator), _labels(size, generator)),
        "transformer, 4 layers of width 256, 32 tokens",
    ),
    "conv": Workload(
        convolutional,
        lambda size, generator: (torch.randn(size, 3, 32, 32, generator=generator), _labels(size, generator)),
        "convolutional network on 3x32x32",
    ),
    "embedding": Workload(
        embedding,
        lambda size, generator: (torch.randint(0, 1_000_000, (size,), generator=generator), _labels(size, generator)),
        "embedding of 1,000,000 x 64 with sparse gradients",
        momentum=0.0,
    ),
}
