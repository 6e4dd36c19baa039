"""Ranks that die or leave, what the others are told, and how they agree. tests/faults kills ranks in every backend."""

import array

import pytest
from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import BrokenError, CommunicationError, RankLeftError, RankLostError, UnavailableError
from allreduce.health.status import LEFT, Fact, RankFacts
from allreduce.transport import ulfm
from allreduce.transport.control import agree
from allreduce.transport.layout import nodes_left
from allreduce.transport.wait import NamedCall
from tests.conftest import JobRunner


def test_a_garbled_agreement_is_made_again() -> None:
    """Open MPI garbles one agreement in hundreds while another thread communicates, without a failure of a rank."""
    brought = []

    class Garbles:
        """Writes an address in the place of the values that ranks contribute to the first agreement."""

        def Ack_failed(self) -> None:  # noqa: N802
            pass

        def Iagree(self, bits: array.array) -> MPI.Request:  # noqa: N802
            brought.append(int(bits[0]))
            bits[0] &= 0x26CE5358 if len(brought) == 1 else -1
            return MPI.REQUEST_NULL

    for ok in (True, False):
        brought.clear()
        assert ulfm.agree(Garbles(), ok) is ok  # type: ignore[arg-type]
        assert len(set(brought)) == 1
        assert len(brought) == 2


ENDS_UNSEEN = """
import os
import numpy as np
import allreduce
from allreduce.errors import RankLostError
topology = allreduce.Topology.of_survivors(ranks_per_node=1)
reduce = allreduce.create("auto", topology)
reduce(np.ones(10), "sum")
if topology.rank == 1:
    os._exit(3)
try:
    reduce(np.ones(10), "sum")
except RankLostError:
    left = topology.survivors()
    with allreduce.create("auto", left) as reduce:
        array = np.ones(10)
        reduce(array, "sum")
    print("previous ranks", left.previous_ranks, "sum", array[0], flush=True)
"""


def test_a_rank_that_ends_without_a_word_is_lost(mpirun: JobRunner) -> None:
    """It ends by os._exit with another code than 0; Open MPI's launcher reports that to no rank."""
    job = mpirun(4, ["-c", ENDS_UNSEEN], ulfm=True, timeout=60, env={"ALLREDUCE_TIMEOUT_SECONDS": "500"})
    assert job.stdout.count("previous ranks (0, 2, 3) sum 3.0") == 3, job.stdout + job.stderr


LEAVES = """
import os, time
from allreduce import Topology
from allreduce.errors import RankLeftError
topology = Topology()
if topology.rank == 2:
    os.kill(os.getpid(), 9)
while topology.detector.lost is None:
    time.sleep(0.01)
if topology.rank == 0:
    topology.close()
    time.sleep(60)
try:
    topology.finished(False)
except RankLeftError as error:
    print(error, flush=True)
    os._exit(5)
"""


def test_a_rank_that_leaves_after_a_loss_is_not_waited_for(mpirun: JobRunner) -> None:
    """Its message travels on a communicator that the failure has not revoked."""
    job = mpirun(3, ["-c", LEAVES], ulfm=True, timeout=60, env={"ALLREDUCE_TIMEOUT_SECONDS": "500"})
    assert "rank 0 has left: it has closed the topology" in job.stdout, job.stdout + job.stderr


LEAVES_EARLY = """
import sys
import numpy as np
import allreduce
from allreduce.elastic.standby import elastic_world
topology = allreduce.Topology()
topology = elastic_world(topology, 2) or sys.exit(0)
with allreduce.create("ring", topology) as reduce:
    reduce(np.ones(10))
    if topology.rank >= 1:
        sys.exit(0)
    reduce(np.ones(10))
"""


def test_ranks_that_have_left_end_when_another_ends_the_job(mpirun: JobRunner) -> None:
    """In MPI_Finalize, three of four ranks would wait for ever for the rank that has ended by an error."""
    job = mpirun(4, ["-c", LEAVES_EARLY], ulfm=True, timeout=60)
    assert job.returncode == 1, job.stderr
    assert "has left: it has ended its program" in job.stderr


FINALIZES = """
import numpy as np
from mpi4py import MPI
import allreduce
with allreduce.create("ring") as reduce:
    reduce(np.ones(10))
if MPI.COMM_WORLD.rank == 0:
    MPI.Finalize()
print("ends", flush=True)
"""


