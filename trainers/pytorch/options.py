"""What MirroredOptimizer refuses: when it is made, on all ranks before it changes anything; and when it is used."""

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from allreduce.backend import AllReduce, Recipe
from allreduce.errors import AllReduceError, OptionError, UnsupportedDtypeError
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport.control import agree, raise_together
from trainers import checks
from trainers.backends import UPDATES, compression_twice
from trainers.checks import MAJORITY
from trainers.pytorch import sharded
from trainers.pytorch.hooks import owner_of
from trainers.pytorch.sparse import sparse_parameters
from trainers.replicas.pytorch.tensors import DTYPES
from trainers.state import backup

AGAIN = "close() this one (after state_dict(), when sharded) and make it again"
GROUP_ADDED = f"parameters were added after MirroredOptimizer was made, so their gradients have no place; {AGAIN}"


class Options(NamedTuple):
    """How a MirroredOptimizer averages and updates; see there. bucket_mb: of the first bucket, and of the others."""

    allreduce: str | AllReduce | Recipe
    topology: Topology | None
    update: str
    overlap: bool | str
    bucket_mb: tuple[float, float]
    check_every: int
    on_divergence: str = "raise"
    source: str | int = MAJORITY
    check_gradients: str | None = None
    trace: str | os.PathLike[str] | Trace | None = None
    copies: int = 1
    compress: str | None = None

    def __str__(self) -> str:
        """What must be alike on the ranks."""
        name = self.allreduce if isinstance(self.allreduce, str) else self.allreduce.name
        return (
            f"MirroredOptimizer(allreduce={name!r}, update={self.update!r}, overlap={self.overlap!r}, "
            f"first_bucket_mb={float(self.bucket_mb[0])!r}, bucket_mb={float(self.bucket_mb[1])!r}, "
            f"check_every={self.check_every!r}, on_divergence={self.on_divergence!r}, source={self.source!r}, "
            f"check_gradients={self.check_gradients!r}, copies={self.copies!r}, "
            f"compress={self.compress!r}"
            f"{', trace=...' * (self.trace is not None)})"
        )


def options_together(comm: MPI.Intracomm, optimizer: Optimizer, model: Module, options: Options) -> None:
    """Raise on all ranks when the arguments of any rank make no sense, or the ranks' options differ. Collective."""
    raise_together(comm, next(_problems(optimizer, model, options, comm.size), None))
    agree(comm, [zlib.crc32(str(options).encode())], str(options), None)


