"""Measure the speed-up of data-parallel training whose computation is a pause, so that it needs no cores.

mpirun -n 2 python speedup.py --pause 0.2 --parameters 1000000
sudo bash scripts/cluster_sim.sh 4x1 1gbit -- python docs/programs/speedup.py    # on simulated hosts

Every rank pauses in each step, as if its GPU computed the gradients of its rows, and then averages the gradients.
One rank needs no average, so its step is the pause.
"""

import argparse
import json
import time
from statistics import median

import allreduce

parser = argparse.ArgumentParser(
    description="Measure the speed-up of training whose computation is a pause."
)
parser.add_argument("--allreduce", default="auto", help="the backend (default auto)")
parser.add_argument(
    "--parameters", type=int, default=5_000_000, help="float32 gradients (default 5,000,000)"
)
parser.add_argument(
    "--pause", type=float, default=1.0, help="seconds of computation in a step (default 1)"
)
parser.add_argument("--steps", type=int, default=9, help="measured steps (default 9)")
parser.add_argument("--json", help="a file to which rank 0 adds the result as a line")
options = parser.parse_args()

with allreduce.create(options.allreduce) as reduce:
    grads = reduce.allocate(options.parameters, "float32")
    seconds = []
    for _ in range(options.steps + 1):
        grads[:] = reduce.rank
        reduce.topology.world.Barrier()
        start = time.perf_counter()
        time.sleep(options.pause)  # in place of forward and backward
        reduce(grads, op="mean")  # waits for the slowest rank
        seconds.append(time.perf_counter() - start)
    assert (grads == (reduce.size - 1) / 2).all()
    step = median(seconds[1:])  # the first step also prepares
    speedup = reduce.size * options.pause / step
    if reduce.rank == 0:
        print(
            f"{reduce.topology}: step {step:.3f} s, of which communication {step - options.pause:.3f} s; "
            f"{speedup:.2f} times as fast as one rank"
        )
        if options.json:
            record = {
                "ranks": reduce.size,
                "nodes": reduce.topology.nodes,
                "allreduce": options.allreduce,
                "parameters": options.parameters,
                "pause": options.pause,
                "step": step,
            }
            with open(options.json, "a") as file:
                file.write(json.dumps(record) + "\n")
