"""The numbers of ranks in the whole job: their ranks in MPI.COMM_WORLD."""

import functools

from mpi4py import MPI


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """The numbers in the job of the ranks of `comm`: their ranks in MPI.COMM_WORLD. Local."""
    return ranks_in(MPI.COMM_WORLD, comm)


def ranks_in(comm: MPI.Comm, part: MPI.Comm) -> tuple[int, ...]:
    """The ranks in `comm` of all ranks of `part`. Local."""
    few, everyone = part.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(few, range(few.size), everyone)
    few.Free()
    everyone.Free()
    return tuple(ranks)


@functools.cache
def here() -> tuple[int, int]:
    """This rank's number in the job, and how many there are; after the end of MPI too. Local."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
