"""SkipNotFinite: steps whose gradients are not finite are left out."""

from dataclasses import dataclass

from trainers.replica import Replica
from trainers.strategies.transforms.transform import Applied, Transform
from trainers.watching.check_gradients import CheckGradients


@dataclass(frozen=True)
class SkipNotFinite(Transform):
    """Leaves out a step on all ranks if any rank's gradients are NaN or infinite, with a warning that names the rank.

    Nothing is updated then, and batch norm's statistics are as before the batch. With LocalSGD, asynchronous servers
    and spare replicas the rank leaves out its own rows alone. Costs a message of 16 bytes and one reading of the
    gradients in each step. `trainers.callbacks.CheckGradients` raises an error instead.
    """

    def start(self, replica: Replica) -> Applied:
        applied = Applied()
        applied.watchers = [CheckGradients("skip")]
        return applied
