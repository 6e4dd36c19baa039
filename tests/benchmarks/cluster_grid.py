"""The grid in short form on the hosts of scripts/cluster_sim.sh; started by test_cluster_sim.py.

Each rank prints one line of JSON: its rank, host and topology, the backends, and how many cases it ran.
"""

import json
import socket
import zlib

import allreduce  # first, because it prepares the environment of MPI

# isort: split
from mpi4py import MPI

from allreduce.backend import AllReduce
from tests.ranks.grid import compare, expected, run_grid, values

DTYPES = ("float32", "bfloat16", "int64")
LENGTHS = (0, 1, 5, 50_003)
LONG = 1_500_007  # even a quarter of it travels in several segments


def run_long(reduce: AllReduce, comm: MPI.Intracomm) -> int:
    """One sum of an allocated array of many segments, twice."""
    array = reduce.allocate(LONG, "float32")
    for turn in (0, 1):
        array[:] = values(array.dtype, LONG, comm.rank, turn)
        reduce(array, "sum")
        assert expected(array.dtype, LONG, "sum", comm.size, turn).hold(array), f"wrong sums of {LONG} elements"
        compare({reduce.name: zlib.adler32(array.view("uint8"))}, comm)
    return 1


def main() -> None:
    with allreduce.Topology() as topology:
        names = allreduce.available(topology)
        cases = 0
        for name in names:
            with allreduce.create(name, topology) as reduce:
                for dtype in DTYPES:
                    if reduce.sums_half or dtype != "bfloat16":
                        cases += run_grid(reduce, dtype, topology.world, LENGTHS)
                cases += run_long(reduce, topology.world)
        found = {"rank": topology.rank, "host": socket.gethostname(), "topology": str(topology)}
        mine = json.dumps({**found, "backends": names, "cases": cases})
        for line in topology.world.gather(mine) or []:  # one rank prints: lines of several can run together
            print(line, flush=True)


main()
