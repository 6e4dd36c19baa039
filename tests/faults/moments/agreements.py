"""Ranks that agree thousands of times that no rank has failed, while another thread lets MPI make progress.

mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.agreements SECONDS
"""

import sys
import time

import numpy as np

import allreduce
from allreduce.transport import ulfm


def main(seconds: float) -> None:
    ulfm.POLL_SECONDS = 1e-5  # the watchdog listens nearly all the time
    topology, draw = allreduce.Topology(), np.random.default_rng(5)
    calls = wrong = 0
    end, goes_on = time.monotonic() + seconds, True
    while goes_on:
        comms = [topology.world.Dup() for _ in range(int(draw.integers(1, 12)))]
        for _ in range(int(draw.integers(1, 30))):
            comm = comms[int(draw.integers(len(comms)))]
            if draw.integers(3) == 0:
                comm.Barrier()
            calls += 1
            wrong += not ulfm.agree(comm, True)
        for comm in comms:
            comm.Free()
        goes_on = topology.world.bcast(time.monotonic() < end)
    print(f"rank {topology.rank}: {wrong} of {calls} wrong" if wrong or not calls else "all were right", flush=True)
    topology.close()


main(float(sys.argv[1]))
