"""Random fits of one kind, as tests.sequences runs them: each is drawn, trained on all ranks, and compared with one
process."""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import allreduce
from allreduce.transport.control import root_value, together
from tests.sequences.calls import FailureError
from trainers import CentralStorageTrainer, MirroredTrainer, ParameterServerTrainer, SpareReplicasTrainer
from trainers.replica import Replica

KINDS = ("mirrored", "sharded", "central", "spare", "servers")


def trainer_of(kind: str, replica: Replica, topology: allreduce.Topology, **servers: int) -> Any:
    """Return a trainer of one of KINDS. servers: arguments of a ParameterServerTrainer."""
    if kind == "servers":
        return ParameterServerTrainer(replica, topology, updates="sync", **servers)
    if kind == "spare":
        return SpareReplicasTrainer(replica, topology, spare=0)
    if kind == "central":
        return CentralStorageTrainer(replica, topology)
    if kind == "sharded":
        return MirroredTrainer(replica, "shared", topology, update="sharded")
    return MirroredTrainer(replica, "ring", topology)


class Fits(NamedTuple):
    """A kind of random fits. draw(random numbers, ranks): returns a case. check(case, topology, folder): trains and
    compares; returns the outcome in a few words. Raises AssertionError; collective."""

    name: str
    draw: Callable[[random.Random, int], Any]
    check: Callable[[Any, allreduce.Topology, str], str]


class Cases:
    """A sequence of random fits. calls: the cases of each outcome."""

    def __init__(self, fits: Fits, topology: allreduce.Topology, seed: int, verbose: bool = False) -> None:
        self._fits, self._topology, self._seed, self._verbose = fits, topology, seed, verbose
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []

    def __str__(self) -> str:
        return f"{self._fits.name}, seed {self._seed}, {self._topology.size} ranks"

    def run(self, cases: int) -> None:
        """Run cases. Collective. Raises FailureError on all ranks."""
        draw, topology = random.Random(self._seed), self._topology
        for number in range(cases):
            case = self._fits.draw(draw, topology.size)
            self.log = [f"case {number}: {case}"]
            if self._verbose and topology.rank == 0:
                print(*self.log, flush=True)
            with tempfile.TemporaryDirectory() as own:
                folder = root_value(topology.world, own, "the folder of a case")
                try:
                    outcome = together(topology.world, partial(self._fits.check, case, topology, folder))
                except Exception as error:
                    raise FailureError(str(error)) from error
            self.calls[outcome] += 1
