"""PyTorch: an optimizer that averages the gradients of all ranks.

from trainers.pytorch import MirroredOptimizer

optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
"""

from trainers.errors import needing

with needing(
    "trainers.pytorch needs PyTorch, which can't be imported ({}); install it with "
    'pip install ".[torch]" in the checkout',
    ImportError,
):
    import torch  # noqa: F401

from trainers.options.average import OuterSGD
from trainers.options.buckets import Buckets
from trainers.pytorch.buckets import GradientError
from trainers.pytorch.optimizer import MirroredOptimizer
from trainers.pytorch.sparse import TAKES_SPARSE
from trainers.replicas.pytorch.division import ELEMENTWISE, TENSORWISE

__all__ = [
    "ELEMENTWISE",
    "TAKES_SPARSE",
    "TENSORWISE",
    "Buckets",
    "GradientError",
    "MirroredOptimizer",
    "OuterSGD",
]
