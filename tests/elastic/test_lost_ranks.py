"""Trainings that continue after failures: jobs under Open MPI's ULFM in which ranks kill themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import event_files
from tests.conftest import JobRunner, in_one_job
from tests.faults import job_of

LOADING = """
import os, sys
from mpi4py import MPI
from trainers import __main__ as command, datasets
load = datasets.load
def dies(*name, **options): return os.kill(os.getpid(), 9) if MPI.COMM_WORLD.rank == 1 else load(*name, **options)
datasets.load = dies
sys.exit(command.main())
"""

pytestmark = pytest.mark.jobs


def training(mpirun: JobRunner, ranks: int, name: str, *options: str) -> dict[str, Any]:
    job = mpirun(ranks, [*job_of("training"), name, *options], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    return json.loads(job.stdout.splitlines()[-1])


def check_like_alone(came: dict[str, Any]) -> None:
    """Every step counts once: the training equals that of one rank, to float tolerance."""
    for name in {"epoch", "loss", "accuracy", "validation_loss", "grad_norm"} & set(came["alone"][0]):
        np.testing.assert_allclose([e[name] for e in came["history"]], [e[name] for e in came["alone"]], rtol=1e-4)
    np.testing.assert_allclose(came["predicted"], came["predicted alone"], rtol=1e-3)
    assert len(set(came["sha256"])) == 1


def test_ranks_are_lost_one_after_another_down_to_one(mpirun: JobRunner) -> None:
    """With a loader; tests/faults/test_faults.py loses ranks of a training on arrays."""
    came = training(mpirun, 4, "several", "rows=whole")
    assert (came["ranks"], came["lost"]) == (1, [[0], [2], [1]])
    check_like_alone(came)
    ends = [text for text in came["told"] if text.startswith(("batch_end", "epoch_end"))]
    assert len(ends) == len(set(ends)) == 6 * 5 + 6  # each event once, on this rank


def test_the_rows_of_lost_ranks_are_missing(mpirun: JobRunner) -> None:
    """The last of four ranks trains on with its own quarter of the rows; the loss is the mean of the rows there are."""
    job = mpirun(4, [*job_of("training"), "several", "rows=divided"], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    came = json.loads(job.stdout.splitlines()[-1])
    assert (came["ranks"], came["lost"], came["steps"]) == (1, [[0], [2], [1]], 6 * 5)
    assert came["history"][-1]["loss"] < came["history"][0]["loss"]
    assert "the rows of the failed ranks are not trained on any more" in job.stderr


def test_a_rank_that_is_lost_in_local_sgd_costs_at_most_a_round(mpirun: JobRunner) -> None:
    """With fragments, and a round that no end of an epoch ends."""
    came = training(mpirun, 4, "local")
    assert (came["ranks"], came["lost"], came["steps"]) == (1, [[0], [2], [1]], 6 * 5)
    assert len(set(came["sha256"])) == 1
    begun = [text for text in came["told"] if text.startswith("batch_begin")]
    assert 6 * 5 <= len(begun) <= 6 * 5 + 3 * 4
    assert set(begun) == {f"batch_begin {epoch} {batch}" for epoch in range(6) for batch in range(5)}
    ends = [text for text in came["told"] if text.startswith("epoch_end")]
    assert ends == [f"epoch_end {epoch} 0" for epoch in range(6)]
    losses = [epoch["loss"] for epoch in came["history"]]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_ranks_are_lost_while_a_trainer_is_made(mpirun: JobRunner) -> None:
    came = training(mpirun, 4, "making")
    assert came["ranks"] == 2
    assert sorted(rank for lost in came["lost"] for rank in lost) == [1, 3]
    check_like_alone(came)


def test_an_edit_that_a_lost_rank_interrupts_is_done_once(mpirun: JobRunner) -> None:
    came = training(mpirun, 3, "edited")
    assert came["during"] == ["fit, epoch 2, step 6", "edit"]
    np.testing.assert_allclose(came["predicted"], came["predicted alone"], rtol=1e-3)


def test_a_rank_is_lost_while_the_command_loads_its_data(mpirun: JobRunner) -> None:
    job = mpirun(3, ["-c", LOADING, "--data", "iris", "--epochs", "2", "--on-failure", "continue"], ulfm=True)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "a rank failed before the training; the other ranks start again without it" in job.stderr
    assert "2 ranks on 1 node" in job.stdout
    assert "test accuracy" in job.stdout


def test_the_command_says_from_where_the_other_ranks_continue(tmp_path: Path) -> None:
    updates = [([], False), (["--update", "sharded"], True), (["--update", "sharded", "--backups", "1"], False)]
    once = ["--data", "iris", "--epochs", "1", "--on-failure", "continue", "--checkpoint"]
    lines = [[*once, str(tmp_path / str(number)), *update] for number, (update, _) in enumerate(updates)]
    found = in_one_job(2, [("trainers.cli.main", line, str(tmp_path)) for line in lines], tmp_path, ulfm=True)
    for (_, goes_back), (first, other) in zip(updates, found, strict=True):
        assert [first["code"], other["code"]] == [0, 0], first["stdout"] + first["stderr"]
        back = ", from the last checkpoint (with --backups 1 without one)" * goes_back
        assert f"if a rank fails: the other ranks continue{back}\n" in first["stdout"]


def served(mpirun: JobRunner, ranks: int, kind: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the results of the trainings of a job by their names, and what it has printed to stderr."""
    job = mpirun(ranks, [*job_of("served"), kind], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    return {each["name"]: each for each in map(json.loads, job.stdout.splitlines())}, job.stderr


def check_history(came: dict[str, dict[str, Any]], name: str, *more: str) -> None:
    """The history is that of one rank. more: metrics beside the usual ones."""
    exact = {"rtol": 1e-4} if name != "async" else {"atol": 0.25}  # whose order of updates is anybody's
    for metric in ("loss", "accuracy", "validation_loss", *more):
        found, wanted = ([epoch[metric] for epoch in came[each]["history"]] for each in (name, "alone"))
        np.testing.assert_allclose(found, wanted, **exact)
    assert len(set(came[name]["sha256"])) == 1


def staleness(came: dict[str, Any]) -> list[int]:
    """Return the number of updates of each epoch."""
    return [sum(epoch["staleness"]) for epoch in came["history"]]


def test_workers_are_lost_one_after_another_and_at_last_the_server(mpirun: JobRunner) -> None:
    """One of two servers, workers in asynchronous epochs, a spare replica, and then the only server."""
    came, said = served(mpirun, 6, "arrays")
    for name, ranks, lost in (("sync", 5, [[4]]), ("async", 3, [[0], [1]]), ("spare", 2, [[5]])):
        assert (came[name]["ranks"], sorted(came[name]["lost"])) == (ranks, lost)
        check_history(came, name, *["grad_norm"] * (name != "async"))
    assert set(staleness(came["async"])) == {5 * 3}  # each part counts once
    assert "a server has failed" in came["no server"]["error"]
    assert said.count(" continue") == 4, said  # a training without its server does not


@pytest.mark.parametrize("name", ["central", "sync", "async"])
def test_owners_keep_their_parts_where_a_second_rank_is_lost_in_the_recovery(mpirun: JobRunner, name: str) -> None:
    """The second one before the ranks have met: a number of a rank is then of the topology in between."""
    came, _ = served(mpirun, 5, name)
    assert (came[name]["ranks"], came[name]["servers"], came[name]["lost"]) == (3, [3], [[0, 1]])
    check_history(came, name)


def test_servers_and_spare_replicas_with_loaders_go_on_without_a_worker(mpirun: JobRunner) -> None:
    """Of divided rows, those of the lost worker are missing; whole batches are computed by the others."""
    came, said = served(mpirun, 6, "loaders")
    wanted = {"sync": (5, [[0]]), "async, whole": (4, [[2]]), "async": (3, [[1]]), "spare": (2, [[5]])}
    assert {name: (came[name]["ranks"], came[name]["lost"]) for name in wanted} == wanted
    assert all(len(set(came[name]["sha256"])) == 1 for name in wanted)
    for name in ("sync", "spare"):  # the epoch before the failure
        assert came[name]["history"][0]["loss"] == pytest.approx(came["alone"]["history"][0]["loss"], rel=1e-4)
    assert set(staleness(came["async, whole"])) == {5 * 3}  # each part counts once
    updates = staleness(came["async"])
    assert updates[0] == 5 * 3
    assert 5 * 2 <= updates[1] <= 5 * 3
    assert updates[2:] == [5 * 2] * 4
    assert said.count("the rows of the failed ranks are not trained on any more") == 3


def test_a_worker_goes_on_without_one_of_its_ranks_and_the_training_without_a_worker(mpirun: JobRunner) -> None:
    """The leader of a worker fails, another rank of a worker, and all ranks of a worker."""
    came, _ = served(mpirun, 6, "workers")
    for name, workers, lost in (("sync", [[0], [1], [2]], [[0], [4]]), ("async", [[0]], [[2], [3]])):
        assert (came[name]["workers"], sorted(came[name]["lost"])) == (workers, lost)
        check_history(came, name)
    assert set(staleness(came["async"])) == {5 * 2}  # each part counts once


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_ranks_that_wait_take_the_places_of_lost_ones(mpirun: JobRunner, kind: str, tmp_path: Path) -> None:
    job = mpirun(6, [*job_of("joining"), kind, tmp_path], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    assert lines.count("not needed") == (kind == "central")
    all_came = [json.loads(line) for line in lines if line != "not needed"]
    assert sorted(came["rank"] for came in all_came) == [0, 1, 2]
    for came in all_came:
        assert (came["ranks"], came["lost"]) == (3, [[1], [0]])
        assert came["history"] == all_came[0]["history"]
        check_like_alone(came)
    assert "rank 3 joined" in job.stderr
    assert "rank 4 joined" in job.stderr


def test_ranks_that_wait_take_the_places_of_lost_ones_in_local_sgd(mpirun: JobRunner) -> None:
    job = mpirun(6, [*job_of("joining"), "local"], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    all_came = [json.loads(line) for line in job.stdout.splitlines() if line != "not needed"]
    assert sorted(came["rank"] for came in all_came) == [0, 1, 2]
    for came in all_came:
        assert (came["ranks"], came["lost"], came["steps"]) == (3, [[1], [0]], 6 * 5)
        assert came["history"] == all_came[0]["history"]
        assert len(set(came["sha256"])) == 1


@pytest.mark.parametrize(("name", "ranks", "lost"), [("sharded", 3, [[1]]), ("storage", 4, [[0, 3]])])
def test_a_lost_part_of_the_state_is_gone_back_for(
    mpirun: JobRunner, name: str, ranks: int, lost: list, tmp_path: Path
) -> None:
    came = training(mpirun, ranks, name, f"folder={tmp_path}")
    assert (came["ranks"], came["lost"]) == (2, lost)
    check_like_alone(came)
    if name == "sharded":
        assert "a rank that failed in evaluate had the only copy of a part" in came["outside"]
        assert "continue with fit(..., checkpoint=folder, resume=True), by another trainer" in came["outside"]
        assert came["resumed"] == 6


def test_slices_with_a_backup_outlive_their_ranks(mpirun: JobRunner) -> None:
    """But not if a rank fails together with the holder of its backup. Also: a node in the exchange of backups, a rank
    while shared memory is half updated, another one in an evaluation of the parameters' average, the storage rank."""
    losing = ["shared:8:sent:0,1", "ring:3:exchange:3,4", "shared:8:update:1", "shared:8:evaluated:0"]
    job = mpirun(8, [*job_of("copies"), *losing, "central:8:exchange:0"], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    # In the order of rounds but for the lines of two processes that have been rank 0.
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    (failed,) = [line["error"] for line in lines if "error" in line]
    all_came = [line for line in lines if "error" not in line]
    assert "had the only copy of a part of the optimizer's state" in failed
    assert sorted((came["ranks"], came["lost"]) for came in all_came) == [(1, 1), (2, 1), (3, 1), (4, 2)]
    for came in all_came:
        check_like_alone(came)
    job = mpirun(
        4, [*job_of("copies"), "hierarchical_copy:2:update:1"], ulfm=True, timeout=60
    )  # rank 0 has not counted
    assert job.returncode == 0, job.stderr
    check_like_alone(json.loads(job.stdout))


def test_central_storage_goes_on_with_what_the_storage_has(mpirun: JobRunner) -> None:
    came = training(mpirun, 3, "central")
    assert (came["ranks"], came["lost"]) == (1, [[0], [2]])
    check_like_alone(came)


@pytest.mark.parametrize(
    ("moment", "lost_in", "total"),
    [("batch_begin,1,2", 3, 7), ("epoch_end,1,0", 6, 10)],
)
def test_a_training_stops_with_a_checkpoint_of_where_it_is(
    mpirun: JobRunner, moment: str, lost_in: int, total: int, tmp_path: Path
) -> None:
    """A resumed training has the same results as an uninterrupted one: each epoch is measured, and reported to
    callbacks, once."""
    job = mpirun(3, [*job_of("training"), "stop", f"folder={tmp_path}", f"moment={moment}"], ulfm=True, timeout=120)
    assert job.returncode == 1, job.stdout + job.stderr
    assert f"rank 0 of the job failed in fit, epoch 2, step {lost_in}; the job stops" in job.stderr
    assert max(tmp_path.glob("checkpoint-*")).name == f"checkpoint-{total:08d}.npz"
    came = training(mpirun, 2, "resumed", f"folder={tmp_path}")
    check_like_alone(came)
    assert came["told"][0] == f"epoch_begin {total // 5} 0"
    newest = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert f"checkpoint-{30:08d}.npz" in newest


def test_no_checkpoint_is_made_of_half_an_epoch(mpirun: JobRunner, tmp_path: Path) -> None:
    job = mpirun(3, [*job_of("training"), "stop apart", f"folder={tmp_path}"], ulfm=True, timeout=120)
    assert job.returncode == 1, job.stdout + job.stderr
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "no checkpoint is written in the middle of epoch 2" in job.stderr


@pytest.mark.parametrize(("way", "ranks", "dies"), [("continue", 3, 0), ("standby", 4, 1)])
def test_callbacks_go_on_when_ranks_are_lost_and_join(
    mpirun: JobRunner, way: str, ranks: int, dies: int, tmp_path: Path
) -> None:
    """All shipped callbacks do the same as on one rank, and a joining rank does not touch the files of rank 0."""
    pytest.importorskip("tensorboardX")
    job = mpirun(ranks, [*job_of("watched"), way, dies, tmp_path], ulfm=True, timeout=120)
    all_came = [json.loads(line) for line in job.stdout.splitlines()]
    assert sorted(came["rank"] for came in all_came) == list(range(2 if way == "continue" else 3)), job.stderr
    assert [came["began as"] for came in all_came if came["late"]] == ([] if way == "continue" else [-1])
    for came in all_came:
        alone = came["alone"]
        np.testing.assert_allclose(came["loss"], alone["loss"], rtol=1e-4)
        np.testing.assert_allclose(came["stopped"], alone["stopped"], rtol=1e-4)
        np.testing.assert_allclose(came["predicted"], alone["predicted"], rtol=1e-3)
        assert came["rates"].items() <= alone["rates"].items()
        if not came["late"]:
            assert came["rates"] == alone["rates"]
    epochs = len(all_came[0]["loss"])
    assert {path.stem for path in tmp_path.glob("*.npz")} == {"best", *map(str, range(1, epochs + 1))}
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", *map(str, range(epochs))]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(list((tmp_path / "logs" / "train").iterdir())) == (1 if dies else 2)
    shown = event_files.values(tmp_path / "logs" / "train")
    assert {value.step for value in shown if value.tag == "epoch_loss"} == set(range(epochs))
    lacking = set(range(1, 5 * epochs + 1)) - {value.step for value in shown if value.tag == "batch_loss"}
    assert lacking <= (set() if dies else {6, 7})  # rank 0 was killed before it had written them


@pytest.mark.parametrize(
    ("kind", "source", "dies", "left", "says"),
    [
        ("trainer", 2, 1, 2, False),
        ("optimizer", 0, 0, 1, True),
    ],
)
def test_the_replica_of_source_is_copied_after_a_loss(
    mpirun: JobRunner, kind: str, source: int, dies: int, left: int, says: bool
) -> None:
    """The replica of the same process is copied, whatever its rank is now. If that process has failed, a line says so
    and the majority's replica is copied."""
    if kind == "optimizer":
        pytest.importorskip("torch")
    job = mpirun(4, [*job_of("sources"), kind, source, dies], ulfm=True, timeout=120)
    all_came = [json.loads(line) for line in job.stdout.splitlines()]
    assert [came["ranks"] for came in all_came] == [3] * 3, job.stderr
    assert {came["left"] for came in all_came} == {left}, job.stderr
    assert (f"rank {dies} of the job, the source of copies" in job.stderr) == says


def test_an_error_of_a_rank_that_has_joined_ends_the_job_once(mpirun: JobRunner, tmp_path: Path) -> None:
    """The rank that raised it ends the job."""
    job = mpirun(4, [*job_of("watched"), "standby", 1, tmp_path, "injected"], ulfm=True, timeout=120)
    assert job.returncode == 1
    assert "rank 3 of 4: Traceback" in job.stderr
    assert job.stderr.count("InjectedError: rank 2: by the rank that has joined") == 1
    assert "rank 0 of 4: " not in job.stderr
    assert "rank 2 of 4: " not in job.stderr
