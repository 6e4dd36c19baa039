"""A DataLoader, a schedule and an evaluation that continue when ranks are killed.

mpirun --with-ft ulfm -n 5 python run_survive_loader.py    # three ranks kill themselves, to show it
"""

import itertools
import os
import signal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

import allreduce
from allreduce.errors import RankLostError
from trainers import datasets
from trainers.pytorch import MirroredOptimizer

EPOCHS, BATCH = 6, 60


class ShareOfEachBatch(BatchSampler):
    """Yields this rank's rows of each batch; all ranks must give the rows in the same order."""

    def __init__(self, sampler, batch_size, drop_last, topology):
        super().__init__(sampler, batch_size, drop_last)
        self.topology = topology

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[self.topology.rank :: self.topology.size]


def digits():
    """Return 1,437 images of digits to train and 360 to test."""
    data = datasets.load("digits")
    x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
    train = TensorDataset(torch.tensor(x_train), torch.tensor(data.y_train))
    return train, TensorDataset(torch.tensor(x_test), torch.tensor(data.y_test))


def evaluate(model, test, reduce):
    """Return the fraction of the test rows that the model classifies correctly."""
    right = rows = 0
    with torch.no_grad():
        for x, y in DataLoader(Subset(test, range(reduce.rank, len(test), reduce.size)), 256):
            right += (model(x).argmax(1) == y).sum().item()
            rows += len(y)
    totals = np.array([right, rows])
    reduce(totals, op="sum")
    return totals[0] / totals[1]


def kill(condition):
    """A real program has no such function."""
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    torch.manual_seed(0)
    train, test = digits()
    steps = len(train) // BATCH  # of an epoch
    model = torch.nn.Linear(64, 10)
    optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters()), model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 5e-3, total_steps=EPOCHS * steps + 1
    )
    ranks = None
    while optimizer.steps < EPOCHS * steps:
        if optimizer.topology is not ranks:  # at the beginning, and after each failure
            ranks = optimizer.topology
            reduce = allreduce.create("auto", ranks)
        epoch, done = divmod(optimizer.steps, steps)
        order = RandomSampler(train, generator=torch.Generator().manual_seed(epoch))
        batches = ShareOfEachBatch(order, BATCH, drop_last=True, topology=ranks)
        rest = list(itertools.islice(batches, done, None))  # of this epoch
        try:
            for x, y in DataLoader(train, batch_sampler=rest):
                kill(ranks.size == 5 and ranks.rank == 1 and optimizer.steps == steps + 5)
                optimizer.rows(len(x))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
            kill(ranks.size == 4 and ranks.rank == 1 and epoch == 3)
            accuracy = evaluate(model, test, reduce)
            if ranks.rank == 0:
                print(f"epoch {epoch + 1}: {ranks.size} ranks, test accuracy {accuracy:.3f}")
        except RankLostError as lost:
            # If evaluate was interrupted, the next backward raises it again, with new ranks.
            scheduler.last_epoch = optimizer.steps  # some ranks may have missed the last step
            if optimizer.topology.rank == 0:
                print(f"after {optimizer.steps} steps: {lost}")
    accuracy = None
    while accuracy is None:  # the next backward reports no failure here, so another call does
        result = None
        try:
            if optimizer.topology is not ranks:
                reduce = allreduce.create("auto", optimizer.topology)
                ranks = optimizer.topology
            kill(ranks.size == 3 and ranks.rank == 1)
            result = evaluate(model, test, reduce)
        except RankLostError:
            pass  # the next line raises it on all ranks, and optimizer.topology is new then
        try:
            optimizer.load_state_dict(optimizer.state_dict())
            accuracy = result
        except RankLostError as lost:
            if optimizer.topology.rank == 0:
                print(f"at the end: {lost}")
    if ranks.rank == 0:
        print(f"at the end: test accuracy {accuracy:.3f}")
        print(f"{optimizer.steps} steps, {ranks.size} ranks at the end")
    optimizer.close()


if __name__ == "__main__":
    main()
