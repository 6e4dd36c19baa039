"""Tests for leaks: creates and drops objects many times; the resources that the process holds must not grow.

    mpirun -n 2 python tests/faults/leaks.py                 all cases, in full: some minutes
    mpirun -n 2 python tests/faults/leaks.py --scale 0.05    a twentieth of the turns

Prints a line for each case: the resources that rank 0 holds halfway through the turns, and the largest growth of any
rank by the end. The exit code is 1 if a growth exceeds the bounds, which the last line shows.
"""

import argparse
import gc
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import allreduce
from allreduce.errors import AllReduceError
from tests.backends import ON_CPU
from trainers import MirroredTrainer, NumpyNetwork, ParameterServerTrainer, SpareReplicasTrainer
from trainers.errors import TrainerError

# isort: split
from mpi4py import MPI

try:
    # isort: split
    import torch

    import tests.without_dynamo  # noqa: F401
    from trainers.pytorch import Buckets, MirroredOptimizer
    from trainers.replicas.pytorch import TorchReplica
except ImportError:
    torch = None

LENGTH = 20_000
SETTLING = 3  # turns before anything is measured


class Held(NamedTuple):
    """The resources that a process holds."""

    memory: int  # KiB of resident memory
    mapped: int  # KiB of memory shared with other processes
    communicators: int  # the largest handle of FRESH new ones: a growing number when others are not freed
    files: int
    threads: int


FRESH = 64  # more than a case holds: MPICH gives the handles that were freed in any order
BOUNDS = Held(memory=6144, mapped=1024, communicators=6, files=2, threads=1)


class Case(NamedTuple):
    """One action to repeat many times. turn: called with the number of the turn. turns: the standard run measures a
    two-hundredth of them, which must show one lost communicator in each."""

    name: str
    turns: int
    turn: Callable[[int], Any]


def main() -> int:
    world = MPI.COMM_WORLD.Dup()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="a part of the turns (default: 1, all)")
    scale = parser.parse_args().scale
    logging.getLogger("allreduce").setLevel(logging.ERROR)  # the notices of thousands of backends
    everything = [*cases(), *(torch_cases() if torch else [])]
    say(world, f"{'':34}{'turns':>7}" + "".join(f"{field:>22}" for field in Held._fields))
    grew = [case.name for case in everything if not _run(world, case, max(16, int(case.turns * scale)))]
    say(world, f"{'allowed':41}" + "".join(f"{'+' + str(bound):>22}" for bound in BOUNDS))
    say(world, f"grew: {', '.join(grew)}" if grew else "nothing grew")
    return 1 if grew else 0


