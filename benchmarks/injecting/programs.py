"""What one rank of a run does; the driver starts it under mpirun.

    mpirun --with-ft ulfm -n 3 python -m benchmarks.injecting.programs FOLDER

FOLDER holds the plan, plan.json. Every rank writes notes there, and in the end its parameters.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology, registry
from benchmarks.injecting import model, points, steps
from benchmarks.injecting.notes import Notes
from benchmarks.injecting.plans import BATCH, BETWEEN, EPOCHS, Plan
from trainers import Checkpoint, MirroredTrainer
from trainers.files import checkpoint
from trainers.watching.callback import Callback
from trainers.watching.check_gradients import CheckGradients
from trainers.watching.history import History


class Steps(Callback):
    """Notes every step when it is finished."""

    reads_batches = False

    def __init__(self, notes: Notes) -> None:
        self._notes, self._epoch = notes, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps.note(self._notes, self._epoch * (model.ROWS // BATCH) + batch, self.trainer.size)


def train(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    """The trainer's way: a fit with an evaluation after each epoch, then each of the other calls."""
    damages = [fault.kind for fault in plan.faults if fault.point == BETWEEN]
    with _made(plan, topology) as trainer:
        if damages:
            _fit(trainer, plan, notes, folder, EPOCHS // 2)
            if trainer.rank == 0:
                _damage(folder, damages[0])
                notes.add("fault", number=0)
        history = _fit(trainer, plan, notes, folder, EPOCHS, resume=bool(damages))
        _, _, x_test, y_test = model.rows()
        scores = trainer.evaluate(x_test, y_test)
        notes.add("call", name="evaluate", size=trainer.size)
        outputs = trainer.predict(x_test)
        notes.add("call", name="predict", size=trainer.size)
        trainer.save(str(folder / "model.npz"))
        notes.add("call", name="save", size=trainer.size)
        hashes = trainer.parameters_sha256()
        np.save(folder / f"parameters.{notes.rank}.npy", trainer.replica.state()["parameters"])
        right = float((outputs.argmax(1) == y_test).mean())
        notes.add(
            "end", size=trainer.size, hashes=hashes, epochs=len(history), accuracy=scores["accuracy"], predicted=right
        )
        close = trainer.topology.close
    close()


def _made(plan: Plan, topology: Topology) -> MirroredTrainer:
    """A trainer of all ranks, or of those that are left when some die while it is made. Collective."""
    options: dict[str, Any] = {"copies": plan.copies} if plan.copies > 1 else {}
    options["on_failure"] = "continue" if plan.goes_on else "stop"
    return MirroredTrainer(model.replica(plan), plan.backend, topology, update=plan.update, **options)


def _fit(
    trainer: MirroredTrainer, plan: Plan, notes: Notes, folder: Path, epochs: int, resume: bool = False
) -> History:
    x, y, x_test, y_test = model.rows()
    return trainer.fit(
        x,
        y,
        epochs,
        BATCH,
        validation_data=(x_test, y_test),
        callbacks=[Steps(notes), *([CheckGradients()] if any(fault.kind == "nan" for fault in plan.faults) else [])],
        checkpoint=Checkpoint(str(folder / "checkpoints"), f"{plan.checkpoint} steps") if plan.checkpoint else None,
        resume=resume,
        progress=False,
    )


def _damage(folder: Path, kind: str) -> None:
    """Cut the newest checkpoint off in its middle, or change a bit there."""
    path = checkpoint.paths(str(folder / "checkpoints"))[0]
    content = bytearray(Path(path).read_bytes())
    middle = len(content) // 2
    if kind == "truncate":
        del content[middle:]
    else:
        content[middle] ^= 1
    Path(path).write_bytes(content)


def _program(name: str) -> Callable[[Plan, Notes, Path, Topology], None]:
    if name == "calls":
        from benchmarks.injecting import calls

        return calls.call
    return train


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the driver asks a rank that hangs where it is
    plan = Plan.of_dict(json.loads((folder / "plan.json").read_text()))
    topology = Topology(ranks_per_node=plan.nodes or None)
    notes = Notes(folder, topology.rank)
    for name in plan.backend, "native":  # so that all classes are there when points are patched
        registry._load(name)
    program = _program(plan.program)
    points.install(plan, notes)
    notes.add("pid", pid=os.getpid())
    points.begin(plan, notes)
    topology.world.Barrier()
    program(plan, notes, folder, topology)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
