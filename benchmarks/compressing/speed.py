"""Calls: the time, bytes and error of all-reducing the gradients of dense layers by each compression, or exactly."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce import Part
from allreduce.arrays import compression as options
from allreduce.arrays.compression import Given, PowerSGD
from allreduce.backend import AllReduce
from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks
from benchmarks.lib import hosts, timing
from benchmarks.lib.columns import columns
from benchmarks.lib.outputs import Screen

NONE, EXACT = "none", "exact"
METHODS = (NONE, "bfloat16", "float16", "int8", "powersgd:4", EXACT)
WIDTH = 2048  # of a dense layer: its gradients are a matrix of at most WIDTH rows
BATCH = 32  # rows from which a rank has its gradients
CALLS = 10  # calls with the same gradients, whose mean result is compared


@dataclass(frozen=True)
class Cost:
    """The cost of a method. median_ms, min_ms: of the slowest rank. speedup: over `none`. bytes_per_rank: that a host
    sends to others in a call, by its ranks; None on one host. error: of a call's result, relative, in the 2-norm.
    error_of_mean: of the mean result of CALLS calls with the same gradients, which error feedback makes small."""

    method: str
    median_ms: float
    min_ms: float
    speedup: float | None
    bytes_per_rank: float | None
    error: float
    error_of_mean: float


def compression(name: str, start: int = 0) -> Given:
    """Return the compression of a method. start: the calls of PowerSGD in full precision."""
    parsed = None if name in (NONE, EXACT) else options.parse(name)
    return replace(parsed, start_powerSGD_iter=start) if isinstance(parsed, PowerSGD) else parsed


def layers(length: int) -> list[Part]:
    """Return parts for `length` elements: the matrices of dense layers, the last one of fewer rows, and a vector."""
    found: list[Part] = []
    start = 0
    while (rows := min((length - start) // WIDTH, WIDTH)) > 0:
        found.append(Part(f"{len(found)}.weight", start, (rows, WIDTH)))
        start = found[-1].stop
    return [*found, *([Part("bias", start, (length - start,))] if start < length else [])]


def gradients(parts: list[Part], length: int, rank: int) -> np.ndarray:
    """Return gradients of a batch as a layer has them, (length,) float32: the mean of outer products of errors and
    activations after a ReLU. Other ranks have others."""
    rng = np.random.default_rng(rank)
    flat = np.empty(length, np.float32)
    for part in parts:
        errors = rng.standard_normal((BATCH, part.shape[0]), np.float32) / BATCH
        here = flat[part.start : part.stop]
        if len(part.shape) == 2:
            activations = np.maximum(rng.standard_normal((BATCH, part.shape[1]), np.float32), 0)
            np.matmul(errors.T, activations, out=here.reshape(part.shape))
        else:
            here[:] = errors.sum(0)
    return flat


class Contestant:
    """A method: its backend, and an array that it reduces."""

    def __init__(self, name: str, topology: Topology, backend: str, parts: list[Part], values: np.ndarray) -> None:
        self.name, self._values = name, values
        self.backend: AllReduce = allreduce.create(backend, topology, compress=compression(name), exact=name == EXACT)
        self.array = self.backend.allocate(values.size, "float32")
        self.backend.describe(self.array, parts)

    def fill(self) -> None:
        """Write this rank's gradients into the array."""
        self.array[:] = self._values

    def call(self) -> None:
        """Average the array. Collective."""
        self.backend(self.array, "mean")

    def errors(self, mean: np.ndarray) -> tuple[float, float]:
        """Return the errors of `Cost`. mean: float64. Collective."""
        self.backend.reset()
        total = np.zeros(mean.size)
        found = []
        for _ in range(CALLS):
            self.fill()
            self.call()
            total += self.array
            found.append(_distance(self.array, mean))
        return found[0], _distance(total / CALLS, mean)


def _distance(found: np.ndarray, mean: np.ndarray) -> float:
    return float(np.linalg.norm(found - mean) / np.linalg.norm(mean))


def run(topology: Topology, args: argparse.Namespace, screen: Screen, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure the methods, print the table, and write the record. Collective."""
    for name in args.methods:
        check(topology, name)
    length = args.size // 4
    parts = layers(length)
    screen.say(f"# {topology}, gradients of {length} float32, {args.backend}, {args.iters} calls in turns")
    costs = measure(topology, args, parts, gradients(parts, length, topology.rank), screen)
    screen.say(*table(costs))
    write({"bytes": 4 * length, "costs": [asdict(cost) for cost in costs]})


def check(topology: Topology, name: str) -> None:
    """Raise OptionError on all ranks if there is no such method."""
    if name not in (NONE, EXACT):
        try:
            options.parse(name)
        except OptionError as error:
            raise on_all_ranks(error, topology.world) from None


def measure(
    topology: Topology, args: argparse.Namespace, parts: list[Part], values: np.ndarray, screen: Screen
) -> list[Cost]:
    """Return the cost of each method. Collective."""
    mean = values.astype(np.float64)
    topology.world.Allreduce(MPI.IN_PLACE, mean)
    mean /= topology.size
    everyone = [Contestant(name, topology, args.backend, parts, values) for name in args.methods]
    fill = {each.name: each.fill for each in everyone}
    calls = {each.name: each.call for each in everyone}
    times = timing.take_turns(topology.world, calls, args.iters, args.warmup, screen, before=fill)
    costs = []
    for each in everyone:
        before = hosts.sent_bytes(topology)
        errors = each.errors(mean)
        after = hosts.sent_bytes(topology)
        sent = None if before is None or after is None else (after - before) / CALLS / topology.size
        found = times[each.name]
        speedup = median(times[NONE]) / median(found) if NONE in times else None
        costs.append(Cost(each.name, 1e3 * median(found), 1e3 * min(found), speedup, sent, *errors))
        each.backend.close()
    return costs


def table(costs: list[Cost]) -> list[str]:
    """Return a line for each method."""
    rows = []
    for cost in costs:
        speedup = "-" if cost.speedup is None else f"{cost.speedup:.2f}"
        sent = "-" if cost.bytes_per_rank is None else f"{cost.bytes_per_rank / 1e6:.3f}"
        errors = f"{cost.error:.1e}", f"{cost.error_of_mean:.1e}"
        rows.append((cost.method, f"{cost.median_ms:.1f}", f"{cost.min_ms:.1f}", speedup, sent, *errors))
    heads = ["", "median ms", "min", "speed-up", "MB sent a rank", "error", f"of {CALLS} calls"]
    return columns(heads, rows)
