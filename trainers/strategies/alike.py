"""rows="whole": ranks must have the same batches. The flags of a step carry a fingerprint of each rank's next batch.

Sums over the ranks show whether all fingerprints are equal: n * sum(d * d) == sum(d) ** 2 holds only for n equal
numbers d (Cauchy and Schwarz). The numbers are so small that their sums are exact in float32, in any order.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from allreduce.transport.control import all_values, combine, on_all_ranks
from allreduce.transport.tables import table
from trainers.data import BatchSource
from trainers.errors import DataError

MARKS = ("read", "low", "low^2", "high", "high^2")  # names of the numbers of `marks`
EXACT_BITS = 24  # integers of so many bits are exact in float32


def _fingerprints(batches: BatchSource) -> dict[int, int]:
    """Return the checksum of each batch that this rank has read, by its step; {} if ranks need not read the same."""
    return {} if batches.divided else {step: sum for step, (_, sum) in batches.seen.items()}


def marks(batches: BatchSource, steps: range, ranks: int) -> tuple[int, ...]:
    """Return the numbers that this rank adds to the sums for `differ`: zeros if it reads no whole batches. Local.

    steps: the steps whose batches have this fingerprint. ranks: the number of ranks.
    """
    fingerprints = _fingerprints(batches)
    if not fingerprints:
        return (0,) * len(MARKS)
    bits = max(1, (EXACT_BITS - (ranks - 1).bit_length()) // 2)
    whole = zlib.crc32(np.array([fingerprints.get(step, 0) for step in steps], np.int64).data)
    low, high = whole % (1 << bits), (whole >> bits) % (1 << bits)
    return 1, low, low * low, high, high * high


def differ(sums: Sequence[float]) -> bool:
    """Return whether the batches of the ranks differ. sums: of the `marks` of all ranks. Local."""
    count, low, low_squares, high, high_squares = map(round, sums)
    return count * low_squares != low * low or count * high_squares != high * high


def error(batches: BatchSource, epoch: int, comm: MPI.Intracomm) -> DataError | None:
    """Return the error that names the first batch of the epoch that differs between the ranks that have read it, or
    None if no batch differs. Collective."""
    known = _fingerprints(batches)
    last = int(combine(comm, np.array([max(known, default=-1)]), "compare batches", MPI.MAX)[0])
    bounds = np.full((2, last + 1), -1, np.int64)
    unknown = -(1 << 32)
    bounds[1] = unknown
    for step, fingerprint in known.items():
        bounds[:, step] = fingerprint, -fingerprint
    combine(comm, bounds, "compare batches", MPI.MAX)
    most, least = bounds[0], -bounds[1]
    wrong = np.flatnonzero((most >= 0) & (most != least))
    if not wrong.size:
        return None
    step = int(wrong[0])
    own = known.get(step, -1) if known else None
    texts = [
        "reads no batches"
        if each is None
        else "not read"
        if each < 0
        else f"#{each:08x}"
        if each
        else "none: it has ended"
        for each in all_values(comm, own, "compare batches")
    ]
    what = f'rows="whole": batch {step + 1} of epoch {epoch + 1} is not the same on all ranks'
    advice = 'all loaders must give the same batches; use rows="divided" for loaders that give each rank its own'
    return on_all_ranks(DataError(f"{what}: {advice}:\n{table(texts)}"), comm)
