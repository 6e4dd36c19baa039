"""What PyTorch loads by itself (entry point "torch.backends"): the name "allreduce", and nothing behind it.

Every `import torch` of the environment runs `register`, also in programs that have nothing to do with
MPI. So this module lies outside of the package, whose import initialises MPI, and imports it when a
program asks for the backend. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns PyTorch's autoloading off.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

NAME = "allreduce"
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# Set for each process by the launchers of Open MPI, of MPICH and its derivatives, and by srun with PMIx.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_TASK = "SLURM_PROCID"  # of srun without MPI, which starts many processes that know nothing of each other


def register() -> None:
    """Make "allreduce" a backend of torch.distributed, and let MPI fill in for missing env:// variables."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    # Counting CUDA's devices starts nothing, so a program can still fork.
    devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    handlers = importlib.import_module(
        "torch.distributed.rendezvous"
    )._rendezvous_handlers  # by name: a function hides it
    handlers["env"] = _filling_in(handlers["env"])


def _create(request: Any, options: Any) -> Any:
    from allreduce.torch_backend.process_group import create_group

    return create_group(request, options)


def _filling_in(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The handler of env://, which asks MPI for what the environment does not say; not for other people's groups."""

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **rest: Any) -> Iterator[Any]:
        told = all(name in os.environ for name in _VARIABLES)
        launched = any(name in os.environ for name in _LAUNCHED)
        alone = not any(name in os.environ for name in (*_VARIABLES, _TASK))
        if told or not ("allreduce" in sys.modules or ((launched or alone) and _ours(sys._getframe()))):
            return original(url, timeout=timeout, **rest)
        from allreduce.torch_backend.rendezvous import rendezvous

        return rendezvous(url, timeout, original)

    return handler


def _ours(frame: FrameType | None) -> bool:
    """True when init_process_group, which called up to `frame`, was asked for our backend: PyTorch tells no handler."""
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return frame is not None and NAME in str(frame.f_locals.get("backend"))
