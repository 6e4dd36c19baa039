"""PyTorch's fused optimizers, which read memory once, on the CPU."""

import torch
from torch.optim import Optimizer

KINDS: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}  # those with a fused kernel
RIGHT = {torch.float32, torch.float64}  # all their kernels on the CPU are right; SGD's of 16 bits is not
REPLACED = (
    "SGD(fused=True) of PyTorch leaves {} parameters on a CPU unchanged, except for the last elements of a tensor; the "
    "plain implementation is used"
)


def replace_wrong(optimizer: Optimizer) -> str:
    """Set `fused` to None in the groups whose kernel is wrong: SGD's, of 16 bits. Returns a warning, or "". Local."""
    text = ""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        wrong = {each.dtype for each in group["params"] if each.device.type == "cpu"} - RIGHT
        if group.get("fused") and wrong:
            group["fused"], text = None, REPLACED.format(min(wrong, key=str))
    return text
