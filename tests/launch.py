"""Start a job of several ranks for a test, and get rid of all of it again, whatever it does."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MPIS = ("openmpi", "mpich")
LAUNCHERS = {
    "openmpi": ("mpirun", "--oversubscribe", "--bind-to", "none"),  # jobs of several tests share the cores
    "mpich": ("mpiexec",),
}
STARTERS = ("mpirun", "mpiexec", "prterun", "srun")
# Here, so that jobs that tests start by themselves inherit them:
PATIENT = {
    # A rank that polls takes a core from the ranks that it waits for, of its own job or of the one that another file
    # of tests runs at the same time. A yield by sched_yield still burns as much time again as the grid's work takes, so
    # a yield sleeps: for Linux's shortest time, 50 microseconds.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "50",
    # Open MPI's transport for RDMA networks sleeps for a second when it finds none, in each job's start.
    "OMPI_MCA_btl": "^ofi",
}
for name, value in PATIENT.items():
    os.environ.setdefault(name, value)
COMPILED_ONCE = {  # what one rank, replica or job of JAX has compiled, the others take from there
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
MARK = "ALLREDUCE_TEST_JOB"  # in the environment of every process of a job, to find those that outlive it


class Launches:
    """Counts the jobs that tests start, whatever starts them in this process, and refuses a start in a test without the
    mark `jobs`.

    unmarked: the running test, if it lacks the mark; else "". jobs, ranks: the number of jobs, and of their ranks.
    """

    def __init__(self) -> None:
        self.unmarked = ""
        self.jobs = self.ranks = 0

    def check(self, event: str, values: tuple[Any, ...]) -> None:
        """An audit hook of Python. Raises AssertionError in the place of the start."""
        if event != "subprocess.Popen" or not starts_job(values[1]):
            return
        count = re.search(r"-n (\d+)", " ".join(map(str, values[1])))
        self.jobs, self.ranks = self.jobs + 1, self.ranks + int(count[1] if count else 1)
        if self.unmarked:
            raise AssertionError(f"{self.unmarked} starts a job; mark it: @pytest.mark.jobs")


def starts_job(command: Any) -> bool:
    """Return whether a command is, or contains, that of a launcher of MPI; a shell's text is searched too."""
    words = [os.fsdecode(word) for word in ([command] if isinstance(command, str | bytes | Path) else command)]
    if any(Path(word).name in STARTERS for word in words):
        return True
    shell = Path(words[0]).name in ("sh", "bash")
    return shell and any(re.search(rf"\b({'|'.join(STARTERS)})\b", word) is not None for word in words[1:])


class JobTimeoutError(AssertionError):
    """A job did not end in time and was killed; the text is its output."""


class MissingEnvironmentError(Exception):
    """The virtual environment of an MPI is missing."""


def environment(mpi: str) -> Path:
    """The virtual environment that holds an MPI: $ALLREDUCE_TEST_OPENMPI or $ALLREDUCE_TEST_MPICH, or by default
    .venv-test or .venv-mpich in the checkout."""
    default = {"openmpi": ".venv-test", "mpich": ".venv-mpich"}[mpi]
    folder = Path(os.environ.get(f"ALLREDUCE_TEST_{mpi.upper()}", ROOT / default))
    if not (folder / "bin" / LAUNCHERS[mpi][0]).exists():
        raise MissingEnvironmentError(
            f"no {mpi} environment at {folder}; scripts/test.sh makes it, or name one in ALLREDUCE_TEST_{mpi.upper()}"
        )
    return folder


def mpirun(
    ranks: int,
    args: Sequence[str | Path],
    *,
    mpi: str = "openmpi",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    ulfm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python *args` on `ranks` ranks and return its end: returncode, stdout, stderr (text).

    ranks: 0 runs it without a launcher. ulfm: ranks may die, and the others live (Open MPI alone).
    The checkout's packages are importable whatever `cwd` is. env: additions to this process's
    environment. Raises JobTimeoutError after `timeout` seconds, when every process of the job is killed.
    """
    bin_folder = environment(mpi) / "bin"
    launcher, *options = LAUNCHERS[mpi]
    if ulfm:
        options += ["--with-ft", "ulfm"]
    started_by = [str(bin_folder / launcher), *options, "-n", str(ranks)] if ranks else []
    command = [*started_by, str(bin_folder / "python"), *map(str, args)]
    code, texts = _run(command, timeout, env, cwd)
    if ranks and code is not None and code < 0:  # prterun itself has crashed, which happens once in some runs
        code, texts = _run(command, timeout, env, cwd)
    if code is None:
        raise JobTimeoutError(f"{shlex.join(command)} did not end in {timeout:.0f} s\n" + "\n".join(texts))
    return subprocess.CompletedProcess(command, code, *texts)


def _run(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None, cwd: str | Path | None
) -> tuple[int | None, list[str]]:
    """Run a job; return its exit code (None: it took too long; negative: a signal ended the launcher) and output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with started(command, out, err, env, cwd) as process:
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
        return code, [_text(file) for file in (out, err)]


@contextmanager
def started(
    command: Sequence[str],
    out: Any,  # files, not pipes: a process that outlives the job can't keep us waiting
    err: Any,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Iterator[subprocess.Popen]:
    """Context manager: run a job during the block; at its end none of the job's processes is left. Arguments: see
    mpirun."""
    mark = uuid.uuid4().hex
    # Open MPI names its folders by process numbers, which come again: what a killed job has left must not be there.
    with tempfile.TemporaryDirectory(prefix="job", ignore_cleanup_errors=True) as temporary:
        given = {**variables(mark), "TMPDIR": temporary, **(env or {})}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=given,
            cwd=cwd or ROOT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process, mark)


def child(code: str) -> "subprocess.CompletedProcess[str]":
    """Run a program on one rank without a launcher, and return its end. The checkout's packages are importable."""
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=60)


def variables(mark: str) -> dict[str, str]:
    """Return the environment of a job whose processes `marked(mark)` finds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_COMM", "PRTE"))}
    return {
        **inherited,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache" / "home"),  # no decision table of this machine's there
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        MARK: mark,
    }


def _text(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return file.read()  # type: ignore[attr-defined, no-any-return]


def end(process: subprocess.Popen, mark: str) -> None:
    """End the remaining processes of a job: first by SIGTERM to its launcher, which knows its ranks, then by
    SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for _ in range(50):  # ranks form process groups of their own, so look for them by their mark
        left = marked(mark)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found
