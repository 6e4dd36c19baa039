"""What is built on torch.distributed, over our process group: a training is that of one process, of odd sizes."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

JOBS = "openmpi 2 3"
STEPS, ROWS = 4, 4
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def network(seed: int = 3) -> Sequential:
    torch.manual_seed(seed)
    return Sequential(Linear(5, 7), Tanh(), Linear(7, 11), Tanh(), Linear(11, 3))


class Branches(Module):
    """A model whose second layer the rows of rank 0 do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = Linear(5, 3), Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = (x[:, :1] > 0).float()
        return self.always(x) + (used * self.sometimes(x) if used.any() else 0)


def trained(model: Module, ranks: Iterable[int], kind: Callable[..., Any] = torch.optim.SGD) -> Module:
    """Train a model on the rows of these ranks."""
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        parts = {of: torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(100 * step + of)) for of in ranks}
        for of, part in parts.items():
            part[:, 0] = part[:, 0].abs() * (1 if of else -1)
        rows = torch.cat([*parts.values()])
        torch.nn.functional.mse_loss(model(rows[:, :5]), rows[:, 5:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def ddp(model: Module, **options: Any) -> Module:
    return DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)


def sharded(model: Sequential) -> Module:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: Module) -> dict[str, Any]:
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
KINDS: dict[str, tuple[Callable[[], Module], Callable[..., Module], Callable[..., Any]]] = {
    "DDP": (network, partial(ddp, gradient_as_bucket_view=True), torch.optim.SGD),
    "DDP, unused parameters": (Branches, partial(ddp, find_unused_parameters=True), torch.optim.SGD),
    "DDP, ZeRO": (network, ddp, zero),
    "FSDP": (network, partial(FullyShardedDataParallel, device_id=torch.device("cpu")), torch.optim.SGD),
    "fully_shard": (network, sharded, torch.optim.SGD),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_training_is_that_of_one_process(name: str) -> None:
    make, wrap, optimizer = KINDS[name]
    expected = trained(make(), range(size())).state_dict()
    torch.testing.assert_close(whole(trained(wrap(make()), [rank()], optimizer)), dict(expected))


@pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="gloo adds the tensors of more ranks in another order")
@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_on_two_ranks_the_bits_are_those_of_gloo(name: str) -> None:
    make, wrap, _ = KINDS[name]
    groups = dist.group.WORLD, dist.new_group(backend="gloo")
    models = [trained(wrap(make(), process_group=group), [rank()]) for group in groups]
    for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
        assert torch.equal(ours, theirs)
    dist.destroy_process_group(groups[1])


def test_powersgds_hook_ends_with_equal_ranks() -> None:
    """It calls collectives in the callbacks of others."""
    model = ddp(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    flat = torch.cat([each.detach().flatten() for each in trained(model, [rank()]).parameters()])
    everyone = [torch.zeros_like(flat) for _ in range(size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone)
    assert flat.isfinite().all()


def test_shards_are_rank_0s_and_come_back_from_a_checkpoint(folder: Path) -> None:
    """Which is saved in the background."""
    model, options = sharded(network(seed=4)), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = {name: value * (1 + rank()) for name, value in network().state_dict().items()}
    set_model_state_dict(model, given, options=options)
    saved, expected = async_save(model.state_dict(), checkpoint_id=folder), network().state_dict()
    saved.result()
    for other in (sharded(network(seed=4)), network(seed=4)):
        restored = other.state_dict()
        load(restored, checkpoint_id=folder)
        other.load_state_dict(restored)
        torch.testing.assert_close(whole(other), dict(expected), rtol=0, atol=0)
