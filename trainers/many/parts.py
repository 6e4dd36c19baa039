"""Parts: the ranks of a topology, divided into parts that each train or answer on their own."""

import zlib
from collections.abc import Sequence
from itertools import accumulate

from allreduce.arrays.chunks import chunk
from allreduce.topology import Topology
from trainers.errors import ArgumentError


class Parts:
    """Consecutive ranks of a topology in parts, each with a topology of its own. Constructor and `close`: collective.

    ranks_per_part: how many ranks a part has at least; ranks that are left over join the first parts, so that none is
        idle: 5 ranks with ranks_per_part=2 are a part of 3 and a part of 2.
    most: the largest number of parts; default: no limit. The parts then have more ranks.
    sizes: instead of both, the ranks of each part, which add up to all ranks.

    What a part does involves no other part: its waits, agreements and errors are its own. A rank that fails (ULFM)
    revokes the topology of its part, and the one that was divided, but not those of other parts.

    index, count: of this rank's part, and the number of parts. ranks: of each part, by their rank in the topology that
    was divided. topology: of this rank's part. Raises ArgumentError on all ranks.
    """

    def __init__(
        self, topology: Topology, ranks_per_part: int = 1, most: int | None = None, sizes: Sequence[int] | None = None
    ) -> None:
        row = f"Parts(ranks_per_part={ranks_per_part!r}, most={most!r}, sizes={sizes!r})"
        values = [hash_of(ranks_per_part), hash_of(most), zlib.crc32(repr(sizes).encode())]
        topology.agree(values, row, parts_error(topology.size, ranks_per_part, most, sizes))
        self.count = min(topology.size // ranks_per_part, most or topology.size) if sizes is None else len(sizes)
        spans = [chunk(topology.size, self.count, index) for index in range(self.count)]
        if sizes is not None:
            spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.ranks = tuple(tuple(range(span.start, span.stop)) for span in spans)
        self.index = next(index for index, ranks in enumerate(self.ranks) if topology.rank in ranks)
        self.topology = topology.split(self.index, on_error="part")

    @property
    def leader(self) -> bool:
        """Whether this rank is the first of its part."""
        return self.topology.rank == 0

    def survivors(self) -> Topology:
        """Continue with the surviving ranks of this part, and return their topology. Collective over these ranks.

        `ranks` still names the ranks that each part began with.
        """
        self.topology = self.topology.survivors(admit=False)
        return self.topology

    def close(self) -> None:
        """Close the topology of this rank's part. Collective over the part."""
        self.topology.close()

    def __str__(self) -> str:
        sizes = "+".join(str(len(ranks)) for ranks in self.ranks)
        return f"{self.count} part{'s' * (self.count != 1)} of {sizes} rank{'s' * (sizes != '1')}"


def hash_of(value: object) -> int:
    """Return a number for an agreement: the value, or -1 if it is not a number."""
    return value if type(value) is int and abs(value) < 2**31 else -1


def parts_error(
    ranks: int, ranks_per_part: object, most: object = None, sizes: Sequence[int] | None = None
) -> ArgumentError | None:
    """Return the error if the ranks can't be divided so. Local."""
    if sizes is not None and (sum(sizes) != ranks or min(sizes) < 1):
        return ArgumentError(f"parts of {list(sizes)} ranks: this job has {ranks}, and each part needs one")
    if type(ranks_per_part) is not int or ranks_per_part < 1:
        return ArgumentError(f"ranks per part: give an integer of at least 1, got {ranks_per_part!r}")
    if most is not None and (type(most) is not int or most < 1):
        return ArgumentError(f"the largest number of parts: give an integer of at least 1, or None, got {most!r}")
    if ranks_per_part > ranks:
        return ArgumentError(
            f"a part of {ranks_per_part} ranks: this job has {ranks} rank{'s' * (ranks != 1)}; give at most {ranks}, "
            f"or start more ranks (mpirun -n {ranks_per_part})"
        )
    return None
