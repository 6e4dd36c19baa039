"""Batch normalization with mean and variance over the batches of all ranks."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainers.horovod.collectives import Sum, allreduce
from trainers.horovod.session import ProcessSet, global_process_set, members


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d over the batches of all ranks, which may differ in size. On CPUs as well.

    In training, forward and backward are collective: two allreduces of one number per channel. process_set: the ranks
    that share statistics. Other arguments as torch.nn.BatchNorm2d.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes tensors of two dimensions or more, not {list(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.running_mean is None) or members(self.process_set).size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))  # 16-bit floats are summed in float32
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        rows = wide.new_tensor([input.numel() // input.size(1)])
        sums = self._sum(torch.cat([wide.sum(others), rows]))
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - (sums[:-1] / sums[-1]).view(shape)
        variance = self._sum((centred * centred).sum(others)) / sums[-1]
        if self.running_mean is not None:
            self._update_running_statistics(sums.detach(), variance.detach())
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _sum(self, mine: torch.Tensor) -> torch.Tensor:
        return allreduce(mine, op=Sum, process_set=self.process_set)

    @torch.no_grad()
    def _update_running_statistics(self, sums: torch.Tensor, variance: torch.Tensor) -> None:
        """Update them as torch.nn.BatchNorm2d does. sums: of each channel, then the number of values per channel."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        rows = sums[-1]
        self.running_mean.lerp_((sums[:-1] / rows).to(self.running_mean.dtype), weight)
        unbiased = variance * rows / (rows - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
