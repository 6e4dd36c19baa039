"""DistributedDataParallel on allreduce, started by mpirun.

mpirun -n 4 python torch_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allreduce.torch_backend
from trainers import datasets


def main():
    dist.init_process_group("allreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 96 // size, sampler=sampler)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    right = (network(x_test).argmax(1) == torch.from_numpy(data.y_test)).float().mean()
    if rank == 0:
        print(f"local rank {local_rank} of {size} ranks: test accuracy {right:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
