"""A /dev/shm of 64 MB, as containers often have it: many ranks, and jobs that take it from each other."""

import shutil
import subprocess
import tempfile

import pytest

from tests import launch
from tests.conftest import lacking

pytestmark = pytest.mark.jobs
IN_A_SMALL_ONE = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


def run(ranks: int, code: str, mpi: str) -> str:
    """Return the output of a job that runs with its own /dev/shm."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    enter = ["unshare", "--mount", "sh", "-c", IN_A_SMALL_ONE, "sh"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("only root can mount a /dev/shm")
    try:
        folder = launch.environment(mpi) / "bin"
    except launch.MissingEnvironmentError as error:
        lacking(error)
    launcher, *options = launch.LAUNCHERS[mpi]
    command = [*enter, folder / launcher, *options, "-n", str(ranks), folder / "python", "-c", code]
    with tempfile.TemporaryFile("w+") as out:
        with launch.started(command, out, subprocess.STDOUT) as job:
            job.wait(100)
        out.seek(0)
        text = out.read()
    assert job.returncode == 0, text
    return text


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_jobs_that_take_it_from_each_other(mpi: str) -> None:
    """Two halves of a job that do not know each other: each gets the memory or a named error, and no bus error."""
    code = (
        "import numpy as np, allreduce\n"
        "from mpi4py import MPI\n"
        "refused, kept = 0, []\n"
        "half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, MPI.COMM_WORLD.rank)\n"
        "with allreduce.Topology(half) as topology, allreduce.create('shared', topology) as reduce:\n"
        "    for turn in range(40):\n"
        "        try:\n"
        "            array = reduce.allocate(500_000)\n"
        "            array[:] = turn; reduce(array, 'sum'); assert (array == 2 * turn).all()\n"
        "            kept.append(array)\n"
        "        except allreduce.errors.UnavailableError as error:\n"
        "            assert 'shared memory is too small' in str(error)\n"
        "            refused, kept = refused + 1, kept[3:]\n"
        "print('lacking' if refused else 'enough')\n"
    )
    assert run(4, code, mpi).count("lacking") == 4  # MPICH joins the lines of two ranks now and then


@pytest.mark.expensive
def test_many_ranks() -> None:
    code = (
        "import numpy as np, allreduce\n"
        "with allreduce.create('shared') as reduce:\n"
        "    for array in (reduce.allocate(100_000), np.empty(300_001)):\n"
        "        array[:] = 1; reduce(array, 'sum'); assert (array == 32).all()\n"
        "print('done')\n"
    )
    assert run(32, code, "openmpi").count("done") == 32
