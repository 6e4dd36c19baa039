"""Whether replicas still are replicas: the bits of what must be equal on all ranks, compared by their sums."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.transport import processes
from allreduce.transport.control import all_values, wait_for

ANSWERS = ("raise", "copy")  # what may be done about ranks that differ
MAJORITY = "majority"
LEARNING_RATES = "learning rates"  # the name by which they are compared
WAITS = "compare the replicas"
LACKING = -1  # the sum of what a rank has none of


class Source:
    """Whose replica is copied when ranks differ. It stays the same process when ranks are lost and renumbered.

    given: "majority", or a rank of `comm`. rank: "majority", or the rank of that process in the newest communicator.
    """

    def __init__(self, given: str | int, comm: MPI.Comm) -> None:
        self.rank = given
        self.number = None if given == MAJORITY else processes.world_ranks(comm)[int(given)]  # in the job

    def move(self, comm: MPI.Comm) -> None:
        """Find the source in `comm`, the newest communicator; if it is lost, take the majority. Local."""
        if self.number is None:
            return
        ranks = processes.world_ranks(comm)
        if self.number in ranks:
            self.rank = ranks.index(self.number)
            return
        if comm.rank == 0:
            notices.log.warning(
                "allreduce: rank %d of the job is lost, whose replica was to be copied when replicas differ (source=); "
                "from now on it is that of the majority",
                self.number,
            )
        self.rank, self.number = MAJORITY, None


class Divergence:
    """What differs between ranks; the same on all of them.

    names: of what was compared. sums: of each rank (rows) and name (columns), int64. sides: each rank's first
        difference in words.
    """

    def __init__(self, names: list[str], sums: np.ndarray, sides: list[str]) -> None:
        self.names, self.sums, self.sides = names, sums, sides

    def root(self, source: str | int) -> int:
        """The rank whose replica is to be everyone's: `source`, or the first of the most that are equal."""
        if source != MAJORITY:
            return int(source)
        rows = [tuple(row) for row in self.sums.tolist()]
        return rows.index(max(rows, key=lambda row: (rows.count(row), -rows.index(row))))

    def differing(self, root: int) -> list[int]:
        """The ranks that differ from `root` in anything."""
        return np.flatnonzero((self.sums != self.sums[root]).any(axis=1)).tolist()

    def __str__(self) -> str:
        differ = np.flatnonzero((self.sums != self.sums[0]).any(axis=0))
        first = int(differ[0])
        values = self.sums[:, first].tolist()
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        odd = [str(rank) for rank, value in enumerate(values) if value != usual]
        ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(odd)} differ{'s' * (len(odd) == 1)}"
        table = "\n".join(f"  rank {rank}: {self.names[first]}: {side}" for rank, side in enumerate(self.sides))
        return (
            f"the replicas are no longer equal: {ranks} from the others in {self.names[first]}, the first of "
            f"{differ.size} differences. Gradients, parameters or hyperparameters were changed on some ranks only:\n"
            f"{table}"
        )


def compare(comm: MPI.Intracomm, held: Mapping[str, np.ndarray | str]) -> Divergence | None:
    """What differs between the ranks; None when nothing does. Collective.

    held: what must be equal by name: contiguous arrays on the host, or texts. A name that a rank lacks differs there.
    Costs one reading of all arrays (a CRC, 4 GB/s here) and a message of 16 bytes; more only when ranks differ.
    """
    own = {name: zlib.crc32(_memory(value)) for name, value in held.items()}
    whole = zlib.crc32(repr(sorted(own.items())).encode())
    low = np.array([whole, -whole], np.int64)  # the minimum of -x is minus the maximum: one message gives both
    wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN), WAITS)
    if low[0] == -low[1]:
        return None
    ranks = all_values(comm, own, WAITS)
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    sums = np.array([[rank.get(name, LACKING) for name in names] for rank in ranks], np.int64)
    first = names[int(np.flatnonzero((sums != sums[0]).any(axis=0))[0])]
    side = _side(held[first], own[first]) if first in held else "has none"
    return Divergence(names, sums, all_values(comm, side, WAITS))


def refusal(every: Any, on_divergence: Any, source: Any, ranks: int | None) -> str:
    """What is wrong with such options; "" for nothing. ranks: their number, None where it is not known."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        return f"every must be an integer >= 1, got {every!r}"
    if on_divergence not in ANSWERS:
        return f'on_divergence={on_divergence!r} is unknown; use "raise" or "copy"'
    rank = isinstance(source, int) and not isinstance(source, bool)
    if source != MAJORITY and not (rank and source >= 0 and (ranks is None or source < ranks)):
        known = "" if ranks is None else f", 0 to {ranks - 1}"
        return f'source must be "majority", or a rank{known}, got {source!r}'
    return ""


def _memory(value: np.ndarray | str) -> Any:
    if isinstance(value, str):
        return value.encode()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _side(value: np.ndarray | str, crc: int) -> str:
    """A rank's value, in words."""
    if isinstance(value, str):
        return value
    text = f"crc {crc:08x}"
    if value.dtype.kind != "f":
        return text
    with np.errstate(all="ignore"):
        return f"{text}, norm {float(np.linalg.norm(value.astype(np.float64)))!r}"
