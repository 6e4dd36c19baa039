"""keep_going.sbatch under a real Slurm: slurmctld and two slurmd on this machine, as root; skipped where they are not.

Debian: apt install slurmctld slurmd slurm-client munge; munged must run.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import launch

pytestmark = pytest.mark.jobs
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} Port={ports[2]} CPUs=4
PartitionName=all Nodes=n[1-2] Default=YES State=UP MaxTime=INFINITE
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def started(names: list[list[str]], environment: dict[str, str]) -> list[subprocess.Popen]:
    return [subprocess.Popen(each, env=environment, stderr=subprocess.DEVNULL) for each in names]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment in which Slurm's commands find two nodes of this machine, n1 and n2."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munge") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)})" if missing else "slurmd needs root")
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode != 0:
        pytest.skip("munged does not run")
    for name in ("state", "n1", "n2"):
        (tmp_path / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=free_ports(3), folder=tmp_path))
    environment = {**launch.variables("slurm"), "SLURM_CONF": str(tmp_path / "slurm.conf"), "TMPDIR": str(tmp_path)}
    daemons = started([["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]], environment)
    try:
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, timeout=20, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def ask(slurm: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def wait_until(slurm: dict[str, str], job: str, output: Path, requeues: bool) -> None:
    """Wait until the job has ended; requeue it once, after its fifth epoch."""
    until = time.monotonic() + 150
    while ask(slurm, "squeue", "--noheader", f"--jobs={job}", "--format=%T"):
        assert time.monotonic() < until, output.read_text(errors="replace") if output.exists() else "not started"
        if requeues and output.exists() and "epoch   5" in output.read_text(errors="replace"):
            requeues = False
            subprocess.run(["scontrol", "requeue", job], env=slurm, check=True, timeout=60)
        # a requeued job waits for two minutes, lest it starts before its processes have ended
        ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("mpi", "launcher"), [("openmpi", "mpirun --bind-to none"), ("mpich", "srun --mpi=pmi2"), ("mpich", "mpiexec")]
)
def test_a_requeued_job_has_the_same_bits(slurm: dict[str, str], tmp_path: Path, mpi: str, launcher: str) -> None:
    """Two ranks on two nodes: the model is that of a job on two ranks which nothing has interrupted."""
    slurm["PATH"] = f"{launch.environment(mpi) / 'bin'}{os.pathsep}{slurm['PATH']}"
    slurm["KEEP_GOING_SRUN"] = launcher
    train = ["-m", "trainers", "--data", "digits", "--epochs", "20", "--batch-size", "16", "--allreduce", "ring"]
    output, ways = tmp_path / "output", ["--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "50 steps"]
    sbatch = ["sbatch", "--parsable", "--ntasks-per-node=1", f"--output={output}", "scripts/keep_going.sbatch"]
    job = subprocess.run(
        [*sbatch, "python", *train, *ways, "--resume", "--save", str(tmp_path / "model.npz")],
        env=slurm, cwd=launch.ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.strip()  # fmt: skip
    wait_until(slurm, job, output, requeues=True)
    text = output.read_text(errors="replace")
    assert "Restarts=1" in ask(slurm, "scontrol", "show", "job", job), text
    assert text.count("test accuracy: ") == 1
    assert "resumed: " in text
    ended = launch.mpirun(2, [*train, "--save", tmp_path / "other.npz"], mpi=mpi, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    with np.load(tmp_path / "model.npz") as model, np.load(tmp_path / "other.npz") as other:
        assert {name: model[name].tobytes() for name in model} == {name: other[name].tobytes() for name in other}
