"""An ordinary DistributedDataParallel script; only the name of the backend differs.

mpirun -n 4 python scripts/torch_ddp.py                  # --backend gloo: with PyTorch's own backend
ALLREDUCE_BACKEND=ring mpirun -n 4 python scripts/torch_ddp.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import allreduce.torch_backend  # noqa: F401, not needed if allreduce is installed by pip
from trainers import datasets
from trainers.cli.options import Parser


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--backend", default="allreduce", help="a backend of torch.distributed (default: allreduce)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=96, help="samples of all ranks together (default: 96)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    torch.manual_seed(options.seed)
    train, test = digits()
    sampler: DistributedSampler = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, batch_size=max(1, options.batch_size // dist.get_world_size()), sampler=sampler)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

    if dist.get_rank() == 0:
        print(f"test accuracy {accuracy(model.module, test):.4f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 1,797 images of 8x8."""
    data = datasets.load("digits")

    def tensors(x: np.ndarray, y: np.ndarray) -> TensorDataset:
        return TensorDataset(torch.as_tensor((x - data.shift) * data.scale).float(), torch.as_tensor(y))

    return tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    main()
