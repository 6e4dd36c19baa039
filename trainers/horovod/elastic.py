"""hvd.elastic: training continues on the remaining ranks after a failure, if MPI supports it.

It needs ULFM (Open MPI 5, `mpirun --with-ft ulfm`); otherwise a failed rank ends the job. No ranks join. Process sets
do not survive a failure: create them again in a reset callback.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from allreduce.elastic.retry import recover, retry
from allreduce.errors import OptionError
from allreduce.topology import Topology
from trainers.horovod import calls, session
from trainers.horovod.state import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "TorchState", "run"]

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Samples the remaining rows of an epoch, divided among the current ranks, as Horovod's ElasticSampler.

    dataset: its length is used. Every rank gets the same number of rows; some rows are repeated if they don't divide
    evenly. Call `record_batch` after each batch and `set_epoch` after each epoch. Pass it to TorchState, which
    synchronizes it.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all rows, in another order."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` rows on every rank as processed. batch_idx: ignored."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its rows that are processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from this state, with the current ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining rows among the current ranks."""
        self.num_replicas, self.rank = session.size(), session.rank()
        rows = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(rows)
        self.remaining_indices = rows[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        total = self.num_samples * self.num_replicas
        padded = (left * (1 + total // max(1, len(left))))[:total]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class TorchState:
    """The state that `hvd.elastic.run` restores after a failure: a model, an optimizer and other values, as attributes.

    model, optimizer: PyTorch's. others: modules, optimizers and ElasticSamplers are saved by their state_dict; all else
    (numbers of batches and epochs, lists ...) by value, if broadcast_object can send it.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **others}
        self._stateful = {name for name, each in given.items() if hasattr(each, "state_dict")}
        self._plain = set(given) - self._stateful
        if clash := {name for name in given if hasattr(type(self), name)}:
            raise OptionError(f"TorchState: {', '.join(sorted(clash))} is the name of a method; use another name")
        self._callbacks: list[Callable[[], object]] = []
        for name, each in given.items():
            setattr(self, name, each)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Call these after a failure, when the state is restored; for example to change the learning rate. Local."""
        self._callbacks.extend(callbacks)

    def save(self) -> None:
        """Keep a copy of the state in memory. Local."""
        self._saved = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._stateful}
        self._saved_plain = {name: copy.deepcopy(getattr(self, name)) for name in self._plain}

    commit = save
    """Horovod's name of `save`. It does not check for new hosts, because none are added here."""

    def check_host_updates(self) -> None:
        """Do nothing: MPI reports failures, and hosts are not added."""

    def restore(self) -> None:
        """Restore the state that was saved last. Local."""
        for name, state in self._saved.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        for name, value in self._saved_plain.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Copy rank 0's state to all ranks, and save it. Collective."""
        for name in sorted(self._stateful):
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
        """After a failure: divide the remaining data among the remaining ranks, and call the reset callbacks. Local."""
        for name in self._stateful:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()
        for callback in self._callbacks:
            callback()


def run(
    train: Callable[Concatenate[TorchState, Arguments], ResultT],
) -> Callable[Concatenate[TorchState, Arguments], ResultT]:
    """Decorates `train(state, ...)`: after a failure the remaining ranks call it again from the last `state.commit()`.

    All ranks begin with rank 0's state. The decorated function is collective.
    """

    @functools.wraps(train)
    def elastic(state: TorchState, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        begun = session.world()

        def attempt(topology: Topology) -> ResultT:
            if topology is not begun:
                state.restore()
                state.on_reset()
            state.sync()
            return train(state, *args, **kwargs)

        return retry(begun, attempt, partial(recover, repair=_begin_session))

    return elastic


def _begin_session(topology: Topology) -> None:
    """Begin a session of the remaining ranks. Collective."""
    calls.drop_handles()
    session.begin(topology)
