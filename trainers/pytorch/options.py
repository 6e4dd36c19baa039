"""MirroredOptimizer's options, and the arguments that it refuses.

The fields of `Options` define the checks and the text that ranks compare. Its docstring is part of MirroredOptimizer's.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from mpi4py import MPI
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce, Config
from allreduce.errors import AllReduceError, OptionError, UnsupportedDtypeError
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport.control import agree, raise_together
from trainers import checks
from trainers.arguments import integer, name_error
from trainers.backends import compress_error
from trainers.options.average import REPLICATED, SHARDED, Exact, LocalSGD, Sharded, choice_error, sharded_of
from trainers.options.buckets import Buckets
from trainers.pytorch.hooks import owner_of
from trainers.pytorch.sparse import sparse_parameters
from trainers.pytorch.transforms import Listed, list_error, without_checks
from trainers.replicas.pytorch.division import division_of, foreign_error
from trainers.replicas.pytorch.tensors import DTYPES, is_dense
from trainers.state import backup
from trainers.strategies.transforms.skip import SkipNotFinite
from trainers.watching.check_divergence import CheckDivergence
from trainers.watching.check_gradients import CheckGradients

CHECK_EVERY = 1000  # steps

NO_EXACT = "is of trainers: MirroredTrainer(TorchReplica(module, loss, optimizer), average=Exact())"
AGAIN = "close() this one (after state_dict(), when sharded) and make it again"
GROUP_ADDED = f"parameters were added after MirroredOptimizer was made, so its buffers have no room for them; {AGAIN}"


@dataclass(frozen=True)
class Options:
    """allreduce: a backend's name, or a backend, which the caller closes.
    topology: the ranks. By default those of a given backend, or all of MPI.COMM_WORLD.
    update: "replicated": every rank updates all parameters. "sharded", or a Sharded: every rank updates its own part,
        which divides the update's time and the optimizer's memory by the number of ranks.
    average: None: the gradients of all ranks in every step. LocalSGD(H): every rank takes H steps of its own, and the
        H-th `step` averages the changes of the parameters. Call `synchronize()` before you evaluate or save the model.
    compress: gradients are sent with fewer bits: "bfloat16", "float16", "int8", "powersgd:4", or an object of options
        (see allreduce.create). Parameters and sparse gradients are not compressed.
    buckets: how the gradients are cut, and whether they are reduced during backward; see Buckets.
    transforms: a list of ClipNorm, SkipNotFinite, and those of your program that only change averaged gradients
        (`Applied.reduced`); and of CheckGradients and CheckDivergence(every=1000), the default. They run in `step`, in
        the order of the list, on what the program has left in `.grad`. All ranks raise the error of one, and none
        updates.
    trace: a file for Perfetto, written by `close`: compute, buckets, waits and updates of all ranks; or a Trace.
    """

    allreduce: str | AllReduce | Config
    topology: Topology | None = field(metadata={"compared": False})
    update: str | Sharded
    average: LocalSGD | None = field(metadata={"compared": False})  # but by its text
    compress: Given  # checked by the backend
    buckets: Buckets
    transforms: Sequence[Listed]
    trace: str | os.PathLike[str] | Trace | None = field(metadata={"compared": False})

    @property
    def sharded(self) -> Sharded | None:
        """The options of a sharded update; None for a replicated one."""
        return sharded_of(self.update)

    @property
    def update_name(self) -> str:
        """Either "replicated" or "sharded"."""
        return SHARDED if self.sharded else REPLICATED

    @property
    def local(self) -> LocalSGD | None:
        """The options of local SGD; None if gradients are averaged in every step."""
        return self.average if isinstance(self.average, LocalSGD) else None

    @property
    def divergence(self) -> CheckDivergence:
        """How often replicas are compared."""
        given = (each for each in self.transforms if isinstance(each, CheckDivergence))
        return next(given, CheckDivergence(CHECK_EVERY))

    @property
    def on_bad(self) -> str | None:
        """What happens if gradients are not finite, "raise" or "skip"; None if they are not checked."""
        given = (each for each in self.transforms if isinstance(each, CheckGradients | SkipNotFinite))
        return next((each.on_bad if isinstance(each, CheckGradients) else "skip" for each in given), None)

    def __str__(self) -> str:
        """The options that must be alike on the ranks; the same text for 25 and 25.0, and for SkipNotFinite() and
        CheckGradients("skip")."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("compared", True)}
        values["allreduce"] = getattr(self.allreduce, "name", self.allreduce)
        values["update"] = SHARDED if self.sharded == Sharded() else self.update
        values["buckets"] = Buckets(self.buckets.overlap, float(self.buckets.mb), float(self.buckets.first_mb))
        gradients = [CheckGradients(self.on_bad)] if self.on_bad else []
        values["transforms"] = [self.divergence, *gradients, *without_checks(self.transforms)]
        traced = f", average={self.average}" + ", trace=..." * (self.trace is not None)
        return f"MirroredOptimizer({', '.join(f'{name}={value!r}' for name, value in values.items())}{traced})"

    def errors(self) -> Iterator[OptionError]:
        """Yield the errors in the options; the first one counts. Local."""
        if wrong := choice_error(self.update, self.average, "None or a LocalSGD"):
            yield OptionError(wrong)
        if isinstance(self.average, Exact):
            yield OptionError(f"{self.average!r} {NO_EXACT}")
        if not isinstance(self.buckets, Buckets):
            yield OptionError(f"buckets must be a Buckets, got {self.buckets!r}")
        if wrong := list_error(self.transforms):
            yield OptionError(wrong)
        if wrong := name_error("CheckGradients: on_bad", self.on_bad, checks.ANSWERS, optional=True):
            yield OptionError(wrong)
        if isinstance(self.allreduce, AllReduce) and self.topology not in (None, self.allreduce.topology):
            text = "has a topology of its own; pass the backend's name, or no topology"
            yield OptionError(f"{self.allreduce!r} {text}")
        if twice := compress_error(self.allreduce, self.compress):
            yield twice
        if self.sharded and (refused := backup.copies_error(self.sharded.copies)):
            yield OptionError(str(refused))
        if wrong := integer(0).error("every", self.divergence.every):
            yield OptionError(f"CheckDivergence: {wrong}")

    def for_survivors(self) -> "Options":
        """Return the options with which the optimizer is created again after a failure."""
        given = self.allreduce.config if isinstance(self.allreduce, AllReduce) else self.allreduce
        return replace(self, allreduce=given, topology=None, trace=None)


