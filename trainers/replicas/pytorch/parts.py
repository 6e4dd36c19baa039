"""The parts of a module that ranks have in common (trained parameters, running statistics), and how it is measured."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainers.errors import ArgumentError
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import DTYPES


def trained_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The trained parameters in the order of the module, or the reason why they can't be replicated."""
    if not isinstance(module, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        given = " and ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in (module, optimizer))
        raise ArgumentError(f"a torch.nn.Module and a torch.optim.Optimizer are needed, not {given}")
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    inside = {id(each) for each in module.parameters()}
    if not chosen <= inside:
        raise ArgumentError(
            f"the optimizer is of another model: {len(chosen - inside)} of its {len(chosen)} parameters are not in "
            f"this {type(module).__name__}; make it from module.parameters()"
        )
    trained = [each for each in module.parameters() if id(each) in chosen and each.requires_grad]
    kinds = {(each.dtype, each.device) for each in trained}
    if len(kinds) != 1 or (kind := next(iter(kinds)))[1].type not in ("cpu", "cuda") or kind[0] not in DTYPES:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in sorted((str(a), str(b)) for a, b in kinds))
        raise ArgumentError(
            f"the trained parameters must have one dtype of {', '.join(DTYPES.values())} on the CPU or one GPU, and "
            f"are {found or 'none'}; MirroredOptimizer of trainers.pytorch takes mixed dtypes"
        )
    return trained


def same_place(buffer: Tensor, place: Host) -> Tensor:
    """`buffer`, when it is where a model is; else ArgumentError."""
    if buffer.device == place.device:
        return buffer
    raise ArgumentError(
        f"the model is on {place.device} and the memory of its gradients on {buffer.device}; on GPUs call "
        "torch.cuda.set_device(rank on the node) first of all, and move the model there"
    )


def check_places(module: nn.Module, trained: list[nn.Parameter], places: list[Tensor]) -> None:
    """Raise ArgumentError when parameters are no longer where they were put."""
    if any(each.data_ptr() != place.data_ptr() for each, place in zip(trained, places, strict=True)):
        raise ArgumentError(
            f"a parameter's .data was replaced, so this {type(module).__name__} would no longer be trained: "
            "copy into parameters (p.copy_) instead, or make the trainer afterwards"
        )


def statistics_of(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """The running statistics of batch norm, which every rank forms from its own rows."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    found = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in found if each is not None and each.dtype == dtype]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of rows whose largest output is at the target; targets are class numbers, or one-hot."""
    wanted = target if target.dim() < output.dim() else target.argmax(1)
    return (output.argmax(1) == wanted).float().mean()
