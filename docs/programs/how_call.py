"""Allocate, reduce, bind: the three calls of a loop.

mpirun -n 4 python how_call.py
"""

import allreduce

with allreduce.create("auto") as reduce:  # collective: all ranks, with the same arguments
    grads = reduce.allocate(1_000_000, "float32")  # 1. memory in which this backend reduces
    grads[:] = reduce.rank
    reduce(grads, op="mean")  # 2. compared, then reduced in place
    average = reduce.bind(grads, op="mean")  # 3. the same call with less overhead
    average()
    if reduce.rank == 0:
        print(grads[0])
