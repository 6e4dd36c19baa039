"""The drivers of tests.faults, in short: the table of leaks, and one job for each kind of fault."""

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from tests.faults import drawing, jobs, judging, notes, plans, points, soak
from tests.faults.programs import model
from tests.faults.programs import soak as program


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_nothing_leaks(mpirun: JobRunner, mpi: str) -> None:
    job = mpirun(2, ["-m", "tests.faults.leaks", "--scale", "0.01"], mpi=mpi, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "nothing grew" in job.stdout


SAID = {  # texts that a job must print
    "losses of divided rows": "the rows of the failed ranks are not trained on any more",
    "a worker of divided rows is lost": "the rows of the failed ranks are not trained on any more",
    **dict.fromkeys(("standby ranks", "standby ranks, local SGD"), r"rank 3 joined[\s\S]*rank 4 joined"),
}


@pytest.mark.jobs
@pytest.mark.parametrize("name", plans.SHORT)
def test_what_must_be_seen_of_a_fault_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault ends the job with a message, or is survived with the right result; tests.faults draws more of them."""
    plan = plans.SCENARIOS[name]
    if plan.framework == "torch":
        pytest.importorskip("torch")
    if any(fault.kind == "shm" for fault in plan.faults) and os.geteuid() != 0:
        pytest.skip("only root can mount a /dev/shm")
    try:
        monkeypatch.setattr(sys, "executable", str(launch.environment("openmpi") / "bin" / "python"))
    except launch.MissingEnvironmentError as error:
        lacking(error)
    ended = jobs.run(plan, tmp_path, 60)
    judged = judging.judge(plan, ended, tmp_path)
    losses = [fault for fault in plan.faults if fault.kind == "kill"]
    assert judged.outcome == (judging.ORDERLY if name.startswith("nobody") else wanted(plan)), (
        f"{judged.why}\n{ended.printed}"
    )
    assert len(judged.faults) == len(plan.faults), "one did not come to happen"
    assert re.search(SAID.get(name, ""), ended.printed), ended.printed
    assert not losses or name.startswith("nobody") or any(fault.seconds is not None for fault in judged.faults)


def wanted(plan: plans.Plan) -> str:
    """Return the right outcome of a run."""
    if any(plans.KINDS[fault.kind].ends for fault in plan.faults):
        return judging.ORDERLY
    return {"differ": judging.REFUSED, "spoil": judging.FOUND}.get(plan.faults[0].kind, judging.SURVIVED)


def test_every_run_of_a_number_is_the_same_and_leaves_somebody() -> None:
    drawn = [drawing.draw(number) for number in range(1000)]
    assert drawn == [drawing.draw(number) for number in range(1000)]
    for plan in drawn:
        assert plan == plans.Plan.of_dict(json.loads(json.dumps(plan.as_dict())))
        victims = [fault.rank for fault in plan.faults]
        assert 1 <= len(set(victims)) == len(victims) < plan.ranks
    assert {plan.program for plan in drawn} == set(plans.PROGRAMS)
    met = {fault.point for plan in drawn for fault in plan.faults if fault.kind != "differ"}
    assert met == {plans.OUTSIDE, *drawing.POINTS}
    assert set(points.POINTS) >= drawing.POINTS
    assert {fault.kind for plan in drawn for fault in plan.faults} == {"kill", "differ", *drawing.OTHERS}


@pytest.mark.parametrize("way", [drawing.SEVERAL, drawing.HOST])
def test_several_losses_and_the_loss_of_a_host_are_drawn(way: str) -> None:
    for plan in (drawing.draw(number, way=way) for number in range(300)):
        assert plan == plans.Plan.of_dict(json.loads(json.dumps(plan.as_dict())))
        lost = {fault.rank for fault in plan.faults if fault.kind in plans.LOSSES}
        assert 0 < len(lost) < plan.ranks
        assert not lost & set(plan.holders)
        first = plan.hosts[0] if plan.hosts else 0
        assert way == drawing.SEVERAL or lost in (set(range(first)), set(range(first, plan.ranks)))


def test_every_point_is_a_place_in_the_code() -> None:
    """Otherwise a rank that is to die at such a point would survive."""
    pytest.importorskip("torch")
    for functions in points.POINTS.values():
        for owner, name in functions:
            module, _, kind = owner.partition(":")
            found = importlib.import_module(module)
            place = getattr(getattr(found, kind) if kind else found, name)
            assert callable(place) or inspect.ismemberdescriptor(place), f"{owner} {name}"  # or holds what is called


def test_what_a_job_has_ended_of_is_told_apart() -> None:
    crash = "[1] ompi_comm_revoke_local+0x1\n"
    assert judging.of_mpi(crash)
    assert not judging.of_mpi("rank 1 of 3: RankLostError: rank 0 was lost")
    assert judging.reason("KeyError: 1\nrank 1: RankLostError: rank 0 was lost") == "RankLostError: rank 0 was lost"
    assert judging.reason("") == "without a word"


def test_a_wrong_result_is_seen(tmp_path: Path) -> None:
    """A batch that was left out, or done twice, changes the parameters more than rounding does."""
    plan = plans.Plan(1, 1)
    right, accuracy = model.without_faults(plan)
    end = {"ranks": [0], "hashes": ["a"], "history": judging.ALL, "accuracy": accuracy, "predicted": accuracy}
    notes.Notes(tmp_path, 0).add("end", **end)
    found = {}
    for name, parameters in (("right", right), ("wrong", model.without_faults(plan, left_out=7)[0])):
        np.save(tmp_path / "parameters.0.npy", parameters)
        found[name] = judging.judge(plan, jobs.Ended(0, "", {}, 1.0), tmp_path).outcome
    assert found == {"right": "quiet", "wrong": "wrong"}


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [("trainers: rank 1 of the job failed in evaluate; 2 ranks continue", "orderly"), ("", "ended")],
)
def test_sigterm_after_the_fit_ends_its_rank(tmp_path: Path, printed: str, outcome: str) -> None:
    """The others continue, and say so."""
    plan = plans.Plan(1, 3, faults=(plans.Fault("term", 1, turn=36),))
    notes.Notes(tmp_path, 1).add("fault", number=0)
    for rank in (0, 2):
        notes.Notes(tmp_path, rank).add("end", ranks=[0, 2])
    assert judging.judge(plan, jobs.Ended(0, printed, {}, 1.0), tmp_path).outcome == outcome


def test_the_report_of_a_soak_counts_what_kills_have_cost(tmp_path: Path) -> None:
    """Two jobs of two ranks: rank 1 is killed in the first, where rank 0 does a step again; the second resumes."""
    attempts = [soak.Attempt(tmp_path / str(number), begin) for number, begin in enumerate((0.0, 20.0))]
    every = {"memory": 100.0, "files": 20, "ranks": [0, 1]}
    for attempt, rank, moment, step, done in (
        (0, 0, 10.0, 0, 1), (0, 1, 10.0, 0, 1), (0, 0, 12.0, 200, 202), (1, 0, 25.0, 150, 1), (1, 0, 30.0, 400, 251),
    ):  # fmt: skip
        attempts[attempt].folder.mkdir(exist_ok=True)
        after = {"ranks": [0], "memory": 104.0} if moment == 12.0 else {}
        note = {"what": "at", "time": moment, "step": step, "done": done, **every, **after}
        with open(notes.path_of(attempts[attempt].folder, rank), "a") as file:
            file.write(json.dumps(note) + "\n")
    with open(notes.path_of(attempts[1].folder, 0), "a") as file:
        file.write(json.dumps({"what": "end", "time": 31.0, "hashes": ["a", "a"]}) + "\n")
    attempts[0].kills.append((1, 11.5))
    report = soak.report(attempts[0], attempts, 2)
    assert report["steps a second, without kills"] == "100.0"
    assert report["steps a second, with kills and restarts"] == "20.0 (20%)"
    assert report["recoveries"] == "1, median 0.500 s, longest 0.500 s"
    assert report["restarts, seconds to the first step"] == "1, median 5.000 s, longest 5.000 s"
    assert report["steps done again after recoveries"] == "1"
    assert report["steps lost at restarts"] == "50"
    assert report["bits at the end"] == "equal on 1 ranks"


@pytest.mark.parametrize(("killed", "ends"), [((0, 1), ""), ((0,), "ended with exit code 1: see below")])
def test_a_soak_goes_on_if_all_working_ranks_were_killed_at_once(
    killed: tuple[int, ...], ends: str, tmp_path: Path
) -> None:
    """The state that the standby ranks would take over is gone then, and the next job begins at the checkpoint."""
    attempt = soak.Attempt(tmp_path, 0.0, [(rank, 1.0) for rank in killed])
    notes.Notes(tmp_path, 0).add("at", ranks=[0, 1])
    (tmp_path / "output").write_text("RankLostError: all working ranks have failed, so the state is gone")
    job = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    job.wait()
    assert soak._drive(job, attempt, argparse.Namespace(most_ranks=4, mtbf=30, limit=60), 1e9, None) == ends


def test_a_soak_goes_on_if_a_rank_was_killed_while_the_job_started(tmp_path: Path) -> None:
    begun, killed = soak.Attempt(tmp_path / "begun", 0.0), soak.Attempt(tmp_path / "killed", 10.0, [(1, 11.0)])
    for attempt in (begun, killed):
        attempt.folder.mkdir()
    job = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    job.wait()
    assert soak._drive(job, killed, argparse.Namespace(most_ranks=2, mtbf=30, limit=60), 1e9, None) == ""
    for step in range(3):
        notes.Notes(begun.folder, 0).add("at", step=step, done=step, ranks=[0], memory=1.0, files=1)
    assert soak.report(begun, [begun, killed], 2)["kills"] == "1 in 2 jobs"


def test_a_soak_does_not_come_to_its_last_epoch() -> None:
    """It would end, as a job that should have gone on does. A day of it takes 10,000 steps a second."""
    steps_of_an_epoch = len(model.rows()[0]) * program.REPEATS // program.BATCH
    assert steps_of_an_epoch * program.EPOCHS > 24 * 3600 * 10_000


@pytest.mark.parametrize(("hashes", "code"), [("aa", 0), ("ab", 1)])
def test_a_soak_fails_if_the_ranks_differ_at_the_end(
    hashes: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(folder: Path, *_: Any) -> soak.Attempt:
        folder.mkdir(parents=True)
        with open(notes.path_of(folder, 0), "w") as file:
            for number in (1, 2):
                at = {"what": "at", "time": number, "step": number, "done": number, "ranks": [0, 1]}
                file.write(json.dumps(at | {"memory": 1.0, "files": 1}) + "\n")
            file.write(json.dumps({"what": "end", "time": 3.0, "hashes": [*hashes]}) + "\n")
        return soak.Attempt(folder, 0.0)

    monkeypatch.setattr(soak, "_attempt", attempt)
    given = argparse.Namespace(seed=1, hours=1e-4, mtbf=1.0, most_ranks=2, json=str(tmp_path / "found.json"))
    assert soak.main(given) == code
