"""Warns when all ranks train on the same data: a program was made data-parallel, but each rank still loads all data.

The averages are right then, but the training takes as long as on one rank, for the same result.
"""

import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.arrays.ops import Op
from allreduce.engine.call import Call
from allreduce.engine.engine import Engine

SWITCH = "ALLREDUCE_SAME_DATA"  # "allow" silences the warning
LEAST_LENGTH = 64  # shorter arrays (metrics, counters) are not compared
EQUAL = 3  # the warning needs this many different arrays of one signature, each equal on all ranks
MOST_CALLS = 8  # calls compared at most
SAMPLES = 4096  # elements of an array that are compared
TEXT = (
    "the first gradients that were averaged are equal on all ranks, bit for bit: the ranks seem to train on the same "
    "batches, which takes as long as one rank alone, for the same result. Give each rank its share of the data: "
    "sampler=DistributedSampler(dataset) for a DataLoader, or x[rank::size]; shares of different size are weighted by "
    f"`rows` of MirroredOptimizer ({SWITCH}=allow silences this warning)"
)


class SameData:
    """Compares the first arrays that a backend averages, and warns if they are equal on all ranks.

    Only op "mean" on at least LEAST_LENGTH elements counts, and only the signature of the first such array whose
    elements are not all equal. So parameters that are averaged once, layer by layer, are not taken for gradients. The
    first array that differs between ranks ends the comparison.
    """

    def __init__(self, engine: Engine, rank: int, compares: bool) -> None:
        self._engine, self._rank = engine, rank
        self._left = MOST_CALLS if compares else 0
        self._call: Call | None = None  # the signature that counts, once it is known
        self._equal: set[int] = set()  # hashes of the arrays that were equal on all ranks

    def inspector(self, call: Call, op: Op) -> Callable[[Any], bool] | None:
        """Return the function that compares this call's arrays between the ranks; None if no comparison is needed.

        All ranks return a function, or none does. The function is collective, changes nothing, and returns False once
        no more comparison is needed.
        """
        if not self._counts(call) or op.scale is None or call.length < LEAST_LENGTH:
            return None

        def inspect(array: Any) -> bool:
            if self._counts(call):
                self._compare(array, call)
            return self._counts(call)

        return inspect

    def _counts(self, call: Call) -> bool:
        return self._left > 0 and self._call in (None, call)

    def _compare(self, buffer: Any, call: Call) -> None:
        """Compare a 1-D array between the ranks. Collective; called inside an agreed call."""
        self._left -= 1
        sample = buffer[:: max(1, buffer.size // SAMPLES)]
        content = (sample.get() if gpu.is_gpu_array(sample) else sample).tobytes()
        mine = zlib.crc32(content)
        varied = content != content[: buffer.itemsize] * (len(content) // buffer.itemsize)
        low, minus_high, varied = self._engine.minimum(np.array([mine, -mine, varied])).tolist()
        if low != -minus_high:
            self._left = 0
        elif varied:
            self._call = call
            self._equal.add(low)
        if len(self._equal) == EQUAL:
            self._left = 0
            if os.environ.get(SWITCH) != "allow":
                notices.once(self._rank, TEXT)
