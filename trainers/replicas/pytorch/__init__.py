"""Any PyTorch module as a replica."""

from trainers.replicas.pytorch.replica import TorchReplica

__all__ = ["TorchReplica"]
