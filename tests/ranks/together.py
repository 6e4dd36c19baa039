"""What tests on ranks do on all of them: make a backend, or meet an error."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError


def usable(name: str, topology: allreduce.Topology) -> AllReduce:
    """The backend called `name`; where it can't be used the test is skipped. Collective."""
    try:
        return allreduce.create(name, topology)
    except UnavailableError as error:
        pytest.skip(str(error))


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of this rank's error."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def raised_everywhere(world: MPI.Intracomm, kind: type[Exception], call: Callable[[], Any]) -> str:
    """Every rank's call raises `kind` with the same text, which is returned. Collective."""
    try:
        call()
        mine = ("nothing", "")
    except Exception as error:
        mine = (type(error).__name__, str(error))
    everyone = world.allgather(mine)
    assert set(everyone) == {(kind.__name__, mine[1])}, f"not one {kind.__name__} with one text: {everyone}"
    return mine[1]


def admitted_call(reduce: Any) -> Any:
    """The record of the call that a backend has run first, which its function holds."""
    (run, *_) = reduce._known.values()
    return inspect.getclosurevars(run).nonlocals["admitted"]
