"""The roles of the ranks in a job: chief, workers, parameter servers, and an evaluator.

Without TF_CONFIG roles go by rank. Rank 0 is the chief, unless another rank is named. Of the other ranks the last one
is the evaluator, if there is one; the ranks before it are servers, and the rest are workers. With 6 ranks, 2 servers
and an evaluator:

    rank    0      1       2       3     4     5
    role    chief  worker  worker  ps    ps    evaluator

With TF_CONFIG a rank has the role of its task. When no rank names a task, the chief, the workers, the ps and the
evaluator of the cluster are ranks 0, 1, ... in this order. In a cluster without a chief worker 0 is the chief, as in
TensorFlow. The chief trains like a worker; it also prints, and writes models and checkpoints.

The ranks that train get new numbers: the chief is 0, then come the workers, then the servers.
"""

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.control import all_values, together
from allreduce.transport.wait import waiting
from trainers.arguments import integer, is_integer
from trainers.errors import RoleError

NAME = "TF_CONFIG"
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
TYPES = (CHIEF, WORKER, SERVER, EVALUATOR)  # in the order in which ranks get tasks if no rank names its own
MOST_CHARACTERS = 1 << 20
MOST_TASKS = 1 << 16
SHOWN = 60  # characters of a value in a message
_SHORT = reprlib.Repr()  # of a JSON value, which may be nested as deep as Python's stack
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 2, 8, 8, SHOWN

Task = tuple[str, int]  # its type, and its index among the tasks of that type


class TFConfig(NamedTuple):
    """The content of TF_CONFIG. tasks: the number of tasks of each type, in the order of TYPES. task: this process's
    task, or None."""

    tasks: tuple[int, ...]
    task: Task | None

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in zip(TYPES, self.tasks, strict=True) if count)


