"""MirroredOptimizer: edits, drops, refusals, and the check of replicas."""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from allreduce import errors, notices
from tests.ranks.pytorch.trained import (
    OPTIMIZERS,
    SIZE,
    both_overlaps,
    both_updates,
    data,
    mine,
    mirrored,
    network,
    several,
    sgd,
    train,
)
from tests.ranks.together import raised_everywhere
from trainers.callbacks import CheckDivergence
from trainers.pytorch import Buckets, GradientError, MirroredOptimizer, optimizer_group

JOBS = "openmpi 1 2"


@pytest.mark.skipif(SIZE != 2, reason="one rank waits for the other")
@both_overlaps
def test_ctrl_c_while_gradients_are_waited_for(overlap: bool, flat: allreduce.Topology, folder: Path) -> None:
    """Ctrl-C leaves backward at once. A program that catches it can continue, because all calls that had begun are
    completed."""
    model = nn.Linear(3, 2)
    with mirrored(sgd(model), model, topology=flat, buckets=Buckets(overlap)) as optimizer:

        def backward() -> None:
            (model.bias.sum() * (flat.rank + 1)).backward()

        if flat.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                backward()
            folder.touch()
        else:
            while not folder.exists():  # so rank 0 waits for nothing but its Ctrl-C
                time.sleep(0.01)
            backward()
        optimizer.zero_grad()
        backward()
        optimizer.step()
        assert model.bias.grad.tolist() == [1.5, 1.5]


# Edits


def another_dtype(model: nn.Module, rank: int) -> None:
    model.double()


def other_memory_on_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 1:
        model[2].weight.data = model[2].weight.data * 0.5


@torch.no_grad()
def in_place(model: nn.Module, rank: int) -> None:
    """On every rank, so it would be applied once per rank."""
    model[0].weight.mul_(0.5)


def in_place_on_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 0:
        in_place(model, rank)


EDITED = "0.weight was edited in place.*`with optimizer.editing"
REFUSED: list[tuple[Callable[[nn.Module, int], None], str, type[Exception], str]] = [
    (another_dtype, "replicated", GradientError, r"has become \(3,\) torch.float64 since"),
    (another_dtype, "sharded", GradientError, r"has become \(3,\) torch.float64 since"),
    (other_memory_on_one_rank, "sharded", errors.DisagreementError, "\n.*\n.*after 2.weight got other memory"),
    (in_place, "sharded", errors.OptionError, EDITED),
    (in_place_on_one_rank, "sharded", errors.OptionError, EDITED),
]


@several
@pytest.mark.parametrize(
    ("edit", "update", "kind", "words"), REFUSED, ids=[f"{edit.__name__}, {update}" for edit, update, *_ in REFUSED]
)
def test_edits_that_are_refused(
    world: MPI.Intracomm, flat: allreduce.Topology, edit: Any, update: str, kind: Any, words: str
) -> None:
    model = network()
    optimizer = MirroredOptimizer(sgd(model), model, topology=flat, update=update)
    train(model, optimizer, mine, steps=1)
    edit(model, world.rank)

    def step() -> None:
        model[4].bias.sum().backward()
        optimizer.step()

    assert re.search(words, raised_everywhere(world, kind, step), re.DOTALL)
    if kind is not errors.DisagreementError:  # after which the ranks make no calls together
        model.float()
        optimizer.zero_grad()
        optimizer.close()


@pytest.mark.skipif(SIZE != 1, reason="needs memory that no other rank shares")
def test_memory_of_one_rank_is_edited_in_place(flat: allreduce.Topology) -> None:
    model = network()
    with mirrored(sgd(model), model, topology=flat, update="sharded") as optimizer:
        with torch.no_grad():
            model[0].weight.mul_(0)
        train(model, optimizer, mine, steps=1)
        assert model[0].weight.abs().max() < 0.5


@both_updates
@both_overlaps
def test_a_model_that_moves_before_its_gradients_are_averaged(
    world: MPI.Intracomm, flat: allreduce.Topology, overlap: bool, update: str
) -> None:
    """Gradients of no_sync() are averaged in their new memory, once."""
    model = network()
    with mirrored(sgd(model), model, topology=flat, update=update, buckets=Buckets(overlap)) as optimizer:
        with optimizer.no_sync():
            (model[4].bias.sum() * (world.rank + 1)).backward()
        assert model[4].bias.grad.tolist() == [world.rank + 1] * 3
        model.double().float()
        for _ in range(2):
            optimizer.synchronize()
        assert model[4].bias.grad.tolist() == pytest.approx([(SIZE + 1) / 2] * 3)
        assert update == "sharded" or model[0].weight.grad is None
        optimizer.step()
        assert optimizer._parts.reducer._begun == 1


# The check


