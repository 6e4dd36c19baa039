"""A PyTorch loop on all ranks: three lines are new.

mpirun -n 4 python first_pytorch.py
"""

import torch

from trainers.pytorch import MirroredOptimizer  # 1

x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))  # all rows, on every rank
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer = MirroredOptimizer(optimizer, model)  # 2: all ranks start with rank 0's model
ranks = optimizer.topology
for _epoch in range(10):
    for batch in torch.arange(1000).split(100):  # the row numbers of a batch
        batch = batch[ranks.rank :: ranks.size]  # 3: this rank's share of them
        optimizer.rows(len(batch))  # weights the average if shares differ in size
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        loss.backward()  # when it returns, .grad holds the averages
        optimizer.step()
if ranks.rank == 0:
    print(f"loss {loss.item():.4f}")
optimizer.close()
