"""Layout: which ranks run on which node. It has no MPI, so formulas of costs use it for jobs of any size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allreduce.arrays.arguments import is_integer
from allreduce.errors import OptionError

NodeSizes = int | Sequence[int] | None  # `ranks_per_node`


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of each node, the same on all ranks. Nodes are sorted by their leader, which is their first rank.

    members: the ranks of each node. simulated: whether `ranks_per_node` has divided real nodes.
    """

    members: tuple[tuple[int, ...], ...]
    simulated: bool = False

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], simulated: bool = False) -> "NodeLayout":
        """Return the layout of nodes of consecutive ranks."""
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return cls(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)), simulated)

    @classmethod
    def of_leaders(cls, leaders: Sequence[int], simulated: bool = False) -> "NodeLayout":
        """Return the layout with these leaders. leaders: the leader of each rank's node, by rank."""
        members: dict[int, list[int]] = {leader: [] for leader in sorted(set(leaders))}
        for rank, leader in enumerate(leaders):
            members[leader].append(rank)
        return cls(tuple(map(tuple, members.values())), simulated)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.node_sizes)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.members)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.members))

    @property
    def leaders_only(self) -> bool:
        """True when nodes differ in size, so that only their leaders can pair up across nodes."""
        return len(set(self.node_sizes)) > 1

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(index for index, ranks in enumerate(self.members) if rank in ranks)

    def __str__(self) -> str:
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        nodes = f"{self.nodes} {'simulated ' * self.simulated}node{'s' * (self.nodes != 1)}"
        return f"{ranks} on {nodes}" + (f" ({'+'.join(map(str, self.node_sizes))})" if self.nodes > 1 else "")


def simulated(ranks_per_node: int | Sequence[int], ranks: int) -> NodeLayout:
    """Return the layout of simulated nodes. The argument must have no `error_of_sizes`."""
    if not isinstance(ranks_per_node, Sequence):
        most = int(ranks_per_node)
        ranks_per_node = [min(most, ranks - begin) for begin in range(0, ranks, most)]
    return NodeLayout.of_sizes(ranks_per_node, simulated=True)


def error_of_sizes(ranks_per_node: NodeSizes, ranks: int) -> OptionError | None:
    """Return the error of a `ranks_per_node` that can't describe this number of ranks, else None."""
    if ranks_per_node is None or is_integer(ranks_per_node, 1):
        return None
    sizes = list(ranks_per_node) if isinstance(ranks_per_node, Sequence) else []
    if all(is_integer(each, 1) for each in sizes) and sum(sizes) == ranks:
        return None
    return OptionError(
        f"ranks_per_node={ranks_per_node!r} can't describe {ranks} ranks: give a positive number of ranks, "
        f"or a sequence of positive node sizes that add up to {ranks}"
    )


def nodes_left(ranks_per_node: NodeSizes, left: Sequence[int], ranks: int) -> NodeSizes:
    """Return `ranks_per_node` for the surviving ranks `left` of `ranks`; each stays on its node."""
    if ranks_per_node is None or error_of_sizes(ranks_per_node, ranks) is not None:
        return ranks_per_node  # Topology raises its error
    return list(Counter(map(simulated(ranks_per_node, ranks).node_of, left)).values())
