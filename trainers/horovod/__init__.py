"""Horovod's API: in a script replace `import horovod.torch as hvd` by `import trainers.horovod.torch as hvd`.

`import trainers.horovod as horovod` replaces `import horovod`, and trainers.horovod.torch.mpi_ops Horovod's module.
docs/api/hvd.md lists the calls, docs/convert/horovod_differences.md the differences from Horovod's.
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
