"""scripts/keep_going.sh: a job that dies is started again on the remaining hosts, and resumes from its last
checkpoint."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import lacking

BASH = shutil.which("bash") or "/bin/bash"
SCRIPT = launch.ROOT / "scripts" / "keep_going.sh"
BATCH = launch.ROOT / "scripts" / "slurm" / "keep_going.sbatch"

# A launcher that pretends: it notes what it was given, and does what the next line of $PLAN says.
LAUNCHER = f"""#!{BASH}
if [ "$1" = --version ]; then echo "$MPI"; exit; fi
echo "$*" >>"$CALLS"
starts=$(wc -l <"$CALLS")
next=$(sed -n "${{starts}}p" "$PLAN")
[[ $next != *checkpoint* ]] || echo "$starts" >"$RUN/checkpoint-$starts"
[[ $next != *told* ]] || echo "rank 2 of 4: ValueError: broken" >>"$ALLREDUCE_JOB_LOG"
[[ $next != *began* ]] || echo "rank 0 of 4: began as process 0" >>"$ALLREDUCE_JOB_LOG"
[[ $next != *ended* ]] || echo "rank 0 of 4: ended" >>"$ALLREDUCE_JOB_LOG"
[[ $next != *asleep* ]] || {{ trap 'exit 7' TERM INT; touch "$RUN/asleep"; while :; do sleep 0.05; done; }}
[[ $next != *rank* ]] || {{ trap 'kill -KILL $!; exit 9' TERM; {BASH} -c "$RANK" & wait $!; exit; }}
exit "${{next##* }}"
"""
# A rank that takes longer to write its checkpoint than Open MPI's mpirun gives it after a SIGTERM.
RANK = """trap 'touch "$RUN/asked"; sleep 0.5; echo >"$RUN/checkpoint-99"; exit 143' TERM
echo "rank 0 of 4: began as process $$" >>"$ALLREDUCE_JOB_LOG"
touch "$RUN/asleep"
while :; do sleep 0.05; done
"""
# Between two looks at the hosts, and after the last rank of this host, the script waits a tenth as long.
SLEEP = f"""#!{BASH}
case $1 in 10) set 1 ;; 1) set 0.1 ;; esac
exec {shutil.which("sleep")} "$1"
"""


class Pretended:
    """keep_going.sh with a pretended launcher, which does as planned, and hosts of which some do not answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls, self.plan, self.run_folder = folder / "calls", folder / "plan", folder / "run"
        self.run_folder.mkdir()
        self.variables = {"CALLS": str(self.calls), "PLAN": str(self.plan), "RUN": str(self.run_folder), "RANK": RANK}
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add(mpirun=LAUNCHER, ssh=f"#!{BASH}\n[[ $1 != lost* ]]\n", sleep=SLEEP)

    def add(self, **programs: str) -> None:
        """Put programs on the PATH."""
        for name, text in programs.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.variables, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", **more}

    def start(self, plan: Sequence[str], *options: str, mpi: str = "Open MPI") -> "subprocess.Popen[str]":
        self.plan.write_text("\n".join(plan) + "\n")
        return subprocess.Popen(
            [BASH, SCRIPT, *options, "--", "train", "--checkpoint", str(self.run_folder)],
            env=self.environment(MPI=mpi), cwd=self.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, plan: Sequence[str], *options: str, mpi: str = "Open MPI") -> tuple[int, str]:
        """Return the exit code, and the last line of the output."""
        job = self.start(plan, *options, mpi=mpi)
        _, said = job.communicate(timeout=30)
        return job.returncode, said.strip().splitlines()[-1]

    def wait_for_sleep(self, name: str = "asleep") -> None:
        """Wait until the job sleeps, or until a rank has been asked to end ("asked")."""
        until = time.monotonic() + 20
        while not (self.run_folder / name).exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        (self.run_folder / name).unlink()

    @property
    def ranks(self) -> list[str]:
        """Return the value of -n in every start."""
        return [line.partition("-n ")[2].split()[0] for line in self.calls.read_text().splitlines()]


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    return Pretended(tmp_path)


