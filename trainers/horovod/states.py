"""What an elastic training saves, gives back after a loss, and sends to all ranks."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from trainers.horovod.errors import ArgumentError
from trainers.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from trainers.horovod.sampler import ElasticSampler


class TorchState:
    """A model, an optimizer, and whatever else `hvd.elastic.run` shall keep, as attributes.

    model, optimizer: of PyTorch. Further ones: modules, optimizers and ElasticSamplers by their state_dict; all else
    (numbers of batches and epochs, lists ...) as it is, if broadcast_object can send it.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **others}
        self._held = {name for name, each in given.items() if hasattr(each, "state_dict")}
        self._plain = set(given) - self._held
        if clash := {name for name in given if hasattr(type(self), name)}:
            raise ArgumentError(f"TorchState: {', '.join(sorted(clash))} is the name of a method; take another one")
        self._callbacks: list[Callable[[], object]] = []
        for name, each in given.items():
            setattr(self, name, each)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Have these called when ranks were lost, after the state was given back: to change the learning rate, say."""
        self._callbacks.extend(callbacks)

    def save(self) -> None:
        """Keep the state in memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._held}
        self._saved_plain = {name: copy.deepcopy(getattr(self, name)) for name in self._plain}

    commit = save
    """Horovod's name. No hosts are added while a job runs, so there is nothing to ask for."""

    def check_host_updates(self) -> None:
        """Nothing: MPI tells of lost ranks by itself, and none are added."""

    def restore(self) -> None:
        """Give back what was saved last."""
        for name, state in self._saved.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        for name, value in self._saved_plain.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Take on rank 0's state, and save it. Collective."""
        for name in sorted(self._held):
            held = getattr(self, name)
            if isinstance(held, torch.nn.Module):
                broadcast_parameters(held.state_dict(), root_rank=0)
            elif isinstance(held, torch.optim.Optimizer):
                broadcast_optimizer_state(held, root_rank=0)
            else:
                held.load_state_dict(broadcast_object(held.state_dict()))
        plain = broadcast_object({name: getattr(self, name) for name in sorted(self._plain)})
        for name, value in plain.items():
            setattr(self, name, value)
        self.save()

    def on_reset(self) -> None:
        """Ranks were lost: share what is left of the data, and call the callbacks."""
        for name in self._held:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()
        for callback in self._callbacks:
            callback()
