"""Successive halving on the ranks of a job: rungs, parts that grow, failures, and searches that go on."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.together import raised_everywhere
from trainers.errors import ArgumentError

optuna = pytest.importorskip("optuna")

from trainers.many.halving import Halving  # noqa: E402
from trainers.many.parts import Parts  # noqa: E402
from trainers.many.search import SearchResult, search  # noqa: E402
from trainers.many.study import Ended  # noqa: E402
from trainers.many.trial import Trial  # noqa: E402

SIZE = MPI.COMM_WORLD.size
HALVING = Halving(1, 2, 4)  # 7 trials: 7, 3, 1


class Objective:
    """The value is x; a file in the trial's folder has the budget up to which it was trained."""

    def __init__(self, fails: Any = lambda trial: False) -> None:
        self._fails = fails
        self.begun: list[tuple[int, int, int]] = []

    def __call__(self, trial: Trial, topology: allreduce.Topology) -> float:
        x = trial.suggest_float("x", 0, 1)
        assert trial.folder is not None
        assert trial.budget is not None
        trained = Path(trial.folder) / "trained"
        before = int(trained.read_text()) if trained.exists() else 0
        assert before == (0, *HALVING.budgets)[trial.rung]
        self.begun.append((trial.number, trial.rung, topology.size))
        if self._fails(trial) and (trial.rung == 0 or topology.rank == topology.size - 1):  # the others wait for it
            raise KeyError("odd one")
        topology.agree([trial.budget], "train")
        if topology.rank == 0:
            trained.write_text(str(trial.budget))
        return x


def rungs(result: SearchResult) -> list[int]:
    """Return how many trials have ended each rung."""
    return [sum(len(each.rungs) > rung for each in result.trials) for rung in range(len(HALVING.budgets))]


def test_the_best_trials_go_on_with_more_ranks(flat: allreduce.Topology, world: MPI.Intracomm, folder: Path) -> None:
    objective, told = Objective(), []
    options: dict[str, Any] = {"halving": HALVING, "directions": "maximize", "storage": str(folder)}
    result = search(objective, 7, flat, told=lambda trial: told.append(trial.number), **options)
    assert rungs(result) == [7, 3, 1], result.trials
    assert [each.state for each in result.trials].count("COMPLETE") == 1
    assert [each.state for each in result.trials].count("PRUNED") == 6
    order = sorted(result.trials, key=lambda each: -each.params["x"])
    assert [len(each.rungs) for each in order] == [3, 2, 2, 1, 1, 1, 1]
    assert result.best == order[0]
    assert [row[:2] for row in order[0].rungs] == [[budget, order[0].params["x"]] for budget in (1, 2, 4)]
    assert len(order[0].rungs[-1][3]) == SIZE
    begun = sorted({each for own in world.allgather(objective.begun) for each in own})
    assert len(begun) == 7 + 3 + 1
    assert sorted(each for own in world.allgather(told) for each in own) == list(range(7))
    world.Barrier()
    assert not list(Path(f"{folder}.checkpoints").glob("*"))
    more = search(Objective(), 9, flat, **options)  # another bracket: 2, 1, 1
    assert more.trials[:7] == result.trials
    assert rungs(more) == [9, 4, 2]
    with pytest.raises(ArgumentError, match=r"its trials were of 'Halving\(first=1, factor=2, last=4\)'"):
        search(objective, 9, flat, **{**options, "halving": Halving(1, 2, 5)})


def test_trials_that_fail(flat: allreduce.Topology) -> None:
    def failed(trials: int, fails: Any) -> SearchResult:
        result = search(Objective(fails), trials, flat, halving=HALVING, sampler=optuna.samplers.RandomSampler)
        assert all("KeyError: 'odd one'" in (each.reason or "") for each in result.trials if each.state == "FAIL")
        return result

    result = failed(7, lambda trial: trial.rung == 0 and trial.number > 1)  # fewer are left than may go on
    assert rungs(result) == [2, 2, 1]
    assert [each.state for each in result.trials].count("FAIL") == 5
    result = failed(3, lambda trial: trial.rung == 1)
    assert rungs(result) == [3, 0, 0]
    assert result.best is None
    assert [each.state for each in result.trials].count("FAIL") == 1


def test_a_search_goes_on_from_its_rung(flat: allreduce.Topology, world: MPI.Intracomm, folder: Path) -> None:
    """An error of `told` ends the first search in its second rung."""
    options: dict[str, Any] = {"halving": HALVING, "storage": str(folder), "seed": 2}

    def told(trial: Ended) -> None:
        raise RuntimeError("the first trial that has lost")

    first, second = Objective(), Objective()
    text = raised_everywhere(world, RuntimeError, lambda: search(first, 7, flat, told=told, **options))
    assert "the first trial that has lost" in text
    result = search(second, 7, flat, **options)
    assert rungs(result) == [7, 3, 1]
    again = {number for own in world.allgather(second.begun) for number, rung, _ in own if rung == 0}
    assert not again


def test_two_searches_at_once(flat: allreduce.Topology) -> None:
    parts = Parts(flat, max(1, SIZE // 2), most=2)
    result = search(Objective(), 7, parts.topology, halving=HALVING, seed=parts.index)
    assert rungs(result) == [7, 3, 1]
    assert {rank for each in result.trials for rank in each.ranks} <= set(parts.ranks[parts.index])
    parts.close()


def test_bad_arguments(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    def error(**options: Any) -> str:
        given = {"halving": HALVING, **options}
        return raised_everywhere(world, ArgumentError, lambda: search(Objective(), 1, flat, **given))

    assert "successive halving compares one value" in error(directions=("minimize", "maximize"))
    assert "leave out one of the two" in error(pruner=optuna.pruners.MedianPruner())
    assert "halving=3: give a Halving" in error(halving=3)
