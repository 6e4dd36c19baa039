"""An algorithm of your own, registered by the program that uses it.

mpirun -n 4 python write_backend.py
"""

import numpy as np

import allreduce
from allreduce.arrays import dtypes


class Everyone(allreduce.Algorithm):
    """Every rank receives all buffers, and sums them in the same order."""

    def reduce(self, buffer, op):
        # 1-D, contiguous, at least one element, on at least two ranks; to be reduced in place
        everything = self.workspace.array("everything", self.size * buffer.size, buffer.dtype)
        self.comm.Allgather(dtypes.wire(buffer), dtypes.wire(everything))
        parts = everything.reshape(self.size, buffer.size)
        accumulator = dtypes.TYPES[buffer.dtype].accumulator  # float32 for 16-bit floats
        total = self.workspace.array("total", buffer.size, accumulator)
        total[:] = parts[0]
        for part in parts[1:]:
            op.combine(total, part, out=total)  # np.add, np.maximum, ...
        op.finish(total)  # the mean's 1/n; nothing for the other operations
        buffer[:] = total  # rounded once


allreduce.register("everyone", Everyone)

if __name__ == "__main__":
    with allreduce.create("everyone") as reduce:
        grads = np.full(5, reduce.rank, "float16")
        reduce(grads)  # the mean, by default
        assert (grads == (reduce.size - 1) / 2).all()
        if reduce.rank == 0:
            print(f"everyone on {reduce.size} ranks: {grads[0]}")
