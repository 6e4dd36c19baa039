"""on_failure="replace": what is refused before anything is trained, and what a rank that joins a later fit is told."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology, create, newcomers
from allreduce.program import program
from allreduce.spares import Manned
from trainers import MirroredTrainer, NumpyNetwork, on_failure, renewing
from trainers.earlier import Earlier
from trainers.errors import ArgumentError
from trainers.rejoining import FitCall
from trainers.serving.trainer import agree_on_arguments
from trainers.surviving import Call, Survival
from trainers.watching.history import Epoch, History


def ranks(kind: type[Topology] = Topology, simulated: bool = False, is_part: bool = False) -> Any:
    """Two of them, as far as anybody asks."""
    topology = object.__new__(kind)
    topology.__dict__.update(simulated=simulated, is_part=is_part, world=SimpleNamespace(size=2, rank=0))
    return topology


def refused(topology: Any) -> str:
    error = on_failure.refusal("replace", topology, NumpyNetwork([2, 2]))
    assert isinstance(error, ArgumentError)
    return str(error)


@pytest.fixture
def ulfm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduce.messages.losses.in_force", lambda: True)


def test_where_no_new_rank_could_find_the_others_it_is_said_before(ulfm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_failure.refusal("replace", ranks(), NumpyNetwork([2, 2])) is None
    assert "spares.man" in refused(ranks(Manned, is_part=True))
    assert "simulated nodes" in refused(ranks(simulated=True))
    assert "part of another" in refused(ranks(is_part=True))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-i"])
    program.cache_clear()
    assert "command that can be run again" in refused(ranks())
    program.cache_clear()
    monkeypatch.setattr(renewing, "made", [2])
    assert "one trainer of a program" in refused(ranks())
    assert on_failure.refusal("continue", ranks(is_part=True), NumpyNetwork([2, 2])) is None


def test_a_part_knows_that_it_is_one() -> None:
    with Topology(MPI.COMM_SELF) as topology:
        assert not topology.is_part
        for part in (topology.split(0), topology.inside()):
            assert part.is_part
        assert not topology.duplicate().is_part


def test_workers_of_servers_are_not_replaced() -> None:
    with Topology(MPI.COMM_SELF) as topology, pytest.raises(ArgumentError, match="every step together"):
        agree_on_arguments(topology, NumpyNetwork([2, 2]), "SpareReplicasTrainer()", None, "replace")


def history() -> History:
    return History([Epoch(1, 0.5, {"accuracy": 0.25}, 1.0, 2.0, 0.5, {"loss": float("nan")}, (3, 1), 2)])


def fit_call() -> FitCall:
    return FitCall(None, lambda: None)  # type: ignore[arg-type, return-value]


def call(name: str) -> Call[Any]:
    return Call(name, lambda: None)


def test_what_calls_came_to_is_told_to_a_rank_that_joins_later() -> None:
    others, joins = Earlier(), Earlier()
    others.note(call("predict"), np.zeros(3))  # before any fit: of an untrained model, as it makes itself
    others.note(call("evaluate"), {"loss": 0.125})
    others.note(fit_call(), history())
    others.note(call("evaluate"), {"loss": 0.25})
    others.note(call("edit"), None)
    assert not others.lacking
    joins.hear(others.results)
    assert joins.answer(call("predict")) == []
    came = joins.answer(fit_call())  # it has left out the evaluation before
    assert repr(came) == repr([history()])
    assert isinstance(came[0], History)
    assert joins.answer(call("save")) == []
    assert joins.answer(call("evaluate")) == [{"loss": 0.25}]
    assert joins.answer(fit_call()) == []  # the one that the others are in
    assert joins.results == others.results


def test_where_it_could_not_have_a_result_places_stay_empty(caplog: pytest.LogCaptureFixture) -> None:
    with Topology(MPI.COMM_SELF) as topology, MirroredTrainer(NumpyNetwork([2, 2]), topology=topology) as trainer:
        survival = Survival(trainer, goes_on=True)
        survival.renewal = renewing.Renewal(trainer, 2, survival.earlier.results)
        survival._say_who_comes(fit_call())
        assert not caplog.text
        survival.earlier.note(fit_call(), history())
        survival.earlier.note(call("predict"), np.zeros(3))
        survival._say_who_comes(call("evaluate"))
        assert not caplog.text
        survival._say_who_comes(fit_call())
        assert "leaves its place empty: " in caplog.text
        assert "what predict has returned" in caplog.text
        survival.renew()  # starts nobody
    failed = Earlier()
    failed.fail(call("evaluate"), ValueError())
    assert not failed.lacking
    failed.fail(fit_call(), ValueError())
    assert "ValueError in which an earlier fit has ended" in failed.lacking


def test_new_processes_get_no_secrets() -> None:
    """They get variables that libraries read, and those that the user names; none that says who a process is."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "lib",
        "ALLREDUCE_TABLE": "",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "OMPI_COMM_WORLD_RANK": "0",
        "SLURM_PROCID": "0",
    }
    given = {"OMP_NUM_THREADS", "PYTHONPATH", "ALLREDUCE_TABLE"}
    assert set(newcomers.handed(environment)) == given
    environment[newcomers.MORE] = " WANDB_API_KEY, HF_*,SLURM_*,,"
    assert set(newcomers.handed(environment)) == given | {"WANDB_API_KEY", "HF_TOKEN", newcomers.MORE}


def test_a_backend_without_a_recipe_is_refused(ulfm: None) -> None:
    with Topology(MPI.COMM_SELF) as topology, create("ring", topology) as backend:
        backend.recipe = None
        error = on_failure.refusal("replace", ranks(), NumpyNetwork([2, 2]), backend)
        assert "no recipe" in str(error)
