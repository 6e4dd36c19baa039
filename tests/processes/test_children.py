"""Child processes of multiprocessing are not ranks: they work beside the ranks, and may not communicate."""

from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

METHODS = ("fork", "spawn", "forkserver")
PLACES = pytest.mark.parametrize(("mpi", "ranks"), [("openmpi", 0), ("openmpi", 2), ("mpich", 2)])

# `communicate` runs in a child, on what the child has: a copy of the parent's backend, or a fresh import.
POOL = """
import multiprocessing, os, sys
import numpy as np
import allreduce

reduce = None

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

if __name__ == "__main__":
    reduce = allreduce.create("ring")
    reduce(np.ones(3), "sum")
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(2) as pool:
            part = np.array(pool.map(square, range(4)), float)
            words = pool.map(communicate, range(2))
        reduce(part, "sum")
        assert part.tolist() == [reduce.size * number for number in (0, 1, 4, 9)], part
        refused = 5 if method == "fork" else 2  # a fresh import has no backend to call
        assert [each[:refused] for each in words] == [["ChildError"] * refused] * 2, words
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

LOADER = """
import sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import allreduce
import trainers.pytorch

class Rows(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((3,), float(index))

class Communicating(Rows):
    def __getitem__(self, index):
        allreduce.create("ring")

def main():
    reduce = allreduce.create("auto")
    for method in sys.argv[1:]:
        workers = 2 if method == "fork" else 1  # others import PyTorch, which takes seconds
        for batch in DataLoader(Rows(), batch_size=4, num_workers=workers, multiprocessing_context=method):
            mean = batch.mean(0).numpy()
            reduce(mean, "sum")
        assert mean.tolist() == [9.5 * reduce.size] * 3, mean
    try:
        next(iter(DataLoader(Communicating(), num_workers=1, multiprocessing_context="fork")))
    except Exception as error:
        assert "ChildError: process" in str(error), error
    else:
        raise AssertionError("a child has communicated")
    reduce.close()
    print("finished")

if __name__ == "__main__":
    main()
"""


SUBPROCESS = """
import os, subprocess, sys
import numpy as np
import allreduce

CHILD = '''
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

def run(*command, **variables):
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout

reduce = allreduce.create("ring")
reduce(np.ones(3), "sum")
if reduce.rank == 0:
    python = (sys.executable, "-c", CHILD)
    launched, launcher = reduce.size > 1, sys.argv[1].split()
    refused = f"not started\\nChildError process"
    for command in (python, ("bash", "-c", '"$@"; true', "-", *python)):
        text = run(*command)
        assert text.startswith(refused if launched else "started\\n1\\n"), text
        assert f"was started by a rank (process {os.getpid()})" in text or not launched, text
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    alone = subprocess.run(python, env=clean, capture_output=True, text=True, timeout=100)
    assert alone.stdout == "started\\n1\\n", alone
    job = run(*launcher, "-n", "2", *python)
    # The launcher may put two ranks' texts on one line.
    assert sorted("".join(job.replace("started", "s").split())) == ["2", "2", "s", "s"], job
reduce(np.ones(3), "sum")
reduce.close()
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
        if not program and ("torch" not in module.name or len(sys.argv) > 1):
            importlib.import_module(module.name)
assert not MPI.Is_initialized()
print("finished")
"""


def run(mpirun: JobRunner, folder: Path, program: str, ranks: int, mpi: str, *arguments: str) -> None:
    script = folder / "program.py"
    script.write_text(program)
    job = mpirun(ranks, [script, *arguments], mpi=mpi, timeout=250)  # ranks 0: without mpirun
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("finished") == max(ranks, 1)


@PLACES
def test_pools_and_forked_children(mpirun: JobRunner, tmp_path: Path, mpi: str, ranks: int) -> None:
    """One after the other, in one program. A forked child does not wait in the end of MPI, which belongs to its parent,
    and its exception does not end the job."""
    run(mpirun, tmp_path, POOL, ranks, mpi, *METHODS)


@PLACES
def test_programs_that_a_rank_starts(mpirun: JobRunner, tmp_path: Path, mpi: str, ranks: int) -> None:
    """They inherit the launcher's variables; a program that starts MPI by these would end the job. Jobs of its own
    work."""
    launcher, *options = launch.LAUNCHERS[mpi]
    run(mpirun, tmp_path, SUBPROCESS, ranks, mpi, " ".join([str(launch.environment(mpi) / "bin" / launcher), *options]))


def test_data_loaders(mpirun: JobRunner, tmp_path: Path) -> None:
    run(mpirun, tmp_path, LOADER, 2, "openmpi", "fork", "spawn")


def test_nothing_needs_mpi_while_it_is_imported(mpirun: JobRunner, tmp_path: Path) -> None:
    """Children can't use MPI: a call into it would end the process without an exception."""
    run(mpirun, tmp_path, IMPORTS, 0, "openmpi", "with torch")
