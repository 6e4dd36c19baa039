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

from allreduce.elastic.retry import recover, retry
from allreduce.errors import AllReduceError, RankLeftError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values, everywhere, raise_together, root_value, together
from trainers.errors import ArgumentError
from trainers.many.meeting import meet
from trainers.many.parts import Parts
from trainers.many.study import (
    COMPLETE,
    DIRECTIONS,
    FAIL,
    PRUNED,
    RANKS,
    SECONDS,
    WHY,
    Claim,
    Ended,
    Study,
    mend,
    optuna,
)
from trainers.many.trial import Trial, checked_values, is_pruned

log = logging.getLogger("trainers")

Objective = Callable[[Trial, Topology], Any]
Outcome = tuple[str, list[float] | None, str | None]  # of a trial: its state, its values, why it failed
LATE_SECONDS = 0.5  # how long a rank whose objective has raised waits before it ends the waits of its part's ranks
LOST, KILLED = "a rank of its part was lost", "its job was ended"


class SearchResult(NamedTuple):
    """The trials of a search, the same on all ranks.

    trials: all that have ended, also those of former jobs. best: the best one, or None; with several directions the
    first of the front. front: all trials of the Pareto front; with one direction the best one alone. seconds: of this
    call. idle: the share of it in which ranks had no trial, from 0 to 1. topology: of the ranks that are left: the
    given one, unless a rank was lost; then a new one, which the caller closes.
    """

    trials: list[Ended]
    best: Ended | None
    front: list[Ended]
    seconds: float
    idle: float
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
    trials: how many trials the study gets, those of former jobs included. A trial that fails counts. A sampler that has
        tried all values (a grid) ends the search earlier.
    topology: the ranks of the search; None for all ranks, on a topology that is closed at the end.
    ranks_per_trial: the ranks of a part, at least. Ranks that are left over join the first parts. parallel: the largest
        number of parts.
    directions: "minimize" or "maximize", or one for each value of the objective.
    sampler, pruner: optuna's; or for sampler a function that makes one of a seed. None: TPE, optuna's default pruner.
    storage: the file of optuna's journal, in a folder that all ranks see. A later search with it goes on. None: the
        search can't go on in another job.
    seed: makes a search of one part repeatable, also one that is continued.
    about: what is equal in all trials; a later search with this storage and another text raises ArgumentError.
    told: called on the first rank of a part with each trial that has ended there.

    After a failure of a rank (mpirun --with-ft ulfm) the trial of its part has failed. Its part continues with the
    ranks that are left, and other parts don't notice. Raises the same error on all ranks; ArgumentError for bad
    arguments.
    """
    own = topology is None
    ranks = topology or Topology.of_survivors()
    several = (directions,) if isinstance(directions, str) else tuple(directions)
    row = f"search(trials={trials!r}, directions={several!r}, storage={storage!r}, seed={seed!r})"
    settings = Settings(trials, several, sampler, pruner, seed, str(about), told)
    try:
        ranks.agree([zlib.crc32(row.encode())], row, _bad(settings, storage) or _bad_objects(objective, settings))
        result = _Search(ranks, Parts(ranks, ranks_per_trial, parallel), objective, settings, storage).run()
    except BaseException as error:
        if own and not ranks.closed:
            ranks.close() if everywhere(error, ranks.world) else ranks.abandon()
        raise
    if own:
        result.topology.close()
    return result


def _bad(settings: Settings, storage: Any) -> ArgumentError | None:
    trials, directions, seed = settings.trials, settings.directions, settings.seed
    if type(trials) is not int or trials < 1:
        return ArgumentError(f"trials={trials!r}: give an integer of at least 1")
    if not directions or not set(directions) <= set(DIRECTIONS):
        return ArgumentError(f"directions={directions!r}: give {' or '.join(DIRECTIONS)}, or one for each value")
    if storage is not None and (not isinstance(storage, str) or not storage):
        return ArgumentError(f"storage={storage!r}: give the name of a file, or None")
    if type(seed) is not int or seed < 0:
        return ArgumentError(f"seed={seed!r}: give an integer of at least 0")
    return None


def _bad_objects(objective: Any, settings: Settings) -> ArgumentError | None:
    try:
        module = optuna()
    except ArgumentError as error:
        return error
    sampler, pruner, told = settings.sampler, settings.pruner, settings.told
    if not callable(objective):
        return ArgumentError(f"objective={objective!r}: give a function of a trial and a topology")
    if sampler is not None and not isinstance(sampler, module.samplers.BaseSampler) and not callable(sampler):
        return ArgumentError(f"sampler={sampler!r}: give one of optuna's, a function that makes one of a seed, or None")
    if pruner is not None and not isinstance(pruner, module.pruners.BasePruner):
        return ArgumentError(f"pruner={pruner!r}: give one of optuna's, or None")
    if told is not None and not callable(told):
        return ArgumentError(f"told={told!r}: give a function, or None")
    return None


class _Search:
    """A search on this rank: its part runs trials until there are enough."""

    def __init__(
        self, topology: Topology, parts: Parts, objective: Objective, settings: Settings, storage: str | None
    ) -> None:
        """Open the journal. Collective. Closes the parts after an error."""
        self._topology, self._parts, self._objective, self._settings = topology, parts, objective, settings
        self._running: int | None = None  # the number of the trial that this part runs
        self._begin, self._busy = time.monotonic(), 0.0
        self._study: Study | None = None
        self._claim: Claim | None = None
        self._keeps, self._path = storage is not None, ""
        self._told: set[int] = set()  # the trials for which told= was called on this rank
        try:
            made = together(topology.world, lambda: self._prepare(storage) if topology.rank == 0 else None)
            self._path = root_value(topology.world, made, "learn the file of a search")
            together(topology.world, self._open_here)
        except Exception as error:
            self._release()
            parts.close() if everywhere(error, topology.world) else parts.topology.abandon()
            raise

    def _prepare(self, storage: str | None) -> str:
        """Claim the journal, and end the trials that a former job has left. On the first rank."""
        path = storage or str(Path(tempfile.mkdtemp(prefix="allreduce-search-")) / "journal")
        self._path = path
        self._claim = Claim(path, first=True)
        mend(path)
        study = self._opened(fresh=True)
        study.begin(self._settings.about)
        left = study.end_running(KILLED, again=True)
        if left:
            numbers = ", ".join(map(str, left))
            log.warning(
                "trainers: trials %s of a former job have failed (%s); their parameters go again", numbers, KILLED
            )
        self._claim.share()
        return path

    def _open_here(self) -> None:
        """Open the journal on the first rank of each part."""
        if not self._parts.leader or self._study is not None:
            return
        self._opened(fresh=False)

    def _opened(self, fresh: bool) -> Study:
        """Return this rank's study. Local. fresh: whether this call may begin the file."""
        if self._study is None and not fresh and not Path(self._path).exists():
            raise ArgumentError(
                f"the file of the search, {self._path}, is not there on rank {self._topology.rank}: give a file of a "
                "folder that all nodes share (storage=)"
            )
        if self._claim is None:
            self._claim = Claim(self._path, first=False)
            self._claim.share()
        if self._study is None:
            given = self._settings
            options = {"sampler": given.sampler, "pruner": given.pruner, "seed": given.seed, "fresh": fresh}
            self._study = Study(self._path, given.directions, **options)
        return self._study

    # The whole search

    def run(self) -> SearchResult:
        """Run the trials of this part, then wait for the other parts. Collective."""
        error: Exception | None = None
        try:
            while retry(self._parts.topology, self._next, self._recover):
                pass
            self._parts.close()
        except Exception as met:  # not of an objective: the other parts run on, and then all ranks raise it
            error, part = met, self._parts.topology
            if everywhere(met, part.world):
                part.close()
            else:
                part.detector.leave(_text(met))
                part.abandon()
        try:
            return retry(self._topology, partial(self._finish, error), lambda each: each.survivors(admit=False))
        finally:
            self._release()

    def _finish(self, error: Exception | None, topology: Topology) -> SearchResult:
        """Wait for all parts, and return the trials. Collective over the ranks that are left; may be repeated."""
        meet(topology, "wait for the other parts of a search")
        raise_together(topology.world, error)
        seconds = time.monotonic() - self._begin
        busy = all_values(topology.world, self._busy, "learn how long ranks were idle")
        first = topology.rank == 0
        table = together(topology.world, lambda: self._table() if first else None)
        (trials, best), seconds = root_value(topology.world, [table, seconds], "send the trials of a search")
        found = [Ended(*each) for each in trials]
        front = [each for each in found if each.number in best]
        idle = max(0.0, 1 - sum(busy) / (len(busy) * seconds)) if seconds else 0.0
        return SearchResult(found, front[0] if front else None, front, seconds, idle, topology)

    def _table(self) -> tuple[list[Ended], list[int]]:
        study = self._opened(fresh=False)
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
        number = root_value(topology.world, None if asked is None else asked.number, "ask for a trial")
        if number is None:
            return False
        self._running, begin = number, time.monotonic()
        inner = topology.split(0)  # an error in the objective breaks this one, and not the part's
        outcome = _Outcome(topology, inner)
        outcome.run(lambda: self._objective(Trial(number, inner, asked), inner), self._settings.directions)
        seconds = time.monotonic() - begin
        self._busy += seconds
        state, values, why = outcome.agree()
        about = {SECONDS: round(seconds, 3), RANKS: list(processes.world_ranks(topology.world))}
        if why is not None:
            about[WHY] = why
        together(topology.world, lambda: self._tell(number, state, values, about) if topology.rank == 0 else None)
        self._running = None
        return True

    def _ask(self) -> Any:
        return self._opened(fresh=False).ask(self._settings.trials)

    def _tell(self, number: int, state: str, values: list[float] | None, about: dict[str, Any]) -> None:
        told = self._opened(fresh=False).tell(number, state, values, **about)
        if self._settings.told is not None and number not in self._told:  # after a loss a trial may be told again
            self._told.add(number)
            self._settings.told(told)

    def _recover(self, topology: Topology) -> Topology:
        """Continue with the ranks of this part that are left; its trial has failed. Collective over these."""

        def repair(topology: Topology) -> None:
            running = all_values(topology.world, self._running, "learn which trial has lost a rank")
            lost = sorted({number for number in running if number is not None})
            about = {WHY: LOST, RANKS: list(processes.world_ranks(topology.world))}

            def tell() -> None:
                for number in lost if topology.rank == 0 else ():
                    self._tell(number, FAIL, None, about)

            together(topology.world, tell)
            self._running = None

        return recover(topology, repair, lambda _: self._parts.survivors())