def say(world: MPI.Intracomm, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _run(world: MPI.Intracomm, case: Case, turns: int) -> bool:
    """Run a case, show its line, and return whether nothing grew on any rank. Collective."""
    for number in range(SETTLING + turns // 2):
        if number == SETTLING:
            gc.collect()
            gc.freeze()  # `held` leaves out what is there by now: of its time PyTorch's million objects are the most
        case.turn(number)
    middle = held(world)
    for number in range(SETTLING + turns // 2, SETTLING + turns):
        case.turn(number)
    growth = np.max(world.allgather(np.array(held(world)) - np.array(middle)), axis=0)
    columns = [f"{value} {more:+d}" for value, more in zip(middle, growth.tolist(), strict=True)]
    say(world, f"{case.name:34}{turns:7}" + "".join(f"{column:>22}" for column in columns))
    return bool((growth <= np.array(BOUNDS)).all())


def held(world: MPI.Intracomm) -> Held:
    """Return the resources that this process holds now. Collective."""
    gc.collect()
    fresh = [world.Dup() for _ in range(FRESH)]
    handle = max(comm.py2f() for comm in fresh)
    for comm in fresh:
        comm.Free()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]
    files = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return Held(int(resident), _mapped(), handle, files, threading.active_count())


def _mapped() -> int:
    """KiB of mappings that are shared with other processes."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        if access.endswith("s"):
            begin, end = (int(part, 16) for part in span.split("-"))
            total += end - begin
    return total >> 10


def refused(name: str, *calls: Callable[[], Any]) -> Case:
    """Return a case of calls, each of which must raise a named error in each turn."""

    def turn(number: int) -> None:
        for call in calls:
            with suppress(AllReduceError, TrainerError):
                call()
                raise AssertionError("this call was to be refused")

    return Case(name, 1_600, turn)


def cases() -> list[Case]:
    """Return the cases that need no PyTorch."""
    rank = MPI.COMM_WORLD.rank
    topology = allreduce.Topology()
    apart = allreduce.Topology(ranks_per_node=1)
    names = [name for name in allreduce.available(topology) if name in ON_CPU]
    living: list[np.ndarray] = []

    def backend(number: int) -> None:
        """The loop of docs/programs/first_arrays.py: the array is still alive when the backend is closed."""
        reduce = allreduce.create(names[number % len(names)], topology if number % 2 else None)
        grads = reduce.allocate(LENGTH)
        reduce(grads)
        reduce.close()
        living[:] = [*living[-2:], grads]

    def trainer(number: int) -> None:
        with MirroredTrainer(network(), "auto", topology if number % 2 else None) as made:
            living[:] = [made.buffer]

    def served(number: int) -> None:
        """Chunked transfers, requests, queues of the worker and its thread."""
        x = np.ones((8, 4), np.float32)
        kinds = [ParameterServerTrainer, partial(ParameterServerTrainer, updates="sync"), SpareReplicasTrainer]
        with kinds[number % 3](network(), topology if number % 2 else None) as made:
            made.fit(x, np.arange(8) % 3, 1, 4, progress=False)

    def network(outputs: int = 3) -> NumpyNetwork:
        return NumpyNetwork([4, outputs])

    return [
        Case("topologies", 10_000, lambda number: allreduce.Topology().close()),
        Case("topologies, simulated nodes", 1_600, lambda number: allreduce.Topology(ranks_per_node=1).close()),
        Case("backends, arrays alive", 4_000, backend),
        Case("trainers, buffers alive", 1_600, trainer),
        Case("servers and spare replicas", 1_600, served),
        refused(
            "refused",
            lambda: allreduce.Topology(ranks_per_node=-1),
            lambda: allreduce.create("rign"),
            lambda: allreduce.create("ring", root=1),
            lambda: allreduce.create(names[min(rank, 1)]),
            lambda: allreduce.create("reduce_to_one", root=-7),
            lambda: allreduce.create("shared", apart),
            lambda: ParameterServerTrainer(network(), servers=9),
            lambda: MirroredTrainer(network(), "rign"),
            lambda: MirroredTrainer(network(3 + rank), "ring", topology),
        ),
    ]


def torch_cases() -> list[Case]:
    rank = MPI.COMM_WORLD.rank
    topology = allreduce.Topology()

    def parts(outputs: int = 4) -> tuple[Any, Any]:
        model = torch.nn.Linear(50, outputs)
        return torch.optim.Adam(model.parameters(), lr=0.01), model

    def optimizers(number: int) -> None:
        """Closed ones, and ones that are forgotten."""
        for close in (True, False):
            for options in ({"buckets": Buckets(True)}, {"buckets": Buckets(False)}, {"update": "sharded"}):
                wrapped, model = parts()
                made = MirroredOptimizer(wrapped, model, topology=topology if number % 2 else None, **options)
                model(torch.ones(2, 50)).sum().backward()
                made.step()
                if close:
                    made.close()

    return [
        Case("optimizers", 1_600, optimizers),
        refused(
            "refused, PyTorch",
            lambda: MirroredOptimizer(*parts(), "rign"),
            lambda: MirroredOptimizer(*parts(4 + rank), "ring", buckets=Buckets(False)),
            lambda: TorchReplica(torch.nn.Linear(50, 4), torch.nn.functional.mse_loss, parts()[0]),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
