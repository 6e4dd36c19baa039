"""Runs of trainers: a fit with an evaluation after each epoch, then each of the other calls; and the same on one rank
alone, without faults, to which the results are compared."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.elastic import standby
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults.notes import Notes, members
from tests.faults.plans import ALONE, BATCH, BETWEEN, EDITED, EPOCHS, ROUND, ROWS, Plan
from tests.faults.programs import model
from trainers import (
    EMA,
    CentralStorageTrainer,
    Checkpoint,
    ClipNorm,
    Loader,
    LocalSGD,
    MirroredTrainer,
    ParameterServerTrainer,
    Schedule,
    Sharded,
    SpareReplicasTrainer,
)
from trainers.data import Arrays, Batches
from trainers.files import checkpoint
from trainers.trainer import Trainer
from trainers.watching.callback import Callback
from trainers.watching.history import History

ALONE_HAVE_A_PART = ("sharded", "central storage")  # trainers of which only a fit goes on without a rank
MEASURED = ("epoch", "loss", "accuracy", "validation_loss", "grad_norm")  # of an epoch, alike on any number of ranks


class Steps(Callback):
    """Notes every step when it is finished."""

    reads_batches = reads_model = False

    def __init__(self, notes: Notes) -> None:
        self._notes, self._epoch = notes, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._notes.step(self._epoch * (ROWS // BATCH) + batch, self.trainer.topology)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """A named point."""


class Edits(Callback):
    """Edits the model after the second epoch."""

    collective = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.trainer.edit(lambda: halve(self.trainer.replica))


class Source:
    """The batches of the training on arrays, or one of several parts of each batch."""

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts = part, parts

    def set_epoch(self, number: int) -> None:
        self._batches = Batches(Arrays(model.rows()[:2]), BATCH, self._part, self._parts).epoch(number)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((x.copy(), y.copy()) for (x, y), *_ in self._batches)


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    """Train. If only a fit could go back to a checkpoint, another trainer resumes from it."""
    ranks: Topology | None = topology
    if plan.waits:
        ranks = standby.elastic_world(topology, plan.spares)
        if ranks is None:
            notes.add("end", idle=True)
            return
    resume = False
    while True:
        trainer = _made(plan, ranks)
        try:
            _use(trainer, plan, notes, folder, resume)
            break
        except RankLostError:
            if plan.trainer not in ALONE_HAVE_A_PART or not plan.checkpoint or not plan.goes_on:
                raise
            ranks, resume = trainer.topology, True
    left = members(trainer.topology)
    trainer.close()
    trainer.topology.close()
    if model.trains_alone(plan, notes, left):
        _train_alone(plan, folder / ALONE)


def _train_alone(plan: Plan, folder: Path) -> None:
    folder.mkdir()
    calm = replace(plan, checkpoint=0, rows="", faults=())
    with MirroredTrainer(model.replica(plan), topology=Topology(MPI.COMM_SELF)) as trainer:
        _use(trainer, calm, Notes(folder, 0), folder, resume=False)


def _made(plan: Plan, topology: Topology | None) -> Trainer:
    """Return a trainer of all ranks of `topology`. Collective."""
    replica = model.replica(plan)
    options: dict[str, Any] = {"on_failure": "continue" if plan.goes_on else "stop"}
    if plan.trainer == "central storage":
        return CentralStorageTrainer(replica, topology, storage=plan.storage, copies=plan.copies, **options)
    if plan.trainer == "spare replicas":
        return SpareReplicasTrainer(replica, topology, spare=plan.spares, **options)
    if plan.trainer.endswith("servers"):
        options |= {"servers": plan.servers, "ranks_per_worker": plan.ranks_per_worker}
        options |= {"updates": "sync"} if plan.trainer == "synchronous servers" else {"max_staleness": 8}
        return ParameterServerTrainer(replica, topology, **options)
    if plan.trainer == "local SGD":
        options["average"] = LocalSGD(ROUND, outer="diloco", fragments=2)
    update = Sharded(copies=plan.copies) if plan.trainer == "sharded" else "replicated"
    return MirroredTrainer(replica, plan.backend, topology, update=update, **options)


def _use(trainer: Trainer, plan: Plan, notes: Notes, folder: Path, resume: bool) -> None:
    """Make every call of a trainer, and note the results. Collective."""
    damaged = any(fault.point == BETWEEN for fault in plan.faults)
    if damaged:
        _fit(trainer, plan, notes, folder, EPOCHS // 2)
        if trainer.rank == 0:
            _truncate(folder)
            notes.add("fault", number=0)
    history = _fit(trainer, plan, notes, folder, EPOCHS, resume=resume or damaged)
    _, _, x_test, y_test = model.rows()
    scores = trainer.evaluate(x_test, y_test)
    _called(trainer, notes, "evaluate")
    outputs = trainer.predict(x_test)
    _called(trainer, notes, "predict")
    if plan.trainer in EDITED:
        trainer.edit(lambda: halve(trainer.replica))
        _called(trainer, notes, "edit")
    trainer.save(str(folder / "model.npz"))
    _called(trainer, notes, "save")
    hashes = trainer.parameters_sha256()
    np.save(folder / f"parameters.{notes.rank}.npy", trainer.replica.state()["parameters"])
    epochs = [epoch.as_dict() for epoch in history]
    notes.add(
        "end",
        ranks=members(trainer.topology),
        hashes=hashes,
        lost=[failure.ranks for failure in trainer.failures],
        history=[{name: epoch[name] for name in MEASURED if name in epoch} for epoch in epochs],
        parts=trainer.strategy.parts,
        updates=[sum(epoch.get("staleness", ())) for epoch in epochs],
        accuracy=scores["accuracy"],
        predicted=float((outputs.argmax(1) == y_test).mean()),
        outputs=outputs[:3].tolist(),
    )


def _called(trainer: Trainer, notes: Notes, name: str) -> None:
    notes.add("call", name=name, ranks=members(trainer.topology))


def halve(replica: Any) -> None:
    """An edit whose repetition, or omission on some ranks, can be detected."""
    replica.parameters *= 0.5


def _fit(trainer: Trainer, plan: Plan, notes: Notes, folder: Path, epochs: int, resume: bool = False) -> History:
    x, y, x_test, y_test = model.rows()
    every = f"{plan.checkpoint} steps" if trainer.strategy.synchronous else "epoch"
    callbacks: list[Callback] = [Steps(notes)]
    callbacks += [Edits()] if plan.trainer in EDITED else []
    options: dict[str, Any] = {}
    if plan.trainer != "local SGD":  # whose ranks have other parameters, which have no average
        schedule = Schedule(lambda step: 0.99**step) if plan.number % 2 else Schedule("cosine", warmup=3)
        options["transforms"] = [ClipNorm(1.0), EMA(0.9), schedule]
    if plan.rows:
        part, parts = trainer.strategy.part, trainer.strategy.parts
        source = Source(*((part, parts) if plan.rows == "divided" and part is not None else (0, 1)))
        options["x"] = Loader(None if part is None else source, rows=plan.rows, steps=ROWS // BATCH)
    else:
        options |= {"x": x, "y": y, "batch_size": BATCH}
    return trainer.fit(
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        checkpoint=Checkpoint(str(folder / "checkpoints"), every) if plan.checkpoint else None,
        resume=resume,
        progress=False,
        **options,
    )


def _truncate(folder: Path) -> None:
    """Truncate the newest checkpoint in its middle."""
    path = checkpoint.paths(str(folder / "checkpoints"))[0]
    os.truncate(path, os.path.getsize(path) // 2)
