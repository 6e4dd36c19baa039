"""The study of a search: optuna's trials in a journal file, which several processes use at once. No MPI here.

Each process that asks for trials opens the same file, and optuna locks it. No rank serves the others, so the search
continues whichever ranks fail. Asking is "count the trials, then create one", so it has a lock of its own.

Every trial is told once: as complete, pruned or failed. A trial whose job was killed is still RUNNING in the file. The
next job tells it as failed, and queues its parameters again, at most MOST_ATTEMPTS times. It does not count twice.
"""

import contextlib
import fcntl
import io
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainers.errors import ArgumentError, SearchError, needing

STUDY = "search"  # the study's name in the file
MOST_ATTEMPTS = 3  # how often the parameters of a trial begin, if a job ends meanwhile
GRACE_SECONDS = 10  # after which optuna's lock of a killed process is released
WHY, REPEATS, ATTEMPT, SECONDS, RANKS = "reason", "repeats", "attempt", "seconds", "ranks"  # attributes of a trial
STOPPED, ABOUT = "stopped", "about"  # attributes of the study: no trial begins; see Study.begin
SAMPLER, SIGTERM = "sampler", "SIGTERM"  # what has stopped the study
DIRECTIONS = ("minimize", "maximize")
COMPLETE, PRUNED, FAIL = "COMPLETE", "PRUNED", "FAIL"  # how a trial ends; optuna's names


def optuna() -> Any:
    """Import optuna. Raises ArgumentError if it is not installed."""
    with needing('a search needs optuna ({}): pip install ".[search]" in the checkout'):
        import optuna as module
    module.logging.set_verbosity(module.logging.WARNING)
    return module


class Ended(NamedTuple):
    """A trial that has ended, as text and numbers.

    state: "COMPLETE", "PRUNED" or "FAIL". values: of the objective, None unless complete. reason: why it failed.
    seconds: of the objective. ranks: of MPI.COMM_WORLD, on which it ran. repeats: the trial whose parameters it had,
    because the job of that trial was killed.
    """

    number: int
    state: str
    values: list[float] | None
    params: dict[str, Any]
    reason: str | None
    seconds: float | None
    ranks: list[int]
    repeats: int | None


