"""One rank of a job that ends in a given way, with or without ranks killed before: what is the job's exit code?

    mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.ends KIND LIVING WAY

KIND: allreduce, torch (torch.distributed), horovod, or the name of a trainer. All ranks but the first LIVING ones are
killed. WAY: how the living ranks end: "meet": they get the error of the failure and do not catch it. Otherwise the
action of the first of them, while the rest wait for it: "raise", "interrupt", "exit" (all call sys.exit(5)), "end" (all
end without an error).
"""

import functools
import sys
from collections.abc import Callable

import numpy as np

import allreduce
from allreduce.errors import RankLostError
from tests.faults.points import die

Call = Callable[[], object]


def backend(living: int) -> tuple[int, Call, Call]:
    """Return the rank, a call of all ranks, and a function with which the remaining ranks continue."""
    topology = allreduce.Topology()
    reduce, numbers = allreduce.create("ring", topology), np.ones(4)

    def go_on() -> None:
        nonlocal reduce, topology
        while topology.size > living:  # ranks that are killed at about the same time may be found one after another
            try:
                reduce(numbers, "sum")
            except RankLostError:
                topology = topology.survivors()
                reduce = allreduce.create("ring", topology)

    return topology.rank, lambda: reduce(numbers, "sum"), go_on


def torch_distributed(living: int) -> tuple[int, Call, Call]:
    import tests.without_dynamo  # noqa: F401

    # isort: split
    import torch
    import torch.distributed as dist

    import allreduce.torch_backend  # noqa: F401

    dist.init_process_group("allreduce")
    numbers = torch.ones(4)
    return dist.get_rank(), lambda: dist.all_reduce(numbers), int


def horovod(living: int) -> tuple[int, Call, Call]:
    import tests.without_dynamo  # noqa: F401

    # isort: split
    import torch

    import trainers.horovod.torch as hvd

    hvd.init()
    numbers = torch.ones(4)
    return hvd.rank(), lambda: hvd.allreduce(numbers, name="numbers"), int


def training(name: str, living: int) -> tuple[int, Call, Call]:
    import trainers

    topology = allreduce.Topology()
    trainer = getattr(trainers, name)(trainers.NumpyNetwork([4, 2]), topology=topology)
    x, y = np.zeros((40, 4), np.float32), np.zeros(40, int)
    return topology.rank, lambda: trainer.fit(x, y, batch_size=8, progress=False), int


def main(kind: str, living: int, way: str) -> None:
    rank, call, go_on = KINDS.get(kind, functools.partial(training, kind))(living)
    call()
    if rank >= living:
        die()
    if way != "meet":
        go_on()
    if way == "exit":
        sys.exit(5)
    if rank == 0 and way == "raise":
        raise ValueError("on purpose")
    if rank == 0 and way == "interrupt":
        raise KeyboardInterrupt
    while way != "end":
        call()


KINDS = {"allreduce": backend, "torch": torch_distributed, "horovod": horovod}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
