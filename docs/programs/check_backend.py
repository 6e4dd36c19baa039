"""Checks a backend of your own against `ring`, call by call and in a training.

mpirun -n 3 python check_backend.py
"""

import numpy as np

import allreduce
import write_backend  # registers "everyone"
from trainers import MirroredTrainer, NumpyNetwork, datasets
from trainers.callbacks import CheckDivergence

NAME = "everyone"


def values(rank, length, dtype):
    """Return small whole numbers: any order of addition gives the same sum."""
    return np.random.default_rng(rank).integers(1, 4, length).astype(dtype)


def check_calls(topology):
    """Compare every dtype, operation and length with `ring`, in memory of both kinds."""
    calls = 0
    with allreduce.create(NAME, topology) as mine, allreduce.create("ring", topology) as ring:
        for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"):
            for op in ("sum", "mean", "max", "min", "prod"):
                if op == "mean" and dtype in ("int32", "int64", "bool"):
                    continue
                for length in (0, 1, 5, 65537):
                    wanted = ring.allocate(length, dtype)
                    wanted[:] = values(topology.rank, length, wanted.dtype)
                    ring(wanted, op)
                    for array in (mine.allocate(length, dtype), np.empty_like(wanted)):
                        array[:] = values(topology.rank, length, wanted.dtype)
                        mine(array, op)
                        assert array.tobytes() == wanted.tobytes(), (dtype, op, length)
                        calls += 1
    return calls


def check_bits(topology):
    """Reduce zeros of both signs and different NaNs: only the same order of operands gives the same bits on all ranks."""
    with allreduce.create(NAME, topology) as mine:
        for value in (
            -0.0 if topology.rank % 2 else 0.0,
            np.copysign(np.nan, topology.rank % 2 - 0.5),
        ):
            for op in ("sum", "max", "min"):
                array = np.full(65537, value, "float32")
                mine(array, op)
                first = array.copy()
                mine.broadcast(first)
                assert array.tobytes() == first.tobytes(), (value, op)


def train(topology):
    """Train; CheckDivergence compares the replicas of all ranks after every step."""
    data = datasets.load("iris")
    with MirroredTrainer(NumpyNetwork([4, 3]), NAME, topology=topology) as trainer:
        checks = [CheckDivergence(every=1)]
        trainer.fit(data.x_train, data.y_train, epochs=2, callbacks=checks, progress=False)


with allreduce.Topology() as topology:
    calls = check_calls(topology)
    check_bits(topology)
    train(topology)
    if topology.rank == 0:
        print(f"{NAME}: {calls} calls agree with ring; the replicas are equal")
