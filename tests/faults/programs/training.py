"""Runs of trainers: a fit with an evaluation after each epoch, then each of the other calls."""

from pathlib import Path
from typing import Any

import numpy as np

from allreduce.elastic import standby
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults.notes import Notes, members
from tests.faults.plans import BATCH, BETWEEN, EPOCHS, ROWS, Plan
from tests.faults.programs import model
from trainers import (
    EMA,
    CentralStorageTrainer,
    Checkpoint,
    MirroredTrainer,
    ParameterServerTrainer,
    Sharded,
    SpareReplicasTrainer,
)
from trainers.files import checkpoint
from trainers.replica import Replica
from trainers.trainer import Trainer
from trainers.watching.callback import Callback
from trainers.watching.check_gradients import CheckGradients
from trainers.watching.history import History

ALONE_HAVE_A_PART = ("sharded", "central storage")  # programs in which only a fit goes on without a rank


class Steps(Callback):
    """Notes every step when it is finished."""

    reads_batches = False

    def __init__(self, notes: Notes) -> None:
        self._notes, self._epoch = notes, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._notes.step(self._epoch * (ROWS // BATCH) + batch, self.trainer.topology)


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    """Train. If only a fit could go back to a checkpoint, another trainer resumes from it."""
    ranks: Topology | None = topology
    if plan.program == "spare ranks":
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
            if plan.program not in ALONE_HAVE_A_PART or not plan.checkpoint or not plan.goes_on:
                raise
            ranks, resume = trainer.topology, True
    trainer.close()
    trainer.topology.close()


def _made(plan: Plan, topology: Topology | None) -> Trainer:
    """Return a trainer of all ranks, or of the remaining ranks if some die during its construction. Collective."""
    replica = model.replica(plan)
    options: dict[str, Any] = {"on_failure": "continue" if plan.goes_on else "stop"}
    if plan.program == "central storage":
        return CentralStorageTrainer(replica, topology, copies=plan.copies, **options)
    if plan.program == "spare replicas":
        return SpareReplicasTrainer(replica, topology, spare=plan.spares, **options)
    if plan.program.endswith("servers"):
        options |= {"servers": plan.servers, "ranks_per_worker": plan.ranks_per_worker}
        options |= {"updates": "sync"} if plan.program == "synchronous servers" else {"max_staleness": 8}
        return ParameterServerTrainer(replica, topology, **options)
    update = Sharded(copies=plan.copies) if plan.program == "sharded" else "replicated"
    return MirroredTrainer(replica, plan.backend, topology, update=update, **options)


def _use(trainer: Trainer, plan: Plan, notes: Notes, folder: Path, resume: bool) -> None:
    """Make every call of a trainer, and note the results. Collective."""
    damages = [fault.kind for fault in plan.faults if fault.point == BETWEEN]
    if damages:
        _fit(trainer, plan, notes, folder, EPOCHS // 2)
        if trainer.rank == 0:
            _damage(folder, damages[0])
            notes.add("fault", number=0)
    history = _fit(trainer, plan, notes, folder, EPOCHS, resume=resume or bool(damages))
    _, _, x_test, y_test = model.rows()
    scores = trainer.evaluate(x_test, y_test)
    _called(trainer, notes, "evaluate")
    outputs = trainer.predict(x_test)
    _called(trainer, notes, "predict")
    if isinstance(trainer, MirroredTrainer | CentralStorageTrainer):
        trainer.edit(lambda: shift(trainer.replica))
        _called(trainer, notes, "edit")
    trainer.save(str(folder / "model.npz"))
    _called(trainer, notes, "save")
    hashes = trainer.parameters_sha256()
    np.save(folder / f"parameters.{notes.rank}.npy", trainer.replica.state()["parameters"])
    notes.add(
        "end",
        ranks=members(trainer.topology),
        hashes=hashes,
        epochs=len(history),
        parts=trainer.strategy.parts,
        updates=[sum(epoch.as_dict().get("staleness", ())) for epoch in history],
        accuracy=scores["accuracy"],
        predicted=float((outputs.argmax(1) == y_test).mean()),
        shifted=isinstance(trainer, MirroredTrainer | CentralStorageTrainer),
    )


def _called(trainer: Trainer, notes: Notes, name: str) -> None:
    notes.add("call", name=name, ranks=members(trainer.topology))


def shift(replica: Replica) -> None:
    """An edit whose repetition, or omission on some ranks, can be detected."""
    if hasattr(replica, "module"):
        import torch

        with torch.no_grad():
            for parameter in replica.module.parameters():
                parameter += model.SHIFT
    else:
        replica.parameters += model.SHIFT  # type: ignore[attr-defined]


def _fit(trainer: Trainer, plan: Plan, notes: Notes, folder: Path, epochs: int, resume: bool = False) -> History:
    x, y, x_test, y_test = model.rows()
    every = f"{plan.checkpoint} steps" if trainer.strategy.synchronous else "epoch"
    return trainer.fit(
        x,
        y,
        epochs,
        BATCH,
        validation_data=(x_test, y_test),
        callbacks=[Steps(notes), *([CheckGradients()] if any(fault.kind == "nan" for fault in plan.faults) else [])],
        checkpoint=Checkpoint(str(folder / "checkpoints"), every) if plan.checkpoint else None,
        resume=resume,
        progress=False,
        transforms=[EMA(0.5)],
    )


def _damage(folder: Path, kind: str) -> None:
    """Truncate the newest checkpoint in its middle, or change a bit there."""
    path = checkpoint.paths(str(folder / "checkpoints"))[0]
    content = bytearray(Path(path).read_bytes())
    middle = len(content) // 2
    if kind == "truncate":
        del content[middle:]
    else:
        content[middle] ^= 1
    Path(path).write_bytes(content)
