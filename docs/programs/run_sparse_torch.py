"""Train an nn.EmbeddingBag: the ranks exchange only the rows that a batch uses.

mpirun -n 4 python run_sparse_torch.py
"""

import torch

from trainers.pytorch import MirroredOptimizer

table = torch.nn.EmbeddingBag(100_000, 16, sparse=True)  # a batch uses 0.5 % of its rows
model = torch.nn.Sequential(table, torch.nn.Linear(16, 1))
optimizer = MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
rank, size = optimizer.topology.rank, optimizer.topology.size
seeds = torch.Generator().manual_seed(0)  # the same batches on every rank
for _step in range(50):
    words = torch.randint(0, 1000, (64, 10), generator=seeds) * 100
    labels = (words % 1000 == 0).sum(1, keepdim=True).float()
    mine = slice(rank * 64 // size, (rank + 1) * 64 // size)  # this rank's rows
    optimizer.rows(len(words[mine]))
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(words[mine]), labels[mine])
    loss.backward()
    optimizer.step()
if rank == 0:
    used = len(table.weight.grad.indices()[0])
    print(f"loss {loss.item():.3f}, rows in the last gradient: {used} of {len(table.weight)}")
optimizer.close()
