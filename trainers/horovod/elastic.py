"""hvd.elastic: a training goes on with the ranks that are left, where MPI lets ranks be outlived.

That is Open MPI's ULFM, `mpirun --with-ft ulfm`. Elsewhere a rank that fails ends the job. No ranks join, and the
process sets of the previous ranks are gone after a failure: make them again in a reset callback.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from allreduce.elastic.retry import recover, retry
from allreduce.topology import Topology
from trainers.horovod import calls, session
from trainers.horovod.errors import ArgumentError
from trainers.horovod.state import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "TorchState", "run"]

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The rows that are left of this epoch, shared by the ranks that are left. As Horovod's.

    dataset: its length is used. Every rank takes equally many; the first rows come again where they don't divide.
    Call `record_batch` after each batch and `set_epoch` after each epoch. Put it into TorchState, which sends it round.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: all rows are there again, in another order."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank, and so each of them, has taken a batch. batch_idx: as in Horovod; no effect here."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Epoch and rows taken."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left by the ranks that there are."""
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


def run(
    train: Callable[Concatenate[TorchState, Arguments], ResultT],
) -> Callable[Concatenate[TorchState, Arguments], ResultT]:
    """`train(state, ...)`; after a failure the ranks that are left begin it again from the last `state.commit()`.

    All ranks begin with rank 0's state. Collective.
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
    """Begin a session of the ranks that are left. Collective."""
    calls.forget()
    session.begin(topology)
