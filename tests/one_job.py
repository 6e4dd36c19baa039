"""Runs programs one after the other in one job, because starting a job takes longer than most of them.

mpirun -n N python -m tests.one_job PROGRAMS.json FOLDER

PROGRAMS: a list of [program, arguments, folder to run in]; a program is a module with a function `main`, or a file.
Each rank leaves in FOLDER its output and its exit code, in files NUMBER.RANK.out, .err and .code.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import allreduce  # noqa: F401, prepares the environment of MPI, so it comes first

# isort: split
from mpi4py import MPI


def run(program: str, arguments: list[str], folder: str) -> object:
    """Return the exit code of a program."""
    os.chdir(folder)
    try:
        if not program.endswith(".py"):
            return importlib.import_module(program).main(arguments)
        sys.argv[1:] = arguments
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        return stop.code or 0
    return 0


def main() -> None:
    comm, programs, folder = MPI.COMM_WORLD, Path(sys.argv[1]), Path(sys.argv[2])
    shown, environment = (os.dup(1), os.dup(2)), dict(os.environ)
    for number, case in enumerate(json.loads(programs.read_text())):
        for descriptor, kind in ((1, "out"), (2, "err")):
            with (folder / f"{number}.{comm.rank}.{kind}").open("w") as file:
                os.dup2(file.fileno(), descriptor)
        code = run(*case)
        torch = sys.modules.get("torch")
        if torch and torch.distributed.is_initialized():  # Lightning leaves its process group, and variables
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        for stream, descriptor, original in zip((sys.stdout, sys.stderr), (1, 2), shown, strict=True):
            stream.flush()
            os.dup2(original, descriptor)
        comm.Barrier()
        (folder / f"{number}.{comm.rank}.code").write_text(json.dumps(code))


if __name__ == "__main__":
    main()
