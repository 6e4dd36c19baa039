"""State that all ranks share: parameters and objects from one rank, and what hvd.elastic keeps of an epoch."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from trainers.horovod import objects, session
from trainers.horovod.calls import synchronize
from trainers.horovod.collectives import allgather, broadcast_, broadcast_async_
from trainers.horovod.errors import ArgumentError, NotSendableError
from trainers.horovod.session import ProcessSet, global_process_set, members, rank


def broadcast_parameters(
    params: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]", root_rank: int
) -> None:
    """Overwrite tensors, those of `model.state_dict()` or `model.named_parameters()`, by the root's. Collective."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, str) or not isinstance(params, Iterable):
        raise ArgumentError(f"broadcast_parameters takes model.state_dict(), not {type(params).__name__}")
    else:
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the hyperparameters of the root's optimizer. Collective.

    As with Horovod, gradients are zeros afterwards where the root's optimizer has no state yet. model: Horovod's; of
    no use here.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"broadcast_optimizer_state takes an optimizer of torch.optim, not {type(optimizer).__name__}"
        )
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if not state["state"]:
        _give_gradients(optimizer)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on all ranks; what the others bring is not looked at. Collective.

    None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them. Anything else is a
    NotSendableError on all ranks: nobody takes a pickle from the network.
    """
    size_name, name = (None, None) if name is None else (f"{name}.size", f"{name}.bytes")
    packed, error = torch.empty(0, dtype=torch.uint8), None
    if rank() == root_rank:
        packed, error = _packed(obj)
    length = broadcast_(torch.tensor([packed.numel()]), root_rank, size_name, process_set)
    if rank() != root_rank:
        packed = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, name, process_set)
    if error is not None:
        raise error
    return obj if rank() == root_rank else objects.unpack(packed)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, by rank; as broadcast_object. Collective."""
    packed, error = _packed(obj)
    everyone = allgather(packed, name, process_set)
    if error is not None:
        raise error
    values = []
    for _ in members(process_set).ranks:
        value, length = objects.unpack(everyone)
        values.append(value)
        everyone = everyone[length:]
    return values


def _packed(obj: Any) -> tuple[torch.Tensor, NotSendableError | None]:
    """An object's bytes, or those of the error that all ranks raise instead."""
    try:
        return objects.pack(obj), None
    except NotSendableError as error:
        return objects.pack_error(error), error


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
        """This rank, and so each of them, has taken a batch. batch_idx: Horovod's; of no use here."""
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
