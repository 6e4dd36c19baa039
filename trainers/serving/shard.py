"""A server's slice of the parameters: gradients in, parameters out."""

from collections.abc import Sequence

import numpy as np

from allreduce.arrays import dtypes
from trainers.replica import Replica


class Shard:
    """The slice `part` of a replica's flat parameters, which this rank alone updates.

    parameters, gradients: the whole flat buffers that the replica is bound to.
    version: how many updates it has had.
    """

    def __init__(self, replica: Replica, parameters: np.ndarray, gradients: np.ndarray, part: slice) -> None:
        self._replica, self.part = replica, part
        self.parameters, self.gradients = parameters[part], gradients[part]
        self._accumulator = dtypes.TYPES[self.gradients.dtype].accumulator
        self.version = 0

    def apply(self, gradients: np.ndarray, factor: float) -> None:
        """One update, with the learning rate times `factor`."""
        self.gradients[:] = gradients
        self.update(factor)

    def update(self, factor: float = 1.0) -> None:
        """The same with the gradients that lie in the bound buffer.

        The rate is changed, not the gradients, because Adam and its like take no notice of how large those are.
        """
        replica = self._replica
        rates = replica.learning_rates
        if factor != 1.0:
            replica.learning_rates = [rate * factor for rate in rates]
        try:
            replica.update(self.part)
        finally:
            if factor != 1.0:
                replica.learning_rates = rates
        replica.refresh()
        self.version += 1

    def add_up(self, summands: Sequence[np.ndarray], share: float = 1.0) -> None:
        """Leave the sum of slices, divided by `share`, in the bound buffer; 16-bit floats are summed in float32."""
        total = self.gradients
        if total.dtype != self._accumulator:
            total = np.zeros(total.size, self._accumulator)
        np.copyto(total, summands[0])
        for summand in summands[1:]:
            total += summand
        if share != 1.0:
            total /= total.dtype.type(share)
        if total is not self.gradients:
            self.gradients[:] = total.astype(self.gradients.dtype)

    def is_finite(self) -> bool:
        """Whether all parameters are numbers."""
        return bool(np.isfinite(self.parameters).all())
