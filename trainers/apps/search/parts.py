"""Parts: the ranks of a topology, divided into parts that each train or answer on their own."""

import zlib

from allreduce.elastic.ranks import chunk
from allreduce.topology import Topology
from trainers.arguments import integer, is_integer
from trainers.errors import ArgumentError


class Parts:
    """Consecutive ranks of a topology in parts, each with a topology of its own. Constructor and `close`: collective.

    ranks_per_part: how many ranks a part has at least; ranks that are left over join the first parts, so that none is
        idle: 5 ranks with ranks_per_part=2 are a part of 3 and a part of 2.
    most: the largest number of parts; default: no limit. The parts then have more ranks.

    What a part does involves no other part: its waits, agreements and errors are its own. A rank that fails (ULFM)
    revokes the topology of its part, and the one that was divided, but not those of other parts.

    index, count: of this rank's part, and the number of parts. ranks: of each part, by their rank in the topology that
    was divided. topology: of this rank's part. Raises ArgumentError on all ranks.
    """

    def __init__(self, topology: Topology, ranks_per_part: int = 1, most: int | None = None) -> None:
        row = f"Parts(ranks_per_part={ranks_per_part!r}, most={most!r})"
        topology.agree([zlib.crc32(row.encode())], row, parts_error(topology.size, ranks_per_part, most))
        self.count = min(topology.size // ranks_per_part, most or topology.size)
        spans = [chunk(topology.size, self.count, index) for index in range(self.count)]
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


def parts_error(ranks: int, ranks_per_part: object, most: object = None) -> ArgumentError | None:
    """Return the error if the ranks can't be divided so. Local."""
    if not is_integer(ranks_per_part, 1):
        return ArgumentError(integer(1).error("ranks per part", ranks_per_part))
    if text := integer(1).or_none().error("the largest number of parts", most):
        return ArgumentError(text)
    if ranks_per_part > ranks:
        return ArgumentError(
            f"a part of {ranks_per_part} ranks: this job has {ranks} rank{'s' * (ranks != 1)}; give at most {ranks}, "
            f"or start more ranks (mpirun -n {ranks_per_part})"
        )
    return None
