"""Runs command lines one after another in one job, because starting a job takes longer.

mpirun -n N python tests/command_runs.py CASES.json OUTCOMES.json

CASES: a list of [module, arguments, folder]; OUTCOMES: for each, what every rank printed and its exit code.
"""

import contextlib
import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import allreduce  # noqa: F401, prepares the environment of MPI, so it comes first

# isort: split
from mpi4py import MPI


def run(module: str, arguments: list[str], folder: str) -> dict[str, Any]:
    """Exit code and output of one command line on this rank."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = importlib.import_module(module).main(arguments)
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def main() -> None:
    comm = MPI.COMM_WORLD
    cases, outcomes = map(Path, sys.argv[1:])
    found = [comm.gather(run(*case)) for case in json.loads(cases.read_text())]
    if comm.rank == 0:
        outcomes.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
