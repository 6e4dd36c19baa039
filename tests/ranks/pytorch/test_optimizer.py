"""MirroredOptimizer: several ranks train as one rank does on all of their rows."""

import copy
import gc
import io
import json
import time
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
from allreduce.errors import DisagreementError, OptionError
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    ROWS,
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
    train,
)
from tests.trace_schema import check_trace
from trainers.pytorch import Buckets, MirroredOptimizer, sharded
from trainers.replicas.pytorch import values


@both_updates
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_as_one_rank(world: MPI.Intracomm, flat: allreduce.Topology, update: str, kind: str) -> None:
    """Equal to the training of one rank on all rows, from rank 0's start, with the plain optimizer's state_dict."""
    model, reference = network(seed=world.rank), network()
    plain = OPTIMIZERS[kind](reference.parameters())
    train(reference, plain, everything)
    with mirrored(OPTIMIZERS[kind](model.parameters()), model, topology=flat, update=update) as optimizer:
        train(model, optimizer, mine)
        assert_close(model, reference, 1e-4)
        assert_mirrored(world, model)
        here, there = optimizer.state_dict(), plain.state_dict()
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    for index, expected in there["state"].items():
        assert here["state"][index].keys() == expected.keys()
        for key, value in expected.items():
            if value is not None:
                torch.testing.assert_close(here["state"][index][key], value, rtol=1e-3, atol=1e-4)


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
def test_shared_parameters(flat: allreduce.Topology, update: str) -> None:
    """Of a layer that is used twice: they count once. The memory is that of the parameters that are trained."""

    def make() -> nn.Sequential:
        model = network(features=40)
        model[0] = nn.Linear(40, 40)
        model.insert(2, model[0])
        model[5].weight.requires_grad_(False)
        return model

    torch.manual_seed(1)
    model = make()
    reference = copy.deepcopy(model)
    with mirrored(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, update=update) as optimizer:
        plain = OPTIMIZERS["momentum"](reference.parameters())
        train(model, optimizer, mine, features=40)
        train(reference, plain, everything, features=40)
        elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
        assert 4 * elements <= optimizer._parts.reducer.dense[0].memory.array.nbytes < 4 * elements + 1024
        assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    assert_close(model, reference)


