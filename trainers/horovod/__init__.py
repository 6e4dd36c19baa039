"""Horovod's API: in a script replace `import horovod.torch as hvd` by `import trainers.horovod.torch as hvd`.

`import trainers.horovod as horovod` replaces `import horovod`, and trainers.horovod.torch.mpi_ops Horovod's module.
docs/api/hvd.md lists the calls, docs/convert/horovod_differences.md the differences from Horovod's.
"""

from trainers.errors import needing

with needing(
    "trainers.horovod needs PyTorch, which can't be imported ({}); install it with "
    'pip install ".[torch]" in the checkout',
    ImportError,
):
    import torch as _torch  # noqa: F401

from trainers.horovod import torch

__all__ = ["torch"]
