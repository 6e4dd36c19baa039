"""The recovery loop after failed ranks: form the next topology, repair, agree; repeat until all have repaired.

- An attempt is a collective action. After it the surviving ranks agree whether all of them have completed it.
- If not, they form the next topology, and every rank repairs what depends on the ranks.
- A repair is such an action too: if a rank has failed meanwhile, they form another topology and repair again.
- When all ranks have repaired, every rank commits. That is local, so no failure can divide the ranks there.

Everything here is collective over the surviving ranks. Without ULFM a failure ends the job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Generic, TypeVar

from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere

ResultT = TypeVar("ResultT")
Commit = Callable[[], object]
Repair = Callable[[Topology], Commit | None]
Advance = Callable[[Topology], Topology]
survivors: Advance = methodcaller("survivors")  # of a topology


@dataclass(frozen=True)
class Outcome(Generic[ResultT]):
    """How a collective action has ended on this rank.

    results: the result, in a tuple because it may be None; empty after an error. error: the error that it raised.
    failure: the RankLostError behind the error; None if all ranks raise the error.
    """

    results: tuple[ResultT, ...] = ()
    error: Exception | None = None
    failure: RankLostError | None = None

    def result(self) -> ResultT:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.results[0]


def attempt(topology: Topology, action: Callable[[], ResultT]) -> Outcome[ResultT]:
    """Run a collective action, and return its outcome. After a failure, revoke `topology`, which ends all waits in it.

    Raises an error that is neither a failure nor raised on all ranks: it ends the job.
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


def recover(topology: Topology, repair: Repair, advance: Advance = survivors) -> Topology:
    """Form the next topology, repair on it, commit, and return it. Raises errors that all ranks raise in `repair`.

    repair(topology): may communicate, and must be repeatable. It returns a local function that commits, or None;
    recover calls it once all ranks have repaired. advance(topology): returns the next topology.
    """
    topology, commit = retry(advance(topology), lambda topology: (topology, repair(topology)), advance)
    if commit is not None:
        commit()
    return topology


def retry(topology: Topology, action: Callable[[Topology], ResultT], advance: Advance = survivors) -> ResultT:
    """Run `action(topology)` and return its result; after a failure, run it again on the next topology.

    advance(topology): returns the next topology, by `survivors` or by a `recover`.
    """
    while True:
        outcome = attempt(topology, partial(action, topology))
        if not ulfm.in_force() or topology.finished(outcome.failure is None):
            return outcome.result()
        topology = advance(topology)
