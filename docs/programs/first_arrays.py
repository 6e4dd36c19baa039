"""Average arrays over all ranks.

mpirun -n 4 python first_arrays.py
"""

import allreduce

with allreduce.create("auto") as reduce:  # collective: all ranks call it
    grads = reduce.allocate(1_000_000, "float32")  # reduced there without a copy
    grads[:] = reduce.rank
    reduce(grads)  # in place; averages by default: op="mean"
    if reduce.rank == 0:  # only rank 0 prints
        print(f"average over {reduce.size} ranks: {grads[0]}")
