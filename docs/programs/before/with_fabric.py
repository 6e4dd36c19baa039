"""Lightning Fabric, with torch.compile.

python with_fabric.py
"""

import warnings

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from trainers import datasets


def main():
    warnings.simplefilter("ignore")
    fabric = Fabric(
        accelerator="cpu",
        devices=1,
    )
    fabric.launch()
    fabric.seed_everything(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(torch.compile(network), optimizer)

    data = datasets.load("digits")
    x = torch.as_tensor((data.x_train - data.shift) * data.scale).float()
    rows = TensorDataset(x, torch.as_tensor(data.y_train))
    loader = fabric.setup_dataloaders(
        DataLoader(rows, batch_size=32, shuffle=True, drop_last=True)
    )
    for _ in range(5):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
    loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {loss:.4f} on {fabric.world_size} ranks")


if __name__ == "__main__":
    main()