ON_SOME_RANKS = """
from mpi4py import MPI
comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank > 0)
if MPI.COMM_WORLD.rank > 0:
    import allreduce
    allreduce.Topology(comm).close()
print("ends", flush=True)
"""


@pytest.mark.parametrize("program", [FINALIZES, ON_SOME_RANKS], ids=["calls it itself", "uses no library"])
def test_ranks_end_beside_one_that_is_in_finalize(program: str, mpirun: JobRunner) -> None:
    """A rank that calls it itself waits for the others as they do; one that does not use the library does not
    answer."""
    job = mpirun(3, ["-c", program], ulfm=True, timeout=60)
    assert (job.returncode, job.stdout.count("ends")) == (0, 3), job.stderr


def test_who_has_left_after_an_agreement_is_not_missed_in_it() -> None:
    """The message that the rank has left may arrive before the answer."""
    with Topology(MPI.COMM_SELF) as topology:
        notes, finish, call = topology.detector.messages, topology.finish_record, NamedCall("finished")
        notes.use_unrevoked(topology.world, finish)
        notes._learn(1, RankFacts(1, (Fact(LEFT, 0, 0, 1, "it has ended its program"),)), 1)
        finish.begin(call)
        notes.check_finish(call)
        finish.begin(call)
        with pytest.raises(RankLeftError, match="rank 1 has left"):
            notes.check_finish(call)
        finish.end()


def test_where_ranks_can_not_be_outlived_nothing_is_asked_of_mpi() -> None:
    assert not ulfm.in_force()
    assert ulfm.lost(RankLostError("told")) is None
    with Topology.of_survivors() as topology:
        assert topology.finished(True)
        assert not topology.finished(False)
        topology.revoke()
        topology.agree([], "goes on")
        with pytest.raises(UnavailableError, match="--with-ft ulfm"):
            topology.survivors()


def test_a_loss_is_known_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulfm, "in_force", lambda: True)
    told = RankLostError("told")
    told.lost = (2,)
    broken = BrokenError("again")
    broken.__cause__ = CommunicationError("in a call")
    broken.__cause__.__cause__ = told
    assert ulfm.lost(broken) is told
    assert ulfm.again(told).lost == (2,)
    revoked = MPI.Exception(MPI.ERR_REVOKED)
    assert (ulfm.lost(revoked) is not None) == (revoked.Get_error_class() == MPI.ERR_REVOKED)
    own = ValueError("x")
    own.__cause__ = own  # as `raise own from own` makes it
    assert ulfm.lost(own) is None
    assert not ulfm.may_be_failure(own)


@pytest.mark.parametrize(
    ("ranks_per_node", "left", "sizes"),
    [
        (None, (0, 2), None),
        (2, (0, 2, 3), [1, 2]),
        (2, (2, 3, 4), [2, 1]),
        ([1, 3, 1], (0, 3), [1, 1]),
        ([1, 3, 1], (4,), [1]),
        ([9], (0, 1), [9]),  # Topology refuses it
    ],
)
def test_those_that_are_left_stay_on_their_simulated_nodes(
    ranks_per_node: int | list[int] | None, left: tuple[int, ...], sizes: list[int] | None
) -> None:
    assert nodes_left(ranks_per_node, left, 5) == sizes


def test_what_a_loss_has_cut_off_in_the_making_is_freed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made, left = [], []

    def cut_off(topology: Topology, comm: MPI.Intracomm, *_: object) -> None:
        topology.own(comm.Dup())
        made.append(topology)
        topology._revoked = True
        raise RankLostError("told")

    monkeypatch.setattr(Topology, "_connect", cut_off)
    monkeypatch.setattr("allreduce.transport.deferred_free.free_later", lambda *comms: left.extend(comms))
    with pytest.raises(RankLostError):
        Topology(MPI.COMM_SELF)
    assert len(left) == 2
    assert made[0].detector.closed
    for comm in left:
        comm.Free()


def test_an_agreement_that_ends_in_an_error_has_no_cause_but_itself() -> None:
    """The error was raised from itself, so a search for its cause never ended."""

    class Failing:
        size = 1

        def Iallreduce(self, *_: object) -> object:  # noqa: N802
            raise CommunicationError("on purpose")

    with pytest.raises(CommunicationError, match="on purpose") as caught:
        agree(Failing(), [1], "a call", None)  # type: ignore[arg-type]
    assert caught.value.__cause__ is None
