"""Named errors of gradients."""

import torch
from torch import Tensor

from allreduce.errors import AllReduceError

SECOND = (
    'got a second gradient after its first was averaged in slices (update="sharded"): compute all gradients of a step '
    "but the last inside of optimizer.no_sync(), and call optimizer.zero_grad() between steps, not model.zero_grad()"
)


class GradientError(AllReduceError, RuntimeError):
    """Gradients were produced, changed or left out in a way in which they can't be averaged."""


def changed(name: str, now: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """That a parameter has another shape or dtype than it had."""
    return (
        f"{name} has become {tuple(now.shape)} {now.dtype} since MirroredOptimizer was made, "
        f"where it was {tuple(shape)} {dtype}; close() it and make it again after such a change"
    )
