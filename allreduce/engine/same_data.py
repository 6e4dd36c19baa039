"""Warns when all ranks train on the same data: a program was made data-parallel, and each rank still loads all of it.

The averages are right then, but the training takes as long as on one rank and learns no more.
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

SWITCH = "ALLREDUCE_SAME_DATA"  # "allow": nothing is said
LEAST_LENGTH = 64  # of arrays that are looked at; metrics and counters are shorter
EQUAL = 3  # different arrays of one signature, each of them equal on all ranks, before it is said
LOOKS = 8  # calls, at most
SAMPLES = 4096  # elements of an array that are compared
TEXT = (
    "all ranks have brought the same gradients, bit for bit, to the first averages: they seem to train on the same "
    "batches, which takes as long as one rank alone and learns no more. Give each rank its share of the data: "
    "sampler=DistributedSampler(dataset) for a DataLoader, or x[rank::size]; shares of different size are weighted by "
    f"`rows` of MirroredOptimizer ({SWITCH}=allow leaves this warning out)"
)


class SameData:
    """Compares the first arrays that a backend averages over all ranks. Local, but for what `look_at` returns.

    Only means of at least LEAST_LENGTH elements count, and of these only the arrays of one call: that of the first
    array whose elements are not all equal. So parameters that are averaged once, layer by layer, do not count as
    gradients. The first array that differs between ranks ends it: the ranks have data of their own.
    """

    def __init__(self, engine: Engine, rank: int, looks: bool) -> None:
        self._engine, self._rank = engine, rank
        self._left = LOOKS if looks else 0
        self._call: Call | None = None  # of the arrays that count, once one has come
        self._equal: set[int] = set()  # hashes of those that were equal on all ranks

    def look_at(self, call: Call, op: Op) -> Callable[[Any], bool] | None:
        """What looks at the arrays of a call; None where none is due. It is due on all ranks, or on none.

        It returns False when it is not due any more, and does nothing then.
        """
        if not self._counts(call) or op.scale is None or call.length < LEAST_LENGTH:
            return None

        def look(array: Any) -> bool:
            if self._counts(call):
                self._look(array, call)
            return self._counts(call)

        return look

    def _counts(self, call: Call) -> bool:
        return self._left > 0 and self._call in (None, call)

    def _look(self, buffer: Any, call: Call) -> None:
        """Compare a 1-D array. Collective, inside of a call on which the ranks have agreed."""
        self._left -= 1
        sample = buffer[:: max(1, buffer.size // SAMPLES)]
        content = (sample.get() if gpu.is_gpu_array(sample) else sample).tobytes()
        mine = zlib.crc32(content)
        varied = content != content[: buffer.itemsize] * (len(content) // buffer.itemsize)
        low, minus_high, varied = self._engine.lowest(np.array([mine, -mine, varied])).tolist()
        if low != -minus_high:
            self._left = 0
        elif varied:
            self._call = call
            self._equal.add(low)
        if len(self._equal) == EQUAL:
            self._left = 0
            if os.environ.get(SWITCH) != "allow":
                notices.once(self._rank, TEXT)