@pytest.mark.parametrize(
    ("plan", "options", "hosts", "code", "ranks", "said"),
    [
        (["checkpoint 137", "checkpoint 1", "0"], [], (), 0, "4 3 2", "+ mpirun -n 2"),
        (["checkpoint 137"] * 4 + ["0"], ["--least", "3"], (), 0, "4 3 3 3 3", "+ mpirun -n 3"),
        (["checkpoint 137", "0"], ["--same-ranks"], (), 0, "4 4", "+ mpirun -n 4"),
        (["checkpoint 9", "5", "6", "7", "0"], [], (), 7, "4 3 2 1", "3 starts in a row have written no checkpoint: g"),
        (["5", "0"], ["--attempts", "1"], (), 5, "4", "1 starts in a row have written no checkpoint: giving up"),
        # with ULFM mpirun returns 0 though all ranks were killed, or have crashed
        (["began checkpoint 0", "began ended 0"], [], (), 0, "4 3", "+ mpirun -n 3"),
        (["began 0", "0"], ["--attempts", "1"], (), 137, "4", "1 starts in a row have written no checkpoint: giving"),
        (["checkpoint 1", "2", "0"], [], (), 2, "4 3", "the program refuses its arguments: giving up (exit code 2)"),
        (["checkpoint 1", "0"], ["--grow", "9"], ("echo a slots=8", "echo a slots=2"), 0, "8 2", ""),
        (["checkpoint 1", "0"], ["--grow", "9"], ("echo a:4; echo b:4", "echo a:4; echo c:4"), 0, "8 8", ""),
        (["checkpoint 1", "0"], ["--grow", "9"], ("echo a:4; echo b:4", "echo b:4; echo a:4"), 0, "8 7", ""),
        (["checkpoint 1", "0"], ["--grow", "9"], ("echo a:4; echo b:4", "echo a:1; exit 1"), 0, "8 7", ""),
        (["checkpoint 1", "0"], [], ("echo ' a slots=08 # ours'", "exit 1"), 0, "8 7", ""),
        (["checkpoint 1", "0"], ["--ranks", "4"], ("echo a", "exit 1"), 0, "4 3", ""),  # more ranks than slots
        (["3"], [], ("echo lost1; echo lost2", ""), 3, "2", "no host answers: giving up (exit code 3)"),
    ],
)  # fmt: skip
def test_ranks_and_attempts(
    plan: list[str], options: list[str], hosts: tuple[str, ...], code: int, ranks: str, said: str, pretended: Pretended
) -> None:
    """hosts: what the script of the hosts does before and after the first start; its input must be empty."""
    if hosts:
        script = (
            f"#!{BASH}\n[ ! -p /dev/stdin ] || exit\n[ ! -e calls ] || {{ {hosts[1] or ':'}; exit; }}\n{hosts[0]}\n"
        )
        (pretended.folder / "disc.sh").write_text(script)
        (pretended.folder / "disc.sh").chmod(0o755)
        options = ["--hostfile", "disc.sh", "--reach", "ssh", *options]  # without a path
    given = [] if hosts else ["--ranks", "4"]
    found, last = pretended.run(plan, *given, *options)
    assert (found, pretended.ranks) == (code, ranks.split()), last
    assert said in last


def test_a_job_s_error_is_said_once_more_behind_mpirun_s_block(pretended: Pretended) -> None:
    _, said = pretended.start(["told 5", "6"], "--attempts", "2").communicate(timeout=30)
    lines = said.splitlines()
    assert [line for line in lines if "ValueError" in line] == ["keep_going.sh: rank 2 of 4: ValueError: broken"]
    assert "the job died with exit code 5" in lines[lines.index("keep_going.sh: rank 2 of 4: ValueError: broken") + 1]


