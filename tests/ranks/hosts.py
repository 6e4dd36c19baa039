"""Several hosts on one machine: ranks that pretend to share no memory."""

from mpi4py import MPI


class Hosts(MPI.Intracomm):
    """A communicator whose ranks claim to be on several hosts; so do communicators derived from it."""

    numbers: tuple[int, ...] = ()  # of the host of each rank, in the program that runs now

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:  # noqa: N802
        return self.Split(type(self).numbers[MPI.COMM_WORLD.rank], key)

    def Split(self, color: int = 0, key: int = 0) -> "Hosts":  # noqa: N802
        return type(self)(super().Split(color, key))
