"""MirroredOptimizer in a hundred lines, compared with the real one bit by bit.

mpirun -n 3 python how_mirrored.py
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn import Parameter

import allreduce
from trainers.pytorch import MirroredOptimizer

BACKEND = "shared"  # adds in the order of the ranks, so the bits do not depend on the division into buckets


class Bucket:
    """A slice of the flat gradient buffer, which is reduced on its own when backward has computed all of it."""

    def __init__(self, gradients: np.ndarray, parameters: list[Parameter]) -> None:
        self.gradients, self.parameters = gradients, parameters
        self.missing = len(parameters)  # gradients that backward has still to compute


class Mirrored:
    """Averages the gradients of a model during backward. All ranks create it, and call backward and step alike."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, bucket_size: int = 2000
    ) -> None:
        self.optimizer, self.futures = optimizer, []
        self.reduce = allreduce.create(BACKEND)
        parameters = list(model.parameters())
        self._begin_equal(parameters)
        # Backward computes the gradients of the last layers first, so they lie in the first bucket.
        groups, size = [[]], 0
        for parameter in reversed(parameters):
            if groups[-1] and size + parameter.numel() > bucket_size:
                groups.append([])
                size = 0
            groups[-1].append(parameter)
            size += parameter.numel()
        # The backend allocates the memory: it reduces there without a copy.
        flat = self.reduce.allocate(sum(parameter.numel() for parameter in parameters), "float32")
        self.buckets, begin = [], 0
        for group in groups:
            end = begin + sum(parameter.numel() for parameter in group)
            self.buckets.append(Bucket(flat[begin:end], group))
            begin = end
        for bucket in self.buckets:
            self._hook(bucket)

    def _begin_equal(self, parameters: list[Parameter]) -> None:
        """Copy rank 0's parameters to all ranks."""
        for parameter in parameters:
            values = np.ascontiguousarray(parameter.detach().numpy())
            self.reduce.broadcast(values, root=0)
            parameter.data.copy_(torch.from_numpy(values))

    def _hook(self, bucket: Bucket) -> None:
        begin = 0
        for parameter in bucket.parameters:
            end = begin + parameter.numel()
            view = torch.from_numpy(bucket.gradients[begin:end]).view(parameter.shape)
            begin = end
            parameter.register_post_accumulate_grad_hook(self._when_computed(bucket, view))

    def _when_computed(self, bucket: Bucket, view: torch.Tensor):
        def computed(parameter: Parameter) -> None:
            """Autograd calls it when a gradient is complete: the gradient moves into the flat buffer."""
            view.copy_(parameter.grad)
            parameter.grad = view  # the optimizer reads the average there
            bucket.missing -= 1
            if bucket.missing == 0:  # a thread reduces the bucket while backward goes on
                self.futures.append(self.reduce.submit(bucket.gradients, op="mean"))

        return computed

    def step(self) -> None:
        """Wait for the averages, and make the update that all ranks make."""
        for future in self.futures:
            future.wait()
        self.futures.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        self.reduce.close()


def train(mirrored: Callable) -> list[torch.Tensor]:
    """Train a small network by the optimizer that `mirrored(optimizer, model)` returns; return its parameters."""
    torch.manual_seed(ranks.rank)  # the ranks begin with unlike models: rank 0's is copied
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    )
    optimizer = mirrored(torch.optim.Adam(model.parameters(), lr=0.01), model)
    x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    y = x.square().mean(1, keepdim=True)
    for batch in torch.arange(600).split(60):
        mine = batch[ranks.rank :: ranks.size]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    optimizer.close()
    return list(model.parameters())


ranks = allreduce.Topology()
small = train(Mirrored)
real = train(partial(MirroredOptimizer, allreduce=BACKEND))
equal = all(torch.equal(one, other) for one, other in zip(small, real, strict=True))
if ranks.rank == 0:
    print(f"{sum(map(torch.numel, real))} parameters, the bits of MirroredOptimizer: {equal}")
