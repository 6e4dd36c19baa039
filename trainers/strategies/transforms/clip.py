"""ClipNorm: averaged gradients are scaled down to a norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from allreduce.arrays import gpu
from trainers.arguments import POSITIVE, Flag
from trainers.arrays.squares import scale
from trainers.replica import Replica, Slices
from trainers.strategies.transforms.transform import Applied, Transform
from trainers.watching.meter import NormMeter

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class ClipNorm(Transform):
    """Clips the averaged gradients (R. Pascanu et al.: On the difficulty of training recurrent neural networks, 2013).

    norm: the largest 2-norm of the gradients of all parameters together, as PyTorch's `clip_grad_norm_` takes it.
        Larger gradients are scaled down to it, on all ranks by the same factor.

    The history has the mean norm before the clipping, "grad_norm". Asynchronous servers and LocalSGD average no
    gradients: there each worker clips those of its own rows.
    """

    norm: Annotated[
        float,
        POSITIVE,
        Flag("clip_norm", "X", "scale the averaged gradients down to this norm, if theirs is larger", default="none"),
    ]

    def start(self, replica: Replica) -> Applied:
        return Clipping(self.norm)


class Clipping(Applied):
    """Clips gradients. most: the largest norm."""

    needs_squares = True

    def __init__(self, most: float) -> None:
        self.meter: NormMeter = NormMeter()
        self._most = most

    def reduced(self, gradients: Sequence[Any], part: Slices | None, squares: Any) -> None:
        norm = squares**0.5
        factor = self._most / (norm + EPSILON)
        if gpu.is_gpu_array(norm):
            for each in gradients:
                each *= gpu.cupy().minimum(factor, 1.0).astype(each.dtype)
        elif not factor >= 1:  # also NaN, which then shows in the loss
            for each in gradients:
                scale(each, factor)
        self.meter.set(norm)
