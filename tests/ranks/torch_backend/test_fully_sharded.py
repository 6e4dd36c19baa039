"""FSDP2's fully_shard over our process group and over gloo: the training of one process, of odd sizes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import allreduce.torch_backend  # noqa: F401

STEPS, ROWS = 3, 4


@pytest.fixture(scope="module")
def meshes() -> dict[str, DeviceMesh]:
    groups = {"allreduce": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    return {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}


def network(seed: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    first, second, third = torch.nn.Linear(5, 7), torch.nn.Linear(7, 11), torch.nn.Linear(11, 3)
    return torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), third)


def sharded(mesh: DeviceMesh, seed: int = 3) -> torch.nn.Module:
    model = network(seed)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: torch.nn.Module, ranks: list[int]) -> torch.nn.Module:
    """Train a model on the rows of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
        rows = torch.cat([torch.randn(ROWS, 8, generator=generator) for generator in generators])
        torch.nn.functional.mse_loss(model(rows[:, :5]), rows[:, 5:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[operator]


def close(some: list[torch.Tensor], others: list[torch.Tensor], **tolerance: float) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_sharded_training_is_the_training_of_one_process(meshes: dict[str, DeviceMesh]) -> None:
    expected = [each.detach() for each in trained(network(), list(range(dist.get_world_size()))).parameters()]
    results = [whole(trained(sharded(mesh), [dist.get_rank()])) for mesh in meshes.values()]
    close(results[0], expected)
    close(results[0], results[1])


def test_shards_come_back_from_a_checkpoint(meshes: dict[str, DeviceMesh], folder: Path) -> None:
    model = trained(sharded(meshes["allreduce"]), [dist.get_rank()])
    save(model.state_dict(), checkpoint_id=folder)
    restored, alone = sharded(meshes["allreduce"], seed=4).state_dict(), network(seed=4).state_dict()
    load(restored, checkpoint_id=folder)
    load(alone, checkpoint_id=folder)
    close([each.full_tensor() for each in restored.values()], whole(model), rtol=0, atol=0)
    close(list(alone.values()), whole(model), rtol=0, atol=0)
