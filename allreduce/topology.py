"""Who is where: the world, the node and the cross communicators, their owner, and simulated nodes."""

import os
import zlib
from collections.abc import Sequence
from typing import Protocol

from mpi4py import MPI

from allreduce import children, notices
from allreduce.errors import ClosedError, OptionError, abort_on_uncaught, agree

TAGS = 1 << 15  # every MPI has at least this many


class Closeable(Protocol):
    """What uses a communicator of a topology and has to be closed before it."""

    def close(self) -> None: ...


class Topology:
    """The ranks of a communicator and the nodes that they run on. Creating and closing are collective.

    comm: an intracommunicator, duplicated here; MPI.COMM_WORLD when none is given.
    ranks_per_node: simulates nodes: consecutive ranks form a node, an int for nodes of one size (the
        last may be smaller) or a sequence of sizes that add up to the number of ranks. Ranks that do not
        really share memory are never put on one simulated node.

    Communicators (all owned here and freed by `close`):
        world   all ranks
        node    the ranks that share memory with this one
        cross   the ranks with this one's node rank, one on each node that has such a rank

    With uneven nodes, `cross` differs in size from rank to rank; `leaders_only` is then true and only
    node rank 0 of each node should speak for it.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, ranks_per_node: int | Sequence[int] | None = None) -> None:
        children.check()
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm.size > 1:
            abort_on_uncaught(MPI.COMM_WORLD)
        asked = f"Topology(ranks_per_node={ranks_per_node!r})"
        agree(comm, [zlib.crc32(asked.encode())], asked, _bad_ranks_per_node(ranks_per_node, comm.size))
        self._owned: list[MPI.Intracomm] = []
        self._users: list[Closeable] = []
        self._children: list[Topology] = []
        self.closed = False
        self.simulated = ranks_per_node is not None
        self.world: MPI.Intracomm = self._own(comm.Dup())
        self.node: MPI.Intracomm = self._own(self._split_nodes(ranks_per_node))
        self.node_sizes, self.node_index = self._number_nodes()
        self.cross: MPI.Intracomm = self._own(self.world.Split(self.node.rank, self.node_index))

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], name: str) -> "Topology":
        """The topology of some ranks of MPI.COMM_WORLD, in the given order. Collective over these alone.

        name: tells this call from others that go on at the same time; the same on all of them.
        """
        children.check()
        everyone = MPI.COMM_WORLD.Get_group()
        if not ranks or not all(0 <= rank < everyone.size for rank in ranks):
            raise OptionError(f"ranks {list(ranks)}: MPI has the ranks 0 to {everyone.size - 1}")
        group = everyone.Incl(list(ranks))
        comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name.encode()) % TAGS)
        try:
            return cls(comm)
        finally:
            comm.Free()
            group.Free()
            everyone.Free()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def node_rank(self) -> int:
        return self.node.rank

    @property
    def node_size(self) -> int:
        return self.node.size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.node_sizes)

    @property
    def leaders_only(self) -> bool:
        """True when nodes differ in size, so that only their leaders can pair up across nodes."""
        return len(set(self.node_sizes)) > 1

    def __str__(self) -> str:
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        nodes = f"{self.nodes} {'simulated ' * self.simulated}node{'s' * (self.nodes != 1)}"
        return (
            f"{ranks} on {nodes} ({'+'.join(map(str, self.node_sizes))})" if self.nodes > 1 else f"{ranks} on {nodes}"
        )

    def inside(self) -> "Topology":
        """The topology of this node alone: its ranks, one node. Collective over the node."""
        return self._child(Topology(self.node))

    def across(self) -> "Topology | None":
        """The topology of one rank per node, each on a node of its own. Collective over the world.

        Equal nodes: the ranks with this rank's node rank. Uneven nodes: the leaders; None on other ranks.
        """
        if self.leaders_only and self.node_rank:
            return None
        return self._child(Topology(self.cross, ranks_per_node=1))

    def private(self, user: Closeable | None = None) -> MPI.Intracomm:
        """A duplicate of `world` on which its user's messages are its own. Collective; owned here.

        user: closed before the communicator when the topology is closed.
        """
        self.check_open()
        if user is not None:
            self._users.append(user)
        return self._own(self.world.Dup())

    def release(self, comm: MPI.Intracomm, user: Closeable | None = None) -> None:
        """Free a communicator that `private` gave to `user`. Collective."""
        if user is not None:
            self._users.remove(user)
        self._owned.remove(comm)
        comm.Free()

    def close(self) -> None:
        """Close what still uses this topology, then free every communicator. Collective."""
        if self.closed:
            return
        self.closed = True
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.close()
        for comm in reversed(self._owned):
            comm.Free()

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        if self.closed:
            raise ClosedError("this topology is closed; make a new Topology()")

    def __enter__(self) -> "Topology":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def _own(self, comm: MPI.Comm) -> MPI.Intracomm:
        assert isinstance(comm, MPI.Intracomm)
        self._owned.append(comm)
        return comm

    def _child(self, child: "Topology") -> "Topology":
        self._children = [each for each in self._children if not each.closed] + [child]
        return child

    def _split_nodes(self, ranks_per_node: int | Sequence[int] | None) -> MPI.Comm:
        real = self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self._tell_oversubscription(real.size)
        if ranks_per_node is None:
            return real
        node = real.Split(_simulated_node(self.rank, ranks_per_node), key=self.rank)
        real.Free()
        return node

    def _number_nodes(self) -> tuple[tuple[int, ...], int]:
        """Nodes are numbered by their lowest world rank, the leader."""
        leader = self.node.bcast(self.rank)
        sizes = {place[0]: place[1] for place in self.world.allgather((leader, self.node.size))}
        leaders = sorted(sizes)
        return tuple(sizes[each] for each in leaders), leaders.index(leader)

    def _tell_oversubscription(self, ranks: int) -> None:
        cores = os.cpu_count() or 1
        if ranks > cores:
            text = f"{ranks} ranks share the {cores} cores of this node: expect no speed-up from more ranks"
            notices.once(self.rank, text)


children.guard(Topology, "__init__", "inside", "across", "private", "release", "close", "check_open")


def _simulated_node(rank: int, ranks_per_node: int | Sequence[int]) -> int:
    if isinstance(ranks_per_node, int):
        return rank // ranks_per_node
    end = 0
    for index, size in enumerate(ranks_per_node):
        end += size
        if rank < end:
            return index
    raise AssertionError("sizes were checked to cover all ranks")


def _bad_ranks_per_node(given: int | Sequence[int] | None, ranks: int) -> OptionError | None:
    if given is None or (isinstance(given, int) and given > 0):
        return None
    sizes = list(given) if isinstance(given, Sequence) else []
    if all(isinstance(size, int) and size > 0 for size in sizes) and sum(sizes) == ranks:
        return None
    return OptionError(
        f"ranks_per_node={given!r} can't describe {ranks} ranks: give a positive number of ranks, "
        f"or a sequence of positive node sizes that add up to {ranks}"
    )