def read(text: str | None) -> TFConfig | None:
    """Parse the text of TF_CONFIG; returns None if it is not set or empty ("{}" is empty too). Raises RoleError."""
    if text is None or not text.strip():
        return None
    if len(text) > MOST_CHARACTERS:
        raise RoleError(f"{NAME} has {len(text)} characters; no cluster needs more than {MOST_CHARACTERS}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoleError(f"{NAME} is not valid JSON ({shown(str(error))}): {shown(text)}") from None
    if not isinstance(config, dict):
        raise RoleError(f"{NAME} must be an object with a cluster and a task; it is {shown(config)}")
    if not config:
        return None
    tasks = _tasks(config.get("cluster"))
    task = None if config.get("task") in (None, {}) else _task(config["task"], tasks)
    if task is not None and task[0] == EVALUATOR and not tasks[EVALUATOR]:
        tasks[EVALUATOR] = 1  # as in TensorFlow, the cluster need not list the evaluator
    return TFConfig(tuple(tasks.values()), task)


def _tasks(cluster: Any) -> dict[str, int]:
    """Return the number of tasks of each type in a cluster."""
    if not isinstance(cluster, dict) or not cluster:
        raise RoleError(
            f'{NAME} has no cluster such as {{"worker": ["host1:port", "host2:port"]}}; its cluster is {shown(cluster)}'
        )
    for kind, addresses in cluster.items():
        if kind not in TYPES:
            raise RoleError(f"{NAME}: task type {shown(kind)} is unknown; the types are {', '.join(TYPES)}")
        if not isinstance(addresses, list) or not all(isinstance(each, str) for each in addresses):
            raise RoleError(f"{NAME}: {kind} must be a list of addresses (host:port); it is {shown(addresses)}")
    tasks = {kind: len(cluster.get(kind, [])) for kind in TYPES}
    for kind in (CHIEF, EVALUATOR):
        if tasks[kind] > 1:
            raise RoleError(f"{NAME}: the cluster has {tasks[kind]} tasks {kind}, and there can be only one")
    if not tasks[CHIEF] + tasks[WORKER]:
        raise RoleError(f"{NAME}: the cluster has neither a chief nor a worker, so no rank trains")
    if sum(tasks.values()) > MOST_TASKS:
        raise RoleError(f"{NAME}: the cluster has {sum(tasks.values())} tasks; {MOST_TASKS} are the most")
    return tasks


def _task(task: Any, tasks: dict[str, int]) -> Task:
    if not isinstance(task, dict) or task.get("type") not in TYPES:
        raise RoleError(
            f'{NAME}: the task must look like {{"type": "worker", "index": 0}}, with a type of {", ".join(TYPES)}; it '
            f"is {shown(task)}"
        )
    kind, index = task["type"], task.get("index", 0 if task["type"] in (CHIEF, EVALUATOR) else None)
    if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 10:
        index = int(index)  # TensorFlow accepts a text
    most = max(tasks[kind], kind == EVALUATOR)
    if not is_integer(index, 0, most - 1):
        there = f"{kind} 0 to {most - 1}" if most else f"no {kind}"
        raise RoleError(f"{NAME}: the index of task {kind} is {shown(index)}; the cluster has {there}")
    return kind, index


def shown(value: Any) -> str:
    """Return a value as short ASCII text, for error messages."""
    text = ascii(value[: SHOWN + 1]) if isinstance(value, str) else ascii(_SHORT.repr(value))[1:-1]
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


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


def assign(
    topology: Topology,
    servers: int | None = 0,
    evaluator: bool | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    chief: int | None = None,
) -> Roles:
    """Return the roles of the ranks of `topology`, the same on all of them. Collective.

    servers: the number of parameter servers; None: as many as in TF_CONFIG, or one if that is not set.
    evaluator: whether a rank evaluates; None: if TF_CONFIG has an evaluator.
    environment: the environment variables, for TF_CONFIG; None: os.environ.
    chief: the rank of the chief; None: that of TF_CONFIG, else 0.

    Raises RoleError on all ranks if TF_CONFIG is damaged, does not describe these ranks or contradicts the arguments,
    or if no rank is left as a worker; DisagreementError if ranks have different clusters.
    """
    config = together(topology.world, lambda: read((os.environ if environment is None else environment).get(NAME)))
    error = None
    if text := integer(0).or_none().error("servers", servers):
        servers, error = 0, RoleError(text)
    trained = (0, 0, 0) if config is None else config.tasks[:3]
    if chief is not None and not is_integer(chief, 0, topology.size - 1):
        chief, error = 0, RoleError(f"chief must be a rank of this job, 0 to {topology.size - 1}, got {chief!r}")
    asked = [-1 if each is None else int(each) for each in (servers, evaluator, chief)]
    text = f"roles: {servers} servers, evaluator {evaluator}, chief {chief}, {NAME}: {config or 'not set'}"
    topology.agree([config is not None, *trained, *asked], text, error)
    own = None if config is None else [config.task, config.tasks[-1]]
    everyone = all_values(topology.world, own, "exchange the roles")

    def decide() -> Roles:
        if config is None:
            return by_rank(topology.size, 1 if servers is None else servers, bool(evaluator), chief or 0)
        named = [None if task is None else (str(task[0]), int(task[1])) for task, _ in everyone]
        evaluators = max(int(count) for _, count in everyone)  # a cluster need not list its evaluator
        roles = by_task(TFConfig((*config.tasks[:3], evaluators), None), named)
        _check_clash(roles, servers, evaluator, chief)
        return roles

    return together(topology.world, decide)


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
    """Return the roles of `ranks` ranks without TF_CONFIG. Raises RoleError if no rank is left as a worker."""
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


def by_task(config: TFConfig, named: Sequence[Task | None]) -> Roles:
    """Return the roles of ranks by the tasks of a cluster. named: each rank's task, all None to assign them in order.
    Raises RoleError if tasks and ranks do not match one to one."""
    tasks = [(kind, index) for kind, count in zip(TYPES, config.tasks, strict=True) for index in range(count)]
    silent = [rank for rank, task in enumerate(named) if task is None]
    if len(tasks) != len(named):
        raise RoleError(
            f"{NAME} describes {len(tasks)} task{'s' * (len(tasks) != 1)} ({config}), and this job has {len(named)} "
            f"rank{'s' * (len(named) != 1)}; every task is a rank: start mpirun -n {len(tasks)}, or change the cluster"
        )
    if silent and len(silent) < len(named):
        raise RoleError(f"{NAME} of rank {silent[0]} names no task, unlike that of others; name one on all or on none")
    holders: dict[Task, int] = {}
    for rank, task in enumerate(tasks if silent else named):
        assert task is not None
        if task in holders:
            raise RoleError(
                f"{NAME}: ranks {holders[task]} and {rank} are both {task[0]} {task[1]}; give every rank "
                "a task of its own (mpirun -n 1 -x TF_CONFIG=... : -n 1 ...), or leave out the task on all of them"
            )
        holders[task] = rank
    ranks = {kind: [holders[task] for task in tasks if task[0] == kind] for kind in TYPES}
    chief, *workers = ranks[CHIEF] + ranks[WORKER]
    return Roles(chief, tuple(workers), tuple(ranks[SERVER]), next(iter(ranks[EVALUATOR]), None))


def _check_clash(roles: Roles, servers: int | None, evaluator: bool | None, chief: int | None) -> None:
    """Raise RoleError when TF_CONFIG contradicts the arguments."""
    there = len(roles.servers)
    if chief not in (None, roles.chief):
        raise RoleError(
            f"chief {chief} is asked for, and {NAME} makes rank {roles.chief} the chief; leave out one of the two"
        )
    if servers is None and not there:
        raise RoleError(f"{NAME} has no ps, and this training needs a server: add one to the cluster")
    if servers == 0 and there:
        raise RoleError(
            f"{NAME} has {there} ps, and this training uses no servers: add --strategy parameter_server, or remove the "
            "ps from the cluster"
        )
    if servers not in (None, there):
        raise RoleError(f"{servers} servers are asked for, and {NAME} has {there} ps; leave out one of the two")
    if evaluator is not None and evaluator != (roles.evaluator is not None):
        has = "has one" if roles.evaluator is not None else "has none"
        raise RoleError(
            f"{'an' if evaluator else 'no'} evaluator is asked for, and {NAME} {has}; leave out one of the two"
        )
