"""Run by scripts/gpu_test.sh under mpirun: MirroredOptimizer and TorchReplica on GPUs train as on the host.

Ranks take the GPUs in turn; those that share one stage through the host, as NCCL wants one for each.
"""

import numpy as np
import torch
from cuda_training import compare, fitted, optimized

import allreduce

TOPOLOGY = allreduce.Topology()
HOST = torch.device("cpu")


def main() -> None:
    gpus = torch.cuda.device_count()
    place = torch.device("cuda", TOPOLOGY.node_rank % gpus)
    torch.cuda.set_device(place)
    alone = TOPOLOGY.node_size <= gpus
    for update in ("replicated", "sharded"):
        wanted = optimized(TOPOLOGY, HOST, allreduce="ring", update=update)
        for name in ("auto", "ring", *["nccl"] * alone):
            for overlap in (True, False):
                options = {"allreduce": name, "update": update, "overlap": overlap, "check_gradients": "raise"}
                compare(optimized(TOPOLOGY, place, check_every=2, **options), wanted)
                with torch.cuda.stream(torch.cuda.Stream(place)):
                    compare(optimized(TOPOLOGY, place, **options), wanted)
                say(f"MirroredOptimizer, {update}, {name}, overlap={overlap}: as on the host")
    wanted, scores, _ = fitted(TOPOLOGY, HOST, allreduce="ring")
    for name in ("auto", "ring", *["nccl"] * alone):
        found, here, kind = fitted(TOPOLOGY, place, allreduce=name)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(here, scores, rtol=1e-3)
        say(f"TorchReplica, {name}, {kind.__module__}: as on the host")


def say(text: str) -> None:
    if TOPOLOGY.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
