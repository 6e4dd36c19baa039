"""The script torch_ddp.py with MirroredOptimizer in place of DistributedDataParallel.

mpirun -n 4 python torch_ddp_mirrored.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allreduce
from trainers import datasets
from trainers.pytorch import MirroredOptimizer


def main():
    topology = allreduce.Topology()
    rank, size = topology.rank, topology.size
    local_rank = topology.node_rank
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    sampler = DistributedSampler(train, size, rank)
    loader = DataLoader(train, 96 // size, sampler=sampler)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer = MirroredOptimizer(optimizer, network, topology=topology)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    right = (network(x_test).argmax(1) == torch.from_numpy(data.y_test)).float().mean()
    if rank == 0:
        print(f"local rank {local_rank} of {size} ranks: test accuracy {right:.3f}")
    optimizer.close()


if __name__ == "__main__":
    main()
