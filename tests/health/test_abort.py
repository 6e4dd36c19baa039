"""A rank that raises ends the whole job within seconds, with its traceback; no rank hangs."""

from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

LOOP = """
import sys
import allreduce
reduce = allreduce.create(sys.argv[1])
grads = reduce.allocate(200_000, "float32")
for step in range(1000):
    if step == 5 and reduce.rank == int(sys.argv[2]):
        raise ValueError("broken on purpose")
    reduce(grads)
"""


@pytest.mark.parametrize(("mpi", "name", "rank"), [("mpich", "ring", 0), ("openmpi", "shared", 2)])
def test_an_exception_ends_the_job(mpirun: JobRunner, mpi: str, name: str, rank: int) -> None:
    job = mpirun(3, ["-c", LOOP, name, rank], mpi=mpi, env={"ALLREDUCE_STALL_SECONDS": "3"})
    assert job.returncode == 1
    text, error = job.stdout + job.stderr, "ValueError: broken on purpose"
    assert f"rank {rank} of 3: Traceback (most recent call last):" in text
    assert text.count(f"rank {rank} of 3: {error}") == text.count(error) == 1
    assert 'File "<string>", line 8' in text


EARLY = """
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1 and sys.argv[1] == "import":
    sys.modules["numpy"] = None  # `import numpy` raises ModuleNotFoundError, in allreduce too
import allreduce
if MPI.COMM_WORLD.rank == 1:
    raise ModuleNotFoundError("import of numpy halted")
allreduce.Topology()
"""


@pytest.mark.parametrize(("ulfm", "where"), [(False, "import"), (True, "program")])
def test_an_error_before_the_first_topology(mpirun: JobRunner, ulfm: bool, where: str) -> None:
    """The other ranks wait in the constructor of Topology, which knows nothing of rank 1 yet."""
    job = mpirun(2, ["-c", EARLY, where], timeout=30, ulfm=ulfm)
    assert job.returncode == 1
    assert "rank 1 of 2: Traceback (most recent call last):" in job.stderr
    assert "ModuleNotFoundError: import of numpy halted" in job.stderr


LATER = """
import atexit, sys
import allreduce
from allreduce.health import abort
atexit.register(lambda: print("a wait of a module imported later", file=sys.stderr, flush=True))
with allreduce.Topology() as topology:
    topology.world.Barrier()
abort.on_leaving(lambda why: print("leaves", file=sys.stderr, flush=True))
"""


def test_the_others_hear_that_a_rank_leaves_before_its_modules_wait(mpirun: JobRunner) -> None:
    """Functions at exit run in the reverse order of their registration; some wait for ranks, up to 10 seconds."""
    job = mpirun(2, ["-c", LATER], timeout=30)
    assert job.returncode == 0, job.stderr
    lines = job.stderr.splitlines()
    assert lines.count("leaves") == lines.count("a wait of a module imported later") == 2
    assert lines[0] == "leaves"
    assert lines[-1] == "a wait of a module imported later"


