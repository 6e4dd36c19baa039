"""Horovod's API: a script that says `import horovod.torch as hvd` runs with `import trainers.horovod.torch as hvd`.

`import trainers.horovod as horovod` stands in for `import horovod`, and trainers.horovod.torch.mpi_ops for its module.
Which calls there are, and where they differ from Horovod's, is in trainers/horovod/README.md.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"trainers.horovod needs PyTorch, which can't be imported ({error}); install it with "
        'pip install ".[torch]" in the checkout'
    ) from error

from trainers.horovod import torch

__all__ = ["torch"]