def sort(optimizer: Optimizer, model: Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """The optimizer's parameters by name, in the order of the model: those to train, and the frozen ones."""
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    named = {name: each for name, each in model.named_parameters() if id(each) in chosen}  # shared ones once
    trained = {name: each for name, each in named.items() if each.requires_grad}
    return trained, {name: each for name, each in named.items() if not each.requires_grad}


def describe(optimizer: Optimizer, model: Module) -> list[str]:
    """One line for each parameter and buffer, with all that must be alike on the ranks."""
    sparse = sparse_parameters(optimizer, model)
    groups = {id(each): at for at, group in enumerate(optimizer.param_groups) for each in group["params"]}
    lines = [
        f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}, strides {each.stride()}, "
        f"{'trained' if each.requires_grad else 'frozen'}{', sparse' * (id(each) in sparse)}"
        f"{', on a GPU' * (each.device.type == 'cuda')}, "
        + (f"group {groups[id(each)]}" if id(each) in groups else "not in the optimizer")
        + f" of {type(optimizer).__name__}"
        for name, each in model.named_parameters()
    ]
    lines += [f"buffer {name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_buffers()]
    return lines


def copies_of_all(options: Options, sparse: Sequence[str]) -> None:
    """Raise an OptionError where second copies are asked for, and would not be of everything. Local.

    sparse: the names of parameters with sparse gradients.
    """
    if options.copies == 2 and sparse:
        raise OptionError(
            f"copies=2: {sparse[0]} has sparse gradients, so every rank updates all of it after the slices, and a lost "
            "rank may leave it a step ahead of them; leave out copies, or make it with sparse=False"
        )


def still_fit(optimizer: Optimizer, trained: dict[str, Parameter], frozen: dict[str, Parameter]) -> None:
    """Raise an OptionError when parameters are trained now that were not when the optimizer was made. Local."""
    for name, parameter in frozen.items():
        if parameter.requires_grad and parameter.grad is not None:
            raise OptionError(
                f"{name} was frozen when MirroredOptimizer was made, so its gradient has no place to be "
                f"averaged in; set requires_grad before, or {AGAIN}"
            )
    if sum(len(group["params"]) for group in optimizer.param_groups) != len(trained) + len(frozen):
        raise OptionError(GROUP_ADDED)


def _problems(optimizer: Optimizer, model: Module, options: Options, ranks: int) -> Iterator[AllReduceError]:
    backend, topology, update, overlap, bucket_mb, check_every, *_ = options
    if not isinstance(optimizer, Optimizer) or not isinstance(model, Module):
        yield OptionError(
            "MirroredOptimizer(optimizer, model) takes a torch.optim.Optimizer and a torch.nn.Module, not "
            f"{type(optimizer).__name__} and {type(model).__name__}"
        )
    if isinstance(backend, AllReduce) and topology is not None and topology is not backend.topology:
        yield OptionError(f"{backend!r} has a topology of its own; pass the backend's name, or no topology")
    if twice := compression_twice(backend, options.compress):
        yield twice
    if update not in UPDATES:
        yield OptionError(f'update={update!r} is unknown; use "replicated" or "sharded"')
    elif update != "sharded" and options.copies == 2:
        yield OptionError(f'copies=2: with update="{update}" all ranks have everything; leave it out')
    if senseless := backup.refusal(options.copies, ranks, goes_on=False):
        yield OptionError(str(senseless))
    if overlap not in (True, False, "auto"):
        yield OptionError(f'overlap={overlap!r} is unknown; use True, False or "auto"')
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and each > 0 for each in bucket_mb):
        yield OptionError(
            f"first_bucket_mb and bucket_mb must be numbers > 0, got {bucket_mb[0]!r} and {bucket_mb[1]!r}"
        )
    if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
        yield OptionError(f"check_every must be an integer >= 0 (0: never), got {check_every!r}")
    if wrong := checks.refusal(1, options.on_divergence, options.source, ranks):
        yield OptionError(wrong)
    if options.check_gradients not in (None, *checks.ANSWERS):
        yield OptionError(f'check_gradients={options.check_gradients!r} is unknown; use "raise", "skip" or None')
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        yield OptionError(
            "the model is wrapped in DistributedDataParallel, which averages gradients as well; pass the plain "
            "model (model.module), or keep DDP and leave out MirroredOptimizer"
        )
    if hasattr(optimizer, "_averager"):
        yield OptionError("the optimizer is a MirroredOptimizer already; pass the plain optimizer")
    yield from _bad_parameters(optimizer, model)
    sparse = sparse_parameters(optimizer, model)
    dense = [name for name, each in sort(optimizer, model)[0].items() if id(each) not in sparse]
    if dense and isinstance(optimizer, torch.optim.SparseAdam):
        yield OptionError(
            f"SparseAdam needs sparse gradients, and those of {dense[0]} are averaged as dense ones, as all but those "
            "of an nn.Embedding(sparse=True); use Adam, or an optimizer, and a MirroredOptimizer, for each kind"
        )
    if dense and update == "sharded":
        refused = sharded.refusal(optimizer)
        if refused is not None:
            yield refused


def _bad_parameters(optimizer: Optimizer, model: Module) -> Iterator[AllReduceError]:
    names = {id(each): name for name, each in model.named_parameters()}
    in_groups = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = [each for each in in_groups if id(each) not in names]
    if foreign:
        yield OptionError(
            f"the optimizer is of another model: {len(foreign)} of its {len(in_groups)} parameters (the first of "
            f"shape {tuple(foreign[0].shape)}) are not in this {type(model).__name__}; make it from "
            "model.parameters() of the same model, after everything that replaces parameters"
        )
        return
    trained = [(names[id(each)], each) for each in in_groups if each.requires_grad]
    if not trained:
        yield OptionError("there is nothing to train: every parameter of the optimizer has requires_grad=False")
    for name, each in trained:
        if each.device.type not in ("cpu", "cuda"):
            yield OptionError(f"{name} is on {each.device}, and MirroredOptimizer works on CPU and CUDA tensors")
        if each.device != trained[0][1].device:
            yield OptionError(
                f"{trained[0][0]} is on {trained[0][1].device} and {name} on {each.device}; MirroredOptimizer takes "
                "models on one device: model.to(device), before the optimizer is made"
            )
        if each.dtype not in DTYPES:
            known = ", ".join(DTYPES.values())
            yield UnsupportedDtypeError(f"{name} has dtype {each.dtype}, which can't be averaged; use one of {known}")
        if each.is_sparse:
            yield OptionError(f"{name} is a sparse tensor; parameters must be dense")
        owner = owner_of(each)
        if owner is not None and not owner.closed:
            yield OptionError(f"{name} belongs to another MirroredOptimizer, which averages it as well; close() that")
