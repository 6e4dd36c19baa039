"""One rank of a training in which ranks kill themselves at named moments, and the others continue.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.training TRAINING [OPTION=VALUE ...]

TRAINING: one of TRAININGS below. The rank that is 0 at the end prints the result as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import RankLostError
from tests.faults import points
from tests.faults.points import die
from trainers import (
    EMA,
    CentralStorageTrainer,
    Checkpoint,
    ClipNorm,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
)
from trainers.callbacks import Callback, LearningRateSchedule
from trainers.data import Arrays, Batches
from trainers.files.checkpoint import path_of

ROWS, BATCH, EPOCHS = 210, 42, 6  # batches that 1 to 3 ranks can divide, and 4 can't
STEP = {"transforms": [ClipNorm(1.0), EMA(0.9)]}  # options of every step


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(ROWS, 8)).astype(np.float32), random.integers(0, 3, ROWS)


def network(seed: int) -> NumpyNetwork:
    return NumpyNetwork([8, 16, 3], seed=seed, lr=0.01)


class Source:
    """The batches of a training on arrays, or one of several parts of each batch."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts = part, parts

    def set_epoch(self, number: int) -> None:
        self.batches = Batches(Arrays(data()), BATCH, self.part, self.parts).epoch(number)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((batch.x.copy(), batch.y.copy()) for batch in self.batches)


def schedule() -> LearningRateSchedule:
    """A schedule whose rate of an epoch depends on all epochs before it."""
    return LearningRateSchedule(lambda epoch, rate: 0.9 * rate)


