"""What is measured of the variants of a training step: time, peak of memory, and how equal the results are."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.control import combine, on_all
from benchmarks.steps.memory import peak_memory, trim
from benchmarks.steps.models import Workload
from benchmarks.steps.variants import DDP_GLOO, PLAIN, Variants
from trainers.pytorch import MirroredOptimizer


class Bench:
    """Measures the variants that the options name. All methods are collective.

    options: of benchmarks.training_step: variants, steps, warmup, report, allreduce.
    """

    def __init__(self, topology: Topology, options: argparse.Namespace) -> None:
        self.options, self._comm = options, topology.world
        self._variants = Variants(topology, options.allreduce)
        self.close = self._variants.close

    def _batches(self, workload: Workload, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless batches, other ones on each rank, the same for each variant."""
        generator = torch.Generator().manual_seed(1 + self._comm.rank)
        prepared = [workload.batch(size, generator) for _ in range(8)]
        while True:
            yield from prepared

    # Time

    def times(self, workload: Workload, size: int) -> dict[str, list[float]]:
        """For each variant the seconds of each step, the slowest rank's."""
        variants = {name: self._variants.make(name, workload) for name in self.options.variants}
        batches = self._batches(workload, size)
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(self.options.warmup + self.options.steps):
            x, y = next(batches)
            for name, variant in variants.items():
                self._comm.Barrier()
                begin = time.perf_counter()
                variant.step(x, y)
                mine = time.perf_counter() - begin
                if turn >= self.options.warmup:
                    taken[name].append(mine)
        for name, variant in variants.items():
            if self.options.report and isinstance(variant.optimizer, MirroredOptimizer) and self._comm.rank == 0:
                print(f"{name}: {variant.optimizer.report()}", file=sys.stderr)
            variant.close()
        slowest = np.array([taken[name] for name in variants])
        self._comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return dict(zip(variants, slowest.tolist(), strict=True))

    # The same result

    def differences(self, workload: Workload, size: int, steps: int) -> dict[str, dict[str, Any]]:
        """How far each variant's parameters are from DDP + gloo's after some steps on the same batches."""
        results = {}
        for name in self.options.variants:
            variant = self._variants.make(name, workload)
            batches = self._batches(workload, size)
            for _ in range(steps):
                variant.step(*next(batches))
            flat = torch.cat([each.detach().reshape(-1) for each in variant.module.parameters()])
            results[name] = flat.clone()
            variant.close()
        reference = results.get(DDP_GLOO)
        found = {}
        for name, flat in results.items():
            if reference is not None and name not in (PLAIN, DDP_GLOO):
                largest = self._largest(float((flat - reference).abs().max()))
                found[name] = {
                    "bits_equal": on_all(self._comm, torch.equal(flat, reference), "compare bits"),
                    "largest": largest,
                }
        return found

    # Memory

    def memory(self, workload: Workload, size: int) -> dict[str, float]:
        """The peak of each variant alone: bytes of a rank, shared pages divided among those that share them."""
        peaks = {}
        names = self.options.variants
        for name in [names[0], *names]:  # the first also loads libraries, so it counts the second time
            trim()
            self._comm.Barrier()
            with peak_memory() as peak:
                variant = self._variants.make(name, workload)
                batches = self._batches(workload, size)
                for _ in range(8):
                    variant.step(*next(batches))
                self._comm.Barrier()
            variant.close()
            del variant
            peaks[name] = self._largest(peak[0])
        return peaks

    def _largest(self, value: float) -> float:
        """Of all ranks' values. Collective."""
        return float(combine(self._comm, np.array([value], np.float64), "find the largest", MPI.MAX)[0])
