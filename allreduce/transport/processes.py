"""World ranks: the ranks of processes in MPI.COMM_WORLD."""

import functools

from mpi4py import MPI


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the world ranks of the ranks of `comm`. Local."""
    return ranks_in(MPI.COMM_WORLD, comm)


def ranks_in(comm: MPI.Comm, part: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks that the ranks of `part` have in `comm`. Local."""
    return translate(part.Get_group(), comm)


def translate(group: MPI.Group, comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks that the processes of `group`, which is freed, have in `comm`. Local."""
    everyone = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), everyone)
    group.Free()
    everyone.Free()
    return tuple(ranks)


@functools.cache
def here() -> tuple[int, int]:
    """Return this process's world rank and the world size; after MPI_Finalize only if called before. Local."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
