"""A plain single-process PyTorch script, and the three lines that make it data-parallel (marked +).

    python scripts/torch_three_lines.py                # one process, batches of 64
    mpirun -n 4 python scripts/torch_three_lines.py    # four, 16 rows of each batch on every rank

Both train on the same batches, so they reach the same accuracy.
"""

import torch

from trainers import datasets
from trainers.pytorch import MirroredOptimizer  # + 1

torch.manual_seed(0)
data = datasets.load("digits")
x_train, x_test = (torch.from_numpy((x - data.shift) * data.scale).float() for x in (data.x_train, data.x_test))
y_train, y_test = torch.from_numpy(data.y_train), torch.from_numpy(data.y_test)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = MirroredOptimizer(optimizer, model)  # + 2
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

for epoch in range(20):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(64)[:-1]:  # not the short last batch: the ranks' parts must be equal
        batch = batch[optimizer.topology.rank :: optimizer.topology.size]  # + 3
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x_train[batch]), y_train[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()

accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
if optimizer.topology.rank == 0:
    print(f"{optimizer.topology}: test accuracy {accuracy:.4f}\n{optimizer.report()}")
