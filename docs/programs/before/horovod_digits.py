"""Horovod's way to train on many ranks.

horovodrun -np 4 python horovod_digits.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd
from trainers import datasets


def main():
    hvd.init()
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    sampler = DistributedSampler(train, hvd.size(), hvd.rank())
    loader = DataLoader(train, 16, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model(x_test[mine]).argmax(1) == torch.from_numpy(data.y_test)[mine]).sum()
    right = hvd.allreduce(right, op=hvd.Sum).item()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: test accuracy {right / len(x_test):.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
