"""What ends the whole job. An error that one rank has alone would leave all others waiting for it for ever."""

import functools

from mpi4py import MPI


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """The numbers in the job of the ranks of `comm`: their ranks in MPI.COMM_WORLD. Local."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), world)
    group.Free()
    world.Free()
    return tuple(ranks)


@functools.cache
def here() -> tuple[int, int]:
    """This rank's number in the job, and how many there are; after the end of MPI too. Local."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
