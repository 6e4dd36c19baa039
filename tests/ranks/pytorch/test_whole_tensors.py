"""update="sharded" by whole tensors: Muon, and optimizers of the user's that read whole tensors."""

import math
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from tests.ranks.pytorch.trained import (
    SIZE,
    SMALL_BUCKETS,
    assert_mirrored,
    data,
    mine,
    mirrored,
    network,
    train,
)
from trainers import EMA, Accumulate, ClipNorm, Exact, MirroredTrainer, Sharded
from trainers.pytorch import Buckets, GradientError
from trainers.replicas.pytorch import TorchReplica


class Mixed(torch.optim.Optimizer):
    """Orthogonal updates of matrices, as Muon's, with a preconditioner each; plain momentum for the rest."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["sides"] = [torch.zeros(size, size) for size in each.shape]
                    state["count"] = 0
                state["count"] += 1
                change = each.grad
                if each.dim() == 2:
                    for side, gram in zip(state["sides"], (change @ change.T, change.T @ change), strict=True):
                        side.add_(gram)
                    first, second = state["sides"]
                    change = torch.linalg.solve(first + torch.eye(len(first)), change) / (1 + second.trace())
                each.sub_(change / (1e-3 + change.norm()), alpha=group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.dim() == 2]


class Tried(torch.optim.Adam):
    """A class that is tried on small tensors, because it is not known."""


def test_a_parameter_without_dimensions_has_no_uneven_numbers() -> None:
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    replica = TorchReplica(model, functional.mse_loss, Tried(model.parameters()))
    assert len(replica.whole_tensors) == 3


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": lambda model: torch.optim.Muon(matrices(model), lr=0.02),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "mixed": lambda model: Mixed([{"params": matrices(model)}, {"params": [model[0].bias, model[2].bias], "lr": 0.02}]),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def assert_same(here: Any, there: Any) -> None:
    """Equal values, which may hold tensors."""
    assert type(here) is type(there), (here, there)
    if isinstance(here, torch.Tensor):
        assert torch.equal(here, there)
        assert here.stride() == there.stride()
    elif isinstance(here, dict):
        assert here.keys() == there.keys()
        for key, value in here.items():
            assert_same(value, there[key])
    elif isinstance(here, list | tuple):
        for one, other in zip(here, there, strict=True):
            assert_same(one, other)
    else:
        assert here == there


@pytest.mark.parametrize(
    ("backend", "shape"), [("auto", None), ("halving_doubling", None), ("auto", 2), ("ring", (1, SIZE - 1))]
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_of_the_replicated_update(
    kind: str, backend: str, shape: Any, world: MPI.Intracomm, topology_of: Callable[..., Any]
) -> None:
    """Parameters and state_dict, also of a training that goes on from this state_dict, with a frozen matrix."""
    if shape is not None and SIZE < 3:
        pytest.skip("no such topology of so few ranks")
    if backend != "auto" and kind != "muon":
        pytest.skip("once is enough")
    options = {"topology": topology_of(shape), "buckets": Buckets(kind == "muon", **SMALL_BUCKETS)}
    name = backend if backend != "auto" else "hierarchical_copy" if shape else "shared"
    results: list[Any] = []
    norms: list[float] = []
    for update in ("replicated", Sharded(shard="tensors" if kind == "adamw" else "auto")):
        model, state = network(seed=world.rank), None
        model[4].weight.requires_grad_(False)
        for _ in range(2):
            with mirrored(OPTIMIZERS[kind](model), model, name, update=update, **options) as optimizer:
                if state is not None:
                    optimizer.load_state_dict(state if world.rank == 0 else None)
                train(model, optimizer, mine, steps=4)
                state = optimizer.state_dict()
                x, y = data(1)
                optimizer.zero_grad()
                functional.cross_entropy(model(mine(x[0])), mine(y[0])).backward()
                norms.append(optimizer.clip_grad_norm_(0.1))
                optimizer.zero_grad()
        results.append((model, state))
    (expected, there), (found, here) = results
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)
    assert_mirrored(world, found)
    assert_same(here, there)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(SIZE == 1, reason="one rank shares nothing")
def test_each_rank_holds_the_state_of_its_tensors(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """And edits of averages before `synchronize` are an error on all ranks, also through .data."""
    model = network()
    model[4].weight.requires_grad_(False)
    with mirrored(OPTIMIZERS["muon"](model), model, "ring", topology=flat, update="sharded") as optimizer:
        train(model, optimizer, mine, steps=1)
        held = optimizer._parts.owners.optimizer.state
        sizes = world.allgather(sum(each["momentum_buffer"].numel() for each in held.values()))
        assert sorted(sizes) == sorted([0] * (SIZE - 2) + [480, 680])
        for edit in (lambda grad: grad.mul_(2), lambda grad: grad.data.mul_(2)):
            optimizer.zero_grad()
            model(mine(data(1)[0][0])).sum().backward()
            for each in matrices(model)[:2]:
                edit(each.grad)
            with pytest.raises(GradientError, match=r"call optimizer\.synchronize"):
                optimizer.step()


def replica(kind: str, **options: Any) -> TorchReplica:
    """Matrices for Muon, with a layer whose other parameters are not trained, and running statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 30, bias=False), nn.Tanh(), nn.BatchNorm1d(30, affine=False))
    module.extend([nn.Linear(30, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False)])
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.02),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "own": lambda parameters: Own(parameters, lr=0.1, momentum=0.9),
    }
    return TorchReplica(module, nn.CrossEntropyLoss(), made[kind](module.parameters()), **options)


