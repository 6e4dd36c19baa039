"""torch.distributed over our collectives, on stock wheels: only the backend's name changes.

    import allreduce.torch_backend  # not needed where allreduce is installed by pip: PyTorch finds it
    torch.distributed.init_process_group("allreduce")  # under mpirun: rank, size and store come from MPI

An operation that fails raises a named error. Where C++ waits for it, in DDP's backward and in futures, that is a
RuntimeError with the name in its text. A rank that dies under `mpirun --with-ft ulfm` is a RankLostError in the
operations that go on and in all later ones of its groups; DDP can't go on without it
(trainers.pytorch.MirroredOptimizer can).

A framework that makes its process group itself may take another backend in silence; `require()` raises then.

Which backend of ours reduces: `ALLREDUCE_BACKEND=ring`, or `pg_options=Options("ring")`, by default "auto".
"""

try:
    import torch as _torch
    import torch.distributed as _dist
except ImportError as error:
    raise ImportError(
        f'allreduce.torch_backend needs PyTorch ({error}); install it with pip install ".[torch]" in the checkout'
    ) from error

if not _dist.is_available():
    raise ImportError("allreduce.torch_backend needs a PyTorch with torch.distributed, which this build lacks")

# Older ones lose the Python part of a Work that only C++ still holds: DDP hangs, functional collectives return before
# they are done.
if tuple(map(int, _torch.__version__.split(".")[:2])) < (2, 7):
    raise ImportError(
        f"allreduce.torch_backend needs PyTorch 2.7 or later, and this is {_torch.__version__}: install one with "
        'pip install ".[torch]" in the checkout'
    )

from allreduce.torch_backend import patches, rendezvous
from allreduce.torch_backend.process_group import NAME, AllReduceProcessGroup, create_group, device_names, require
from allreduce.torch_backend.reduce import Options

if NAME not in _dist.Backend.backend_list:  # else PyTorch has loaded allreduce_torch_autoload by itself
    _dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=device_names())
    rendezvous.serve_environment()
patches.apply()
rendezvous.set_environment_from_launcher()

__all__ = ["AllReduceProcessGroup", "Options", "require"]