class Study:
    """An optuna study in a journal file. path: of the file, in a folder that all ranks see.

    directions: "minimize" or "maximize", for each value of the objective. sampler: one of optuna's; it gets new random
    numbers unless `fresh`. None: TPE with a seed that depends on `seed` and on the trial's number, so that the same
    trials follow the same trials. pruner: one of optuna's; None: its default.

    Raises ArgumentError if the file is not such a journal, or was begun with other directions.
    """

    def __init__(
        self,
        path: str,
        directions: Sequence[str],
        *,
        sampler: Any = None,
        pruner: Any = None,
        seed: int = 0,
        fresh: bool = True,
    ) -> None:
        module = optuna()
        journal = module.storages.journal
        self._path, self._seed, self._seeds_sampler = path, seed, sampler is None
        lock = journal.JournalFileSymlinkLock(path, grace_period=GRACE_SECONDS)
        try:
            self._storage = module.storages.JournalStorage(journal.JournalFileBackend(path, lock_obj=lock))
            self.study = module.create_study(
                storage=self._storage,
                study_name=STUDY,
                directions=list(directions),
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # of a file with other content
            raise ArgumentError(f"{path} is no journal of a search ({type(error).__name__}: {error})") from error
        if [each.name.lower() for each in self.study.directions] != list(directions):
            begun = ", ".join(each.name.lower() for each in self.study.directions)
            raise ArgumentError(
                f"{path}: its trials {begun}, and this search is to {', '.join(directions)}; give another file"
            )
        self.study.stop = self.stop  # which samplers call that have tried everything; optuna's needs its own loop
        if sampler is not None and (not fresh or self.trials()):
            sampler.reseed_rng()  # else it would repeat the points of another part, or of the former job

    def ask(self, most: int) -> Any:
        """Return a new trial of optuna's, queued ones first; None if there are `most`, or the sampler has no more."""
        with locked(f"{self._path}.ask"):
            trials = self.trials()
            waiting = any(trial.state.name == "WAITING" for trial in trials)
            if self.stopped == SIGTERM or (not waiting and (self.stopped or counted(trials) >= most)):
                return None
            if self._seeds_sampler:
                seed = zlib.crc32(f"{self._seed} {len(trials)}".encode())
                self.study.sampler = optuna().samplers.TPESampler(seed=seed)
            with failing("sampler"):
                return self.study.ask()

    def tell(self, number: int, state: str, values: Sequence[float] | None = None, **attributes: Any) -> Ended:
        """Tell how a trial has ended, unless that was told before; return it. attributes: WHY, SECONDS, RANKS."""
        trial_id = self._id_of(number)
        if not self._storage.get_trial(trial_id).state.is_finished():
            for name, value in attributes.items():
                self._storage.set_trial_system_attr(trial_id, name, value)
            told = optuna().trial.TrialState[state]
            with failing("sampler"):
                given = list(values) if state == COMPLETE and values else None
                self.study.tell(number, given, told, skip_if_finished=True)
        return ended(self._storage.get_trial(trial_id))

    def begin(self, about: str) -> None:
        """Begin a job. about: what is equal in all trials; ArgumentError if a former job had another text.

        A former job may have stopped the study; it goes on.
        """
        attributes = self.study.user_attrs
        if self.stopped:
            self.stop("")
        if (former := attributes.get(ABOUT, about)) != about:
            raise ArgumentError(
                f"{self._path}: its trials were of {former!r}, and this search is of {about!r}, so they can't be "
                "compared; give another file"
            )
        if ABOUT not in attributes:
            self.study.set_user_attr(ABOUT, about)

    def stop(self, why: str = SAMPLER) -> None:
        """Let no part begin another trial, but those that are queued if the sampler has tried everything."""
        self.study.set_user_attr(STOPPED, why)

    @property
    def stopped(self) -> str:
        """Why no trial begins any more, SAMPLER or SIGTERM; "" if trials begin."""
        return str(self.study.user_attrs.get(STOPPED) or "")

    def _id_of(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(STUDY)
        return int(self._storage.get_trial_id_from_study_id_trial_number(study, number))

    def end_running(self, why: str, again: bool) -> list[int]:
        """Tell all trials that are RUNNING as failed, because no rank runs them any more; return their numbers.

        again: queue their parameters, as trials that don't count.
        """
        trials = self.trials()
        repeated = {trial.system_attrs.get(REPEATS) for trial in trials}
        running = [trial for trial in trials if trial.state.name == "RUNNING"]
        for trial in running:
            attempt = trial.system_attrs.get(ATTEMPT, 1)
            if again and trial.number not in repeated and attempt < MOST_ATTEMPTS:
                self._repeat(trial, attempt + 1)
            self.tell(trial.number, FAIL, None, **{WHY: why})
        return [trial.number for trial in running]

    def _repeat(self, trial: Any, attempt: int) -> None:
        """Queue a trial's parameters, with what its sampler knows of it."""
        about = {**trial.system_attrs, REPEATS: trial.number, ATTEMPT: attempt}
        given = {"params": trial.params, "distributions": trial.distributions, "system_attrs": about}
        module = optuna().trial
        self.study.add_trial(module.create_trial(state=module.TrialState.WAITING, **given))

    def ended(self) -> list[Ended]:
        """Return all trials that have ended."""
        return [ended(trial) for trial in self.trials() if trial.state.is_finished()]

    def best(self) -> list[int]:
        """Return the number of the best trial; with several directions those of the Pareto front."""
        if not any(trial.state.name == COMPLETE for trial in self.trials()):
            return []
        if len(self.study.directions) == 1:
            return [self.study.best_trial.number]
        return [trial.number for trial in self.study.best_trials]

    def trials(self) -> list[Any]:
        """Return all trials, as optuna's FrozenTrials."""
        return list(self.study.get_trials(deepcopy=False))


def failure_of(name: str, error: Exception) -> SearchError:
    """Return the error of a search whose sampler or pruner has raised `error`. name: "sampler" or "pruner"."""
    return SearchError(f"the {name} has failed: {type(error).__name__}: {error}")


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Context manager: an error of the sampler or pruner becomes a SearchError, for all trials would have it."""
    try:
        yield
    except Exception as error:
        raise failure_of(name, error) from error


def counted(trials: Sequence[Any]) -> int:
    """Return how many trials there are, without those that repeat others."""
    return sum(REPEATS not in trial.system_attrs for trial in trials)


def ended(trial: Any) -> Ended:
    """Return a FrozenTrial of optuna's as an Ended."""
    values = [float(value) for value in trial.values] if trial.state.name == COMPLETE else None
    why, seconds, ranks, repeats = (trial.system_attrs.get(name) for name in (WHY, SECONDS, RANKS, REPEATS))
    return Ended(trial.number, trial.state.name, values, dict(trial.params), why, seconds, list(ranks or ()), repeats)


# Locks, which end with their process


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Context manager: hold the lock file alone."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Claim:
    """This job's claim on a journal file: while a job lives, no other job may take its trials for killed ones.

    The ranks of a job that open the file share the claim. Raises ArgumentError if another job has it.
    """

    def __init__(self, path: str, first: bool) -> None:
        """first: of the job's ranks, this one comes first: it checks that there is no other job."""
        self._path = path
        try:
            self._file = io.FileIO(f"{path}.job", "a+")  # on NFS a shared lock needs reading, the other one writing
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if first:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._file, fcntl.LOCK_SH)  # with the other ranks of this job
        except BlockingIOError as error:
            self.close()
            raise ArgumentError(
                f"{self._path}: another job searches with this file; wait for its end, or give another"
            ) from error
        except OSError as error:
            self.close()
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ArgumentError:
        return ArgumentError(f"{self._path} can't be used: {error.strerror or error}; give a file of a folder")

    def close(self) -> None:
        """Give the claim up. Local."""
        self._file.close()


def mend(path: str) -> None:
    """Remove an unfinished line from the end of a journal: its writer was killed. Only while no process writes."""
    file = Path(path)
    if not file.exists():
        return
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        logging.getLogger("trainers").warning("trainers: %s ends in an unfinished line, which is removed", path)
        os.truncate(path, content.rfind(b"\n") + 1)