@pytest.mark.parametrize(
    ("mpi", "before", "after"),
    [
        ("Open MPI", "-n 7 --hostfile FILE", "-n 4 --hostfile FILE"),
        ("HYDRA", "-n 7 -f FILE", "-n 4 -f FILE"),
        ("slurm", "-n 7 -N 3 -w here,lost,there", "-n 4 -N 2 -w here,there"),
    ],
)
def test_a_lost_host_is_left_out(mpi: str, before: str, after: str, pretended: Pretended, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nhere slots=3\n\nlost:3  # an old one\nthere\n")
    given = ["--hostfile", str(hosts), "--reach", "ssh"]
    assert pretended.run(["checkpoint 1", "0"], *given, mpi=mpi)[0] == 0
    lines = [" ".join("FILE" if word.endswith("/hosts") else word for word in line.split())
             for line in pretended.calls.read_text().splitlines()]  # fmt: skip
    rest = f" train --checkpoint {pretended.run_folder}"
    assert lines == [before + rest, after + rest]


def batch(pretended: Pretended, plan: str, **slurm: str) -> "subprocess.Popen[str]":
    """Start keep_going.sbatch as Slurm does."""
    pretended.plan.write_text(plan)
    return subprocess.Popen(
        [BASH, BATCH, "train", "--checkpoint", str(pretended.run_folder)],
        env=pretended.environment(SLURM_SUBMIT_DIR=str(launch.ROOT), MPI="slurm 23", **slurm),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_job_of_slurm_goes_on_without_the_lost_node(pretended: Pretended) -> None:
    asked, not_b = f"#!{BASH}\nprintf 'a\\nb\\nc\\n'\n", f"#!{BASH}\n[[ $1 != b ]]\n"
    pretended.add(srun=LAUNCHER.replace("$*", "srun -c$SRUN_CPUS_PER_TASK $*"), scontrol=asked, not_b=not_b)
    reach = f"--least 3 --reach {pretended.bin / 'not_b'}"
    slurm = {"SLURM_JOB_NODELIST": "[a-c]", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "5"}
    job = batch(pretended, "checkpoint 1\n0\n", KEEP_GOING=reach, **slurm)
    _, said = job.communicate(timeout=30)
    assert job.returncode == 0, said
    starts = [line.partition(" train")[0] for line in pretended.calls.read_text().splitlines()]
    assert starts == ["srun -c5 --mpi=pmix -n 6 -N 3 -w a,b,c", "srun -c5 --mpi=pmix -n 4 -N 2 -w a,c"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGUSR1, "requeue 5\n"), (signal.SIGTERM, "")])
def test_the_job_of_slurm_requeues_itself_if_its_time_is_up(
    number: int, expected: str, pretended: Pretended, tmp_path: Path
) -> None:
    """It leaves no file. `scancel` sends SIGTERM."""
    (tmp_path / "scratch").mkdir()
    asked = f"#!{BASH}\nif [ $1 = requeue ]; then echo $*; else echo a; fi\n"
    pretended.add(srun=LAUNCHER, scontrol=asked)
    scratch = str(tmp_path / "scratch")
    job = batch(pretended, "asleep 0\n", SLURM_JOB_NODELIST="a", SLURM_JOB_ID="5", TMPDIR=scratch)
    pretended.wait_for_sleep()
    job.send_signal(number)
    out, said = job.communicate(timeout=20)
    assert out == expected, said
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(("launcher", "starts"), [("starter", 1), ("starter --with-ft ulfm", 2)])
def test_a_look_that_fails_starts_nothing(launcher: str, starts: int, pretended: Pretended, tmp_path: Path) -> None:
    """Only a job with ULFM can have lost a host that answers again."""
    (pretended.bin / "starter").symlink_to("mpirun")
    lines, looks = tmp_path / "lines", tmp_path / "looks"
    for file, text in (("hosts", "cat lines; echo >>looks"), ("bin/sleep", f"exec {shutil.which('sleep')} 0.1")):
        (tmp_path / file).write_text(f"#!{BASH}\n{text}\n")
        (tmp_path / file).chmod(0o755)

    def look(text: str, count: int) -> None:
        lines.write_text(text)
        before, until = looks.stat().st_size, time.monotonic() + 20
        while len(pretended.ranks) < 2 and looks.stat().st_size < before + count:
            assert time.monotonic() < until
            time.sleep(0.01)

    lines.write_text("a\nb\n")
    given = ["--hostfile", "hosts", "--grow", "1", "--reach", "ssh", "--launcher", launcher]
    job = pretended.start(["asleep", "asleep"], *given)
    pretended.wait_for_sleep()
    for count in (2, 5):  # the first of them may have been under way
        look("a\n", count)
        assert pretended.ranks == ["2"]
        look("a\nb\n", 3)
    if starts == 2:
        pretended.wait_for_sleep()
    assert pretended.ranks == ["2"] * starts
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)


