"""On one machine, no process of a job listens on an address that other machines reach, seen from the machine's
network."""

import ipaddress
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import lacking

pytestmark = pytest.mark.jobs
SECONDS = 120
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
# Reduces, so that ranks connect; then waits until the test has looked.
PROGRAM = """
import pathlib, sys, time
import numpy as np
import allreduce

with allreduce.create("native") as reduce:
    reduce(np.ones(100_000), op="sum")
    reduce.topology.agree([], "all are there")
    if reduce.rank == 0:
        pathlib.Path(sys.argv[1]).touch()
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.05)
"""
# The ranks and one that they start add up a large array.
SPAWNS = """
import sys
import numpy as np
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
started = parent != MPI.COMM_NULL
others = parent if started else MPI.COMM_WORLD.Spawn(sys.executable, [__file__], maxprocs=1)
everyone = others.Merge(started)
array = np.ones(100_000)
everyone.Allreduce(MPI.IN_PLACE, array)
print(array[0], flush=True)
everyone.Free()
others.Disconnect()
"""
JOBS = {
    "openmpi": 'prepare_openmpi "$1" "$2"; "$3" "${mpirun[@]}" python "${@:4}"',
    "mpich": '"$3" "$1/bin/mpiexec" -n "$2" "$1/bin/python" "${@:4}"',
}


def listeners() -> dict[str, str]:
    """Return the sockets that listen beyond the loopback in this process's network: their inodes and addresses."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                if not ipaddress.ip_address(address).is_loopback:
                    found[fields[9]] = str(ipaddress.ip_address(address))
    return found


def exposed(mark: str) -> list[tuple[str, str]]:
    """Return the names and addresses of a job's processes that listen beyond the loopback."""
    everywhere, found = listeners(), []
    for number in launch.marked(mark):
        for descriptor in Path(f"/proc/{number}/fd").iterdir():
            try:
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
            except OSError:
                continue
            if inode in everywhere:
                found.append((Path(f"/proc/{number}/comm").read_text().strip(), everywhere[inode]))
    return found


def job(folder: Path, mpi: str, ranks: int, **more: str) -> tuple[int, list[tuple[str, str]]]:
    """Start a job as the scripts do; return the number of its processes, and those that listen."""
    try:
        environment = launch.environment(mpi)
    except launch.MissingEnvironmentError as error:
        lacking(error)
        raise
    ready, done, mark = folder / "ready", folder / "done", uuid.uuid4().hex
    script = f'set -eu; . "{launch.ROOT}/scripts/environment.sh"; {JOBS[mpi]}'
    inherited = launch.variables(mark).items()
    variables = {name: value for name, value in inherited if not name.startswith(("OMPI_MCA", "SLURM"))}
    process = subprocess.Popen(
        ["bash", "-c", script, "job", environment, str(ranks), "run_apart", "-c", PROGRAM, ready, done],
        env={**variables, **more}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + SECONDS
        while not ready.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        found = exposed(mark) if ready.exists() else []
        alive = len(launch.marked(mark))
    finally:
        done.touch()
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return alive, found


@pytest.mark.parametrize(("mpi", "ranks"), [("openmpi", 3), ("mpich", 2)])
def test_nothing_listens_for_other_machines(tmp_path: Path, mpi: str, ranks: int) -> None:
    apart = ["bash", "-c", f'. "{launch.ROOT}/scripts/environment.sh"; run_apart readlink /proc/self/ns/net']
    own = subprocess.run(apart, capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": ""})
    if own.stdout.strip() == os.readlink("/proc/self/ns/net"):
        pytest.skip("may not make network namespaces here")
    alive, found = job(tmp_path, mpi, ranks)
    assert alive > ranks  # the launcher is one more
    assert found == []


def test_ranks_in_a_network_of_their_own_may_start_others(tmp_path: Path) -> None:
    """A user's program may call MPI_Comm_spawn; MPI reaches processes that start later by TCP, over the loopback."""
    program, folder = tmp_path / "program.py", launch.environment("openmpi") / "bin"
    program.write_text(SPAWNS)
    script = f'. "{launch.ROOT}/scripts/environment.sh"; run_apart "$@"'
    command = ["bash", "-c", script, "job", folder / "mpirun", "-n", "2", "--oversubscribe", folder / "python", program]
    env = {**launch.variables(""), "OMPI_MCA_btl": "^ofi"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3.0") == 3


def test_ranks_do_not_listen_where_there_are_no_namespaces(tmp_path: Path) -> None:
    """Open MPI's daemon listens in the machine's own network, so this test can see it."""
    alive, found = job(tmp_path, "openmpi", 2, NETWORK="host")
    assert alive > 2
    assert {name for name, _ in found} == {"prterun"}
