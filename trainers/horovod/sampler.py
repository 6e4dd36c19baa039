"""Which rows a rank takes, where ranks may be lost in the middle of an epoch."""

import random
from collections.abc import Iterator, Sized

import torch

from trainers.horovod import session


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