class _Outcome:
    """How an objective ends on the ranks of a part.

    - A rank that returns or prunes first compares that with the other ranks, on the topology of the trial.
    - A rank whose objective raises waits a moment for the others. If they don't end too, they may wait for this rank,
      so it leaves the topology of the trial: their waits end in a RankLeftError.
    - When all ranks have ended, they learn how, and the part goes on.
    """

    def __init__(self, part: Topology, inner: Topology) -> None:
        self._part, self._inner = part, inner
        self._own: Outcome = (FAIL, None, None)
        self._follows = False  # the error of this rank only says that it has waited for another one
        self._broken = False  # calls of this rank were interrupted

    def run(self, objective: Callable[[], Any], directions: Sequence[str]) -> None:
        """Call the objective; return when it has ended on all ranks of the part. Collective over the part."""
        try:
            self._own = self._ended(objective, directions)
        except Exception as error:
            if ulfm.lost(error) is not None:
                self._part.detector.handle_failure()
                raise
            self._fail(error)
            leave = partial(self._leave, _text(error))
            meet(self._part, "the end of a trial", self._part.timeout, LATE_SECONDS, leave)
        else:
            meet(self._part, "the end of a trial", self._part.timeout)

    def _ended(self, objective: Callable[[], Any], directions: Sequence[str]) -> Outcome:
        try:
            returned = objective()
        except Exception as error:
            if not is_pruned(error):
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
        self._own = FAIL, None, _text(error)
        self._follows = isinstance(error, RankLeftError)
        self._broken = isinstance(error, AllReduceError) and not everywhere(error, self._inner.world)

    def _leave(self, why: str) -> None:
        self._broken = True
        self._inner.detector.leave(f"its objective has raised {why}")

    def agree(self) -> Outcome:
        """Return how the trial has ended, the same on all ranks. Collective over the part."""
        row = [*self._own, self._follows, self._broken]
        everyone = all_values(self._part.world, row, "learn how a trial has ended")
        if any(broken for *_, broken in everyone):
            self._inner.abandon()
        else:
            self._inner.close()
        failed = [(follows, rank, why) for rank, (state, _, why, follows, _) in enumerate(everyone) if state == FAIL]
        if not failed:
            state, values, *_ = everyone[0]
            return state, values, None
        _, rank, why = min(failed)
        alike = len(failed) == len(everyone) and len({why for *_, why in failed}) == 1
        return FAIL, None, why if alike else f"rank {processes.world_ranks(self._part.world)[rank]}: {why}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
