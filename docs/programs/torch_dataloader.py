"""A PyTorch script for many ranks, with schedule, clipping, evaluation and checkpoint.

mpirun -n 4 python torch_dataloader.py    # kill it and run it again: it resumes
"""

import os

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import allreduce
from trainers import datasets
from trainers.pytorch import MirroredOptimizer

EPOCHS = int(os.environ.get("EPOCHS", "6"))
BATCH = 64  # rows of all ranks together
FILE = "checkpoint.pt"


def digits():
    """Return 1,437 images of digits to train and 360 to test."""
    data = datasets.load("digits")
    x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
    train = TensorDataset(torch.tensor(x_train), torch.tensor(data.y_train))
    return train, TensorDataset(torch.tensor(x_test), torch.tensor(data.y_test))


def evaluate(model, loader, reduce):
    """Return the fraction of the test rows that the model classifies correctly."""
    model.eval()
    right = rows = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            rows += len(y)
    totals = np.array([right, rows])
    reduce(totals, op="sum")
    right, rows = totals
    return right / rows


def main():
    reduce = allreduce.create("auto")
    torch.manual_seed(reduce.rank)
    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=reduce.size, rank=reduce.rank)
    train_loader = DataLoader(train, BATCH // reduce.size, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(reduce.rank, len(test), reduce.size)), 256)

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = torch.load(FILE, weights_only=True) if os.path.exists(FILE) else None
    if saved:
        model.load_state_dict(saved["model"])
    optimizer = MirroredOptimizer(optimizer, model, topology=reduce.topology)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)  # warm-up
    if saved:  # after the scheduler was created, because that sets the learning rate
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    first = saved["epochs"] if saved else 0
    if reduce.rank == 0:
        print(f"starts at epoch {first + 1}")

    for epoch in range(first, EPOCHS):
        model.train()
        rate = optimizer.param_groups[0]["lr"]
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.rows(len(x))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        accuracy = evaluate(model, test_loader, reduce)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epochs": epoch + 1,
        }
        if reduce.rank == 0:
            print(f"epoch {epoch + 1}: rate {rate:.4f}, test accuracy {accuracy:.3f}")
            torch.save(state, FILE + ".new")
            os.replace(FILE + ".new", FILE)


if __name__ == "__main__":
    main()
