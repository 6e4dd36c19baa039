"""Hugging Face Accelerate over allreduce: one line before the Accelerator.

mpirun -n 2 python scripts/with_accelerate.py

Accelerate does not know the backend "allreduce" (InitProcessGroupKwargs(backend="allreduce") is refused) and makes
its own process group, mostly with gloo, if there is none; it uses an existing one.
"""

try:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    raise SystemExit(
        f'Accelerate or PyTorch is missing ({error}): pip install ".[torch,frameworks]" in the checkout'
    ) from None

from allreduce.torch_backend import require
from trainers import datasets


def main() -> None:
    dist.init_process_group("allreduce")  # the only change
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    data = datasets.load("digits")
    x = torch.as_tensor((data.x_train - data.shift) * data.scale).float()
    rows = TensorDataset(x, torch.as_tensor(data.y_train))
    loader = DataLoader(rows, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    accelerator.print(require(model))  # raises if Accelerate uses another backend

    for _ in range(5):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"loss {loss:.4f} on {accelerator.num_processes} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
