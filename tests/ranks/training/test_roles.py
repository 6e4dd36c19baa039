"""Roles on several ranks, agreed on, and the topology of the ranks that train."""

import numpy as np
import pytest

import allreduce
import allreduce.errors
from trainers.cli import roles
from trainers.cli.evaluator import end_signal
from trainers.errors import RoleError

JOBS = "openmpi 1 2 3 5"


def test_the_ranks_have_roles_in_order(flat: allreduce.Topology) -> None:
    assert roles.assign(flat) == roles.by_rank(flat.size)
    if flat.size > 2:
        assert roles.assign(flat, 1, True) == roles.by_rank(flat.size, 1, True)
    last = flat.size - 1
    assert roles.assign(flat, chief=last) == roles.by_rank(flat.size, chief=last)
    with roles.training(flat, roles.by_rank(flat.size, chief=last)) as part:
        assert part.rank == (0 if flat.rank == last else flat.rank + 1)


def test_the_evaluator_is_alone(flat: allreduce.Topology) -> None:
    if flat.size < 2:
        pytest.skip("needs a rank to evaluate")
    last = flat.size - 1
    assigned = roles.assign(flat, evaluator=True, chief=last)
    assert assigned == roles.Roles(last, tuple(range(flat.size - 2)), (), flat.size - 2)
    with roles.training(flat, assigned) as part:
        if flat.rank == assigned.evaluator:
            assert part.size == 1
        else:
            assert (part.rank, part.size) == (assigned.training.index(flat.rank), flat.size - 1)


def test_invalid_arguments_and_ranks_that_differ(flat: allreduce.Topology) -> None:
    with pytest.raises(RoleError, match=f"{flat.size} servers? of {flat.size} ranks? leave no worker") as raised:
        roles.assign(flat, flat.size)
    assert raised.value.ranks == tuple(range(flat.size))
    with pytest.raises(RoleError, match=f"chief must be a rank of this job, 0 to {flat.size - 1}, got {flat.size}"):
        roles.assign(flat, chief=flat.size)
    with pytest.raises(RoleError, match="servers must be an integer >= 0, got -1"):
        roles.assign(flat, -1)
    if flat.size > 1:
        with pytest.raises(allreduce.errors.DisagreementError, match=r"chief 0\n(.*\n)*.*chief 1"):
            roles.assign(flat, chief=int(flat.rank == flat.size - 1))


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
