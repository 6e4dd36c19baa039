"""allreduce/kernels/communicators.c, before a stand-in for Open MPI: a failure that is reported while a communicator is
created waits until it has been created. Open MPI itself would crash (ompi_comm_revoke_local)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allreduce.process import start
from tests import launch
from tests.conftest import JobRunner

LIBRARIES = list((launch.ROOT / "allreduce" / "kernels").glob("communicators*.so"))
STAND_IN = r"""
#include <stdbool.h>
#include <stdio.h>
int ompi_comm_nextcid(void *c, void *p, void *b, const void *x, const void *y, bool f, int m) {
    return printf("number %ld %d%d\n", (long)c, f, m), 0;
}
bool ompi_comm_revoke_local(void *c, bool only) { return printf("revoke %ld %d\n", (long)c, only), true; }
int mca_coll_base_comm_select(void *c) { return printf("select %ld\n", (long)c), (long)c == 9; }
int mca_coll_base_comm_unselect(void *c) { return printf("unselect %ld\n", (long)c), 0; }
"""
RUN = """
import ctypes, sys
stand_in = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[2])
number = lambda comm: library.ompi_comm_nextcid(ctypes.c_void_p(comm), None, None, None, None, True, 4)
revoke = lambda comm, only: library.ompi_comm_revoke_local(ctypes.c_void_p(comm), only) & 1
select = lambda comm: library.mca_coll_base_comm_select(ctypes.c_void_p(comm))
unselect = lambda comm: library.mca_coll_base_comm_unselect(ctypes.c_void_p(comm))
for step in sys.argv[3].split("; "):
    result = eval(step)
    ctypes.CDLL(None).fflush(None)
    print("->", result, flush=True)
"""


@pytest.mark.parametrize(
    ("steps", "printed"),
    [
        # MPI was loaded before the library, which so knows of no communicator: all goes through
        ("revoke(1, True)", "revoke 1 1; -> 1"),
        ("select(1); revoke(1, True)", "select 1; -> 0; revoke 1 1; -> 1"),
        # put off, and said once
        (
            "select(1); number(2); revoke(2, True); revoke(2, True); select(2); revoke(2, False)",
            "select 1; -> 0; number 2 14; -> 0; -> 1; -> 0; select 2; revoke 2 1; -> 0; revoke 2 0; -> 1",
        ),
        (
            "select(1); number(2); revoke(2, True); revoke(2, False); select(2)",
            "select 1; -> 0; number 2 14; -> 0; -> 1; -> 1; select 2; revoke 2 0; -> 0",
        ),
        # its creation was given up; another communicator has the same address
        (
            "select(1); number(2); revoke(2, True); number(2); select(2)",
            "select 1; -> 0; number 2 14; -> 0; -> 1; number 2 14; -> 0; select 2; -> 0",
        ),
        (
            "select(1); select(2); unselect(2); number(2); revoke(2, True)",
            "select 1; -> 0; select 2; -> 0; unselect 2; -> 0; number 2 14; -> 0; -> 1",
        ),
        # its creation has failed
        ("select(1); number(9); revoke(9, True); select(9)", "select 1; -> 0; number 9 14; -> 0; -> 1; select 9; -> 1"),
    ],
)
def test_a_revocation_waits_for_the_communicator(steps: str, printed: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not LIBRARIES:
        pytest.skip("no compiler, or no library")
    (tmp_path / "stand_in.c").write_text(STAND_IN)
    stand_in = tmp_path / "libmpi.so.40"
    options = ["-shared", "-fPIC", "-Wl,-soname,libmpi.so.40", "-o", stand_in]
    subprocess.run([compiler, *options, tmp_path / "stand_in.c"], check=True)
    command = [sys.executable, "-c", RUN, stand_in, LIBRARIES[0], steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == printed.split("; "), done.stderr


@pytest.mark.parametrize(
    ("version", "started", "loads"),
    [
        ("5.0.11", False, True),
        ("5.0.3rc1", False, True),
        ("5.0.11", True, False),  # it can't come after MPI
        # these have other functions, or libraries of another name, in which it would call itself for ever
        ("5.1.0", False, False),
        ("", False, False),
    ],
)
def test_the_library_stands_before_open_mpi_5_0(
    version: str, started: bool, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LIBRARIES:
        pytest.skip("no C library was built")
    loaded: list[str] = []
    monkeypatch.setenv(start.VERSION, version)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    if not started:
        monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    monkeypatch.setattr(start.ctypes, "CDLL", lambda path, mode: loaded.append(path) or mode == os.RTLD_GLOBAL)
    start._load_before_mpi()
    assert loaded == [str(path) for path in LIBRARIES if loads]


def test_a_library_that_can_t_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of several machines has the library of another one: a compiler is not missing."""
    if not LIBRARIES:
        pytest.skip("no C library was built")

    def refuse(path: str, mode: int) -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setenv(start.VERSION, "5.0.11")
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(start, "_unguarded", [])
    monkeypatch.setattr(start.ctypes, "CDLL", refuse)
    start._load_before_mpi()
    assert "can't be loaded (wrong ELF class); install allreduce again on this machine" in start.unguarded()


@pytest.mark.jobs
@pytest.mark.parametrize(("order", "notices"), [("mpi4py.MPI, allreduce", 1), ("allreduce, mpi4py.MPI", 0)])
def test_a_program_that_starts_mpi_before_allreduce_is_told(order: str, notices: int, mpirun: JobRunner) -> None:
    """Once, on rank 0: allreduce could not set Open MPI's options, nor load its library before it."""
    job = mpirun(2, ["-c", f"import {order}; allreduce.Topology().close(); allreduce.Topology()"], ulfm=True)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("mpi4py.MPI was imported before allreduce; import allreduce first") == notices, job.stderr