@both_updates
@both_overlaps
def test_mixed_dtypes_and_layouts(world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool, update: str) -> None:
    """Each dtype has its own buffer; channels_last parameters keep their layout."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
            self.narrow = nn.Linear(8, 8).bfloat16()
            self.wide = nn.Linear(8, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.narrow(self.conv(x).mean((2, 3)).bfloat16()).double())

    model, reference = Mixed(), Mixed()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(ROWS, 3, 4, 4, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrored(given, model, topology=flat, update=update, buckets=Buckets(overlap, **SMALL_BUCKETS)) as optimizer:
        for net, opt, take in ((model, optimizer, mine), (reference, plain, everything)):
            functional.cross_entropy(net(take(x)), take(y)).backward()
            if net is model and update == "replicated":
                assert model.conv.weight.grad.stride() == model.conv.weight.stride()
            opt.step()
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert len(optimizer._parts.reducer.dense) >= 3
        assert_mirrored(world, model)
    assert_close(model, reference, 2e-2)
    torch.testing.assert_close(model.wide.weight, reference.wide.weight, rtol=2e-2, atol=1e-3)


@both_updates
def test_state_before_wrapping_comes_from_rank_0(world: MPI.Intracomm, flat: allreduce.Topology, update: str) -> None:
    """Of parameters that join and leave the training: an unfrozen layer begins at step 1, whatever the other layers
    count; a frozen one keeps its state."""
    model, reference = network(), network()
    given, plain = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](reference.parameters())
    for net, optimizer in ((model, given), (reference, plain)):
        net[0].weight.requires_grad_(False)
        if net is reference or world.rank == 0:
            train(net, optimizer, everything, steps=4)
        net[0].weight.requires_grad_(True)
        net[4].bias.requires_grad_(False)
        optimizer.zero_grad()
    train(reference, plain, everything, steps=2)
    with mirrored(given, model, topology=flat, update=update) as mirror:
        train(model, mirror, mine, steps=2)
        here, there = mirror.state_dict()["state"], plain.state_dict()["state"]
    assert_close(model, reference, 1e-4)
    assert here.keys() == there.keys()
    for at, state in there.items():
        assert here[at]["step"] == state["step"] == (2 if at == 0 else 4 if at == 5 else 6)
        torch.testing.assert_close(here[at]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-4)


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
@pytest.mark.parametrize(("compiler", "update"), [("eager", "replicated"), ("aot_eager", "sharded")])
def test_compiled_module(flat: allreduce.Topology, compiler: str, update: str) -> None:
    model, reference = network(), network()
    train(reference, OPTIMIZERS["momentum"](reference.parameters()), everything)
    compiled = torch.compile(model, backend=compiler)
    with mirrored(OPTIMIZERS["momentum"](compiled.parameters()), compiled, topology=flat, update=update) as optimizer:
        train(compiled, optimizer, mine)
    assert_close(model, reference)


def test_gradients_live_in_the_backends_memory(flat: allreduce.Topology) -> None:
    model = network()
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, "shared", topology=flat) as optimizer:
        train(model, optimizer, mine, steps=1)
        table = optimizer.backend._allocations
        assert all(table.memory_of(each.grad.numpy()) == ALLOCATED for each in model.parameters())


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


def test_a_state_that_one_rank_cannot_pack(
    monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm, flat: allreduce.Topology
) -> None:
    """All ranks raise an error in the middle of the pieces, and the next call works as usual."""

    def lacking(*_: Any, **__: Any) -> np.ndarray:
        raise MemoryError("no room")

    model = network()
    with mirrored(OPTIMIZERS["adamw"](model.parameters()), model, topology=flat, update="sharded") as optimizer:
        train(model, optimizer, mine, steps=1)
        with monkeypatch.context() as patch:
            if world.rank == SIZE - 1:
                patch.setattr(sharded, "pack", lacking)
            with pytest.raises(MemoryError, match="no room"):
                optimizer.state_dict()
        for state in optimizer._parts.owners.optimizer.state.values():  # strided, as an optimizer may leave it
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


def test_backend_of_the_callers(flat: allreduce.Topology) -> None:
    """A backend that was passed in is used, and is not closed."""
    with allreduce.create("ring", flat) as backend:
        for overlap in (False, True):
            model = network()
            with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, backend, buckets=Buckets(overlap)) as optimizer:
                train(model, optimizer, mine, steps=1)
            assert not backend.closed
        assert optimizer.backend.name == "ring"


@both_updates
def test_a_model_can_be_pickled(flat: allreduce.Topology, update: str) -> None:
    """While it is mirrored and afterwards: the records about its parameters are not in the pickle."""
    model = network()
    with mirrored(OPTIMIZERS["sgd"](model.parameters()), model, topology=flat, update=update) as optimizer:
        train(model, optimizer, mine, steps=1)
        during = io.BytesIO()
        torch.save(model, during)
    after = io.BytesIO()
    torch.save(model, after)
    for file in (during, after):
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert_close(loaded, model)
        functional.cross_entropy(loaded(data()[0][0]), data()[1][0]).backward()


@both_updates
@both_overlaps
def test_close_gives_the_memory_back(flat: allreduce.Topology, overlap: bool, update: str) -> None:
    """Neither a closed optimizer nor `.grad` keeps shared memory alive."""
    gc.collect()
    before = _shared_mappings()
    model = network()
    options = {"topology": flat, "update": update, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
    optimizer = MirroredOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, "shared", **options)
    assert _shared_mappings() > before
    train(model, optimizer, mine, steps=2)
    optimizer.close()
    end = time.monotonic() + 20  # another thread may hold a last reference for a moment
    while _shared_mappings() > before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert _shared_mappings() <= before


def _shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/allreduce-")


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
def test_a_reduction_during_backward_has_several_buckets(
    world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool, update: str
) -> None:
    model = network(seed=world.rank)
    plain = OPTIMIZERS["momentum"](model.parameters())
    buckets = Buckets(overlap, **SMALL_BUCKETS)
    with mirrored(plain, model, topology=flat, update=update, buckets=buckets) as optimizer:
        train(model, optimizer, mine, steps=3)
        reducer = optimizer._parts.reducer
        assert reducer.during == (overlap and SIZE > 1)
        assert len(reducer.dense) == (2 if reducer.during else 1)
        assert (optimizer.steps, reducer._begun) == (3, 3)


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


def test_a_trace_that_can_not_be_written(flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(OptionError, match="the trace can't be written"):
        MirroredOptimizer(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, trace="/missing/trace.json")
    if SIZE > 1:
        trace = tmp_path / "trace.json" if world.rank == 0 else None
        with pytest.raises(DisagreementError, match=r"trace=\.\.\."):
            MirroredOptimizer(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, trace=trace)
