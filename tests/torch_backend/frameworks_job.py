"""A job for test_jobs.py: what is built on torch.distributed, over ours and over gloo.

Prints one line a check, "NAME same" or "NAME different ...". Run under mpirun.
"""

import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import allreduce.torch_backend  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
Group = dist.ProcessGroup


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(32, 20, generator=generator), torch.randint(0, 5, (32,), generator=generator)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    x, y = batch()
    for _ in range(steps):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
    return train(model, sgd(model))


def no_sync(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, gradient_as_bucket_view=True)
    x, y = batch()
    with model.no_sync():
        torch.nn.functional.cross_entropy(model(x), y).backward()
    return train(model, sgd(model))


def static_graph(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, static_graph=True, bucket_cap_mb=0.01)
    return train(model, sgd(model))


def unused_parameters(group: Group) -> list[torch.Tensor]:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.always, self.sometimes = torch.nn.Linear(20, 5), torch.nn.Linear(20, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.always(x) + (self.sometimes(x) if dist.get_rank() else 0)

    model = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    return train(model, sgd(model))


def zero(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, process_group=group, lr=0.01
    )
    parameters = train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return parameters


def fsdp(group: Group) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(network(), process_group=group, device_id=torch.device("cpu"))
    return train(model, sgd(model))


# These have nothing of gloo's to be compared with: its PowerSGD crashes, a mesh and a checkpoint use the world.


def power_sgd(group: Group) -> bool:
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return alike(train(model, sgd(model), steps=6), group)


def saved_in_the_background(group: Group) -> bool:
    """Rank 0's complete state, loaded into the shards of all ranks; then saved while the program continues."""
    given = {name: value * (1 + group.rank()) for name, value in network().state_dict().items()}
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    async_save(model.state_dict(), checkpoint_id=folder[0]).result()
    expected = network().state_dict()
    restored = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(restored, checkpoint_id=folder[0])
    return all(torch.equal(restored[name], value) for name, value in expected.items())


def alike(parameters: list[torch.Tensor], group: Group) -> bool:
    flat = torch.cat([each.flatten() for each in parameters])
    everyone = [torch.zeros_like(flat) for _ in range(group.size())]
    dist.all_gather(everyone, flat, group=group)
    return all(torch.equal(flat, other) for other in everyone) and bool(flat.isfinite().all())


def say(name: str, same: bool) -> None:
    if dist.get_rank() == 0:
        print(name, "same" if same else "different", flush=True)


def main() -> None:
    dist.init_process_group("allreduce")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    compared: list[Callable[[Group], list[torch.Tensor]]] = [ddp, no_sync, static_graph, unused_parameters]
    for run in [*compared, zero, fsdp]:
        say(run.__name__, all(torch.equal(one, other) for one, other in zip(run(ours), run(gloo), strict=True)))
    for check in (power_sgd, saved_in_the_background):
        say(check.__name__, check(ours))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
