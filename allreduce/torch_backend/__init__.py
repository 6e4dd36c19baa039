"""The torch.distributed backend "allreduce", for unmodified PyTorch wheels.

    import allreduce.torch_backend  # not needed where allreduce is installed by pip: PyTorch finds it
    torch.distributed.init_process_group("allreduce")  # under mpirun: rank, size and store come from MPI

A failed operation raises a named error. If C++ waits for the operation (DDP's backward, futures), it is a RuntimeError
with that name in its text. If a rank dies under `mpirun --with-ft ulfm`, running and later operations of its groups
raise RankLostError. DDP can't continue after that; trainers.pytorch.MirroredOptimizer can.

A framework that creates the process group itself may silently use another backend; `require()` raises in that case.

ALLREDUCE_BACKEND=ring or pg_options=Options("ring") selects the AllReduce backend; the default is "auto".
Options(compress="int8") sends gradients with fewer bits.
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

# Older versions lose the Python part of a Work that only C++ still holds: DDP hangs, and functional collectives return
# before they are done.
if tuple(map(int, _torch.__version__.split(".")[:2])) < (2, 7):
    raise ImportError(
        f"allreduce.torch_backend needs PyTorch 2.7 or later, and this is {_torch.__version__}: install one with "
        'pip install ".[torch]" in the checkout'
    )

from allreduce.torch_backend import patches, rendezvous
from allreduce.torch_backend.checks import NAME
from allreduce.torch_backend.process_group import AllReduceProcessGroup, create_group, require
from allreduce.torch_backend.reduce import Options

if NAME not in _dist.Backend.backend_list:  # else PyTorch has loaded allreduce_torch_autoload by itself
    _devices = ["cpu", "cuda"] if _torch.cuda.device_count() else ["cpu"]  # counting initializes no CUDA
    _dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=_devices)
    rendezvous.install_env_handler()
patches.apply()
rendezvous.set_environment_from_launcher()

__all__ = ["AllReduceProcessGroup", "Options", "require"]
