"""Helpers for tests on ranks: create a backend, or expect an error, on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError


def usable(name: str, topology: allreduce.Topology, **options: Any) -> AllReduce:
    """Return the backend called `name`; skip the test if it can't be used. Collective."""
    try:
        return allreduce.create(name, topology, **options)
    except UnavailableError as error:
        pytest.skip(str(error))


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    """Return the text of this rank's error."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def raised_everywhere(world: MPI.Intracomm, kind: type[Exception], call: Callable[[], Any]) -> str:
    """Every rank's call must raise `kind` with the same text, which is returned. Collective."""
    try:
        call()
        mine = ("nothing", "")
    except Exception as error:
        mine = (type(error).__name__, str(error))
    everyone = world.allgather(mine)
    assert set(everyone) == {(kind.__name__, mine[1])}, f"not one {kind.__name__} with one text: {everyone}"
    return mine[1]
