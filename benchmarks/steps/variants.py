"""The variants of a training step that are timed: no communication, DDP on gloo or on us, MirroredOptimizer."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from allreduce.topology import Topology
from benchmarks.measuring.peers import join
from benchmarks.steps.models import Workload
from trainers.pytorch import MirroredOptimizer

PLAIN, DDP_GLOO, DDP_OURS = "no communication", "DDP + gloo", "DDP + allreduce"
REPLICATED, REPLICATED_OVERLAP = "replicated", "replicated, overlap"
SHARDED, SHARDED_OVERLAP = "sharded", "sharded, overlap"
NAMES = (PLAIN, DDP_GLOO, DDP_OURS, REPLICATED, REPLICATED_OVERLAP, SHARDED, SHARDED_OVERLAP)


class Variant(NamedTuple):
    module: torch.nn.Module  # what is called
    optimizer: torch.optim.Optimizer
    close: Callable[[], object]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()


class Variants:
    """Makes variants; holds the process groups that DDP averages over.

    backend: the one of MirroredOptimizer, by name. Creating it, `make` and `close` are collective.
    """

    def __init__(self, topology: Topology, backend: str) -> None:
        self._topology, self._backend = topology, backend
        self._groups: dict[str, Any] = {}
        join(dist, topology)

    def make(self, name: str, workload: Workload) -> Variant:
        """A variant with a fresh model, equal on all ranks. Collective."""
        torch.manual_seed(0)
        model = workload.model()
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=workload.momentum)
        if name == PLAIN:
            return Variant(model, plain, lambda: None)
        if name in (DDP_GLOO, DDP_OURS):
            module = torch.nn.parallel.DistributedDataParallel(model, process_group=self._group(name))
            return Variant(module, plain, lambda: None)
        mirrored = MirroredOptimizer(
            plain,
            model,
            self._backend,
            topology=self._topology,
            update=name.partition(",")[0],
            overlap=name in (REPLICATED_OVERLAP, SHARDED_OVERLAP),
        )
        return Variant(model, mirrored, mirrored.close)

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            if name == DDP_OURS:
                importlib.import_module("allreduce.torch_backend")  # registers it, pip or not
            self._groups[name] = dist.new_group(backend="gloo" if name == DDP_GLOO else "allreduce")
        return self._groups[name]

    def close(self) -> None:
        dist.destroy_process_group()