OWN_HOOK = """
import sys
import allreduce
def own(*_): print("the program's own hook", file=sys.stderr, flush=True)
sys.excepthook = own if sys.argv[1] == "before" else sys.excepthook
topology = allreduce.Topology()
sys.excepthook = own if sys.argv[1] == "after" else sys.excepthook
if topology.rank == 1:
    raise ValueError("on purpose")
topology.world.Barrier()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_excepthook_that_the_program_sets_before_or_after_a_topology(mpirun: JobRunner, when: str) -> None:
    """It runs first; then the job ends."""
    job = mpirun(2, ["-c", OWN_HOOK, when], timeout=30)
    assert job.returncode == 1
    assert "rank 1 of 2: ValueError: on purpose\n" in job.stderr.partition("the program's own hook\n")[2]


ALONE = """
import sys
import numpy as np
from trainers import MirroredTrainer, NumpyNetwork
trainer = MirroredTrainer(NumpyNetwork([4, 3]))
x = np.zeros((2, 4), "float32")
if trainer.rank == 0:
    {call}
{rest}
"""


@pytest.mark.parametrize(
    ("call", "rest", "words", "error"),
    [
        ("trainer.fit(x, [0, 1])", "", "is collective: every rank calls it", "RankLeftError: rank 1 has left"),
        (
            "trainer.save(sys.argv[1])", "trainer.predict(x)",
            "are collective: every rank calls them", "DisagreementError: the ranks disagree",
        ),
    ],
)  # fmt: skip
def test_a_call_of_rank_0_alone_is_told_to_be_collective(
    mpirun: JobRunner, tmp_path: Path, call: str, rest: str, words: str, error: str
) -> None:
    job = mpirun(2, ["-c", ALONE.format(call=call, rest=rest), tmp_path / "model.npz"])
    assert job.returncode != 0
    assert words in job.stdout + job.stderr
    assert error in job.stdout + job.stderr


def test_ranks_in_different_calls_are_told(mpirun: JobRunner) -> None:
    """Once. Without a comparison of the calls, no message of one call is taken for one of another."""
    code = (
        "import numpy as np, allreduce\n"
        "reduce = allreduce.create('ring', allreduce.Topology(ranks_per_node=1), check=False)\n"
        "array = np.full(1000, 1 + reduce.rank)\n"
        "for op in ('sum', 'max'): reduce(array, op)\n"
        "reduce(array, 'sum' if reduce.rank else 'max')\n"
        "print('wrong result', array[0])\n"
    )
    job = mpirun(2, ["-c", code])
    assert job.returncode != 0
    assert "wrong result" not in job.stdout
    assert (job.stdout + job.stderr).count("DisagreementError: the ranks disagree about this call") == 1


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_nothing_is_left_in_shared_memory(mpirun: JobRunner, mpi: str, tmp_path: Path) -> None:
    """Neither after a clean end, nor after a backend that was never closed, nor after an abort.

    The abort is by an exception that all ranks raise independently: it is reported once, and written to a file for
    scripts.
    """
    written = tmp_path / "error"
    code = (
        "import sys, re, allreduce\n"
        "closed, reduce = allreduce.create('shared'), allreduce.create('shared')\n"
        "kept = [each.allocate(300_000, 'float32') for each in (closed, reduce)]\n"
        "closed(kept[0]); reduce(kept[1])\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('\\n'.join(set(re.findall(r'(/dev/shm/\\S+|/\\S*(?:ompi|vader|sm_segment|mpich)\\S*)', maps))))\n"
        "sys.stdout.flush(); reduce.topology.world.Barrier()\n"
        "closed.close(); kept[0][0] = 1\n"
        "if sys.argv[1] == 'raise': raise ValueError('on purpose')\n"
    )
    for end in ("end", "raise"):
        job = mpirun(2, ["-c", code, end], mpi=mpi, env={"ALLREDUCE_JOB_LOG": str(written)})
        assert (job.returncode == 0) == (end != "raise"), job.stderr
        assert job.stderr.count("ValueError: on purpose") == (end == "raise")
        used = {Path(line) for line in job.stdout.split() if line.startswith("/dev/shm/")}
        if end == "raise":  # what MPICH talks through itself stays behind when a job is aborted; no window does
            used = {path for path in used if not path.name.startswith("mpich_shm_")}
        assert not [path for path in used if path.exists()], f"left after {end}: {used}"
    lines = [line.partition(": ")[2] for line in written.read_text().splitlines()]
    texts = ("began as process ", "ended", "ValueError: on purpose")
    assert [sum(line.startswith(text) for line in lines) for text in texts] == [4, 2, 1]
    assert len(lines) == 7


def test_a_worker_that_leaves_is_missed_by_its_servers(mpirun: JobRunner) -> None:
    code = (
        "import sys\nimport numpy as np\nfrom allreduce import Topology\n"
        "from trainers import NumpyNetwork, ParameterServerTrainer\nfrom trainers.callbacks import Callback\n"
        "class Leaves(Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        sys.exit()\n"
        "x, y = np.zeros((100, 4), 'float32'), np.zeros(100, int)\n"
        "topology = Topology(timeout=40)\n"
        "with ParameterServerTrainer(NumpyNetwork([4, 2]), topology) as trainer:\n"
        "    trainer.fit(x, y, callbacks=[Leaves()] if topology.rank == 0 else [])\n"
    )
    job = mpirun(3, ["-c", code])
    assert job.returncode != 0
    assert "RankLeftError: rank 0 has left: it has ended its program" in job.stdout + job.stderr
