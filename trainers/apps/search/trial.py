"""Trial: a trial of optuna's that all ranks of a part run together. The first rank asks optuna, and tells the rest."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from allreduce.elastic.ranks import root_value, together
from allreduce.topology import Topology
from trainers.apps.search.study import failure_of
from trainers.errors import ArgumentError, SearchError

ResultT = TypeVar("ResultT")


class Trial:
    """One trial, on all ranks of its part. Every method is collective over the part: all ranks make the same calls.

    number: of the trial in its study. params: the values that were suggested so far. topology: the ranks of the part.
    The names of the methods are optuna's. Calls that differ raise DisagreementError on all ranks of the part, and the
    trial has then failed.
    """

    def __init__(self, number: int, topology: Topology, asked: Any) -> None:
        """asked: optuna's trial on the first rank, None on the others."""
        self.number, self.topology = number, topology
        self.params: dict[str, Any] = {}
        self._asked = asked
        self.failure: SearchError | None = None  # of the sampler or the pruner, on the first rank: it ends the search

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number from `low` to `high`, the same on all ranks. log: the logarithms are spread evenly."""
        row = f"suggest_float({name!r}, {low!r}, {high!r}, step={step!r}, log={log!r})"
        return float(self._suggest(name, row, lambda asked: asked.suggest_float(name, low, high, step=step, log=log)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return an integer from `low` to `high`, the same on all ranks."""
        row = f"suggest_int({name!r}, {low!r}, {high!r}, step={step!r}, log={log!r})"
        return int(self._suggest(name, row, lambda asked: asked.suggest_int(name, low, high, step=step, log=log)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of `choices`, the same on all ranks."""
        listed, texts = list(choices), list(map(repr, choices))  # 1, 1.0 and True are equal, and their texts are not
        row = f"suggest_categorical({name!r}, {listed!r})"
        index = self._suggest(name, row, lambda asked: texts.index(repr(asked.suggest_categorical(name, listed))))
        self.params[name] = listed[index]  # the number of the choice is sent, not the choice
        return self.params[name]

    def report(self, value: float, step: int) -> None:
        """Report a value of the objective before its end, at a step of its training; the first rank's value counts."""
        self._ask(f"report(step={step!r})", lambda asked: asked.report(value, step))

    def should_prune(self) -> bool:
        """Return whether the pruner ends this trial, the same on all ranks, which then raise optuna.TrialPruned."""
        return bool(self._ask("should_prune()", lambda asked: self._kept("pruner", asked.should_prune)))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a value with the trial in the study; the first rank's counts. value: JSON-serializable."""
        self._ask(f"set_user_attr({key!r})", lambda asked: asked.set_user_attr(key, value))

    def _suggest(self, name: str, row: str, ask: Callable[[Any], Any]) -> Any:
        self.params[name] = self._ask(row, lambda asked: self._kept("sampler", lambda: ask(asked)))
        return self.params[name]

    def _kept(self, name: str, ask: Callable[[], ResultT]) -> ResultT:
        """Return the result of `ask`, and keep an error of the sampler or pruner, which ends the search."""
        try:
            return ask()
        except Exception as error:
            if name == "pruner" or not isinstance(error, ValueError):  # of `suggest`: about its arguments
                self.failure = failure_of(name, error)
            raise

    def _ask(self, row: str, ask: Callable[[Any], ResultT]) -> ResultT:
        """Call `ask` with optuna's trial on the first rank, and return its result on all ranks. Collective.

        row: the call in words, which must be equal on all ranks.
        """
        topology = self.topology
        topology.agree([zlib.crc32(row.encode())], f"trial.{row}")
        found = together(topology.world, lambda: None if self._asked is None else ask(self._asked))
        result: ResultT = root_value(topology.world, found, f"trial.{row}")
        return result


def checked_values(returned: Any, directions: Sequence[str]) -> list[float]:
    """Return the values of an objective as a list of numbers, one for each direction. Raises ArgumentError."""
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the objective must return numbers, got {returned!r}") from error
    if len(found) != len(directions):
        raise ArgumentError(
            f"the objective returned {returned!r}; expected {len(directions)} numbers, for {directions}"
        )
    if any(math.isnan(value) for value in found):
        raise ArgumentError(f"the objective returned {returned!r}; a trial needs numbers that can be compared")
    return found
