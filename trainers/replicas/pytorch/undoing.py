"""What a batch changes in a module besides gradients, so that the batch can be undone."""

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of a module (the running statistics of batch norm, say), as they were before a batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """A batch begins."""
        self._kept = {name: each.detach().clone() for name, each in self._module.named_buffers()}

    def forget(self) -> None:
        """The batch has come into the model."""
        self._kept = {}

    @torch.no_grad()
    def restore(self) -> None:
        """As before the last batch, unless that is forgotten."""
        for name, kept in self._kept.items():
            self._module.get_buffer(name).copy_(kept)
        self.forget()