# The other arguments


def check_arguments(comm: MPI.Intracomm, optimizer: Optimizer, model: Module, options: Options) -> None:
    """Raise on all ranks when the arguments of any rank are wrong, or the ranks' options differ. Collective."""
    raise_together(comm, next(_argument_errors(optimizer, model, options), None))
    agree(comm, [zlib.crc32(str(options).encode())], str(options), None)


def split_frozen(optimizer: Optimizer, model: Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """The optimizer's parameters by name, in the order of the model: those to train, and the frozen ones."""
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    named = {name: each for name, each in model.named_parameters() if id(each) in chosen}  # shared ones once
    trained = {name: each for name, each in named.items() if each.requires_grad}
    return trained, {name: each for name, each in named.items() if not each.requires_grad}


def describe(optimizer: Optimizer, model: Module) -> list[str]:
    """One line for each parameter and buffer, with all properties that must be alike on the ranks."""
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


def check_still_fit(optimizer: Optimizer, trained: dict[str, Parameter], frozen: dict[str, Parameter]) -> None:
    """Raise OptionError if a frozen parameter has a gradient now, or parameters were added. Local."""
    for name, parameter in frozen.items():
        if parameter.requires_grad and parameter.grad is not None:
            raise OptionError(
                f"{name} was frozen when MirroredOptimizer was made, so there is no buffer for its "
                f"gradient; set requires_grad before, or {AGAIN}"
            )
    if sum(len(group["params"]) for group in optimizer.param_groups) != len(trained) + len(frozen):
        raise OptionError(GROUP_ADDED)


def _argument_errors(optimizer: Optimizer, model: Module, options: Options) -> Iterator[AllReduceError]:
    if not isinstance(optimizer, Optimizer) or not isinstance(model, Module):
        yield OptionError(
            "MirroredOptimizer(optimizer, model) takes a torch.optim.Optimizer and a torch.nn.Module, not "
            f"{type(optimizer).__name__} and {type(model).__name__}"
        )
    yield from options.errors()
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        yield OptionError(
            "the model is wrapped in DistributedDataParallel, which averages gradients as well; pass the plain "
            "model (model.module), or keep DDP and leave out MirroredOptimizer"
        )
    if hasattr(optimizer, "steps_skipped"):
        yield OptionError("the optimizer is a MirroredOptimizer already; pass the plain optimizer")
    if wrong := foreign_error(model, optimizer):
        yield OptionError(wrong)
    trained = split_frozen(optimizer, model)[0]
    if not trained:
        yield OptionError("there is nothing to train: every parameter of the optimizer has requires_grad=False")
    for name, each in trained.items():
        yield from _errors_of_parameter(name, each, *next(iter(trained.items())))
    yield from _update_errors(optimizer, model, trained, options)


def _update_errors(
    optimizer: Optimizer, model: Module, trained: dict[str, Parameter], options: Options
) -> Iterator[OptionError]:
    if options.local:
        yield from _local_errors(trained, options.local)
    sparse = sparse_parameters(optimizer, model)
    dense = [name for name, each in trained.items() if id(each) not in sparse]
    rest = [name for name, each in trained.items() if id(each) in sparse]
    if dense and isinstance(optimizer, torch.optim.SparseAdam):
        yield OptionError(
            f"SparseAdam needs sparse gradients, and {dense[0]} gets dense ones: only nn.Embedding(sparse=True) keeps "
            "sparse ones; use Adam, or give dense and sparse parameters an optimizer, and a MirroredOptimizer, each"
        )
    if dense and options.sharded and (reason := division_of(optimizer, options.sharded.shard)[1]):
        yield OptionError(reason)
    if dense and rest and options.sharded and options.sharded.copies == 2:
        yield OptionError(
            f"copies=2: {rest[0]} has sparse gradients, so every rank updates it completely after the slices; after a "
            "failure it may be a step ahead of the slices. Leave out copies, or make it with sparse=False"
        )


def _errors_of_parameter(
    name: str, parameter: Parameter, first_name: str, first: Parameter
) -> Iterator[AllReduceError]:
    if parameter.device.type not in ("cpu", "cuda"):
        yield OptionError(f"{name} is on {parameter.device}, and MirroredOptimizer works on CPU and CUDA tensors")
    if parameter.dtype not in DTYPES:
        names = ", ".join(DTYPES.values())
        yield UnsupportedDtypeError(f"{name} has dtype {parameter.dtype}, which can't be averaged; use one of {names}")
    if parameter.is_sparse:
        yield OptionError(f"{name} is a sparse tensor; parameters must be dense")
    owner = owner_of(parameter)
    if owner is not None and not owner.closed:
        yield OptionError(f"{name} belongs to another MirroredOptimizer, which averages it too; close() that one")
    if parameter.device != first.device:
        yield OptionError(
            f"{first_name} is on {first.device} and {name} on {parameter.device}; MirroredOptimizer takes "
            "models on one device: model.to(device), before the optimizer is made"
        )


def _local_errors(trained: dict[str, Parameter], local: LocalSGD) -> Iterator[OptionError]:
    if wrong := local.length_error(sum(each.numel() for each in trained.values())):
        yield OptionError(wrong)
    for name, each in trained.items():
        if each.device.type != "cpu":
            yield OptionError(f"LocalSGD averages parameters on the CPU, and {name} is on {each.device}")
        if not is_dense(each):
            yield OptionError(f"LocalSGD: {name} has strides {each.stride()}, with gaps or overlaps in its memory")
