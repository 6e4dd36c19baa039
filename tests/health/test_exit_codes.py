"""The exit code of a job, for each way in which it can end: scripts that restart jobs depend on it."""

import re

import pytest

from tests.conftest import JobRunner

KILLED = 128 + 9
# All ranks but the first LIVING ones are killed. WAY: how the living ranks end: "meet": they get the error of the
# failure and do not catch it. Otherwise the action of the first of them, while the rest wait for it: "raise",
# "interrupt", "exit" (all call sys.exit(5)).
PROGRAM = """
import sys
import numpy as np
import allreduce
from allreduce.errors import RankLostError
from tests.faults.points import die

def backend():
    global reduce
    reduce = allreduce.create("ring", topology)
    return lambda: reduce(np.ones(4), "sum")

def torch():
    import tests.without_dynamo
    import torch
    import torch.distributed as dist
    import allreduce.torch_backend
    dist.init_process_group("allreduce")
    return lambda: dist.all_reduce(torch.ones(4))

def servers():
    from trainers import NumpyNetwork, ParameterServerTrainer
    trainer = ParameterServerTrainer(NumpyNetwork([4, 2]), topology=topology)
    x, y = np.zeros((40, 4), np.float32), np.zeros(40, int)
    return lambda: trainer.fit(x, y, batch_size=8, progress=False)

kind, living, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
topology = allreduce.Topology()
rank, call = topology.rank, globals()[kind]()
call()
if rank >= living:
    die()
while way != "meet" and topology.size > living:  # ranks that are killed at about the same time may be found in turn
    try:
        call()
    except RankLostError:
        topology = topology.survivors()
        call = backend()
if way == "exit":
    sys.exit(5)
if rank == 0 and way == "raise":
    raise ValueError("on purpose")
if rank == 0 and way == "interrupt":
    raise KeyboardInterrupt
while True:
    call()
"""


@pytest.mark.parametrize(
    ("mpi", "ulfm", "kind", "ranks", "living", "way", "code"),
    [
        # without ULFM; test_abort.py raises an exception, and in test_waits.py a rank of Open MPI calls sys.exit
        ("openmpi", False, "backend", 2, 2, "interrupt", 130),
        ("mpich", False, "backend", 2, 2, "exit", 5),
        ("openmpi", False, "backend", 2, 1, "meet", KILLED),
        ("mpich", False, "backend", 2, 1, "meet", 9),
        ("openmpi", True, "backend", 2, 2, "raise", 1),
        ("openmpi", True, "backend", 3, 2, "exit", 5),
        ("openmpi", True, "backend", 3, 2, "meet", 1),
        # a single remaining rank is a special case: mpirun turns its MPI_Abort into exit code 0
        ("openmpi", True, "backend", 2, 1, "exit", 5),
        ("openmpi", True, "backend", 2, 1, "interrupt", 130),
        ("openmpi", True, "backend", 2, 1, "meet", 1),
        ("openmpi", True, "torch", 2, 1, "meet", 1),
        ("openmpi", True, "servers", 3, 2, "meet", 1),
    ],
)
def test_of_a_job(
    mpirun: JobRunner, mpi: str, ulfm: bool, kind: str, ranks: int, living: int, way: str, code: int
) -> None:
    env = {"ALLREDUCE_TIMEOUT_SECONDS": "60"}  # shorter than the job's: a rank that waits for ever gives another code
    job = mpirun(ranks, ["-c", PROGRAM, kind, str(living), way], mpi=mpi, ulfm=ulfm, timeout=150, env=env)
    assert job.returncode == code
    if ulfm and way == "meet":
        assert "RankLostError: " in job.stderr
    if ulfm and (kind, way) == ("backend", "meet"):  # an error that nobody catches is told once: the wait, and the call
        assert re.search(rf"RankLostError: (a rank|rank {ranks - 1}) of {ranks} was lost", job.stderr)
        assert job.stderr.count("Traceback") <= 2


def test_of_a_job_with_ulfm_that_loses_a_rank_before_mpi_is_up(mpirun: JobRunner) -> None:
    code = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\nimport allreduce"
    job = mpirun(2, ["-c", code], ulfm=True, timeout=150, env={"ALLREDUCE_START_SECONDS": "2"})
    assert job.returncode == 1
    assert " of 2: MPI has not started in 2 s, so this rank ends the job" in job.stderr


@pytest.mark.parametrize(("ranks", "ulfm"), [(1, True), (2, False)])
def test_of_a_job_that_ends_while_a_hook_fails(mpirun: JobRunner, ranks: int, ulfm: bool) -> None:
    """Its end is not prevented, and the other ranks do not hang: MPI may report a failed rank meanwhile."""
    code = (
        "import allreduce; from allreduce.health import abort; topology = allreduce.Topology()\n"
        "abort.on_ending(lambda code, text: 1 / 0)\n"
        "if topology.rank == 0: abort.end_job('on purpose', 3)\n"
        "topology.world.Barrier()"
    )
    job = mpirun(ranks, ["-c", code], ulfm=ulfm, timeout=30)
    assert job.returncode == 3
    assert "while it ended the job: ZeroDivisionError" in job.stderr
