"""search: trials of an objective on parts of the ranks, with optuna's samplers and pruners."""

import logging
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from allreduce.elastic.meeting import meet
from allreduce.elastic.ranks import (
    all_values,
    everywhere,
    raise_together,
    recover,
    retry,
    root_value,
    together,
    world_ranks,
)
from allreduce.topology import Topology
from trainers.apps.search.outcome import STOPPED, Outcome, text_of
from trainers.apps.search.parts import Parts, parts_error
from trainers.apps.search.study import (
    DIRECTIONS,
    FAIL,
    RANKS,
    SECONDS,
    SIGTERM,
    WHY,
    Claim,
    Ended,
    Study,
    mend,
    optuna,
)
from trainers.apps.search.trial import Trial
from trainers.arguments import integer
from trainers.errors import ArgumentError
from trainers.recovery.terminating import Terminating, terminated

log = logging.getLogger("trainers")

Objective = Callable[[Trial, Topology], Any]
LOST, KILLED = "a rank of its part was lost", "its job was ended"


class SearchResult(NamedTuple):
    """The trials of a search, the same on all ranks.

    trials: all that have ended, also those of former jobs. best: the best one, or None; with several directions the
    first of the front. front: all trials of the Pareto front; with one direction the best one alone. seconds: of this
    call. topology: of the ranks that are left: the given one, unless a rank was lost; then a new one, which the caller
    closes.
    """

    trials: list[Ended]
    best: Ended | None
    front: list[Ended]
    seconds: float
    topology: Topology

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial."""
        return {} if self.best is None else self.best.params

    @property
    def best_value(self) -> float | None:
        """The value of the best trial; with several directions its first value."""
        return None if self.best is None or self.best.values is None else self.best.values[0]


class Settings(NamedTuple):
    """The arguments of a search."""

    trials: int
    directions: tuple[str, ...]
    sampler: Any
    pruner: Any
    seed: int
    about: str
    told: Callable[[Ended], object] | None
    ranks_per_trial: int
    parallel: int | None


def search(
    objective: Objective,
    trials: int,
    topology: Topology | None = None,
    ranks_per_trial: int = 1,
    *,
    parallel: int | None = None,
    directions: Sequence[str] | str = "minimize",
    sampler: Any = None,
    pruner: Any = None,
    storage: str | None = None,
    seed: int = 0,
    about: str = "",
    told: Callable[[Ended], object] | None = None,
) -> SearchResult:
    """Find the parameters for which an objective is best; returns the trials. Collective.

    objective(trial, topology): called on all ranks of a part, with a topology of these ranks. It returns a number, or a
        tuple of numbers for a Pareto front; the first rank's count. It may raise optuna.TrialPruned on all ranks of the
        part. Any other exception makes the trial fail; other parts don't notice.
    trials: how many trials the study gets, with the trials of former jobs. A trial that fails counts. A sampler that
        has tried all values (a grid) ends the search earlier; while other parts run its last trials, a part may repeat
        one. An error of a sampler or a pruner ends the search: SearchError; a ValueError of a sampler in a suggest
        method fails the trial.
    topology: the ranks of the search; None for all ranks, on a topology that is closed at the end.
    ranks_per_trial: the ranks of a part, at least. Ranks that are left over join the first parts. parallel: the largest
        number of parts.
    directions: "minimize" or "maximize", or one for each value of the objective.
    sampler, pruner: optuna's. None: TPE, optuna's MedianPruner.
    storage: the file of optuna's journal, in a folder that all ranks see. A later search with it goes on. None: the
        search can't go on in another job.
    seed: of TPE. It makes a search of one part repeatable, also one that is continued.
    about: describes all trials of the study. A later search with this storage and another text raises ArgumentError.
    told: called on the first rank of a part with each trial that has ended there.

    After a failure of a rank (mpirun --with-ft ulfm) the trial of its part has failed. Its part continues with the
    ranks that are left, and other parts don't notice. After SIGTERM to any rank the trial of its part is stopped, the
    other parts begin no trials, and all ranks raise Terminated. A later search with this storage repeats these trials.

    Raises the same error on all ranks; ArgumentError for bad arguments.
    """
    own = topology is None
    ranks = topology or Topology.of_survivors()
    several = tuple(directions) if isinstance(directions, list | tuple) else (directions,)
    row = f"search(trials={trials!r}, directions={several!r}, storage={storage!r}, seed={seed!r})"
    settings = Settings(trials, several, sampler, pruner, seed, about, told, ranks_per_trial, parallel)
    made: _Search | None = None
    try:
        error = _bad(settings, storage) or _bad_objects(objective, settings)
        ranks.agree([zlib.crc32(row.encode())], row, error or parts_error(ranks.size, ranks_per_trial, parallel))
        with Terminating(quiet=True) as sigterm:
            made = _Search(ranks, objective, settings, storage)
            result = made.run(sigterm)
        if result is None:
            how = f"a search with the same file goes on, {storage}" if storage else "it had no file (storage=)"
            raise terminated(f"SIGTERM: the search has been stopped; {how}", made.topology.world)
    except BaseException as met:
        last = ranks if made is None else made.topology
        if not last.closed and (own or last is not ranks):
            last.close() if everywhere(met, last.world) else last.abandon()
        raise
    if own:
        result.topology.close()
    return result


def _bad(settings: Settings, storage: Any) -> ArgumentError | None:
    trials, directions, seed = settings.trials, settings.directions, settings.seed
    if text := integer(1).error("trials", trials) or integer(0).error("seed", seed):
        return ArgumentError(text)
    if not directions or not all(each in DIRECTIONS for each in directions):
        return ArgumentError(f"directions={directions!r}: give {' or '.join(DIRECTIONS)}, or one for each value")
    if storage is not None and (not isinstance(storage, str) or not storage):
        return ArgumentError(f"storage={storage!r}: give the name of a file, or None")
    return None


def _bad_objects(objective: Any, settings: Settings) -> ArgumentError | None:
    try:
        module = optuna()
    except ArgumentError as missing:
        return missing
    sampler, pruner, told = settings.sampler, settings.pruner, settings.told
    if not callable(objective):
        return ArgumentError(f"objective={objective!r}: give a function of a trial and a topology")
    if sampler is not None and not isinstance(sampler, module.samplers.BaseSampler):
        return ArgumentError(f"sampler={sampler!r}: give one of optuna's, or None")
    if pruner is not None and not isinstance(pruner, module.pruners.BasePruner):
        return ArgumentError(f"pruner={pruner!r}: give one of optuna's, or None")
    if told is not None and not callable(told):
        return ArgumentError(f"told={told!r}: give a function, or None")
    return None


class _Search:
    """A search on this rank: its part runs trials until there are enough; then all ranks meet.

    topology: of all ranks, or after a failure of the ranks that are left.
    """

    def __init__(self, topology: Topology, objective: Objective, settings: Settings, storage: str | None) -> None:
        """Open the journal. Collective."""
        self.topology, self._objective, self._settings = topology, objective, settings
        self._parts: Parts | None = None
        self._running: int | None = None  # the number of the trial that this part runs
        self._begin = time.monotonic()
        self._study: Study | None = None
        self._claim: Claim | None = None
        self._sigterm: Terminating | None = None
        self._stops = False  # this part ends after SIGTERM
        self._keeps, self._path = storage is not None, ""
        self._told: set[int] = set()  # the trials for which told= was called on this rank
        try:
            made = together(topology.world, lambda: self._prepare(storage) if topology.rank == 0 else None)
            self._path = root_value(topology.world, made, "learn the file of a search")
        except Exception:
            self._release()
            raise

    def _prepare(self, storage: str | None) -> str:
        """Claim the journal, and end the trials that a former job has left. On the first rank."""
        path = storage or str(Path(tempfile.mkdtemp(prefix="allreduce-search-")) / "journal")
        self._path = path
        self._claim = Claim(path, first=True)
        mend(path)
        study = self._opened(fresh=True)
        study.begin(self._settings.about)
        if left := study.end_running(KILLED, again=True):
            log.warning(
                "trainers: trials %s of a former job have failed (%s); their parameters are tried again",
                ", ".join(map(str, left)),
                KILLED,
            )
        return path

    def _opened(self, fresh: bool = False) -> Study:
        """Return this rank's study. Local. fresh: whether this call may begin the file."""
        if self._study is None and not fresh and not Path(self._path).exists():
            raise ArgumentError(
                f"the file of the search, {self._path}, is not there on rank {self.topology.rank}: give a file of a "
                "folder that all nodes share (storage=)"
            )
        if self._claim is None:
            self._claim = Claim(self._path, first=False)
        if self._study is None:
            given = self._settings
            options = {"sampler": given.sampler, "pruner": given.pruner, "seed": given.seed, "fresh": fresh}
            self._study = Study(self._path, given.directions, **options)
        return self._study

    # The whole search

    def run(self, sigterm: Terminating) -> SearchResult | None:
        """Run trials until there are enough; returns None after SIGTERM. Collective. sigterm: an open block."""
        self._sigterm = sigterm
        try:
            parts = retry(self.topology, self._divided, self._survivors)
            error = self._run_part(parts)
            found = retry(self.topology, partial(self._meet, error), self._survivors)
            sigterm.agreed |= found is None  # by all ranks
            return found
        except Exception as met:
            if self._parts is not None and not self._parts.topology.closed:
                part = self._parts.topology
                part.close() if everywhere(met, part.world) else part.abandon()
            raise
        finally:
            self._release()

    def _survivors(self, topology: Topology) -> Topology:
        """Go on with the ranks of the search that are left. Collective over these."""
        self._parts = None
        self.topology = topology.survivors(admit=False)
        return self.topology

    def _divided(self, topology: Topology) -> Parts:
        """Divide the ranks. Collective over the ranks that are left; may be repeated."""
        given = self._settings
        self._parts = parts = Parts(topology, min(given.ranks_per_trial, topology.size), given.parallel)
        together(topology.world, lambda: self._opened() if parts.leader else None)
        return parts

    def _meet(self, error: Exception | None, topology: Topology) -> SearchResult | None:
        """Wait for all parts; returns the result, None after SIGTERM. Collective over the ranks that are left; may be
        repeated. error: the error that has ended this rank's part; all ranks raise it."""
        self._parts = None
        meet(topology, "wait for the other parts of a search")
        raise_together(topology.world, error)
        if any(all_values(topology.world, self._stops or self._is_told, "learn of SIGTERM")):
            return None
        return self._result(topology)

    def _run_part(self, parts: Parts) -> Exception | None:
        """Run the trials of this rank's part. Collective over the part.

        Returns an error that no objective has raised: the other parts run on, and then all ranks raise it.
        """
        try:
            while retry(parts.topology, self._next, self._recover):
                pass
            parts.close()
        except Exception as error:
            part = parts.topology
            if everywhere(error, part.world):
                part.close()
            else:
                part.detector.leave(text_of(error))
                part.abandon()
            return error
        return None

    @property
    def _is_told(self) -> bool:
        """Whether this rank has received SIGTERM."""
        return self._sigterm is not None and self._sigterm.here

    def _result(self, topology: Topology) -> SearchResult:
        seconds = time.monotonic() - self._begin
        table = together(topology.world, lambda: self._table() if topology.rank == 0 else None)
        (trials, best), seconds = root_value(topology.world, [table, seconds], "send the trials of a search")
        found = [Ended(*each) for each in trials]
        front = [each for each in found if each.number in best]
        return SearchResult(found, front[0] if front else None, front, seconds, topology)

    def _table(self) -> tuple[list[Ended], list[int]]:
        study = self._opened()
        study.end_running(LOST, again=False)  # of parts that were lost whole
        return study.ended(), study.best()

    def _release(self) -> None:
        """Give up the claim on the journal, and remove a temporary one. Local."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        if not self._keeps and self._path:  # on all ranks: the first one may be lost
            shutil.rmtree(Path(self._path).parent, ignore_errors=True)

    # One trial

    def _next(self, topology: Topology) -> bool:
        """Ask for a trial, run it and tell how it has ended. Returns False if there are enough. Collective over the
        part."""
        asked = together(topology.world, lambda: self._ask() if topology.rank == 0 else None)
        number = root_value(topology.world, asked and asked.number, "ask for a trial")
        if number is None:
            return False
        self._running, begin = number, time.monotonic()
        inner = topology.split(0)  # an error in the objective breaks this one, and not the part's
        outcome = Outcome(topology, inner)
        trial = Trial(number, inner, asked)
        outcome.run(lambda: self._objective(trial, inner), self._settings.directions)
        seconds = time.monotonic() - begin
        state, values, why = outcome.agree()
        about = {SECONDS: round(seconds, 3), RANKS: list(world_ranks(topology.world))}
        if why is not None:
            about[WHY] = why

        def tell() -> None:
            if topology.rank == 0:
                if trial.failure is not None:
                    raise trial.failure
                self._tell(number, state, values, about)

        together(topology.world, tell)
        self._running = None
        self._stops = any(all_values(topology.world, state == STOPPED or self._is_told, "learn of SIGTERM"))
        if self._stops and topology.rank == 0:
            self._opened().stop(SIGTERM)  # the other parts begin no trials
        return not self._stops

    def _ask(self) -> Any:
        return self._opened().ask(self._settings.trials)

    def _tell(self, number: int, state: str, values: list[float] | None, about: dict[str, Any]) -> None:
        if state != STOPPED:
            self._say(self._opened().tell(number, state, values, **about))

    def _say(self, trial: Ended) -> None:
        if self._settings.told is not None and trial.number not in self._told:  # after a loss it may be told again
            self._told.add(trial.number)
            self._settings.told(trial)

    def _recover(self, topology: Topology) -> Topology:
        """Continue with the ranks of this part that are left. Collective over these."""
        parts = self._parts
        assert parts is not None

        def repair(topology: Topology) -> None:
            running = all_values(topology.world, self._running, "learn which trial has lost a rank")
            lost = sorted({number for number in running if number is not None})
            about = {WHY: LOST, RANKS: list(world_ranks(topology.world))}

            def tell() -> None:
                for number in lost if topology.rank == 0 else ():
                    self._tell(number, FAIL, None, about)

            together(topology.world, tell)
            self._running = None

        return recover(topology, repair, lambda _: parts.survivors())
