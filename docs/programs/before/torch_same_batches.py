"""One process takes all rows of each batch.

python torch_same_batches.py
"""

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from trainers import datasets


def main():
    torch.manual_seed(0)
    data = datasets.load("digits")
    x_train, x_test = (
        torch.tensor((x - data.shift) * data.scale) for x in (data.x_train, data.x_test)
    )
    train = TensorDataset(x_train, torch.from_numpy(data.y_train))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator()
    order = RandomSampler(train, generator=generator)
    loader = DataLoader(train, batch_sampler=BatchSampler(order, 50, drop_last=False))

    for epoch in range(5):
        generator.manual_seed(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    loss = torch.nn.functional.cross_entropy(model(x_test), torch.from_numpy(data.y_test))
    print(f"test loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
