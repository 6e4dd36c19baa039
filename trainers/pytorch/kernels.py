"""Which of PyTorch's fused kernels all ranks may use: those whose trial gave the right numbers on each of them."""

import numpy as np
import torch
from mpi4py import MPI
from torch.optim import Optimizer

from allreduce import notices
from allreduce.messages.agreement import combine
from trainers.replicas.pytorch import fused


class Kernels:
    """The fused kernels of an optimizer. The ranks' CPUs may differ, and replicas must stay equal in bits.

    optimizer: the plain one, with the same options on all ranks. comm: a communicator of all ranks, for `look` alone.
    """

    def __init__(self, optimizer: Optimizer, comm: MPI.Intracomm) -> None:
        self._optimizer, self._rank = optimizer, comm.rank
        self._right: set[fused.Key] = set()
        self.look(comm)

    def look(self, comm: MPI.Intracomm) -> None:
        """Try the kernels for the options that the optimizer has now, on all ranks. Collective."""
        kind = type(self._optimizer)
        if kind not in fused.KINDS:
            return
        needed = [(group, dtype) for group in self._optimizer.param_groups for dtype in fused.dtypes_of(group)]
        right = np.array([fused.works(kind, *each) for each in needed], np.int64)
        combine(comm, right, "try fused kernels", MPI.MIN)
        self._right |= {fused.key_of(kind, *each) for each, is_right in zip(needed, right, strict=True) if is_right}

    def right(self, group: dict[str, object], dtype: torch.dtype) -> bool:
        """Whether the kernel gave the right numbers on all ranks; False when options were changed since. Local."""
        return fused.key_of(type(self._optimizer), group, dtype) in self._right

    def replace_broken(self) -> None:
        """See that the optimizer uses no kernel that is not right: `fused` of its groups becomes None. Local."""
        if text := fused.replace_broken(self._optimizer, self.right):
            notices.once(self._rank, text)
