"""The script horovod_digits.py with MirroredOptimizer in place of Horovod's names.

mpirun -n 4 python horovod_mirrored.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allreduce
from trainers import datasets
from trainers.pytorch import MirroredOptimizer


def main():
    reduce = allreduce.create("auto")
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    sampler = DistributedSampler(train, reduce.size, reduce.rank)
    loader = DataLoader(train, 16, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * reduce.size, momentum=0.5)
    optimizer = MirroredOptimizer(optimizer, model, topology=reduce.topology)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    mine = slice(reduce.rank, None, reduce.size)
    right = (model(x_test[mine]).argmax(1) == torch.from_numpy(data.y_test)[mine]).sum()
    right = right.reshape(1).numpy()
    reduce(right, op="sum")
    if reduce.rank == 0:
        print(f"{reduce.size} ranks: test accuracy {right[0] / len(x_test):.3f}")
    optimizer.close()
    reduce.close()


if __name__ == "__main__":
    main()
