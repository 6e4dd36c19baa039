"""Outcome: how an objective ends on the ranks of a part, agreed by all of them."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from allreduce.elastic.meeting import meet
from allreduce.elastic.ranks import all_values, everywhere, lost, world_ranks
from allreduce.errors import AllReduceError, RankLeftError
from allreduce.topology import Topology
from trainers.apps.search.study import COMPLETE, FAIL, PRUNED, optuna
from trainers.apps.search.trial import checked_values
from trainers.errors import ArgumentError
from trainers.recovery.terminating import CODE

STOPPED = "STOPPED"  # by SIGTERM: not told to optuna
LATE_SECONDS = 0.5  # how long a rank whose objective has raised waits before it ends the waits of its part's ranks
EndOfTrial = tuple[str, list[float] | None, str | None]  # its state, its values, why it failed


class Outcome:
    """How an objective ends on the ranks of a part.

    - A rank that returns or prunes first compares that with the other ranks, on the topology of the trial.
    - A rank whose objective raises waits a moment for the others. If they don't end too, they may wait for this rank,
      so it leaves the topology of the trial: their waits end in a RankLeftError.
    - When all ranks have ended, they learn how, and the part goes on.
    """

    def __init__(self, part: Topology, inner: Topology) -> None:
        self._part, self._inner = part, inner
        self._own: EndOfTrial = (FAIL, None, None)
        self._follows = False  # the error of this rank only says that it has waited for another one
        self._broken = False  # calls of this rank were interrupted

    def run(self, objective: Callable[[], Any], directions: Sequence[str]) -> None:
        """Call the objective; return when it has ended on all ranks of the part. Collective over the part."""
        try:
            self._own = self._ended(objective, directions)
        except Exception as error:
            if lost(error) is not None:
                self._part.detector.handle_failure()
                raise
            self._fail(error)
            leave = partial(self._leave, text_of(error))
            meet(self._part, "the end of a trial", self._part.timeout, LATE_SECONDS, leave)
        else:
            meet(self._part, "the end of a trial", self._part.timeout)

    def _ended(self, objective: Callable[[], Any], directions: Sequence[str]) -> EndOfTrial:
        try:
            returned = objective()
        except SystemExit as error:
            if error.code != CODE:
                raise
            self._agree("ends after SIGTERM", None)
            return STOPPED, None, None
        except Exception as error:
            if not isinstance(error, optuna().TrialPruned):
                raise
            self._agree("is pruned", None)
            return PRUNED, None, None
        values: list[float] | None = None
        wrong: ArgumentError | None = None
        try:
            values = checked_values(returned, directions)
        except ArgumentError as met:
            wrong = met
        self._agree("returns", wrong)
        return COMPLETE, values, None

    def _agree(self, how: str, error: ArgumentError | None) -> None:
        if not self._inner.closed:
            self._inner.agree([zlib.crc32(how.encode())], f"the objective {how}", error)
        elif error is not None:
            raise error

    def _fail(self, error: Exception) -> None:
        self._own = FAIL, None, text_of(error)
        self._follows = isinstance(error, RankLeftError)
        self._broken = isinstance(error, AllReduceError) and not everywhere(error, self._inner.world)

    def _leave(self, why: str) -> None:
        self._broken = True
        self._inner.detector.leave(f"its objective has raised {why}")

    def agree(self) -> EndOfTrial:
        """Return how the trial has ended, the same on all ranks. Collective over the part."""
        row = [*self._own, self._follows, self._broken]
        everyone = all_values(self._part.world, row, "learn how a trial has ended")
        if any(broken for *_, broken in everyone):
            self._inner.dissolve(self._part.world)
        else:
            self._inner.close()
        failed = [(follows, rank, why) for rank, (state, _, why, follows, _) in enumerate(everyone) if state == FAIL]
        if not failed:
            state, values, *_ = everyone[0]
            return state, values, None
        _, rank, why = min(failed)
        alike = len(failed) == len(everyone) and len({why for *_, why in failed}) == 1
        return FAIL, None, why if alike else f"rank {world_ranks(self._part.world)[rank]}: {why}"


def text_of(error: BaseException) -> str:
    """Return an error as text."""
    return f"{type(error).__name__}: {error}"
