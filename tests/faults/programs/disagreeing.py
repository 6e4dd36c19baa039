"""One rank does something different from the others: all must raise the same named error, whatever they are doing."""

from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology, create
from tests.faults.notes import Notes
from tests.faults.plans import BATCH, DISAGREEMENTS, EPOCHS, STEPS, Fault, Plan
from tests.faults.programs import model
from trainers import MirroredTrainer
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.watching.callback import Callback
from trainers.watching.check_divergence import CheckDivergence
from trainers.watching.check_gradients import CheckGradients

LENGTH = 5000


class Odd:
    """The one difference of a rank."""

    def __init__(self, fault: Fault, notes: Notes) -> None:
        self._fault, self._notes = fault, notes
        self._here = notes.rank == fault.rank

    def __call__(self, about: str, turn: int | None = None) -> bool:
        """Whether this rank is to differ in this respect now; notes it. turn: the number of the occasion, if there are
        several."""
        now = self._here and about == self._fault.point and turn in (None, self._fault.turn)
        if now:
            self._notes.add("fault", number=0)
        return now


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    (fault,) = plan.faults
    way = {"calls": _calls, "trainer": _trainer, "loop": _loop}[DISAGREEMENTS[fault.point].way]
    try:
        way(plan, Odd(fault, notes), topology)
    except Exception as error:
        print(f"rank {notes.rank}: {type(error).__name__}: {error}", flush=True)
        notes.add("refused", error=type(error).__name__)
    else:
        notes.add("end")


def _calls(plan: Plan, odd: Odd, topology: Topology) -> None:
    other = "native" if plan.backend != "native" else "ring"
    reduce = create(other if odd("backend") else plan.backend, topology, check=True)
    reduce.allocate(LENGTH + odd("allocation"))
    for step in range(STEPS):
        reduce.broadcast(np.ones(LENGTH), int(odd("root", step)))
        length = LENGTH + odd("length", step)
        dtype = "float32" if odd("dtype", step) else "float64"
        op = "max" if odd("op", step) else "sum"
        pair = [np.ones(length, dtype), np.ones(length + 10, dtype)]
        pair = pair[1:] if odd("a call left out", step) else pair
        for array in reversed(pair) if odd("order of calls", step) else pair:
            reduce(array, op)


def _trainer(plan: Plan, odd: Odd, topology: Topology) -> None:
    x, y, *_ = model.rows()
    rate = model.RATES["momentum"] * (2 if odd("learning rate") else 1)
    hidden = 33 if odd("model") else 32
    network = NumpyNetwork((64, hidden, 10), activation="tanh", lr=rate, seed=1)
    with MirroredTrainer(network, plan.backend, topology) as trainer:
        callbacks: list[Callback] = [Spoiler(odd), CheckGradients()]
        callbacks += [CheckDivergence()] if odd("callbacks") else []
        epochs = EPOCHS + odd("epochs")
        rows = len(x) - odd("rows")
        size = BATCH + odd("batch size")
        trainer.fit(x[:rows], y[:rows], epochs, size, callbacks=callbacks, progress=False)


class Spoiler(Callback):
    """Sets this rank's gradients to NaN in one step."""

    reads_batches = False

    def __init__(self, odd: Odd) -> None:
        self._odd, self._step = odd, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._odd("NaN in a gradient", self._step):
            self.trainer.replica.parameters[:5] = np.nan


def _loop(plan: Plan, odd: Odd, topology: Topology) -> None:
    import torch

    from trainers.pytorch import MirroredOptimizer

    module = model.torch_module()
    if odd("parameters"):
        module.append(torch.nn.Linear(10, 10))
    plain = model.torch_optimizer(plan, module)
    optimizer = MirroredOptimizer(plain, module, plan.backend, topology=topology, transforms=[CheckGradients()])
    for step in range(STEPS):
        x = torch.ones(8, 64)
        if odd("NaN in backward", step):
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        module(x).square().mean().backward()
        if not odd("a step left out", step):
            optimizer.step()
    optimizer.close()
