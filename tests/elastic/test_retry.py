"""The ends of a retry loop in an error; test_agreement.py runs the loop itself in every order of events."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from allreduce.elastic import retry
from allreduce.errors import CommunicationError, OptionError, RankLostError
from allreduce.process import start
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import on_all_ranks


@pytest.fixture(autouse=True)
def _outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulfm, "in_force", lambda: True)


def test_an_error_of_one_rank_or_of_all_ends_the_loop() -> None:
    """At once, and without the word of another rank if it is of one rank."""
    agreed: list[bool] = []
    topology: Any = SimpleNamespace(world=MPI.COMM_SELF, finished=lambda ok: agreed.append(ok) or ok)
    with pytest.raises(KeyError):
        retry.retry(topology, lambda _: {}["of one rank"])
    assert not agreed

    def refuse(topology: Topology) -> None:
        raise on_all_ranks(OptionError("bad"), MPI.COMM_SELF)

    with pytest.raises(OptionError, match="bad"):
        retry.recover(topology, refuse, lambda topology: topology)
    assert agreed == [True]


def test_a_failure_ends_the_waits_of_all_ranks() -> None:
    """The model has no rank that waits for one which has gone on: there a lost rank ends all waits."""
    revoked: list[bool] = []
    topology: Any = SimpleNamespace(world=MPI.COMM_SELF, revoke=lambda: revoked.append(True))
    told = RankLostError("told")

    def fail() -> None:
        raise told

    outcome = retry.attempt(topology, fail)
    assert outcome.error is outcome.failure is told
    assert revoked


class _Broken(Topology):
    """A topology whose first `failures` constructions end in an error of MPI that names no failed rank."""

    failures = 0

    def __init__(self, *_: object, **__: object) -> None:
        type(self).failures -= 1
        if type(self).failures >= 0:
            raise MPI.Exception(MPI.ERR_OTHER)


@pytest.fixture
def revoked(monkeypatch: pytest.MonkeyPatch) -> list[MPI.Comm]:
    """Return what is revoked, in a job of ULFM of this rank alone."""
    found: list[MPI.Comm] = []
    monkeypatch.setattr(ulfm, "shrink", lambda comm: comm.Dup())
    monkeypatch.setattr(ulfm, "agree", lambda comm, ok: ok)
    monkeypatch.setattr(ulfm, "revoke", found.append)
    return found


@pytest.mark.parametrize(("failures", "made"), [(0, True), (1, True), (2, False)])
def test_an_unnamed_error_of_mpi_is_taken_for_a_failure_once(
    failures: int, made: bool, revoked: list[MPI.Comm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI reports a failure during the construction of communicators as MPI_ERR_OTHER now and then."""
    monkeypatch.setattr(_Broken, "failures", failures)
    if made:
        assert isinstance(_Broken.of_survivors(MPI.COMM_SELF), _Broken)
    else:
        with pytest.raises(CommunicationError, match="communicators of the 1 surviving ranks: MPI_ERR_OTHER"):
            _Broken.of_survivors(MPI.COMM_SELF)
    assert len(revoked) == failures  # which ends the waits of ranks that had no error


@pytest.mark.parametrize("timeout", [-1.0, 1.0])
def test_an_error_of_all_ranks_revokes_nothing(
    timeout: float, revoked: list[MPI.Comm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower rank would get the revocation for its error, and then wait for the others."""

    def differ(topology: Topology, comm: MPI.Intracomm, *_: object) -> None:
        raise on_all_ranks(OptionError("timeout"), comm)

    monkeypatch.setattr(Topology, "_connect", differ)
    with pytest.raises(OptionError, match="timeout"):
        Topology.of_survivors(MPI.COMM_SELF, timeout=timeout)
    assert revoked == []


@pytest.mark.parametrize(
    ("given", "set_to"),
    [(None, "^hcoll,portals4,han"), ("^hcoll", "^hcoll,han"), ("^han", "^han"), ("tuned,basic", "tuned,basic")],
)
def test_han_is_left_out(given: str | None, set_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start.COLL, raising=False)
    if given is not None:
        monkeypatch.setenv(start.COLL, given)
    start._leave_out_collectives()
    assert os.environ[start.COLL] == set_to