@several
@pytest.mark.parametrize("what", ["parameter", "learning rate"])
def test_check_every(world: MPI.Intracomm, flat: allreduce.Topology, what: str) -> None:
    """Of a replicated update. Ranks that share their parameters can only differ in the rates."""
    model = network()
    optimizer = MirroredOptimizer(sgd(model), model, topology=flat, transforms=[CheckDivergence(2)])
    train(model, optimizer, mine, steps=4)
    if what == "learning rate":
        change = lambda: optimizer.param_groups[0].update(lr=0.5)  # noqa: E731, a scheduler that saw its own loss
        words = ["rank 1 differs from the others in group 0", "lr=0.5"]
    else:
        change = lambda: model[2].weight.grad[0].mul_(2)  # noqa: E731
        words = ["rank 1 differs from the others in 2.weight, the first of 2 differences", "rank 1: 2.weight: crc"]

    def loop() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(mine(data()[0][0])).pow(2).sum().backward()
            if world.rank == 1:
                change()
            optimizer.step()

    text = raised_everywhere(world, errors.DivergenceError, loop)
    assert all(word in text for word in words), text


@several
def test_rates_that_differ_in_a_sharded_update(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = network()
    optimizer = MirroredOptimizer(sgd(model), model, topology=flat, update="sharded")
    train(model, optimizer, mine, steps=1)
    if world.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    text = raised_everywhere(world, errors.DisagreementError, lambda: train(model, optimizer, mine, steps=1))
    assert "lr 0.5" in text


# Drops and refusals


def in_use() -> dict[str, int]:
    """Return the resources that an optimizer could leave behind."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "mappings": Path("/proc/self/maps").read_text().count("/allreduce-"),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "families": len(optimizer_group._groups),
    }


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def refuse(number: int, topology: allreduce.Topology) -> None:
    """Make an optimizer that is refused, for one of several reasons."""
    model = network()
    reasons: list[tuple[nn.Module, dict[str, Any], type[Exception]]] = [
        (network(), {}, errors.OptionError),
        (model, {"allreduce": "rinng"}, errors.UnknownBackendError),
        (model, {"allreduce": "native", "update": "sharded"}, errors.OptionError),
        (model, {"update": "sharded", "transforms": [CheckDivergence(-1)]}, errors.OptionError),
    ]
    other, options, kind = reasons[number % len(reasons)]
    with pytest.raises(kind):
        MirroredOptimizer(sgd(other), model, topology=topology, **options)


@pytest.mark.skipif(SIZE > 2, reason="counted on 1 and on 2 ranks; many ranks take long")
@pytest.mark.parametrize("end", ["closed", "dropped", "refused"])
def test_nothing_is_left_of_optimizers(flat: allreduce.Topology, end: str) -> None:
    """Optimizers of all kinds; dropped ones are closed by the next one; refused ones, beside one in use. One rank alone
    makes so many that lost memory shows."""

    def make(number: int) -> None:
        if end == "refused":
            refuse(number, flat)
            return
        model = network()
        options = {"update": ("sharded", "replicated")[number % 2], "buckets": Buckets(overlap=number % 3 == 0)}
        plain = OPTIMIZERS["adamw"](model.parameters())
        optimizer = MirroredOptimizer(plain, model, "shared", topology=flat, **options)
        train(model, optimizer, mine, steps=1)
        if end == "closed":
            optimizer.close()
            used.append(model)  # whose gradients hold no shared memory
            del used[:-18]

    def count() -> dict[str, int]:
        with mirrored(sgd(model := network()), model, topology=flat):  # buries what was dropped
            pass
        return {**in_use(), "communicators": len(flat._owned), "users": len(flat._users)}

    used: list[nn.Module] = []
    with mirrored(sgd(kept := network()), kept, topology=flat):
        for number in range(6):
            make(number)
        before, size = count(), memory()
        for number in range(300 if SIZE == 1 else 12):
            make(number)
        assert count() == before
        assert memory() - size < 8 << 20
    families = len(optimizer_group._groups)
    refuse(0, flat)
    assert len(optimizer_group._groups) == families


@several
def test_state_dict_says_nothing(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sharded state_dict gives no notice of copies that the user did not cause; a copy that the user causes gives
    one."""
    model = network()
    monkeypatch.setattr(flat.cma, "works", False)  # so that there are copies
    with mirrored(sgd(model), model, "shared", topology=flat, update="sharded") as optimizer:
        train(model, optimizer, mine, steps=1)
        monkeypatch.setattr(notices, "_said", set())
        caplog.clear()
        optimizer.state_dict()
        assert not caplog.records
        optimizer.backend.all_gather(np.zeros(1000, np.float32))
        assert len(caplog.records) == (MPI.COMM_WORLD.rank == 0)
