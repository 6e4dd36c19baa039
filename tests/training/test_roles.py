"""Roles by rank."""

import pytest

from trainers.cli import roles
from trainers.cli.roles import Roles
from trainers.errors import ArgumentError, RoleError


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


def test_a_role_error_is_an_argument_error() -> None:
    assert issubclass(RoleError, ArgumentError)
