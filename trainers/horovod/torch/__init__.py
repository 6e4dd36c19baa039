"""`import trainers.horovod.torch as hvd`: the names that Horovod's users know, and nothing else."""

from trainers.horovod import elastic
from trainers.horovod.compression import Compression
from trainers.horovod.optimizer import DistributedOptimizer
from trainers.horovod.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from trainers.horovod.sync_batch_norm import SyncBatchNorm
from trainers.horovod.torch import mpi_ops
from trainers.horovod.torch.mpi_ops import *

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm", "elastic"]
__all__ += ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
__all__ += mpi_ops.__all__
