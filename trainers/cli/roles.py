"""The roles of the ranks in a job: chief, workers, parameter servers, and an evaluator.

Rank 0 is the chief, unless another rank is named. Of the other ranks the last one is the evaluator, if there is one;
the ranks before it are servers, and the rest are workers. With 6 ranks, 2 servers and an evaluator:

    rank    0      1       2       3     4     5
    role    chief  worker  worker  ps    ps    evaluator

The chief trains like a worker; it also prints, and writes models and checkpoints.

The ranks that train get new numbers: the chief is 0, then come the workers, then the servers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.control import together
from allreduce.transport.wait import waiting
from trainers.arguments import FLAG, integer, is_integer
from trainers.errors import RoleError

CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"


class Roles(NamedTuple):
    """The ranks of each role, in order. Every rank has exactly one role."""

    chief: int
    workers: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    evaluator: int | None = None

    @property
    def training(self) -> tuple[int, ...]:
        """The ranks that train: all but the evaluator, in the order of their ranks in training."""
        return (self.chief, *self.workers, *self.servers)

    def as_dict(self) -> dict[str, list[int]]:
        """The ranks of each role by its name, for JSON."""
        evaluators = [] if self.evaluator is None else [self.evaluator]
        return {CHIEF: [self.chief], WORKER: [*self.workers], SERVER: [*self.servers], EVALUATOR: evaluators}

    def __str__(self) -> str:
        return "; ".join(f"{role} rank {', '.join(map(str, ranks))}" for role, ranks in self.as_dict().items() if ranks)


def assign(topology: Topology, servers: int = 0, evaluator: bool = False, *, chief: int = 0) -> Roles:
    """Return the roles of the ranks of `topology`, the same on all of them. Collective.

    servers: the number of parameter servers. evaluator: whether a rank evaluates. chief: the rank of the chief.

    Raises RoleError on all ranks if no rank is left as a worker, DisagreementError if the ranks pass other arguments.
    """
    roles = together(topology.world, lambda: by_rank(topology.size, servers, evaluator, chief))
    text = f"roles: {servers} servers, evaluator {evaluator}, chief {chief}"
    topology.agree([servers, bool(evaluator), chief], text)
    return roles


def training(topology: Topology, roles: Roles, ranks_per_node: int | Sequence[int] | None = None) -> Topology:
    """Create the topology of the ranks that train, with the chief as rank 0; on the evaluator, a topology of itself
    alone. Collective."""
    if roles.training == tuple(range(topology.size)):
        return Topology(topology.world, ranks_per_node, topology.timeout)
    evaluates = topology.rank == roles.evaluator
    with waiting(topology.world, "divide the ranks by their roles"):
        part = topology.world.Split(int(evaluates), 0 if evaluates else roles.training.index(topology.rank))
    assert isinstance(part, MPI.Intracomm)
    try:
        return Topology(part, None if evaluates else ranks_per_node, topology.timeout)
    finally:
        part.Free()


def by_rank(ranks: int, servers: int = 0, evaluator: bool = False, chief: int = 0) -> Roles:
    """Return the roles of `ranks` ranks. Raises RoleError if an argument is invalid or no rank is left as a worker."""
    if text := integer(0).error("servers", servers):
        raise RoleError(text)
    if text := FLAG.error("evaluator", evaluator):
        raise RoleError(text)
    if not is_integer(chief, 0, ranks - 1):
        raise RoleError(f"chief must be a rank of this job, 0 to {ranks - 1}, got {chief!r}")
    trained = ranks - evaluator
    workers = trained - servers
    if workers < 1:
        wanted = [f"{servers} server{'s' * (servers != 1)}"] * (servers > 0) + ["an evaluator"] * evaluator
        raise RoleError(
            f"{' and '.join(wanted)} of {ranks} rank{'s' * (ranks != 1)} leave no worker: start at least "
            f"{servers + evaluator + 1} ranks (mpirun -n {servers + evaluator + 1})"
        )
    order = (chief, *(rank for rank in range(ranks) if rank != chief))
    return Roles(chief, order[1:workers], order[workers:trained], order[-1] if evaluator else None)
