"""Trainings that continue after failures: jobs under Open MPI's ULFM in which ranks kill themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from tests import event_files
from tests.conftest import JobRunner
from tests.faults import job_of
from tests.faults.moments.training import Deaths, fitted, network
from trainers import MirroredTrainer

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


def test_a_rank_is_lost_while_the_command_loads_its_data(mpirun: JobRunner) -> None:
    job = mpirun(3, ["-c", LOADING, "--data", "iris", "--epochs", "2", "--on-failure", "continue"], ulfm=True)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "a rank failed before the training; the other ranks start again without it" in job.stderr
    assert "2 ranks on 1 node" in job.stdout
    assert "test accuracy" in job.stdout


@pytest.mark.parametrize(
    ("moment", "lost_in", "total"),
    [("batch_begin,1,2", 3, 7), ("epoch_end,1,0", 6, 10)],
)
def test_a_training_stops_with_a_checkpoint_of_where_it_is(
    mpirun: JobRunner, moment: str, lost_in: int, total: int, tmp_path: Path
) -> None:
    """A resumed training, here on one rank, has the same results as an uninterrupted one: each epoch is measured, and
    reported to callbacks, once."""
    job = mpirun(3, [*job_of("training"), tmp_path, moment], ulfm=True, timeout=120)
    assert job.returncode == 1, job.stdout + job.stderr
    assert f"rank 0 of the job failed in fit, epoch 2, step {lost_in}; the job stops" in job.stderr
    assert max(tmp_path.glob("checkpoint-*")).name == f"checkpoint-{total:08d}.npz"
    told = Deaths(None)
    with Topology(MPI.COMM_SELF) as here, MirroredTrainer(network(1), topology=here) as trainer:
        history, predicted = fitted(trainer, told, str(tmp_path), resume=True)
    with Topology(MPI.COMM_SELF) as here, MirroredTrainer(network(0), topology=here) as trainer:
        wanted, predicted_alone = fitted(trainer, Deaths(None))
    assert told.told[0] == f"epoch_begin {total // 5} 0"
    for name in ("epoch", "loss", "accuracy", "validation_loss", "grad_norm"):
        np.testing.assert_allclose(history.column(name), wanted.column(name), rtol=1e-4)
    np.testing.assert_allclose(predicted, predicted_alone, rtol=1e-3)


def test_no_checkpoint_is_made_of_half_an_epoch(mpirun: JobRunner, tmp_path: Path) -> None:
    job = mpirun(3, [*job_of("training"), tmp_path, "epoch_begin,1,0", "apart"], ulfm=True, timeout=120)
    assert job.returncode == 1, job.stdout + job.stderr
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "no checkpoint is written in the middle of epoch 2" in job.stderr


# A training with all shipped callbacks, in which rank DIES is killed in epoch 2. With "injected", a callback raises an
# error on the rank that has joined. Each rank prints the result of its fit, and that of one rank alone.
WATCHED = """
import json, sys
from pathlib import Path
from mpi4py import MPI
from allreduce import Topology
from allreduce.elastic import standby
from allreduce.transport import processes
from tests.faults.moments.training import BATCH, data, network
from tests.faults.points import InjectedError, die
from trainers import MirroredTrainer, Schedule
from trainers.callbacks import (
    Callback, CheckDivergence, CheckGradients, CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoard, Timeline,
)

class Story(Callback):
    "Kills a rank, and records the learning rates of each epoch."
    def __init__(self, dies, injected):
        self.dies, self.injected, self.rates = dies, injected, {}
    def on_train_begin(self, logs=None):
        self.began_as = self.trainer.rank
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2) and processes.here()[0] == self.dies:
            die()
        if self.injected and self.epoch == 4 and processes.here()[0] == 3:  # the rank that joins
            raise InjectedError("by the rank that has joined")
    def on_train_batch_end(self, batch, logs=None):
        self.rates[self.epoch] = self.trainer.replica.learning_rates[0]

def fitted(topology, folder, story, **options):
    x, y = data()
    early = EarlyStopping("loss", mode="max", patience=3, start_from_epoch=4, restore_best_weights=True)
    callbacks = [
        early,
        ModelCheckpoint(folder / "best.npz", "loss", save_best_only=True),
        ModelCheckpoint(folder / "{epoch}.npz"),
        TensorBoard(folder / "logs", update_freq="batch"),
        CSVLogger(folder / "log.csv"),
        CheckDivergence(every=1),
        CheckGradients(),
        Timeline(folder / "trace.json"),
        story,
    ]
    rates = Schedule(lambda step: 0.95 ** (step // 5))
    with MirroredTrainer(network(topology.rank), topology=topology, **options) as trainer:
        history = trainer.fit(x, y, 12, BATCH, callbacks=callbacks, transforms=[rates], progress=False)
        return {
            "rank": trainer.rank,
            "began as": story.began_as,
            "loss": history.column("loss"),
            "rates": story.rates,
            "stopped": [early.stopped_epoch, early.best_epoch, early.best],
            "predicted": trainer.evaluate(x, y)["loss"],
        }

sys.modules["torch"] = None  # tensorboardX would import it, and works without
way, dies, folder, *injected = sys.argv[1:]
ranks = Topology()
if way == "standby":
    ranks = standby.elastic_world(ranks, 1)
if ranks is None:
    sys.exit()
late = isinstance(ranks, standby.JoiningRank)
came = fitted(ranks, Path(folder), Story(int(dies), bool(injected)), on_failure="continue")
here = Path(folder) / f"alone {processes.here()[0]}"
here.mkdir()
came["alone"] = fitted(Topology(MPI.COMM_SELF), here, Story(-1, False))
print(json.dumps(came | {"late": late}), flush=True)
"""


@pytest.mark.parametrize(("way", "ranks", "dies"), [("continue", 3, 0), ("standby", 4, 1)])
def test_callbacks_go_on_when_ranks_are_lost_and_join(
    mpirun: JobRunner, way: str, ranks: int, dies: int, tmp_path: Path
) -> None:
    """All shipped callbacks do the same as on one rank, and a joining rank does not touch the files of rank 0."""
    pytest.importorskip("tensorboardX")
    job = mpirun(ranks, ["-c", WATCHED, way, dies, tmp_path], ulfm=True, timeout=120)
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


def test_an_error_of_a_rank_that_has_joined_ends_the_job_once(mpirun: JobRunner, tmp_path: Path) -> None:
    """The rank that raised it ends the job."""
    job = mpirun(4, ["-c", WATCHED, "standby", 1, tmp_path, "injected"], ulfm=True, timeout=120)
    assert job.returncode == 1
    assert "rank 3 of 4: Traceback" in job.stderr
    assert job.stderr.count("InjectedError: rank 2: by the rank that has joined") == 1
    assert "rank 0 of 4: " not in job.stderr
    assert "rank 2 of 4: " not in job.stderr
