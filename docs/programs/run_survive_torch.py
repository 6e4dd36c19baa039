"""A PyTorch loop that continues when a rank is killed; rank 1 kills itself here, to show it.

mpirun --with-ft ulfm -n 4 python run_survive_torch.py
"""

import os
import signal

import torch

from allreduce.errors import RankLostError
from trainers.pytorch import MirroredOptimizer

torch.manual_seed(0)
x = torch.randn(1000, 8)
y = x @ torch.randn(8, 3)
model = torch.nn.Linear(8, 3)
optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-1), model)
first = optimizer.topology
while optimizer.steps < 200:  # steps that are done, the same on all ranks
    ranks = optimizer.topology  # of the remaining ranks
    if ranks is first and ranks.rank == 1 and optimizer.steps == 100:
        os.kill(os.getpid(), signal.SIGKILL)  # a real program has no such line
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(optimizer.steps))
    batch = order[:96][ranks.rank :: ranks.size]  # this rank's share
    try:
        optimizer.rows(len(batch))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    except RankLostError as lost:  # on all remaining ranks, with equal replicas
        if optimizer.topology.rank == 0:
            print(f"after {optimizer.steps} steps: {lost}")
if optimizer.topology.rank == 0:
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    print(f"{optimizer.steps} steps, {optimizer.topology.size} ranks at the end, loss {loss:.4f}")
optimizer.close()
