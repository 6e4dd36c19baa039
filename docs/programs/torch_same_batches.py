"""Each rank takes its share of every batch: any number of ranks trains as one process does.

mpirun -n 4 python torch_same_batches.py    # the same loss as with -n 1
"""

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from trainers import datasets
from trainers.pytorch import MirroredOptimizer


class ShareOfEachBatch(BatchSampler):
    """Yields this rank's rows of each batch; all ranks must give the rows in the same order."""

    def __init__(self, sampler, batch_size, drop_last, topology):
        super().__init__(sampler, batch_size, drop_last)
        self.topology = topology

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[self.topology.rank :: self.topology.size]


def main():
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = MirroredOptimizer(optimizer, model)
    topology = optimizer.topology
    generator = torch.Generator()
    order = RandomSampler(train, generator=generator)
    loader = DataLoader(
        train, batch_sampler=ShareOfEachBatch(order, 50, drop_last=False, topology=topology)
    )

    for epoch in range(5):
        generator.manual_seed(epoch)
        for x, y in loader:
            optimizer.rows(len(x))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    loss = torch.nn.functional.cross_entropy(model(x_test), torch.from_numpy(data.y_test))
    if topology.rank == 0:
        print(f"test loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
