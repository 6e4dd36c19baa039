"""Child processes of multiprocessing are not ranks: they work beside the ranks, and may not communicate."""

from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

# `communicate` runs in a child, on what the child has: a copy of the parent's backend, or a fresh import.
CHILDREN = """
import multiprocessing, os, subprocess, sys
import numpy as np
import allreduce

reduce = None
PROGRAM = '''
import allreduce
from mpi4py import MPI
print("started" if MPI.Is_initialized() else "not started")
try:
    with allreduce.create("ring") as reduce:
        print(reduce.size)
except Exception as error:
    print(type(error).__name__, error)
'''
LAUNCHER = ("PMI", "OMPI_", "HYD", "ALLREDUCE_RANK")

def square(number):
    return number * number

def communicate(_):
    words = []
    for call in (lambda: allreduce.Topology(), lambda: allreduce.create("ring"), lambda: reduce(np.ones(3), "sum"),
                 lambda: reduce.allocate(5), lambda: reduce.close()):
        try:
            call()
            words.append("done")
        except Exception as error:
            words.append(type(error).__name__)
    return words

def run(*command, **options):
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout

def programs(launcher):
    python = (sys.executable, "-c", PROGRAM)
    launched = reduce.size > 1
    for command in (python, ("bash", "-c", '"$@"; true', "-", *python)):
        text = run(*command)
        assert text.startswith("not started\\nChildError process" if launched else "started\\n1\\n"), text
        assert f"was started by a rank (process {os.getpid()})" in text or not launched, text
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    assert run(*python, env=clean) == "started\\n1\\n"
    job = run(*launcher, "-n", "2", *python)
    # The launcher may put two ranks' texts on one line.
    assert sorted("".join(job.replace("started", "s").split())) == ["2", "2", "s", "s"], job

if __name__ == "__main__":
    launcher, *methods = sys.argv[1:]
    reduce = allreduce.create("ring")
    reduce(np.ones(3), "sum")
    for method in methods:
        with multiprocessing.get_context(method).Pool(2) as pool:
            part = np.array(pool.map(square, range(4)), float)
            words = pool.map(communicate, range(2))
        reduce(part, "sum")
        assert part.tolist() == [reduce.size * number for number in (0, 1, 4, 9)], part
        refused = 5 if method == "fork" else 2  # a fresh import has no backend to call
        assert [each[:refused] for each in words] == [["ChildError"] * refused] * 2, words
    if reduce.rank == 0:
        programs(launcher.split())
    codes = []
    for way in ("exit", "raise", "end"):
        child = os.fork()
        if child == 0:
            if way == "exit":
                sys.exit(3)
            if way == "raise":
                raise ValueError("on purpose")
            break
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        reduce(np.ones(3), "sum")
        reduce.close()
        assert codes == [3, 1, 0], codes
        print("finished")
"""

IMPORTS = """
import importlib, mpi4py, os, pkgutil, sys
os.environ.setdefault("KERAS_BACKEND", "torch")
mpi4py.rc.initialize = False
from mpi4py import MPI
for package in map(importlib.import_module, ("allreduce", "trainers")):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        program = module.name.endswith("__main__") or module.name.startswith("allreduce.kernels.")  # no Python
        if not program:
            importlib.import_module(module.name)
assert not MPI.Is_initialized()
print("finished")
"""


@pytest.mark.parametrize(
    ("mpi", "ranks", "methods"),
    [("openmpi", 0, ("fork", "spawn", "forkserver")), ("openmpi", 2, ("fork", "forkserver")), ("mpich", 2, ("spawn",))],
)
def test_children(mpirun: JobRunner, tmp_path: Path, mpi: str, ranks: int, methods: tuple[str, ...]) -> None:
    """One after the other, in one program: pools, programs that inherit the launcher's variables, jobs, and forks. A
    program that starts MPI by these variables would end the job. A forked child does not wait in the end of MPI, which
    belongs to its parent, and its exception does not end the job."""
    launcher, *options = launch.LAUNCHERS[mpi]
    command = " ".join([str(launch.environment(mpi) / "bin" / launcher), *options])
    script = tmp_path / "program.py"
    script.write_text(CHILDREN)
    job = mpirun(ranks, [script, command, *methods], mpi=mpi, timeout=250)  # ranks 0: without mpirun
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("finished") == max(ranks, 1)


def test_nothing_needs_mpi_while_it_is_imported(mpirun: JobRunner) -> None:
    """Children can't use MPI: a call into it would end the process without an exception."""
    done = mpirun(0, ["-c", IMPORTS], timeout=250)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