ENDS_WITH_0 = RANK.replace("exit 143", 'echo "rank 0 of 4: ended" >>"$ALLREDUCE_JOB_LOG"; exit 0')


@pytest.mark.parametrize(
    ("rank", "grows", "number", "code", "said"),
    [
        ("", False, signal.SIGINT, 7, "stopped by SIGINT"),
        (RANK, False, signal.SIGTERM, 143, "stopped by SIGTERM"),
        (RANK, True, signal.SIGTERM, 143, "stopped by SIGTERM"),
        (ENDS_WITH_0, True, None, 143, "ended with 0 after it was asked to continue on more ranks; end with 143"),
    ],
)
def test_a_job_that_is_stopped_is_not_started_again(
    rank: str, grows: bool, number: signal.Signals | None, code: int, said: str, pretended: Pretended
) -> None:
    """Its ranks get the signal, and have time for their checkpoint. grows: they have been asked to continue on three
    ranks before; a program that ends with 0 then has not continued."""
    pretended.variables["RANK"] = rank
    hosts = pretended.folder / "hosts"
    hosts.write_text("a slots=2\n")
    plan = ["rank" if rank else "asleep", "0"]
    job = pretended.start(plan, "--hostfile", "hosts", "--grow", "1", "--reach", "ssh")
    pretended.wait_for_sleep()
    if grows:
        hosts.write_text("a slots=3\n")
        pretended.wait_for_sleep("asked")
    if number is not None:
        job.send_signal(number)
    _, text = job.communicate(timeout=20)
    assert (job.returncode, pretended.ranks) == (code, ["2"]), text
    assert said in text
    assert (pretended.run_folder / "checkpoint-99").exists() == (rank != "")


