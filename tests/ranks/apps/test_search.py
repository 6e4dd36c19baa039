"""search on the ranks of a job: suggestions, pruning, failures, and what parts do with ranks that are left over."""

import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import ClosedError, CollectiveTimeoutError
from allreduce.transport.control import all_values
from allreduce.transport.wait import wait_for
from tests.ranks.together import raised_everywhere
from trainers.apps.search.parts import Parts
from trainers.apps.search.searching import SearchResult, search
from trainers.apps.search.study import Claim, Ended
from trainers.apps.search.trial import Trial
from trainers.errors import ArgumentError, SearchError

optuna = pytest.importorskip("optuna")
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
PART = min(2, SIZE)


def states(result: SearchResult) -> list[str]:
    return [each.state for each in result.trials]


def quadratic(trial: Trial, topology: allreduce.Topology) -> float:
    x = trial.suggest_float("x", -10, 10)
    choice = trial.suggest_categorical("choice", [True, 1, None, "a"])
    own = [x, trial.suggest_int("k", 1, 1000, log=True), trial.number, repr(choice)]
    assert all_values(topology.world, own, "compare") == [own] * topology.size
    return (x - 2) ** 2


def test_all_ranks_of_a_part_get_the_same(flat: allreduce.Topology, world: MPI.Intracomm, folder: Path) -> None:
    seen: list[int] = []
    result = search(quadratic, 5, flat, PART, storage=str(folder), told=lambda trial: seen.append(trial.number))
    assert states(result) == ["COMPLETE"] * 5, result.trials
    assert [each.number for each in result.trials] == list(range(5))
    assert sorted(number for own in world.allgather(seen) for number in own) == list(range(5))
    assert {rank for each in result.trials for rank in each.ranks} <= set(range(SIZE))
    assert min(len(each.ranks) for each in result.trials) >= PART
    assert result.best is not None
    assert result.best_value == min(each.values[0] for each in result.trials if each.values)
    assert set(world.allgather(zlib.crc32(repr(result.trials).encode()))) == {zlib.crc32(repr(result.trials).encode())}
    assert len(set(world.allgather(result.seconds))) == 1
    more = search(quadratic, 6, flat, PART, storage=str(folder))  # goes on
    assert more.trials[:5] == result.trials
    assert len(more.trials) == 6
    with pytest.raises(ArgumentError, match="its trials minimize, and this search is to maximize"):
        search(quadratic, 7, flat, directions="maximize", storage=str(folder))
    with pytest.raises(ArgumentError, match="its trials were of '', and this search is of 'other rows'"):
        search(quadratic, 7, flat, storage=str(folder), about="other rows")


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution:UserWarning")
def test_a_choice_is_the_object_that_was_given(flat: allreduce.Topology, folder: Path) -> None:
    """The journal and the other ranks get JSON, which has no tuples."""
    choices = [(64, 32), (128,), float("nan"), 1.0, 1, True, None]
    seen: list[int] = []

    def objective(trial: Trial, topology: allreduce.Topology) -> float:
        found = trial.suggest_categorical("sizes", choices)
        seen.append(next(number for number, each in enumerate(choices) if each is found))
        assert trial.params["sizes"] is found
        assert all_values(topology.world, seen[-1], "compare") == [seen[-1]] * topology.size
        return 1.0

    sampler = optuna.samplers.RandomSampler(seed=1)
    result = search(objective, 30, flat, SIZE, storage=str(folder), sampler=sampler)
    assert states(result) == ["COMPLETE"] * 30, result.trials
    assert set(seen) == set(range(len(choices)))


def test_one_part_is_repeatable(flat: allreduce.Topology) -> None:
    def params(trials: int, **options: Any) -> list[dict[str, Any]]:
        return [each.params for each in search(quadratic, trials, flat, SIZE, **options).trials]

    first = params(4, seed=3)
    assert params(4, seed=3) == first
    assert params(1, seed=4) != first[:1]


