"""Which PyTorch optimizers work on any slice of the parameters: the sharded updates need to know."""

import torch
from torch.optim import Optimizer

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
}
"""Optimizers that treat every element alike and apart from all others, so that they work on any slice.
Add a class of your own if it is one of them."""


def refusal(optimizer: Optimizer) -> str:
    """Why an optimizer can't work on slices, or ""."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return ""
    names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    return (
        f'{kind.__name__} can\'t be used with update="sharded": it needs whole tensors, or is not known to treat '
        f'every element apart from all others. Use update="replicated", or one of {names}; an elementwise class '
        "of your own is let in by trainers.pytorch.ELEMENTWISE.add(YourClass)"
    )
