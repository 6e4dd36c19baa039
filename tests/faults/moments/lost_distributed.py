"""One rank of a job of three: DDP's backward fails because ranks disagree, and then because rank 1 has killed itself.

mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.lost_distributed

Prints the errors of the calls, and ends with exit code 0.
"""

from collections.abc import Callable
from typing import Any

import tests.without_dynamo  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from torch import nn

import allreduce.torch_backend  # noqa: F401
from tests.faults.points import die

STEPS = 3  # with the second one DDP makes its buckets anew, which broadcasts

torch.set_num_threads(1)


def say_what_is_raised(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    print(f"{name}: {text.splitlines()[0]}", flush=True)


def trained() -> nn.Module:
    """A DDP model that has done some steps."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(STEPS):
        loss(model).backward()
    return model


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(5, 3)).sum()


def main() -> None:
    dist.init_process_group("allreduce")
    data, rank = torch.ones(4), dist.get_rank()
    model = trained()
    say_what_is_raised("disagreement", (lambda: dist.all_reduce(data)) if rank == 1 else loss(model).backward)
    model = trained()
    receiving = dist.irecv(data.clone(), (rank + 1) % 3)
    if rank == 1:
        die()
    say_what_is_raised("backward", loss(model).backward)
    say_what_is_raised("all_reduce", lambda: dist.all_reduce(data))
    say_what_is_raised("wait", receiving.wait)
    say_what_is_raised("recv", lambda: dist.recv(data, 2 - rank))
    say_what_is_raised("monitored_barrier", dist.group.WORLD.monitored_barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
