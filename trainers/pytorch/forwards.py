"""What the forwards of a step change in a model besides gradients: undone when no rank takes that step."""

import torch

from trainers.pytorch.hooks import Hook
from trainers.replicas.pytorch.undoing import Buffers


class Forwards:
    """Those of one model that is trained, since the last step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before, self._begun = Buffers(model), False

    def begin(self) -> None:
        """A forward begins. Local."""
        if not self._begun:
            self._begun = True
            self._before.keep()

    def stepped(self, left_out: bool) -> None:
        """A step has ended; left_out: the buffers become what they were before its first forward. Local."""
        self._begun = False
        if left_out:
            self._before.restore()
        else:
            self._before.forget()


class OnForward(Hook[Forwards]):
    """A model's, before it is called."""

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        forwards = self._user()
        if forwards is not None and module.training:
            forwards.begin()
