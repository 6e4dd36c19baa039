"""PyTorch's fused optimizers, which read memory once, on the CPU."""

import torch
from torch.optim import Optimizer

KINDS: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}  # those with a fused kernel
REPLACED = (
    "SGD(fused=True) of PyTorch leaves {} parameters on a CPU unchanged, except for the last elements of a tensor; the "
    "plain implementation is used"
)


def is_wrong(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Whether the fused kernel for CPUs gives wrong results for this dtype (PyTorch 2.13). Local."""
    return isinstance(optimizer, torch.optim.SGD) and dtype in (torch.float16, torch.bfloat16)


def replace_wrong(optimizer: Optimizer) -> str:
    """Set `fused` to None in the groups whose kernel is wrong. Returns a warning, or "". Local."""
    text = ""
    for group in optimizer.param_groups:
        on_cpu = {each.dtype for each in group["params"] if each.device.type == "cpu"} if group.get("fused") else ()
        for dtype in on_cpu:
            if is_wrong(optimizer, dtype):
                group["fused"], text = None, REPLACED.format(dtype)
    return text
