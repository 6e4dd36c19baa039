"""A PyTorch script for one process, with schedule, clipping, evaluation and checkpoint.

python torch_dataloader.py    # kill it and run it again: it resumes
"""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainers import datasets

EPOCHS = int(os.environ.get("EPOCHS", "6"))
BATCH = 64
FILE = "checkpoint.pt"


def digits():
    """Return 1,437 images of digits to train and 360 to test."""
    data = datasets.load("digits")
    x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
    train = TensorDataset(torch.tensor(x_train), torch.tensor(data.y_train))
    return train, TensorDataset(torch.tensor(x_test), torch.tensor(data.y_test))


def evaluate(model, loader):
    """Return the fraction of the test rows that the model classifies correctly."""
    model.eval()
    right = rows = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            rows += len(y)
    return right / rows


def main():
    torch.manual_seed(0)
    train, test = digits()
    train_loader = DataLoader(train, BATCH, shuffle=True)
    test_loader = DataLoader(test, 256)

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = torch.load(FILE, weights_only=True) if os.path.exists(FILE) else None
    if saved:
        model.load_state_dict(saved["model"])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)  # warm-up
    if saved:  # after the scheduler was created, because that sets the learning rate
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    first = saved["epochs"] if saved else 0
    print(f"starts at epoch {first + 1}")

    for epoch in range(first, EPOCHS):
        model.train()
        rate = optimizer.param_groups[0]["lr"]
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        accuracy = evaluate(model, test_loader)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epochs": epoch + 1,
        }
        print(f"epoch {epoch + 1}: rate {rate:.4f}, test accuracy {accuracy:.3f}")
        torch.save(state, FILE)


if __name__ == "__main__":
    main()
