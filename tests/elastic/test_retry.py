"""The retry loop after failures, on a topology that fails as the test says."""

import os

import pytest
from mpi4py import MPI

from allreduce.elastic import retry
from allreduce.errors import CommunicationError, OptionError, RankLostError
from allreduce.process import start
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import on_all_ranks


class Fails:
    """A topology. answers: the results of its next agreements, and of those of the topologies after it."""

    world = MPI.COMM_SELF

    def __init__(self, answers: list[bool], number: int = 0) -> None:
        self.answers, self.number, self.revoked = answers, number, False

    def revoke(self) -> None:
        self.revoked = True

    def finished(self, ok: bool) -> bool:
        return self.answers.pop(0) and ok

    def survivors(self, admit: bool = True) -> "Fails":
        return Fails(self.answers, self.number + 1)


@pytest.fixture(autouse=True)
def _outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulfm, "in_force", lambda: True)


def test_an_action_is_done_again_until_all_ranks_have_done_it() -> None:
    def action(topology: Topology) -> int:
        if topology.number == 1:  # type: ignore[attr-defined]
            raise RankLostError("told")
        return topology.number  # type: ignore[attr-defined]

    assert retry.retry(Fails([False, True, True]), action) == 2  # type: ignore[arg-type]


def test_ranks_commit_when_all_have_repaired() -> None:
    done: list[str] = []

    def repair(topology: Topology) -> retry.Commit:
        done.append(f"repair {topology.number}")  # type: ignore[attr-defined]
        return lambda: done.append(f"commit {topology.number}")  # type: ignore[attr-defined]

    assert retry.recover(Fails([False, True]), repair).number == 2  # type: ignore[arg-type,attr-defined]
    assert done == ["repair 1", "repair 2", "commit 2"]


@pytest.mark.parametrize("error", [OptionError("bad"), RankLostError("the state is gone")])
def test_an_error_of_all_ranks_ends_the_repair(error: Exception) -> None:
    def repair(topology: Topology) -> None:
        raise on_all_ranks(error, MPI.COMM_SELF)

    with pytest.raises(type(error)) as caught:
        retry.recover(Fails([True]), repair)  # type: ignore[arg-type]
    assert caught.value is error


def test_a_failure_ends_the_waits_of_all_ranks() -> None:
    def action() -> None:
        raise RankLostError("told")

    topology = Fails([])
    outcome = retry.attempt(topology, action)  # type: ignore[arg-type]
    assert topology.revoked
    assert outcome.failure is outcome.error


def test_an_error_of_one_rank_is_raised_at_once() -> None:
    with pytest.raises(KeyError):
        retry.attempt(Fails([]), lambda: {}["of one rank"])  # type: ignore[arg-type]


class _Broken(Topology):
    """A topology whose first `failures` constructions end in an error of MPI that names no failed rank."""

    failures = 0

    def __init__(self, *_: object, **__: object) -> None:
        type(self).failures -= 1
        if type(self).failures >= 0:
            raise MPI.Exception(MPI.ERR_OTHER)


@pytest.mark.parametrize(("failures", "made"), [(0, True), (1, True), (2, False)])
def test_an_unnamed_error_of_mpi_is_taken_for_a_failure_once(
    failures: int, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI reports a failure during the construction of communicators as MPI_ERR_OTHER now and then."""
    monkeypatch.setattr(ulfm, "shrink", lambda comm: comm.Dup())
    monkeypatch.setattr(ulfm, "agree", lambda comm, ok: ok)
    revoked: list[MPI.Comm] = []
    monkeypatch.setattr(ulfm, "revoke", revoked.append)
    monkeypatch.setattr(_Broken, "failures", failures)
    if made:
        assert isinstance(_Broken.of_survivors(MPI.COMM_SELF), _Broken)
    else:
        with pytest.raises(CommunicationError, match="communicators of the 1 surviving ranks: MPI_ERR_OTHER"):
            _Broken.of_survivors(MPI.COMM_SELF)
    assert len(revoked) == failures  # which ends the waits of ranks that had no error


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_all_ranks_revokes_nothing(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower rank would get the revocation for its error, and then wait for the others."""
    monkeypatch.setattr(ulfm, "shrink", lambda comm: comm.Dup())
    revoked: list[MPI.Comm] = []
    monkeypatch.setattr(ulfm, "revoke", revoked.append)

    def differ(topology: Topology, comm: MPI.Intracomm, on_one_host: bool) -> None:
        raise on_all_ranks(OptionError("timeout"), comm)

    monkeypatch.setattr(Topology, "_connect", differ)
    with pytest.raises(OptionError, match="timeout"):
        Topology.of_survivors(MPI.COMM_SELF, timeout=1.0 if late else -1.0)
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
