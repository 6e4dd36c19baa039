"""Hugging Face Accelerate, for one process or for `accelerate launch`.

python with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from trainers import datasets


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    data = datasets.load("digits")
    x = torch.as_tensor((data.x_train - data.shift) * data.scale).float()
    rows = TensorDataset(x, torch.as_tensor(data.y_train))
    loader = DataLoader(rows, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    for _ in range(5):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"loss {loss:.4f} on {accelerator.num_processes} ranks")


if __name__ == "__main__":
    main()
