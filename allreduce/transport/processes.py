"""World ranks: the ranks of processes in MPI.COMM_WORLD."""

import functools

from mpi4py import MPI


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the world ranks of the ranks of `comm`. Local."""
    return ranks_in(MPI.COMM_WORLD, comm)


def ranks_in(comm: MPI.Comm, part: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks that the ranks of `part` have in `comm`. Local."""
    few, everyone = part.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(few, range(few.size), everyone)
    few.Free()
    everyone.Free()
    return tuple(ranks)


@functools.cache
def here() -> tuple[int, int]:
    """Return this process's world rank and the world size; after MPI_Finalize only if called before. Local."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
