"""Several hosts on one machine: ranks that share no memory, by their own account."""

from mpi4py import MPI


class Hosts(MPI.Intracomm):
    """A communicator whose ranks are on several hosts, by its own account; what is made from it is one, too."""

    sizes: tuple[int, ...] = ()  # of the hosts of the program that runs now

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:  # noqa: N802
        host = [index for index, size in enumerate(type(self).sizes) for _ in range(size)][self.rank]
        return self.Split(host, key)
