"""Ranks that do different things: no rank waits for ever or without a message, and no result is silently wrong."""

from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

LIMITS = {"ALLREDUCE_STALL_SECONDS": "2", "ALLREDUCE_TIMEOUT_SECONDS": "40"}  # no test waits for its end

PROGRAM = """
import sys
import numpy as np
import allreduce
reduce = allreduce.create("ring")
one, other = reduce.allocate(50_000, "float32"), np.ones(50_000, "float32")
few = np.ones(10, "float32")
for op in ("sum", "max"):
    for array in (one, other, few):
        reduce(array, op)  # all of these signatures are known from here on
for step in range(6):
    if step == 3 and reduce.rank == 1:
        {action}
    reduce(one, "sum")
{end}
print("came to the end")
"""


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_a_call_too_few(mpirun: JobRunner, mpi: str) -> None:
    program = PROGRAM.format(action="continue", end="reduce.close()")
    job = mpirun(3, ["-c", program], mpi=mpi, env=LIMITS)
    assert job.returncode != 0
    assert "came to the end" not in job.stdout
    assert "DisagreementError: the ranks disagree" in job.stdout + job.stderr
    assert "rank 1: close() of ring" in job.stdout + job.stderr


@pytest.mark.parametrize(("mpi", "action", "code"), [("openmpi", "sys.exit(3)", 3), ("mpich", "break", 1)])
def test_a_rank_that_leaves(mpirun: JobRunner, mpi: str, action: str, code: int) -> None:
    """The job ends with the exit code of that rank, if the code reports an error."""
    job = mpirun(3, ["-c", PROGRAM.format(action=action, end="")], mpi=mpi, env=LIMITS)
    assert job.returncode == code
    assert "RankLeftError: rank 1 has left: it has ended its program" in job.stdout + job.stderr


def test_a_rank_that_is_late(mpirun: JobRunner) -> None:
    """First a report, later a time-out, both of which name the rank that has not arrived. The time-out is an exception,
    which a program may catch."""
    code = (
        "import allreduce, time, numpy as np\n"
        "from allreduce.errors import BrokenError, CollectiveTimeoutError\n"
        "reduce = allreduce.create('ring')\n"
        "if reduce.rank == 1: time.sleep(50)\n"
        "try:\n    reduce(np.ones(50_000), 'sum')\n"
        "except CollectiveTimeoutError as error: late = error\n"
        "try:\n    reduce(np.ones(5), 'sum')\n"
        "except BrokenError: print('told twice', flush=True)\n"
        "time.sleep(1)\n"
        "raise late\n"
    )
    job = mpirun(3, ["-c", code], mpi="mpich", env={"ALLREDUCE_STALL_SECONDS": "1", "ALLREDUCE_TIMEOUT_SECONDS": "3"})
    assert job.stdout.count("told twice") == 2, job.stdout + job.stderr
    assert job.stderr.count("has waited 1 s for other ranks in: ") == 1
    assert "rank 0 has waited 1 s for other ranks in: all_reduce: length 50000" in job.stderr
    report, _, error = job.stderr.partition("CollectiveTimeoutError: waited")
    assert "rank 1: has not arrived" in report
    assert "rank 1: has not arrived" in error


def test_an_exception_in_a_thread(mpirun: JobRunner) -> None:
    code = (
        "import allreduce, threading, numpy as np\n"
        "reduce = allreduce.create('ring')\n"
        "def work():\n"
        "    for step in range(5):\n"
        "        if step == 3 and reduce.rank == 1: raise ValueError('on purpose')\n"
        "        reduce(np.ones(50), 'sum')\n"
        "thread = threading.Thread(target=work, name='mine'); thread.start(); thread.join()\n"
        "import time; time.sleep(100)\n"
    )
    job = mpirun(2, ["-c", code], timeout=60)
    assert job.returncode == 1
    assert "rank 1 of 2: ValueError in thread 'mine'" in job.stderr
    assert "ValueError: on purpose" in job.stderr


def test_an_exception_in_one_part(mpirun: JobRunner, tmp_path: Path) -> None:
    """It ends the programs of its part; the other part continues, here until the first part has ended."""
    code = (
        "import allreduce, atexit, numpy as np, time\n"
        "from pathlib import Path\n"
        "topology = allreduce.Topology()\n"
        "part = topology.split(topology.rank % 2, on_error='part')\n"
        "reduce = allreduce.create('ring', part)\n"
        "if topology.rank == 2: atexit.register(Path('ended').touch)\n"
        "ended = np.zeros(1)\n"
        "while not ended[0]:\n"
        "    if topology.rank == 0: raise ValueError('on purpose')\n"
        "    ended[0] = Path('ended').exists()\n"
        "    reduce(ended, 'max')\n"
        "part.close()\n"
        "print('went on', flush=True)\n"
    )
    job = mpirun(4, ["-c", code], cwd=tmp_path, env=LIMITS)
    assert job.returncode != 0
    assert job.stdout.count("went on") == 2, job.stderr
    assert job.stderr.count("Traceback") == 2, job.stderr
    assert "RankLeftError: rank 0 has left: ValueError: on purpose" in job.stderr
