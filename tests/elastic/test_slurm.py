"""keep_going.sbatch under a real Slurm of two nodes on this machine, which scripts/slurm/try_here.sh starts and ends.

Skipped where Slurm is not installed (Debian: apt-get install slurmctld slurmd slurm-client munge; and libpmix-dev for
srun --mpi=pmix).
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import launch

pytestmark = pytest.mark.jobs
SLURM = ["bash", str(launch.ROOT / "scripts" / "slurm" / "try_here.sh")]
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
LAUNCHERS = [
    ("openmpi", "mpirun --bind-to none"),
    ("openmpi", "srun --mpi=pmix"),
    ("mpich", "srun --mpi=pmi2"),
    ("mpich", "mpiexec"),
]
# A fit that waits after each step until the file "fast" exists. An epoch has 8 steps.
PROGRAM = """
import sys, time
from pathlib import Path
from trainers import Checkpoint, MirroredTrainer, NumpyNetwork, datasets
from trainers.callbacks import Callback

class Wait(Callback):
    def on_train_batch_end(self, batch, logs=None):
        Path("fast").exists() or time.sleep(0.1)

data = datasets.load("iris")
with MirroredTrainer(NumpyNetwork([4, 10, 3], lr=0.02), allreduce="ring") as trainer:
    kept = {} if sys.argv[2:] == ["whole"] else {"checkpoint": Checkpoint("run", every="5 steps"), "resume": True}
    trainer.fit(data.x_train, data.y_train, epochs=60, batch_size=16, callbacks=[Wait()], **kept)
    trainer.save(sys.argv[1])
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment in which Slurm's commands find two nodes of this machine, n1 and n2."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)})" if missing else "slurmd needs root")
    environment = launch.variables("slurm")
    command = [*SLURM, "sh", "-c", 'echo "$SLURM_CONF"; cat']
    with (tmp_path / "slurm.log").open("w") as log, subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as started:  # fmt: skip
        assert started.stdin is not None
        assert started.stdout is not None
        configuration = started.stdout.readline().strip()
        assert configuration, (tmp_path / "slurm.log").read_text()
        try:
            yield {**environment, "SLURM_CONF": configuration}
        finally:
            started.stdin.close()
            assert started.wait(60) == 0
    assert not Path(configuration).parent.exists()
    assert not launch.marked("slurm")


def ask(slurm: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def submit(slurm: dict[str, str], launcher: str, folder: Path) -> str:
    """Submit PROGRAM on two nodes of a rank each by keep_going.sbatch; return the number of the job."""
    (folder / "train.py").write_text(PROGRAM)
    scripts = launch.ROOT / "scripts"
    given = {"KEEP_GOING_SCRIPTS": str(scripts), "KEEP_GOING_SRUN": launcher, "KEEP_GOING": "--progress run"}
    sbatch = ["sbatch", "--parsable", "--ntasks-per-node=1", "--output=output"]
    return subprocess.run(
        [*sbatch, str(scripts / "slurm" / "keep_going.sbatch"), "python", "train.py", "model.npz"],
        env={**slurm, **given}, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    ).stdout.strip()  # fmt: skip


def end_of(slurm: dict[str, str], job: str, folder: Path, stops: list[tuple[str, list[str]]]) -> str:
    """Wait until the job has ended and return its output. stops: a text, and the command that stops the job when its
    output since the last stop has this text. After the last stop the program waits no longer."""
    output, seen, begin = folder / "output", 0, time.monotonic()
    pending = begin  # since when
    while state := ask(slurm, "squeue", "--noheader", f"--jobs={job}", "--format=%T"):
        text = output.read_text(errors="replace") if output.exists() else ""
        assert time.monotonic() < begin + 250, text
        if stops and stops[0][0] in text[seen:]:
            seen = len(text)
            subprocess.run([*stops.pop(0)[1], job], env=slurm, check=True, timeout=60)
            if not stops:
                (folder / "fast").touch()
        # A requeued job waits for two minutes: if it started before the end of its old processes, their exit code would
        # be taken for its own.
        if state != "PENDING":
            pending = time.monotonic()
        elif time.monotonic() > pending + 8:
            ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.3)
    return output.read_text(errors="replace")


@pytest.mark.parametrize(("mpi", "launcher"), LAUNCHERS)
def test_a_requeued_job_has_the_same_bits(slurm: dict[str, str], tmp_path: Path, mpi: str, launcher: str) -> None:
    """As one that nothing has stopped. It is stopped twice: by the signal that Slurm sends before the time limit, and
    by `scontrol requeue`."""
    slurm["PATH"] = f"{launch.environment(mpi) / 'bin'}{os.pathsep}{slurm['PATH']}"
    probe = [*launcher.split(), "-n", "1", "true"]
    if launcher.endswith("pmix") and subprocess.run(probe, env=slurm, capture_output=True, check=False).returncode:
        pytest.skip("Slurm does not find libpmix.so (Debian: apt-get install libpmix-dev)")
    job = submit(slurm, launcher, tmp_path)
    stops = [("epoch   3", ["scancel", "--batch", "--signal=USR1"]), ("epoch   6", ["scontrol", "requeue"])]
    text = end_of(slurm, job, tmp_path, stops)
    assert text.count("the job requeues itself") == 1
    assert "Restarts=2" in ask(slurm, "scontrol", "show", "job", job), text
    assert text.count("resumed: ") == 2, text
    assert "TIME LIMIT" not in text
    ended = launch.mpirun(2, [tmp_path / "train.py", "whole.npz", "whole"], mpi=mpi, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    with np.load(tmp_path / "model.npz") as found, np.load(tmp_path / "whole.npz") as whole:
        assert {name: found[name].tobytes() for name in found} == {name: whole[name].tobytes() for name in whole}


@pytest.mark.parametrize(("mpi", "plugin"), [("openmpi", "pmi2"), ("openmpi", "none"), ("mpich", "none")])
def test_a_plugin_that_the_mpi_does_not_know_is_named(slurm: dict[str, str], mpi: str, plugin: str) -> None:
    """MPI starts n jobs of one rank then, without a word."""
    python = str(launch.environment(mpi) / "bin" / "python")
    command = ["srun", f"--mpi={plugin}", "-N2", "-n2", python, "-c", "import allreduce; allreduce.Topology()"]
    ended = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert re.search(r"LauncherError: .*srun.* has started 2 processes", ended.stderr), ended.stderr
    assert "tart it with srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)" in ended.stderr
