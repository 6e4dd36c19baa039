"""Roles by rank and by TF_CONFIG: the roles of TensorFlow's clusters here, and every invalid configuration."""

import inspect
import json
from typing import Any

import pytest

from trainers.cli import roles
from trainers.cli.roles import Roles, TFConfig
from trainers.errors import ArgumentError, RoleError

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def config(task: Any = None, **cluster: Any) -> str:
    return json.dumps({"cluster": cluster or CLUSTER, "task": task})


def test_a_signature_does_not_show_the_environment() -> None:
    assert inspect.signature(roles.assign).parameters["environment"].default is None


def test_roles_by_rank() -> None:
    assert roles.by_rank(6, 2, True) == Roles(0, (1, 2), (3, 4), 5)
    assert roles.by_rank(1) == Roles(0)
    assert roles.by_rank(2, 0, True) == Roles(0, (), (), 1)
    assert roles.by_rank(4) == Roles(0, (1, 2, 3))
    assert roles.by_rank(6, 2, True, chief=4) == Roles(4, (0, 1), (2, 3), 5)
    assert roles.by_rank(3, 1, True, chief=2) == Roles(2, (), (0,), 1)
    assert roles.by_rank(4, 1, True).as_dict() == {"chief": [0], "worker": [1], "ps": [2], "evaluator": [3]}
    assert str(roles.by_rank(5, 1, True)) == "chief rank 0; worker rank 1, 2; ps rank 3; evaluator rank 4"


@pytest.mark.parametrize(
    ("ranks", "servers", "evaluator", "text"),
    [
        (1, 1, False, r"1 server of 1 rank leave no worker: start at least 2 ranks \(mpirun -n 2\)"),
        (2, 5, False, "5 servers of 2 ranks leave no worker: start at least 6"),
        (1, 0, True, "an evaluator of 1 rank leave no worker: start at least 2"),
        (2, 1, True, "1 server and an evaluator of 2 ranks leave no worker: start at least 3"),
    ],
)
def test_a_worker_must_be_left(ranks: int, servers: int, evaluator: bool, text: str) -> None:
    with pytest.raises(RoleError, match=text):
        roles.by_rank(ranks, servers, evaluator)


def test_a_cluster_as_tensorflow_writes_it() -> None:
    task = {"type": "worker", "index": 1}
    assert roles.read(config(task)) == TFConfig((1, 2, 1, 0), ("worker", 1))
    assert str(roles.read(config(task))) == "1 chief, 2 worker, 1 ps"
    more = json.dumps({"cluster": CLUSTER, "task": {**task, "trial": ""}, "environment": "cloud", "rpc_layer": "grpc"})
    assert roles.read(more) == roles.read(config(task))
    assert roles.read(config({"type": "ps", "index": "0"})) == TFConfig((1, 2, 1, 0), ("ps", 0))
    assert roles.read(config({"type": "chief"})) == TFConfig((1, 2, 1, 0), ("chief", 0))
    assert roles.read(config()) == TFConfig((1, 2, 1, 0), None)
    listed = config({"type": "evaluator", "index": 0}, worker=["a"], evaluator=["b"])
    assert roles.read(listed) == TFConfig((0, 1, 0, 1), ("evaluator", 0))
    assert roles.read(config({"type": "evaluator", "index": 0})) == TFConfig((1, 2, 1, 1), ("evaluator", 0))
    for unset in (None, "", "  ", "{}"):
        assert roles.read(unset) is None


