"""Averages of slices become whole: what `synchronize` does for a sharded update."""

from collections.abc import Callable
from functools import partial

import numpy as np

from allreduce.messages.agreement import raise_together
from trainers.pytorch.averaging import AVERAGED, SCATTERED, Averager
from trainers.pytorch.backward import EDITED
from trainers.pytorch.errors import GradientError


def gather(averager: Averager, all_gather: Callable[[np.ndarray], object]) -> None:
    """Go from SCATTERED to AVERAGED. Collective.

    all_gather: fills a bucket from what the ranks own. Edits of a rank are refused on all of them.
    """
    work = partial(_gather, averager, all_gather, edited(averager))
    averager.clock.communicate(partial(averager.together, "gathers gradients", work))


def edited(averager: Averager) -> GradientError | None:
    """Take in the changes that the program has made to averaged gradients. Local.

    Returns what is wrong: edits of SCATTERED gradients (clipped by a norm of leftovers, for example), or gradients of
    another shape or dtype.
    """
    if averager.state == SCATTERED:
        return GradientError(EDITED) if averager.edited() else None
    try:
        averager.take_given()
    except GradientError as error:
        return error
    return None


def _gather(averager: Averager, all_gather: Callable[[np.ndarray], object], error: GradientError | None) -> None:
    """Runs in the lane. error: of this rank, raised on all of them."""
    raise_together(averager.comm, error)
    for memory in averager.buckets:
        memory.through(all_gather, reads=averager.owned(memory.array.size))
    averager.become(AVERAGED)