def test_objectives_that_fail_or_prune(flat: allreduce.Topology) -> None:
    """In a job of one rank, the rank is the odd one and the others."""
    ends: dict[str, list[str]] = {}

    def objective(trial: Trial, topology: allreduce.Topology) -> Any:
        last = topology.rank == topology.size - 1
        kind = trial.suggest_categorical("kind", KINDS)
        if kind == "raises" and last:
            raise KeyError("odd one")
        if kind == "raises while the others wait":
            if last:
                raise KeyError("odd one")
            topology.agree([1], "the others")
        if kind == "prunes":
            trial.report(1.0, 0)
            trial.should_prune()
            raise optuna.TrialPruned
        if kind == "suggests on one rank" and last and SIZE > 1:
            trial.suggest_float("x", 0, 1)
        if kind == "bad range":
            trial.suggest_float("x", 1, 0)
        if kind == "no number":
            trial.report("much", 0)
        return {"nan": float("nan"), "text": "much", "two": (1.0, 2.0)}.get(kind, 1.0)

    def told(trial: Any) -> None:
        ends.setdefault(trial.params["kind"], []).append(f"{trial.state}: {trial.reason}")

    sampler = optuna.samplers.GridSampler({"kind": KINDS}, seed=1)
    result = search(objective, 2 * len(KINDS), flat, SIZE, sampler=sampler, told=told)
    assert len(result.trials) == len(KINDS)  # the grid has no more
    for each in result.trials:
        state, reason = {**KINDS, **(ALONE if SIZE == 1 else {})}[each.params["kind"]]
        assert each.state == state, each
        assert reason in (each.reason or ""), each
    assert len({each.params["kind"] for each in result.trials}) == len(KINDS)


KINDS = {
    "fine": ("COMPLETE", ""),
    "raises": ("FAIL", f"rank {SIZE - 1}: KeyError: 'odd one'"),
    "raises while the others wait": ("FAIL", f"rank {SIZE - 1}: KeyError: 'odd one'"),
    "prunes": ("PRUNED", ""),
    "suggests on one rank": ("FAIL", "DisagreementError"),
    "bad range": ("FAIL", "ValueError"),
    "no number": ("FAIL", "The `value` argument is of type"),
    "nan": ("FAIL", "ArgumentError: the objective returned nan"),
    "text": ("FAIL", "ArgumentError: the objective must return numbers, got 'much'"),
    "two": ("FAIL", "expected 1 numbers"),
}
ALONE = {
    "raises": ("FAIL", "KeyError: 'odd one'"),
    "raises while the others wait": ("FAIL", "KeyError: 'odd one'"),
    "suggests on one rank": ("COMPLETE", ""),
}


@pytest.mark.parametrize("where", ["before_trial", "sample_independent", "after_trial", "prune"])
def test_a_sampler_that_fails_ends_the_search(flat: allreduce.Topology, world: MPI.Intracomm, where: str) -> None:
    """Its trials have not failed: it would be so in all of them."""
    told: list[Ended] = []

    def fail(*_: Any) -> None:
        raise KeyError("out of order")

    def objective(trial: Trial, topology: allreduce.Topology) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.report(x, 0)
        trial.should_prune()
        return x

    kind, failing = "sampler", optuna.samplers.RandomSampler(seed=1)
    if where == "prune":
        kind, failing = "pruner", optuna.pruners.NopPruner()
    setattr(failing, where, fail)
    options: dict[str, Any] = {kind: failing, "told": told.append}
    text = raised_everywhere(world, SearchError, lambda: search(objective, 3, flat, SIZE, **options))
    assert f"the {kind} has failed: KeyError: 'out of order'" in text
    assert not told


def test_the_topology_of_a_search_without_one_is_closed() -> None:
    result = search(quadratic, 1)
    for name in ("rank", "size"):
        with pytest.raises(ClosedError, match="this topology is closed"):
            getattr(result.topology, name)


def test_several_values(flat: allreduce.Topology) -> None:
    def pair(trial: Trial, topology: allreduce.Topology) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 1)
        return x, 1 - x

    result = search(pair, 4, flat, directions=("minimize", "maximize"), sampler=optuna.samplers.RandomSampler(seed=1))
    assert len(result.front) >= 1
    assert all(len(each.values or ()) == 2 for each in result.front)


