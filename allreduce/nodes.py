"""What a topology is asked for: ranks, nodes to simulate, time to wait; or why that can't be."""

from collections import Counter
from collections.abc import Sequence

from mpi4py import MPI

from allreduce import versions
from allreduce.errors import OptionError
from allreduce.health.stall import STALL, TIMEOUT, seconds
from allreduce.transport.control import all_values, root_value


def simulated_node(rank: int, ranks_per_node: int | Sequence[int]) -> int:
    if isinstance(ranks_per_node, int):
        return rank // ranks_per_node
    end = 0
    for index, size in enumerate(ranks_per_node):
        end += size
        if rank < end:
            return index
    raise AssertionError("sizes were checked to cover all ranks")


def divide(real: MPI.Intracomm, rank: int, ranks_per_node: int | Sequence[int] | None) -> MPI.Comm:
    """The node that this rank is on, or is said to be on. real: the ranks that share memory with it. Collective."""
    return real.Dup() if ranks_per_node is None else real.Split(simulated_node(rank, ranks_per_node), key=rank)


def nodes_left(
    ranks_per_node: int | Sequence[int] | None, left: Sequence[int], ranks: int
) -> int | Sequence[int] | None:
    """`ranks_per_node` of those ranks that are left of `ranks`: each stays on its node."""
    if ranks_per_node is None or bad_ranks_per_node(ranks_per_node, ranks) is not None:
        return ranks_per_node  # Topology refuses what is bad
    return list(Counter(simulated_node(rank, ranks_per_node) for rank in left).values())


def number_nodes(world: MPI.Intracomm, node: MPI.Intracomm) -> tuple[list[list[int]], int]:
    """The ranks of all nodes, and which node is this rank's. Nodes are in the order of their leaders. Collective."""
    leader = root_value(node, world.rank, "learn the leader of this node")
    found = all_values(world, [leader, versions.digest()], "count the nodes")
    versions.compare(world, [of_rank[1] for of_rank in found])
    ranks: dict[int, list[int]] = {}
    for rank, (of_rank, _) in enumerate(found):
        ranks.setdefault(of_rank, []).append(rank)
    leaders = sorted(ranks)
    return [ranks[each] for each in leaders], leaders.index(leader)


def bad_ranks_per_node(given: int | Sequence[int] | None, ranks: int) -> OptionError | None:
    if given is None or _is_positive(given):
        return None
    sizes = list(given) if isinstance(given, Sequence) else []
    if all(map(_is_positive, sizes)) and sum(sizes) == ranks:
        return None
    return OptionError(
        f"ranks_per_node={given!r} can't describe {ranks} ranks: give a positive number of ranks, "
        f"or a sequence of positive node sizes that add up to {ranks}"
    )


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def bad_split(colour: int, on_error: str) -> OptionError | None:
    if isinstance(colour, bool) or not isinstance(colour, int) or not 0 <= colour < 2**31:
        return OptionError(f"colour must be an integer >= 0, the same on the ranks of a part, got {colour!r}")
    if on_error not in ("job", "part"):
        return OptionError(f'on_error={on_error!r} is unknown; use "job" or "part"')
    return None


def bad_timeout(timeout: float | None) -> OptionError | None:
    try:
        seconds(TIMEOUT, 1800.0)
        seconds(STALL, 30.0)
    except OptionError as error:
        return error
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0):
        return None
    return OptionError(f"timeout must be a number of seconds > 0, got {timeout!r}")


def checked(comm: MPI.Intracomm | None, default: MPI.Intracomm) -> MPI.Intracomm:
    """The communicator that was given, or the default; OptionError when nothing can be done on it."""
    if comm is None:
        return default
    if not isinstance(comm, MPI.Intracomm):
        kind = "an intercommunicator" if isinstance(comm, MPI.Intercomm) else type(comm).__qualname__
        raise OptionError(f"Topology takes an intracommunicator of mpi4py (MPI.COMM_WORLD, say), not {kind}")
    if comm == MPI.COMM_NULL:
        raise OptionError("Topology was given MPI.COMM_NULL: a communicator that was freed, or that excludes this rank")
    return comm