class Deaths(Callback):
    """Makes this rank die at a moment: (event, epoch, batch), with batch 0 for events of epochs. file: must exist
    before this rank dies."""

    def __init__(self, moment: tuple[str, int, int] | None, file: str = "") -> None:
        self.moment, self.epoch, self.file = moment, -1, file
        self.told: list[str] = []

    def _come(self, event: str, batch: int = 0) -> None:
        self.told.append(f"{event} {self.epoch} {batch}")
        if (event, self.epoch, batch) == self.moment:
            while self.file and not os.path.exists(self.file):
                time.sleep(0.01)
            die()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._come("epoch_begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._come("batch_begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._come("batch_end", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._come("epoch_end")


def several(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """Three of four ranks die, the chief first: in a batch, after a batch and in an event, until one rank remains."""
    moments = {0: ("batch_begin", 1, 2), 2: ("batch_end", 3, 4), 1: ("epoch_end", 4, 0)}
    deaths = Deaths(moments.get(ranks.rank))
    return trained(ranks, {}, deaths, rows=options.get("rows"))


def local(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """Three of four ranks die in a local SGD with rounds of 4 of an epoch's 5 steps: in a round, before an average, and
    after an epoch that has ended in the middle of a round."""
    moments = {0: ("batch_begin", 1, 2), 2: ("batch_end", 3, 4), 1: ("epoch_end", 4, 0)}
    deaths = Deaths(moments.get(ranks.rank))
    deaths.reads_model = False  # so that no end of an epoch ends a round
    streamed = LocalSGD(4, outer="diloco", fragments=2, delay=1, alpha=0.5)
    return trained(ranks, {"average": streamed}, deaths, rows="whole")


def sharded(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """One of three ranks dies, and its slice of the optimizer's state is lost: back to a checkpoint."""
    deaths = Deaths(("batch_begin", 2, 3) if ranks.rank == 1 else None)
    came = trained(ranks, {"update": "sharded"}, deaths, Checkpoint(options["folder"], every="7 steps"))
    return came | outside_of_a_fit(options["folder"])


def outside_of_a_fit(folder: str) -> dict[str, Any]:
    """The remaining ranks do not hold a complete state, so they follow the error's advice: another trainer resumes from
    the checkpoint."""
    x, y = data()
    with Topology.of_survivors() as ranks:
        trainer = MirroredTrainer(network(0), topology=ranks, update="sharded", on_failure="continue")
        if trainer.rank == 1:
            die()
        try:
            trainer.evaluate(x, y)
        except RankLostError as error:
            text = str(error)
    with MirroredTrainer(network(0), topology=trainer.topology, update="sharded") as trainer:
        history = trainer.fit(x, y, EPOCHS, BATCH, checkpoint=folder, resume=True, progress=False)
    return {"outside": text, "resumed": len(history)}


def central(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """Two of three ranks die; neither is the storage rank, whose number changes."""
    moments = {0: ("batch_begin", 1, 4), 2: ("batch_end", 3, 0)}
    return trained(ranks, {"storage": 1}, Deaths(moments.get(ranks.rank)), kind=CentralStorageTrainer)


def storage(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """The storage rank dies: back to a checkpoint; one of four ranks dies during that."""
    if ranks.rank == 3:
        points.at("go back", die)
    written = path_of(options["folder"], 2 * (ROWS // BATCH))
    deaths = Deaths(("epoch_begin", 2, 0) if ranks.rank == 0 else None, written)
    return trained(ranks, {}, deaths, Checkpoint(options["folder"], every="epoch"), CentralStorageTrainer)


def stop(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """The chief dies, and the others stop with a checkpoint of their position. moment: EVENT,EPOCH,BATCH."""
    event, epoch, batch = options["moment"].split(",")
    deaths = Deaths((event, int(epoch), int(batch)) if ranks.rank == 0 else None)
    return stopped(MirroredTrainer(network(0), topology=ranks), deaths, options["folder"])


def resumed(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """A training that was stopped resumes, and no rank dies."""
    return trained(ranks, {}, Deaths(None), Checkpoint(options["folder"]), resume=True)


def stop_apart(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """A worker dies in an asynchronous epoch, in whose middle no checkpoint can be written, and the others stop."""
    deaths = Deaths(("epoch_begin", 1, 0) if ranks.rank == 0 else None)
    trainer = ParameterServerTrainer(network(0), topology=ranks)
    return stopped(trainer, deaths, Checkpoint(options["folder"], every="2 epochs"))


def stopped(trainer: Any, deaths: Deaths, checkpoint: Checkpoint | str) -> dict[str, Any]:
    callbacks = [deaths, schedule()]
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50]), "progress": False, **STEP}
    trainer.fit(x, y, EPOCHS, BATCH, callbacks=callbacks, checkpoint=checkpoint, **given)
    raise AssertionError("nobody has stopped")


class Dying(NumpyNetwork):
    """Makes its rank die during the construction of a trainer."""

    dies_in = ""  # the memory that `bind` gets

    def bind(self, parameters: Any, gradients: Any) -> None:
        if self.dies_in == ("gradients" if parameters is None else "parameters"):
            die()
        super().bind(parameters, gradients)


def making(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """Two of four ranks die during the construction of a trainer: one in its second attempt, which others have
    completed."""
    replica = Dying([8, 16, 3], seed=ranks.rank, lr=0.01)
    replica.dies_in = {3: "gradients", 1: "parameters"}.get(ranks.rank, "")
    return trained(ranks, {"update": "sharded"}, Deaths(None), replica=replica)


class Halving(Callback):
    """Halves the parameters after an epoch. dies: this rank dies while it does so."""

    collective = True

    def __init__(self, replica: NumpyNetwork, dies: bool) -> None:
        self.replica, self.dies = replica, dies

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.trainer.edit(self.halve)

    def halve(self) -> None:
        if self.dies:
            die()
        self.replica.parameters *= 0.5


def edited(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """A rank dies in an edit (in a callback) that other ranks have completed, and another rank in an edit outside of a
    fit."""
    x, y = data()
    outputs, during = [], []
    for topology, dying in ((ranks, (1, 2)), (Topology(MPI.COMM_SELF), ())):
        replica, on = network(0), "continue" if dying else None
        with MirroredTrainer(replica, topology=topology, on_failure=on) as trainer:
            halving = Halving(replica, dies=dying[:1] == (ranks.rank,))
            trainer.fit(x, y, 3, BATCH, callbacks=[halving], progress=False)
            trainer.edit(Halving(replica, dies=dying[1:] == (ranks.rank,)).halve)
            outputs.append(trainer.predict(x)[:3].tolist())
            during += [failure.during for failure in trainer.failures]
    return {"rank": 0, "during": during, "predicted": outputs[0], "predicted alone": outputs[1]}


def trained(
    ranks: Topology,
    options: dict[str, Any],
    deaths: Deaths,
    checkpoint: Checkpoint | None = None,
    kind: Any = MirroredTrainer,
    replica: NumpyNetwork | None = None,
    on_failure: str = "continue",
    resume: bool = False,
    rows: str | None = None,
) -> dict[str, Any]:
    """Return the result of a training, and that of one rank alone. rows: train with a loader of these rows."""
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50])}
    replica = replica or network(ranks.rank)
    with kind(replica, topology=ranks, on_failure=on_failure, **options) as trainer:
        callbacks = [deaths, schedule()]
        given |= {"progress": False}
        if "average" not in options:  # other parameters on each rank have no average
            given |= STEP
        common: dict[str, Any] = {"callbacks": callbacks, "checkpoint": checkpoint, "resume": resume, **given}
        if rows is None:
            history = trainer.fit(x, y, EPOCHS, BATCH, **common)
        else:
            parts = (ranks.rank, ranks.size) if rows == "divided" else (0, 1)
            history = trainer.fit(Loader(Source(*parts), rows=rows), epochs=EPOCHS, **common)
        came = {
            "history": [epoch.as_dict() for epoch in history],
            "ranks": trainer.size,
            "lost": [failure.ranks for failure in trainer.failures],
            "sha256": trainer.parameters_sha256(),
            "evaluated": trainer.evaluate(x, y),
            "predicted": trainer.predict(x)[:3].tolist(),
            "told": deaths.told,
            "rank": trainer.rank,
            "steps": trainer.strategy.steps,
        }
    with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as alone:
        came["alone"] = [epoch.as_dict() for epoch in alone.fit(x, y, EPOCHS, BATCH, callbacks=[schedule()], **given)]
        came["predicted alone"] = alone.predict(x)[:3].tolist()
    return came


TRAININGS: dict[str, Callable[[Topology, dict[str, str]], dict[str, Any]]] = {
    "several": several,
    "local": local,
    "sharded": sharded,
    "central": central,
    "storage": storage,
    "stop": stop,
    "resumed": resumed,
    "stop apart": stop_apart,
    "making": making,
    "edited": edited,
}


def main(name: str, *options: str) -> None:
    ranks = Topology()
    came = TRAININGS[name](ranks, dict(option.split("=") for option in options))
    if came["rank"] == 0:
        print(json.dumps(came), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
