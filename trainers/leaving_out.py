"""A step that all ranks leave out: what they have measured still goes round, and so do their flags."""

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import wait_for

if TYPE_CHECKING:
    from trainers.base import Trainer


def left_out(trainer: "Trainer", share: float, flags: tuple[float, ...], last: np.ndarray) -> Any:
    """As `trainer._step(flags)`, without an update. Collective.

    share: this rank's of the batch, by which its metrics are weighted already. Ranks whose loss is no number do not
    count; last: the metrics of a step before, which stand in where no rank has one.
    """
    metrics = len(trainer.replica.metrics)
    measured = trainer._fresh_measured
    own = (measured.get() if gpu.is_gpu_array(measured) else measured)[:metrics].astype(np.float64)
    sums = np.zeros(metrics + 1 + len(flags))
    if np.isfinite(own).all():
        sums[: metrics + 1] = [*own, share]
    sums[metrics + 1 :] = flags
    wait_for(trainer._comm, trainer._comm.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), "leave a step out")
    means = sums[:metrics] / sums[metrics] if sums[metrics] else last
    result = np.concatenate([means, sums[metrics + 1 :]]).astype(measured.dtype)
    return gpu.cupy().asarray(result) if gpu.is_gpu_array(measured) else result
