"""Tests for leaks: creates and drops objects many times; the resources that the process holds must not grow.

    mpirun -n 2 python tests/faults/leaks.py                 all cases, in full: some minutes
    mpirun -n 2 python tests/faults/leaks.py --scale 0.05    a twentieth of the turns
    mpirun -n 2 python tests/faults/leaks.py --cases topologies,backends

Prints a line for each case: the resources that rank 0 holds halfway through the turns, and the largest growth of any
rank by the end. The exit code is 1 if a growth exceeds the bounds, which the last line shows.
"""

import argparse
import gc
import logging
import sys
import threading
from collections.abc import Callable, Sequence
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


def main(arguments: Sequence[str] | None = None) -> int:
    world = MPI.COMM_WORLD.Dup()
    options = _parse(arguments)
    logging.getLogger("allreduce").setLevel(logging.ERROR)  # the notices of thousands of backends
    everything = [*cases(), *(torch_cases() if torch else [])]
    chosen = [case for case in everything if not options.cases or case.name.startswith(tuple(options.cases.split(",")))]
    say(world, f"{'':34}{'turns':>7}" + "".join(f"{field:>22}" for field in Held._fields))
    grew = [case.name for case in chosen if not _run(world, case, max(10, int(case.turns * options.scale)))]
    say(world, f"{'allowed':41}" + "".join(f"{'+' + str(bound):>22}" for bound in BOUNDS))
    say(world, f"grew: {', '.join(grew)}" if grew else "nothing grew")
    return 1 if grew else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="a part of the turns (default: 1, all)")
    parser.add_argument("--cases", default="", metavar="NAME,...", help="those whose names begin so (default: all)")
    return parser.parse_args(arguments)


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


def refused(call: Callable[[], Any]) -> None:
    """Make a call that must raise a named error."""
    try:
        call()
    except (AllReduceError, TrainerError):
        return
    raise AssertionError("this call was to be refused")


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
        Case("topologies, simulated nodes", 1_000, lambda number: allreduce.Topology(ranks_per_node=1).close()),
        Case("backends, arrays alive", 4_000, backend),
        Case("trainers, buffers alive", 300, trainer),
        Case("servers and spare replicas", 300, served),
        Case("refused: Topology", 1_600, lambda _: refused(lambda: allreduce.Topology(ranks_per_node=-1))),
        Case("refused: create, name", 1_600, lambda _: refused(lambda: allreduce.create("rign"))),
        Case("refused: create, option", 1_600, lambda _: refused(lambda: allreduce.create("ring", root=1))),
        Case("refused: create, names differ", 1_600, lambda _: refused(lambda: allreduce.create(names[min(rank, 1)]))),
        Case("refused: create, root", 1_600, lambda _: refused(lambda: allreduce.create("reduce_to_one", root=-7))),
        Case("refused: create, nodes", 1_600, lambda _: refused(lambda: allreduce.create("shared", apart))),
        Case("refused: servers", 1_600, lambda _: refused(lambda: ParameterServerTrainer(network(), servers=9))),
        Case("refused: MirroredTrainer", 1_600, lambda _: refused(lambda: MirroredTrainer(network(), "rign"))),
        Case(
            "refused: MirroredTrainer, models", 1_600,
            lambda _: refused(lambda: MirroredTrainer(network(3 + rank), "ring", topology)),
        ),
    ]  # fmt: skip


def torch_cases() -> list[Case]:
    rank = MPI.COMM_WORLD.rank
    topology = allreduce.Topology()

    def parts(outputs: int = 4) -> tuple[Any, Any]:
        model = torch.nn.Linear(50, outputs)
        return torch.optim.Adam(model.parameters(), lr=0.01), model

    def optimizer(close: bool, **options: Any) -> Callable[[int], None]:
        def turn(number: int) -> None:
            wrapped, model = parts()
            made = MirroredOptimizer(wrapped, model, topology=topology if number % 2 else None, **options)
            model(torch.ones(2, 50)).sum().backward()
            made.step()
            if close:
                made.close()

        return turn

    def replica(number: int) -> None:
        wrapped, _ = parts()
        refused(lambda: TorchReplica(torch.nn.Linear(50, 4), torch.nn.functional.mse_loss, wrapped))

    options = [
        ("overlap", {"buckets": Buckets(True)}),
        ("no overlap", {"buckets": Buckets(False)}),
        ("sharded", {"update": "sharded"}),
    ]
    living = [
        Case(f"optimizers, {name}, {end}", 300, optimizer(end == "closed", **each))
        for name, each in options
        for end in ("closed", "forgotten")
    ]
    return [
        *living,
        Case("refused: MirroredOptimizer, name", 1_600, lambda _: refused(lambda: MirroredOptimizer(*parts(), "rign"))),
        Case(
            "refused: MirroredOptimizer, models", 1_600,
            lambda _: refused(lambda: MirroredOptimizer(*parts(4 + rank), "ring", buckets=Buckets(False))),
        ),
        Case("refused: TorchReplica", 1_600, replica),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
