"""One rank of a job in which ranks of workers of two ranks kill themselves, and the others continue.

    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.workers

The rank that is 0 at the end prints the result of each training, as a line of JSON.
"""

from mpi4py import MPI

from tests.faults.moments.served import alone, trained
from trainers import ParameterServerTrainer

if __name__ == "__main__":
    # The first and the last of five workers of one rank die.
    deaths = {0: ("batch_begin", 1, 2), 4: ("batch_end", 3, 1)}
    trained("sync", ParameterServerTrainer, deaths, updates="sync")
    # Of the workers (0, 1) and (2), a rank that is no leader dies, then the whole last worker.
    deaths = {1: ("part", 1, 0), 2: ("epoch_end", 3, 0)}
    trained("async", ParameterServerTrainer, deaths, ranks_per_worker=2)
    if MPI.COMM_WORLD.Shrink().rank == 0:
        alone()
