"""Roles on several ranks: by options and by TF_CONFIG, agreed on, and the topology of the ranks that train."""

import json
from typing import Any

import numpy as np
import pytest

import allreduce
import allreduce.errors
from trainers.cli import roles
from trainers.cli.evaluator import end_signal
from trainers.errors import RoleError

JOBS = "openmpi 1 2 3 5"


def environment(*tasks: Any, task: Any = None) -> dict[str, str]:
    cluster = {kind: [f"host{at}:1" for at in range(count)] for kind, count in tasks if count}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_by_options(flat: allreduce.Topology) -> None:
    assert roles.assign(flat, environment={}) == roles.by_rank(flat.size)
    if flat.size > 2:
        assert roles.assign(flat, None, True, {}) == roles.by_rank(flat.size, 1, True)
    with pytest.raises(RoleError, match=f"{flat.size} servers? of {flat.size} ranks? leave no worker") as raised:
        roles.assign(flat, flat.size, environment={})
    assert raised.value.ranks == tuple(range(flat.size))
    last = flat.size - 1
    assert roles.assign(flat, environment={}, chief=last) == roles.by_rank(flat.size, chief=last)
    with roles.training(flat, roles.by_rank(flat.size, chief=last)) as part:
        assert part.rank == (0 if flat.rank == last else flat.rank + 1)
    with pytest.raises(RoleError, match=f"chief must be a rank of this job, 0 to {last}, got {flat.size}"):
        roles.assign(flat, environment={}, chief=flat.size)
    with pytest.raises(RoleError, match="servers must be an integer >= 0, or None, got -1"):
        roles.assign(flat, -1, environment={})


def test_by_tf_config_in_any_order(flat: allreduce.Topology) -> None:
    """The last rank is the chief; the first is the evaluator, which only its own TF_CONFIG names."""
    if flat.size < 2:
        pytest.skip("needs a rank to evaluate")
    tasks = [("evaluator", 0), *(("worker", index) for index in range(flat.size - 2)), ("chief", 0)]
    kind, index = tasks[flat.rank]
    mine = environment(("chief", 1), ("worker", flat.size - 2), task={"type": kind, "index": index})
    assigned = roles.assign(flat, environment=mine)
    assert assigned == roles.Roles(flat.size - 1, tuple(range(1, flat.size - 1)), (), 0)
    assert flat.rank in assigned.as_dict()[kind]
    with roles.training(flat, assigned) as part:
        if kind == "evaluator":
            assert part.size == 1
        else:
            assert (part.rank, part.size) == (0 if kind == "chief" else flat.rank, flat.size - 1)
    with pytest.raises(RoleError, match="no evaluator is asked for, and TF_CONFIG has one"):
        roles.assign(flat, evaluator=False, environment=mine)


def test_tf_config_and_ranks_that_differ(flat: allreduce.Topology) -> None:
    everyone = tuple(range(flat.size))
    with pytest.raises(
        RoleError, match=f"describes {flat.size + 1} tasks .*, and this job has {flat.size} rank"
    ) as met:
        roles.assign(flat, environment=environment(("worker", flat.size + 1)))
    assert met.value.ranks == everyone
    with pytest.raises(RoleError, match="TF_CONFIG has no ps, and this training needs a server"):
        roles.assign(flat, None, environment=environment(("worker", flat.size)))
    with pytest.raises(RoleError, match="an evaluator is asked for, and TF_CONFIG has none"):
        roles.assign(flat, 0, True, environment(("worker", flat.size)))
    if flat.size == 1:
        return
    served = environment(("worker", flat.size - 1), ("ps", 1))
    with pytest.raises(RoleError, match="chief 1 is asked for, and TF_CONFIG makes rank 0 the chief"):
        roles.assign(flat, None, environment=served, chief=1)
    with pytest.raises(RoleError, match="3 servers are asked for, and TF_CONFIG has 1 ps"):
        roles.assign(flat, 3, environment=served)
    damaged = {"TF_CONFIG": "{"} if flat.rank == 1 else {}
    with pytest.raises(RoleError, match="rank 1: TF_CONFIG is not valid JSON") as met:
        roles.assign(flat, environment=damaged)
    assert met.value.ranks == everyone
    with pytest.raises(allreduce.errors.DisagreementError, match=r"TF_CONFIG: \d worker\n(.*\n)*.*TF_CONFIG: not set"):
        roles.assign(flat, environment={} if flat.rank == flat.size - 1 else environment(("worker", flat.size)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_training_is_heard(fails: bool, flat: allreduce.Topology) -> None:
    """Also by an evaluator that has failed and waits for the end, and if the training fails."""
    if flat.size < 2:
        pytest.skip("needs a rank to evaluate")
    assigned = roles.by_rank(flat.size, evaluator=True)
    comm = flat.private()
    heard = []
    try:
        with end_signal(comm, assigned.chief, assigned.evaluator) as ended:
            if fails:
                raise ZeroDivisionError("on all ranks")
            if flat.rank == assigned.evaluator:
                while not ended():
                    heard.append(np.nan)
    except ZeroDivisionError:
        assert fails
    assert flat.rank != assigned.evaluator or ended()
    flat.release(comm)