HOSTILE = {
    "no JSON": ("{'cluster': 1}", "TF_CONFIG is not valid JSON"),
    "cut short": (config()[:-1], "TF_CONFIG is not valid JSON"),
    "deep": ("[" * 100_000, "TF_CONFIG is not valid JSON"),
    "long number": ('{"cluster": ' + "9" * 10_000 + "}", "TF_CONFIG"),
    "large": (" " * 100 + "x" * (1 << 20), "TF_CONFIG has 1048676 characters"),
    "list": ("[1]", "must be an object with a cluster and a task"),
    "control characters": ('"\\u001b[31m\\ud800"', r"it is '\\x1b\[31m\\ud800'"),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', "has no cluster such as"),
    "empty cluster": (config(**{"": []}).replace('"": []', ""), "has no cluster such as"),
    "cluster": ('{"cluster": ["a"]}', "has no cluster such as"),
    "type": (config(master=["a"]), "task type 'master' is unknown; the types are chief, worker, ps, evaluator"),
    "long type": (config(**{"x" * 5000: ["a"]}), r"task type 'x{20,60}\.\.\. is unknown"),
    "address": (config(worker="a:1"), "worker must be a list of addresses .* it is 'a:1'"),
    "addresses": (config(worker=[1, None]), r"worker must be a list of addresses .* it is \[1, None\]"),
    "nested addresses": (config(worker=[[[["a"]]]]), r"worker must be a list of addresses .* it is \[\[\[\.\.\.\]\]\]"),
    "chiefs": (config(chief=["a", "b"]), "the cluster has 2 tasks chief"),
    "evaluators": (config(worker=["a"], evaluator=["b", "c"]), "the cluster has 2 tasks evaluator"),
    "only servers": (config(ps=["a"]), "neither a chief nor a worker"),
    "many": (config(worker=["a"] * 70_000), "the cluster has 70000 tasks"),
    "task": (config([1]), "the task must look like"),
    "task without type": (config({"index": 0}), "the task must look like"),
    "task of a list": (config({"type": ["worker"], "index": 0}), "the task must look like"),
    "index": (config({"type": "worker", "index": 2}), "the index of task worker is 2; the cluster has worker 0 to 1"),
    "no index": (config({"type": "worker"}), "the index of task worker is None"),
    "negative": (config({"type": "worker", "index": -1}), "the index of task worker is -1"),
    "truth": (config({"type": "worker", "index": True}), "the index of task worker is True"),
    "fraction": (config({"type": "worker", "index": 0.5}), "the index of task worker is 0.5"),
    "infinity": ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": Infinity}}', "is inf"),
    "huge": (config({"type": "worker", "index": 1 << 80}), "the index of task worker is 1208925819614629174706176"),
    "digits": (config({"type": "worker", "index": "\u0661"}), r"the index of task worker is '\\u0661'"),
    "nobody": (config({"type": "ps", "index": 0}, worker=["a"]), "the index of task ps is 0; the cluster has no ps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_text_is_named_and_quoted_in_part(name: str) -> None:
    text, expected = HOSTILE[name]
    with pytest.raises(RoleError, match=expected) as raised:
        roles.read(text)
    assert len(str(raised.value)) < 400
    assert str(raised.value).isprintable()
    assert str(raised.value).isascii()


def by_task(cluster: dict[str, int], *tasks: Any) -> Roles:
    counts = tuple(cluster.get(kind, 0) for kind in roles.TYPES)
    return roles.by_task(TFConfig(counts, None), tasks)


def test_ranks_have_the_roles_of_their_tasks() -> None:
    tasks = [("ps", 0), ("evaluator", 0), ("worker", 1), ("chief", 0), ("worker", 0), ("ps", 1)]
    assigned = by_task({"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}, *tasks)
    assert assigned == Roles(3, (4, 2), (0, 5), 1)
    assert assigned.training == (3, 4, 2, 0, 5)
    assert assigned.as_dict() == {"chief": [3], "worker": [4, 2], "ps": [0, 5], "evaluator": [1]}


def test_worker_0_is_the_chief_of_a_cluster_without_one() -> None:
    assert by_task({"worker": 3}, ("worker", 2), ("worker", 0), ("worker", 1)) == Roles(1, (2, 0))


def test_ranks_without_tasks_take_them_in_order() -> None:
    assert by_task({"chief": 1, "worker": 1, "ps": 1, "evaluator": 1}, *[None] * 4) == Roles(0, (1,), (2,), 3)


@pytest.mark.parametrize(
    ("cluster", "tasks", "text"),
    [
        ({"worker": 2}, [None] * 3, r"describes 2 tasks \(2 worker\), and this job has 3 ranks; .* start mpirun -n 2"),
        ({"worker": 1}, [("worker", 0)] * 2, "describes 1 task .1 worker., and this job has 2 ranks"),
        (
            {"worker": 2},
            [("worker", 0)] * 2,
            "ranks 0 and 1 are both worker 0; give every rank a task of",
        ),
        ({"worker": 2}, [("worker", 0), None], "TF_CONFIG of rank 1 names no task, unlike that of others"),
    ],
)
def test_every_rank_has_a_task_of_its_own(cluster: dict[str, int], tasks: list[Any], text: str) -> None:
    with pytest.raises(RoleError, match=text):
        by_task(cluster, *tasks)


def test_a_role_error_is_an_argument_error() -> None:
    assert issubclass(RoleError, ArgumentError)
