"""The command `python -m trainers search`: finds the options with which a training is best."""

import argparse
import contextlib
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allreduce.elastic.ranks import on_all_ranks, root_value, together
from allreduce.files import writable
from allreduce.topology import Topology
from trainers import datasets
from trainers.apps.search.options import OF_THE_SEARCH, arguments
from trainers.apps.search.searching import SearchResult, search
from trainers.apps.search.study import COMPLETE, Ended, optuna
from trainers.apps.search.trial import Trial
from trainers.cli import results
from trainers.cli.command import Command
from trainers.cli.options import (
    BY_NAME,
    integer,
    make_callbacks,
    make_network,
    make_trainer,
    parse,
    step_options,
)
from trainers.datasets.dataset import split
from trainers.datasets.shards import is_pattern
from trainers.errors import ArgumentError, SearchError, as_error, needing
from trainers.files.model_file import replacing
from trainers.replicas.numpy.categories import load_network
from trainers.watching.callback import Callback, Logs

if TYPE_CHECKING:
    from trainers.apps.search.config import Tuning

ABOUT = """Find the options with which a training is best: trials of optuna's, on parts of the ranks.

The file of --config names the options that are varied (see the guide, "Search for the best options"). All other options
of python -m trainers can be given here, for all trials. A fifth of the rows to train is held out to compare the trials;
the test rows show only at the end how good the best model is.
"""
EXAMPLES = """examples:
  mpirun -n 4 python -m trainers search --config tuning.yaml --data digits
  mpirun -n 4 python -m trainers search --config tuning.yaml --ranks-per-trial 2 --storage search.journal
  mpirun -n 4 python -m trainers search --config tuning.yaml --save best.npz --json search.json
"""
WARM_UP_EPOCHS = 2  # in which no trial is pruned


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--config", metavar="FILE", required=True, help="the options to vary, and the goal: YAML")
    parser.add_argument(
        "--ranks-per-trial", metavar="N", type=integer(1),
        help="the ranks that train a trial together; ranks that are left over join the first trials (default: 1, or "
        "all ranks divided by maxParallelTrials)",
    )  # fmt: skip
    parser.add_argument(
        "--storage", metavar="FILE",
        help="keep the trials in this file, optuna's journal; the same command then goes on with them",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE", help="write the best trial's model (.npz)")
    parser.add_argument("--json", metavar="FILE", help="write the trials; - writes them to stdout, all else to stderr")


class SearchCommand(Command):
    """The command `search`: it passes arguments that it does not know on to the trainings."""

    def parse(self, arguments: Sequence[str], shown: bool, program: str) -> Any:
        """As Command.parse: the options of the search, the other arguments, and these as the options of a training."""
        options, base = self.parser(shown, program).parse_known_args(arguments)
        for given in base:
            name = given.partition("=")[0].removeprefix("--").replace("-", "_")
            if given.startswith("--") and name in OF_THE_SEARCH:  # the search's options have been taken out
                raise ArgumentError(f"{given}: a search does not take this option of a training")
        return options, base, parse(base, shown, program)


COMMAND = SearchCommand("--config FILE [OPTION...]", ABOUT, EXAMPLES, add_options)


class Job(NamedTuple):
    """The options of the search, those of each trial, and the data; the same on all ranks."""

    options: argparse.Namespace
    base: list[str]
    tuning: "Tuning"
    data: datasets.Dataset
    rest: tuple[np.ndarray, np.ndarray]  # rows that compare the trials

    @property
    def stream(self) -> Any:
        return sys.stderr if self.options.json == results.STANDARD_OUTPUT else sys.stdout


def run(given: Sequence[str], world: Topology, program: str) -> None:
    """Run the command. Collective. Raises the same error on all ranks."""
    job = together(world.world, lambda: _read(given, world, program))
    with _models(job.options, world) as models:
        if world.rank == 0:
            _say(job, f"{world}; data: {job.data}\n{_about(job)}")
        keeper = Keeper(job, models)
        result = search(
            keeper.objective,
            job.tuning.trials,
            world,
            _ranks_per_trial(job.options, job.tuning, world.size),
            parallel=job.tuning.parallel,
            directions=job.tuning.direction,
            pruner=_pruner(job.tuning),
            storage=job.options.storage or str(Path(models) / "journal"),
            seed=parse(job.base, shown=False).seed,
            about=" ".join([job.data.name, job.tuning.metric, *job.base]),
            told=keeper.told,
        )
        together(result.topology.world, lambda: _end(job, result, models) if result.topology.rank == 0 else None)
        if result.best is None:
            raise on_all_ranks(_none_is_complete(result), result.topology.world)
        if result.topology is not world:
            result.topology.close()


def _read(given: Sequence[str], world: Topology, program: str) -> Job:
    """Read the options, the tuning and the data, and check everything. Local."""
    options, base, first = COMMAND.parse(given, world.rank == 0, program)
    found = _tuning(options.config)
    for parameter in found.parameters:
        if any(each.partition("=")[0] == BY_NAME[parameter.name].flag for each in base):
            raise ArgumentError(f"{BY_NAME[parameter.name].flag} is varied by --config; leave it out here")
    found.check(base)
    optuna()
    _check_files(options)
    if is_pattern(first.data):
        raise ArgumentError(f"--data {first.data}: a search takes one file or folder, not a pattern of files")
    data = datasets.load(first.data, first.label, ignore=first.ignore or (), categories=first.categories or ())
    held = split(data.y_train)
    trained = dataclasses.replace(data, x_train=data.x_train[~held], y_train=data.y_train[~held])
    return Job(options, base, found, trained, (data.x_train[held], data.y_train[held]))


def _tuning(path: str) -> "Tuning":
    with needing('--config needs pydantic and pyyaml ({}): pip install ".[search]" in the checkout'):
        from trainers.apps.search import config
    return config.load(path)


def _check_files(options: argparse.Namespace) -> None:
    for name in ("save", "json", "storage"):
        path = getattr(options, name)
        if path and not (name == "json" and path == results.STANDARD_OUTPUT) and not writable(path):
            raise ArgumentError(f"--{name} {path}: this can't be written; give a file in a folder that exists")


def _ranks_per_trial(options: argparse.Namespace, tuned: "Tuning", ranks: int) -> int:
    given: int | None = options.ranks_per_trial
    return given or max(1, ranks // (tuned.parallel or ranks))


def _pruner(tuned: "Tuning") -> Any:
    pruners = optuna().pruners
    if tuned.halves is not None:
        return pruners.SuccessiveHalvingPruner(min_resource=tuned.halves.first, reduction_factor=tuned.halves.factor)
    return pruners.MedianPruner(n_warmup_steps=WARM_UP_EPOCHS + 1) if tuned.prunes else pruners.NopPruner()


@contextlib.contextmanager
def _models(options: argparse.Namespace, world: Topology) -> Iterator[str]:
    """Context manager: the folder of the trials' models, beside the journal; a temporary one without --storage."""
    given = f"{options.storage}.models" if options.storage else None

    def made() -> str:
        if given is None:
            return tempfile.mkdtemp(prefix="allreduce-search-")
        with as_error(ArgumentError, f"{given} can't be made"):
            Path(given).mkdir(exist_ok=True)
        return given

    folder = together(world.world, lambda: made() if world.rank == 0 else None)
    folder = root_value(world.world, folder, "learn the folder of the models")
    try:
        yield folder
    finally:
        if given is None:  # also after the loss of rank 0
            shutil.rmtree(folder, ignore_errors=True)


class Keeper:
    """Runs the trials of this rank's part, and keeps the file of the best model."""

    def __init__(self, job: Job, models: str) -> None:
        self._job, self._models = job, Path(models)
        self._best: tuple[float, int] | None = None  # of this part: the value and the number of the trial

    def objective(self, trial: Trial, topology: Topology) -> float:
        """Train with the trial's options; returns the metric. Collective over the trial's ranks."""
        job, tuned = self._job, self._job.tuning
        options = parse([*job.base, *tuned.suggest(trial)], shown=False)
        network = together(topology.world, lambda: make_network(options, job.data))
        watch = Watching(trial, tuned.metric, tuned.prunes)
        with make_trainer(options, network, topology) as trainer:
            trainer.fit(
                job.data.x_train,
                job.data.y_train,
                options.epochs,
                options.batch_size,
                seed=options.seed,
                validation_data=job.rest,
                callbacks=[watch, *make_callbacks(options)],
                progress=False,
                **step_options(options),
            )
            if watch.pruned:
                raise optuna().TrialPruned()
            if watch.value is None:
                raise ArgumentError(f"--epochs {options.epochs}: a trial needs an epoch, whose {tuned.metric} counts")
            trainer.save(str(file_of(self._models, trial.number)))
        return watch.value

    def told(self, trial: Ended) -> None:
        """Print a trial that has ended, and remove models that are not the best of this part. On its first rank."""
        _say(self._job, line_of(trial))
        if trial.state != COMPLETE or trial.values is None:
            file_of(self._models, trial.number).unlink(missing_ok=True)
            return
        value = trial.values[0] * (1 if self._job.tuning.goal == "MAXIMIZE" else -1)
        former, this = self._best, (value, trial.number)
        self._best = this if former is None or value > former[0] else former
        for _, number in {former or this, this} - {self._best}:
            file_of(self._models, number).unlink(missing_ok=True)


class Watching(Callback):
    """Ends the fit of a trial if the pruner says so.

    value: the metric of the last epoch, or None. pruned: whether the pruner has ended the fit.
    """

    collective = True
    reads_batches = reads_model = False

    def __init__(self, trial: Trial, metric: str, prunes: bool) -> None:
        self._trial, self._metric, self._prunes = trial, metric, prunes
        self.pruned = False
        self.value: float | None = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.trainer.group.enter("Watching")
        self.value = float((logs or {})[self._metric])
        self._trial.report(self.value, epoch + 1)
        if self._prunes and self._trial.should_prune():
            self.pruned = self.trainer.stop_training = True


# What is shown and written


def file_of(models: str | Path, number: int) -> Path:
    return Path(models) / f"trial-{number}.npz"


def _about(job: Job) -> str:
    tuned = job.tuning
    varied = ", ".join(each.name for each in tuned.parameters)
    rungs = f", successive halving from epoch {tuned.halves.first} by {tuned.halves.factor}" if tuned.halves else ""
    return f"search: {tuned.trials} trials, {tuned.goal} {tuned.metric}, varies {varied}{rungs}"


def line_of(trial: Ended) -> str:
    """Return a trial as a line of text."""
    values = " ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
    end = f"{trial.values[0]:.4f}" if trial.values else trial.state.lower()
    why = f"  {trial.reason.splitlines()[0]}" if trial.reason else ""
    seconds = "" if trial.seconds is None else f"{trial.seconds:.1f} s"
    return f"trial {trial.number:>3}  {end:>8}  {seconds:>8}  {values}{why}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _end(job: Job, result: SearchResult, models: str) -> None:
    """Show and write the results. On the first rank."""
    options, best = job.options, result.best
    states = [each.state.lower() for each in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [f"{len(states)} trials: {counts}; {result.seconds:.1f} s"]
    accuracy = None
    if best is not None:
        lines.append(f"best: {line_of(best)}")
        lines.append(f"options: {' '.join(arguments(best.params))}")
        kept = file_of(models, best.number)
        if kept.exists():
            accuracy = test_accuracy(str(kept), job.data)
            lines.append(f"test accuracy of the best model: {accuracy:.4f}")
            if options.save:
                with replacing(options.save) as file:
                    file.write(kept.read_bytes())
                lines.append(f"saved: {options.save}")
        elif options.save:
            lines.append(f"the best trial's model is not in {models}, so --save writes nothing")
    _say(job, "\n".join(lines))
    if options.json:
        results.write_json(options.json, _as_json(job, result, accuracy))


def _none_is_complete(result: SearchResult) -> SearchError:
    reasons = [each.reason for each in result.trials if each.reason]
    why = f"; the first reason: {reasons[0]}" if reasons else ""
    return SearchError(f"none of {len(result.trials)} trials is complete{why}")


def test_accuracy(path: str, data: datasets.Dataset) -> float:
    """Return the share of test rows whose class a saved model predicts. Local."""
    network = load_network(path)
    return float((network.predict(data.x_test).argmax(axis=1) == data.y_test).mean())


def _as_json(job: Job, result: SearchResult, accuracy: float | None) -> dict[str, Any]:
    tuned = job.tuning
    return {
        "data": job.data.name,
        "goal": tuned.goal,
        "metric": tuned.metric,
        "trials": [each._asdict() for each in result.trials],
        "best": None if result.best is None else result.best.number,
        "best_value": result.best_value,
        "best_options": result.best_params,
        "test_accuracy": accuracy,
        "seconds": result.seconds,
        "ranks": result.topology.size,
    }


def _say(job: Job, text: str) -> None:
    print(text, file=job.stream, flush=True)