class Own(torch.optim.SGD):
    """A class that is not known; it moves a tensor by its norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad /= 1e-3 + each.grad.norm()
        super().step()


CASES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "muon": ("muon", "shared", None, {}),
    "muon on a ring": ("muon", "ring", None, {}),
    "muon by halving": ("muon", "halving_doubling", None, {}),
    "muon on nodes": ("muon", "hierarchical_copy", (1, SIZE - 1), {}),
    "muon, exact": ("muon", "ring", None, {"average": Exact(micro_batch=5)}),
    "muon, clipped and averaged": ("muon", "ring", None, {}),
    "muon on nodes, clipped": ("muon", "hierarchical_copy", (1, SIZE - 1), {}),
    "muon, compressed": ("muon", "ring", None, {"compress": "bfloat16"}),
    "own": ("own", "ring", None, {}),
    "adamw": ("adamw", "ring", None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_mirrored_trainer(case: str, world: MPI.Intracomm, topology_of: Callable[..., Any], folder: Path) -> None:
    """The parameters, the state and the losses are those of the replicated update, also after a load."""
    kind, backend, shape, options = CASES[case]
    if shape is not None and SIZE < 3:
        pytest.skip("no such topology of so few ranks")
    generator = np.random.default_rng(1)
    x = generator.normal(size=(50, 6)).astype("float32")
    results = []
    step: dict[str, Any] = {"transforms": [Accumulate(2), ClipNorm(0.1), EMA(0.9)]} if "clipped" in case else {}
    for update, shard in (("replicated", "auto"), ("sharded", "tensors" if kind == "adamw" else "auto")):
        mine = replica(kind, shard=shard, precision="bfloat16" if case == "muon" else None)
        with MirroredTrainer(mine, backend, topology_of(shape), update=update, **options) as trainer:
            losses = trainer.fit(x, x[:, :3].argmax(1), 2, 25, progress=False, **step).column("loss")
            trainer.save(str(folder))
            again = replica(kind, shard=shard)
            with MirroredTrainer(again, backend, topology_of(shape), update=update, **options) as other:
                other.load(str(folder))
                assert_states_equal(
                    other.strategy.owners.snapshot({}, other.rank == 0),
                    trainer.strategy.owners.snapshot({}, trainer.rank == 0),
                )
            losses += trainer.fit(x, x[:, :3].argmax(1), 2, 25, progress=False, **step).column("loss")
            assert len(set(trainer.parameters_sha256())) == 1
            if update == "sharded" and shape is None and SIZE > 1:  # otherwise each node owns everything
                assert_shares_alike(world, mine, trainer.strategy.owners.own_part)
        results.append((losses, mine.state()))
    (expected, there), (found, here) = results
    assert found == pytest.approx(expected, rel=1e-6)  # a sum of float32, in another order
    assert_states_equal(here, there)


def assert_shares_alike(world: MPI.Intracomm, mine: TorchReplica, part: Any) -> None:
    """The rank updates whole tensors, and the largest share is at most 1.2 times the mean, or the largest tensor."""
    sizes = [math.prod(shape) for shape in mine.shapes.values()]
    ends = {0, mine.gradient_length, *accumulate(sizes)}
    slices = part if isinstance(part, tuple) else (part,)
    assert {end for each in slices for end in (each.start, each.stop)} <= ends
    share = sum(min(each.stop, sum(sizes)) - min(each.start, sum(sizes)) for each in slices)
    shares = world.allgather(share)
    assert max(shares) <= max(1.2 * sum(shares) / SIZE, *sizes)


def assert_states_equal(here: dict[str, np.ndarray], there: dict[str, np.ndarray]) -> None:
    assert here.keys() == there.keys()
    for name, array in here.items():
        np.testing.assert_array_equal(array, there[name], err_msg=name)