def test_a_temporary_journal_is_removed_after_an_error(
    flat: allreduce.Topology, world: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(trial: Ended) -> None:
        raise ArgumentError("told")

    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    assert raised_everywhere(world, ArgumentError, lambda: search(quadratic, 1, flat, SIZE, told=told)).endswith("told")
    world.Barrier()
    assert not list(folder.parent.glob("allreduce-search-*"))


def test_a_broken_trial_leaves_few_communicators(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """MPICH has 2048 for a job. What a rank still waits in can't be freed."""
    inner = flat.split(0)
    waited, free = inner.private(), inner.private()
    if RANK == 0 and SIZE > 1:
        with pytest.raises(CollectiveTimeoutError):
            wait_for(waited, waited.Ibarrier(), "wait for nobody", limit=0.001)
    inner.dissolve(flat.world)
    assert inner.closed
    assert world.allgather(free == MPI.COMM_NULL) == [True] * SIZE
    assert world.allgather(waited == MPI.COMM_NULL) == [SIZE == 1] * SIZE


def test_bad_arguments(flat: allreduce.Topology, world: MPI.Intracomm, folder: Path) -> None:
    def error(**options: Any) -> str:
        given = {"trials": 1, **options}
        return raised_everywhere(world, ArgumentError, lambda: search(quadratic, topology=flat, **given))

    assert "trials must be an integer >= 1, got 0" in error(trials=0)
    assert "directions=('up',)" in error(directions="up")
    assert f"a part of {SIZE + 1} ranks" in error(ranks_per_trial=SIZE + 1)
    assert "directions=(3,)" in error(directions=3)
    assert "seed must be an integer >= 0, got -1" in error(seed=-1)
    assert "objective=None: give a function" in raised_everywhere(
        world,
        ArgumentError,
        lambda: search(None, 1, flat),  # type: ignore[arg-type]
    )
    assert "sampler='tpe': give one of optuna's" in error(sampler="tpe")
    assert "pruner=<class" in error(pruner=optuna.pruners.NopPruner)
    missing = str(folder / "none" / "journal")
    assert "can't be used: No such file" in error(storage=missing)
    path = str(folder)
    if RANK == 0:
        folder.write_text("something else\n")
    assert "is no journal of a search" in error(storage=path)
    claim = Claim(path, first=True) if RANK == 0 else None
    world.Barrier()
    assert "another job searches with this file" in error(storage=path)
    if claim is not None:
        claim.close()


# Parts of the ranks


@pytest.mark.parametrize("ranks_per_part", range(1, SIZE + 1))
def test_ranks_that_are_left_over_join_a_part(flat: allreduce.Topology, ranks_per_part: int) -> None:
    parts = Parts(flat, ranks_per_part)
    assert parts.count == SIZE // ranks_per_part
    sizes = [len(ranks) for ranks in parts.ranks]
    assert sum(parts.ranks, ()) == tuple(range(SIZE))  # neighbours stay together
    assert min(sizes) >= ranks_per_part
    assert max(sizes) <= min(sizes) + 1 or parts.count == 1
    assert (parts.topology.rank, parts.topology.size) == (parts.ranks[parts.index].index(RANK), sizes[parts.index])
    assert parts.leader == (parts.ranks[parts.index][0] == RANK)
    parts.close()


def test_there_are_at_most_so_many_parts(flat: allreduce.Topology) -> None:
    parts = Parts(flat, 1, most=2)
    assert parts.count == min(SIZE, 2)
    assert parts.topology.size in ((SIZE // 2, SIZE - SIZE // 2) if SIZE > 1 else (1,))
    parts.close()


def test_more_ranks_than_there_are(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    text = raised_everywhere(world, ArgumentError, lambda: Parts(flat, SIZE + 1))
    assert f"a part of {SIZE + 1} ranks: this job has {SIZE} rank" in text
    for bad in (0, True, 1.5, "2"):
        assert repr(bad) in raised_everywhere(world, ArgumentError, lambda bad=bad: Parts(flat, bad))
    assert "'x'" in raised_everywhere(world, ArgumentError, lambda: Parts(flat, 1, "x" if RANK == 0 else 1))  # type: ignore[arg-type]


def test_parts_work_on_their_own(flat: allreduce.Topology) -> None:
    parts = Parts(flat, 1)
    for _ in range(RANK):  # unequally often
        parts.topology.agree([RANK], "of one part alone")
    assert parts.count == SIZE
    parts.close()
    flat.agree([1], "all are there")
