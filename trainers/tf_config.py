"""TF_CONFIG: TensorFlow's description of a cluster, read from the environment. Pure: no MPI here.

    {"cluster": {"chief": ["host0:port"], "worker": ["host1:port", "host2:port"], "ps": ["host3:port"]},
     "task": {"type": "worker", "index": 1}}

The text may be anything: what is wrong with it is a RoleError that quotes a bounded part of it.
"""

import json
from typing import Any, NamedTuple

from trainers.errors import RoleError

NAME = "TF_CONFIG"
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
TYPES = (CHIEF, WORKER, SERVER, EVALUATOR)  # in the order in which tasks are given to ranks where no rank names its own
MOST_CHARACTERS = 1 << 20
MOST_TASKS = 1 << 16
SHOWN = 60  # characters of what was given

Task = tuple[str, int]  # its type, and its index among those


class TFConfig(NamedTuple):
    """tasks: how many there are of each type, in the order of TYPES. task: this process's; None where none is named."""

    tasks: tuple[int, ...]
    task: Task | None

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in zip(TYPES, self.tasks, strict=True) if count)


def read(text: str | None) -> TFConfig | None:
    """What TF_CONFIG says; None where it is not set, or empty as TensorFlow has it ("{}"). Raises RoleError."""
    if text is None or not text.strip():
        return None
    if len(text) > MOST_CHARACTERS:
        raise RoleError(f"{NAME} has {len(text)} characters; no cluster needs more than {MOST_CHARACTERS}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoleError(f"{NAME} is no JSON text ({shown(str(error))}): {shown(text)}") from None
    if not isinstance(config, dict):
        raise RoleError(f"{NAME} must be an object with a cluster and a task; it is {shown(config)}")
    if not config:
        return None
    tasks = _tasks(config.get("cluster"))
    task = None if config.get("task") in (None, {}) else _task(config["task"], tasks)
    if task is not None and task[0] == EVALUATOR and not tasks[EVALUATOR]:
        tasks[EVALUATOR] = 1  # TensorFlow: it is no part of the training cluster, which need not list it
    return TFConfig(tuple(tasks.values()), task)


def _tasks(cluster: Any) -> dict[str, int]:
    """How many tasks of each type a cluster has."""
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
        raise RoleError(f"{NAME}: the cluster has neither a chief nor a worker, so nobody trains")
    if sum(tasks.values()) > MOST_TASKS:
        raise RoleError(f"{NAME}: the cluster has {sum(tasks.values())} tasks; {MOST_TASKS} are the most")
    return tasks


def _task(task: Any, tasks: dict[str, int]) -> Task:
    """The type and the index of a process's own task."""
    if not isinstance(task, dict) or task.get("type") not in TYPES:
        raise RoleError(
            f'{NAME}: the task must be such as {{"type": "worker", "index": 0}}, of a type {", ".join(TYPES)}; it is '
            f"{shown(task)}"
        )
    kind, index = task["type"], task.get("index", 0 if task["type"] in (CHIEF, EVALUATOR) else None)
    if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 10:
        index = int(index)  # TensorFlow takes it so
    most = max(tasks[kind], kind == EVALUATOR)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < most:
        there = f"0 to {most - 1}" if most else f"none, for the cluster has no {kind}"
        raise RoleError(f"{NAME}: the index of task {kind} is {shown(index)}; the cluster has {there}")
    return kind, index


def shown(value: Any) -> str:
    """What was given, in ASCII and cut short, so that it can be printed whatever it is."""
    text = value if isinstance(value, str) else repr(value) if _is_small(value) else type(value).__name__
    text = ascii(text[: SHOWN + 1]) if isinstance(value, str) else ascii(text)[1:-1]
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _is_small(value: Any) -> bool:
    """Whether repr() of it is: what was nested in a JSON text may be as deep as Python's stack."""
    if isinstance(value, int | float | None):
        return not isinstance(value, int) or abs(value) < 1 << 64
    if isinstance(value, dict | list):
        held = [*value, *value.values()] if isinstance(value, dict) else value
        return len(value) <= 8 and all(not isinstance(each, dict | list) and _is_small(each) for each in held)
    return isinstance(value, str) and len(value) < SHOWN