def test_a_job_grows_with_its_hostfile(pretended: Pretended, tmp_path: Path) -> None:
    """Also after a host that was lost answers again, but not when one is lost. To grow is no failure, and a failure at
    the end of the smaller job makes the next one no smaller."""
    lines = tmp_path / "lines"
    lines.write_text("here slots=2\nlost slots=2\n")
    pretended.add(ssh=f"#!{BASH}\n[[ $1 != lost || -e {tmp_path / 'back'} ]]\n")
    given = ["--hostfile", str(lines), "--grow", "1", "--reach", "ssh", "--attempts", "1"]
    job = pretended.start(["checkpoint 1", "asleep", "asleep", "rank", "0"], *given)
    pretended.wait_for_sleep()
    lines.write_text("here slots=3\nlost slots=2\n")
    pretended.wait_for_sleep()
    (tmp_path / "back").touch()
    pretended.wait_for_sleep()
    lines.write_text("")  # a file that is being written
    time.sleep(1.5)
    lines.write_text("here slots=3\nlost slots=2\nother\n")
    _, said = job.communicate(timeout=30)
    assert (job.returncode, pretended.ranks) == (0, ["4", "2", "3", "5", "6"]), said
    assert "the hosts have slots for 5 ranks: the job writes a checkpoint and ends" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the program after --"),
        (["--ranks", "none"], "--ranks none: give a number of at least 1"),
        (["--ranks"], "--ranks needs a value"),
        (["--grow", "5", "--", "a"], "--grow 5: give the hosts by --hostfile FILE"),
        (["--rank", "3"], '"--rank" is not an option; put -- before the program'),
        (["--hostfile", "missing", "--", "a"], "--hostfile missing: there is no such file"),
        (["--hostfile", "scripts/slurm/try_here.sh"], "it begins with #!, and can't be run: chmod +x scripts/"),
        (["--", "python", "mine.py"], "the program has no --checkpoint DIR"),
        (["--", "python", "-m", "trainers", "--checkpoint=run"], "add --resume after --checkpoint run"),
        (["--launcher", "nompi", "--progress", "run", "--", "a"], "there is no nompi"),
        (
            ["--ranks", "2", "--least", "3", "--launcher", "true", "--progress", "run", "--", "a"],
            "--least 3: the job beg",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str) -> None:
    ended = subprocess.run([BASH, SCRIPT, *arguments], cwd=launch.ROOT, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert words in ended.stderr


@contextmanager
def started(folder: Path, mpi: str, *words: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start keep_going.sh with an MPI's launcher; `python` in words is that of its environment. The output is written
    to the file "said" in the folder."""
    try:
        bin_folder = launch.environment(mpi) / "bin"
    except launch.MissingEnvironmentError as error:
        lacking(error)
        pytest.skip(str(error))
    (folder / "sleep").write_text(SLEEP)
    (folder / "sleep").chmod(0o755)
    path = os.pathsep.join([str(folder), str(bin_folder), os.environ["PATH"]])
    launcher = " ".join([str(bin_folder / launch.LAUNCHERS[mpi][0]), *launch.LAUNCHERS[mpi][1:]])
    command = [BASH, str(SCRIPT), "--launcher", launcher, *map(str, words)]
    with (folder / "said").open("w") as said, launch.started(command, said, said, {"PATH": path}) as job:
        yield job


def wait_for_checkpoint(folder: Path, job: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while not list(folder.glob("checkpoint-*")):
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.jobs
def test_a_job_whose_rank_is_killed_ends_on_one_rank_less(tmp_path: Path) -> None:
    folder, result = tmp_path / "run", tmp_path / "result.json"
    train = ["-m", "trainers", "--data", "iris", "--epochs", "100", "--checkpoint", folder, "--resume"]
    with started(tmp_path, "mpich", "--ranks", "3", "--", "python", *train, "--json", result) as job:
        wait_for_checkpoint(folder, job)
        mark = Path(f"/proc/{job.pid}/environ").read_bytes().split(launch.MARK.encode() + b"=")[1][:32].decode()
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in sorted(launch.marked(mark))}
        ranks = [pid for pid, (name, *rest) in words.items() if b"python" in name and b"trainers" in rest]
        os.kill(ranks[1], signal.SIGKILL)
        code = job.wait(60)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert "restarts from the last checkpoint on 2 ranks" in said
    assert f"resumed: {folder}/checkpoint-" in said
    written = json.loads(result.read_text())
    assert written["ranks"] == 2
    assert [epoch["epoch"] for epoch in written["history"]] == list(range(1, 101))
    assert written["test_accuracy"] > 0.9


# Two ranks are slow, so that the job does not end before it grows.
GROWING = """
import sys, time
import numpy as np
from trainers import MirroredTrainer, NumpyNetwork
from trainers.callbacks import Callback

class Slow(Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

x, y = np.zeros((300, 8), "float32"), np.zeros(300, int)
with MirroredTrainer(NumpyNetwork([8, 16, 3])) as trainer:
    slow = [Slow()] if trainer.size == 2 else []
    history = trainer.fit(x, y, 40, 30, checkpoint=sys.argv[1], resume=True, callbacks=slow)
    if trainer.rank == 0:
        print("epochs", *(epoch.epoch for epoch in history), "on", trainer.size, flush=True)
"""


@pytest.mark.jobs
def test_a_job_of_two_ranks_becomes_one_of_three(tmp_path: Path) -> None:
    """No epoch is lost; tests.matrix compares the steps of a training that SIGTERM stops, and that others resume."""
    hosts, folder = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("localhost slots=2\n")
    program = ["python", "-c", GROWING, folder]
    with started(tmp_path, "openmpi", "--hostfile", hosts, "--grow", "1", "--progress", folder, "--", *program) as job:
        wait_for_checkpoint(folder, job)
        hosts.write_text("localhost slots=3\n")
        code = job.wait(120)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert "the job continues from the last checkpoint on 3 ranks" in said
    assert re.search(r"trains on 3 ranks: \d+\.\d\d s without training", said), said
    assert f"epochs {' '.join(map(str, range(1, 41)))} on 3" in said
