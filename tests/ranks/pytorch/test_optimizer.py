"""MirroredOptimizer: several ranks train as one rank does on all of their rows."""

import copy
import json
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import allreduce
from allreduce.arrays.memory_kinds import ALLOCATED
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    SMALL_BUCKETS,
    assert_close,
    assert_mirrored,
    both_overlaps,
    both_updates,
    data,
    everything,
    mine,
    mirrored,
    network,
    several,
    train,
)
from tests.trace_schema import check_trace
from trainers.pytorch import Buckets, MirroredOptimizer, sharded
from trainers.replicas.pytorch import values
from trainers.state.backup import Backup

KERNELS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
}


@both_updates
@pytest.mark.parametrize("asked", [False, True], ids=["free", "fused"])
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_kernels_move_every_dtype(
    flat: allreduce.Topology, dtype: torch.dtype, kind: str, asked: bool, update: str
) -> None:
    """Also if the user asks for the fused kernel: it changes parameters as much as the plain implementation does."""
    factors = (torch.arange(1000) % 7 + 1).to(dtype).reshape(1, 1000) / 8
    models = [nn.Linear(1000, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
        model.to(dtype)
    plain = KERNELS[kind](models[0].parameters(), foreach=False)
    options: dict[str, Any] = {"fused": True} if asked else {}
    with mirrored(KERNELS[kind](models[1].parameters(), **options), models[1], topology=flat, update=update) as other:
        for _ in range(4):
            for model, optimizer in zip(models, (plain, other), strict=True):
                optimizer.zero_grad()
                (model.weight * factors).sum().backward()
                optimizer.step()
        torch.testing.assert_close(models[1].weight, models[0].weight, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert abs(models[0].weight.float().mean().item() - 1) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_fused_kernels_are_used_where_they_are_right(flat: allreduce.Topology, kind: str, dtype: torch.dtype) -> None:
    """A sharded update selects them by itself, and a program may ask for them, also by a state that is loaded."""
    right = dtype == torch.float32
    model = network().to(dtype)
    with mirrored(KERNELS[kind](model.parameters()), model, topology=flat, update="sharded") as optimizer:
        owners = optimizer._parts.owners
        for asked in (None, True):
            state = optimizer.state_dict()
            state["param_groups"][0]["fused"] = asked
            optimizer.load_state_dict(state)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 12, dtype=dtype)).sum().backward()
                optimizer.step()
            kept = asked if right or kind == "adamw" else None
            assert owners.plain.param_groups[0]["fused"] is kept
            assert owners.optimizer.param_groups[0]["fused"] is (right or kept)


@both_updates
def test_grad_scaler(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """An overflow on one rank makes all ranks skip the step, and halve the scale."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, topology=flat, update=update) as optimizer:
        start = copy.deepcopy(model.state_dict())
        for overflows in (True, False):
            optimizer.zero_grad()
            factor = float("inf") if overflows and world.rank == SIZE - 1 else 1.0
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(mine(data()[0][0])), mine(data()[1][0]))
            scaler.scale(loss * factor).backward()
            if update == "sharded":
                optimizer.synchronize()
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(each, start[name]) for name, each in model.state_dict().items())
            assert moved == (not overflows)
            assert scaler.get_scale() == 4.0
        assert_mirrored(world, model)


@pytest.mark.skipif(SIZE != 2, reason="compiling takes seconds, and depends on no number of ranks")
def test_compiled_module(flat: allreduce.Topology) -> None:
    model, reference = network(), network()
    train(reference, OPTIMIZERS["momentum"](reference.parameters()), everything)
    compiled = torch.compile(model, backend="aot_eager")
    with mirrored(
        OPTIMIZERS["momentum"](compiled.parameters()), compiled, topology=flat, update="sharded"
    ) as optimizer:
        train(compiled, optimizer, mine)
    assert_close(model, reference)


def test_gradients_live_in_the_backends_memory(flat: allreduce.Topology) -> None:
    """Those of the parameters that are trained, once each."""
    model = network(features=40)
    model[0] = nn.Linear(40, 40)
    model.insert(2, model[0])
    model[5].weight.requires_grad_(False)
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, "shared", topology=flat) as optimizer:
        train(model, optimizer, mine, steps=1, features=40)
        table, trained = optimizer.backend._allocations, [each for each in model.parameters() if each.requires_grad]
        assert all(table.memory_of(each.grad.numpy()) == ALLOCATED for each in trained)
        needed = 4 * sum(each.numel() for each in trained)
        assert needed <= optimizer._parts.reducer.dense[0].memory.array.nbytes < needed + 1024


def test_a_state_dict_takes_memory_for_one_parameter_at_a_time(
    monkeypatch: pytest.MonkeyPatch, flat: allreduce.Topology
) -> None:
    """Besides the result: pieces are packed, sent and dropped one by one, whatever the size of the buckets."""
    model, pieces = network(), []
    largest = max(each.numel() for each in model.parameters())

    def unpack(packed: np.ndarray) -> tuple[Any, int]:
        counter = 8  # the count of steps, beside the two moments
        assert packed.nbytes <= 2 * 4 * largest + counter + values.HEAD + values.TEXT_BYTES
        assert all(piece() is None for piece in pieces)
        pieces.append(weakref.ref(packed))
        return values.unpack(packed)

    with mirrored(OPTIMIZERS["adamw"](model.parameters()), model, topology=flat, update="sharded") as optimizer:
        train(model, optimizer, mine, steps=1)
        monkeypatch.setattr(sharded, "unpack", unpack)
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters())) <= len(pieces)


@several
def test_a_state_that_one_rank_can_not_pack(
    monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm, flat: allreduce.Topology
) -> None:
    """All ranks raise its error, in the middle of the pieces or of a backup; the next call works as usual."""

    def lacking(*_: Any, **__: Any) -> np.ndarray:
        raise MemoryError("no room")

    model = network()
    with mirrored(OPTIMIZERS["adamw"](model.parameters()), model, topology=flat, update="sharded") as optimizer:
        owners = optimizer._parts.owners
        owners.shards.backup = Backup(owners.reducer.comm, 0, [held[:2] for held in owners._held])
        step = partial(train, model, optimizer, mine, steps=1)
        step()
        with monkeypatch.context() as patch:
            if world.rank == SIZE - 1:
                patch.setattr(sharded, "pack", lacking)
            for call in (optimizer.state_dict, step):
                with pytest.raises(MemoryError, match=f"rank {SIZE - 1}: no room"):
                    call()
        step()
        for state in owners.optimizer.state.values():  # strided, as an optimizer may leave it
            state["exp_avg"] = state["exp_avg"].repeat_interleave(2)[::2]
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_sharded_parameters_are_one_memory_until_close(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    optimizer = MirroredOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, topology=flat, update="sharded")
    train(model, optimizer, mine, steps=1)
    assert optimizer._parts.owners.kind == "sharded"
    states = optimizer._parts.owners.optimizer.state.values()
    held = world.allreduce(sum(value.numel() for state in states for value in state.values() if value.dim()))
    elements = [each.numel() for each in model.parameters()]
    assert 2 * sum(elements) <= held < 2 * sum(elements) + 2 * 16 * len(elements)
    if world.rank == 0:
        with torch.no_grad():
            model[0].bias[0] = 42
    world.Barrier()
    assert model[0].bias[0] == 42
    world.Barrier()
    optimizer.close()
    optimizer.close()
    with torch.no_grad():
        model[0].bias[0] = world.rank
    world.Barrier()
    assert model[0].bias[0] == world.rank


@pytest.mark.every_pair
@pytest.mark.skipif(SIZE != 3, reason="needs three ranks")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_nodes_of_different_size_hold_the_same_bits(
    world: MPI.Intracomm, topology_of: Callable[..., allreduce.Topology], shape: tuple[int, ...], kind: str
) -> None:
    """PyTorch's fused kernels give other bits at the end of a tensor, so all nodes must split at the same elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 191), nn.Tanh(), nn.Linear(191, 3))  # of no number of vectors
    with mirrored(OPTIMIZERS[kind](model.parameters()), model, topology=topology_of(shape), update="sharded") as opt:
        for _ in range(20):
            train(model, opt, mine)
        assert_mirrored(world, model)


@both_updates
@both_overlaps
def test_a_trace(update: str, overlap: bool, flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path) -> None:
    path = world.bcast(tmp_path) / "trace.json"
    parameters = []
    for trace in (path, None):
        model = network()
        plain = OPTIMIZERS["momentum"](model.parameters())
        options = {"topology": flat, "update": update, "trace": trace, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
        with mirrored(plain, model, "auto", **options) as optimizer:
            buckets = len(optimizer._parts.reducer.dense)
            assert buckets == (2 if overlap and SIZE > 1 else 1)
            train(model, optimizer, mine, steps=3)
            assert_mirrored(world, model)
        parameters.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *parameters))
    world.Barrier()
    events = check_trace(json.loads(path.read_text()), SIZE)
    own = [event for event in events if event["pid"] == world.rank]
    assert Counter(event["cat"] for event in own)["update"] == 3
    call = "all_reduce" if update == "replicated" else "reduce_scatter"
    reductions = [each for each in own if each["name"].startswith(call) and each["args"]["dtype"] == "float32"]
    assert len(reductions) == 3 * buckets
    threads = {event["tid"] for event in reductions}
    assert threads == {1} if overlap and SIZE > 1 else len(threads) == 1  # the worker may have a thread for others
    assert all(event["args"]["bytes"] > 0 for event in reductions)
    main = [event["cat"] for event in own if event["tid"] == 0]
    assert main[0] == "compute"
    assert main.count("compute") >= 3
