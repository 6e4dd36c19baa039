"""The one loop that goes on after failed ranks: next topology, repair, agree; again until all ranks have repaired.

- An attempt is a collective action. After it the ranks that are left agree whether all of them have completed it.
- If not, they form the next topology, and every rank repairs what depends on the ranks.
- They agree on the repair too. When a rank has failed meanwhile, they form another topology and repair once more.
- When all ranks have repaired, every rank commits. That is local, so no failure can divide the ranks there.

Everything here is collective over the ranks that are left. Where ULFM is not in force, a failure ends the job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere

ResultT = TypeVar("ResultT")
Commit = Callable[[], object]
Repair = Callable[[Topology], Commit | None]
Advance = Callable[[Topology], Topology]


@dataclass(frozen=True)
class Outcome(Generic[ResultT]):
    """How a collective action has ended on this rank.

    results: the result, in a tuple because it may be None; empty after an error. error: the error that it raised.
    failure: the failed rank that the error tells of; None when all ranks raise the error.
    """

    results: tuple[ResultT, ...] = ()
    error: Exception | None = None
    failure: RankLostError | None = None

    def result(self) -> ResultT:
        """The result; raises the error."""
        if self.error is not None:
            raise self.error
        return self.results[0]


def attempt(topology: Topology, action: Callable[[], ResultT]) -> Outcome[ResultT]:
    """Do a collective action. When a rank has failed, all waits of all ranks in `topology` end.

    An error that neither tells of a failure nor is raised on all ranks is raised here: it ends the job.
    """
    try:
        return Outcome((action(),))
    except Exception as error:
        failure = ulfm.lost(error)
        if failure is not None and not everywhere(failure, topology.world):
            topology.revoke()
            return Outcome(error=error, failure=failure)
        if not everywhere(error, topology.world):
            raise
        return Outcome(error=error)


def survivors(topology: Topology) -> Topology:
    """The next topology where nothing else has to be done before."""
    return topology.survivors()


def recover(topology: Topology, repair: Repair, advance: Advance = survivors) -> Topology:
    """The next topology, on which all ranks have repaired and committed. Raises errors that all ranks raise in it.

    repair: repairs on the next topology. It may communicate, and changes nothing that a second repair needs. It returns
        what this rank does when all ranks have repaired, if anything. advance: makes the next topology of the last one.
    """
    while True:
        topology = advance(topology)
        outcome = attempt(topology, partial(repair, topology))
        if topology.finished(outcome.failure is None):
            if (commit := outcome.result()) is not None:
                commit()
            return topology


def retry(topology: Topology, action: Callable[[Topology], ResultT], advance: Advance = survivors) -> ResultT:
    """The result of `action(topology)`, which the ranks that are left do again after a failure.

    advance: makes the topology for the next attempt, by `survivors` or by a `recover`.
    """
    while True:
        outcome = attempt(topology, partial(action, topology))
        if not ulfm.in_force() or topology.finished(outcome.failure is None):
            return outcome.result()
        topology = advance(topology)
