"""Programs that run one after the other in one job, because starting a job takes longer than most of them."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import JobRunner

# Each program runs in a folder of its own, and what it prints goes to files in that folder.
PROGRAM = """
import os, runpy, sys
import allreduce
shown = os.dup(1), os.dup(2)
ranks = allreduce.Topology()
top, environment = os.getcwd(), dict(os.environ)
for number, program in enumerate(sys.argv[1:]):
    os.chdir(os.path.join(top, str(number)))
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{ranks.rank}.{kind}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv[1:] = []
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:  # after SIGTERM, on a page that says so
        if ended.code != 143:
            raise
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():  # Lightning leaves its process group, and variables
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(shown[0], 1)
    os.dup2(shown[1], 2)
    ranks.world.Barrier()
    print(f"finished {number}.", flush=True)
"""


class Output(NamedTuple):
    """finished: whether a program ended well on all ranks. printed, errors: its stdout and stderr, rank after rank."""

    finished: bool
    printed: str
    errors: str


def in_turn(
    mpirun: JobRunner, ranks: int, programs: Sequence[Path], folder: Path, **job: Any
) -> "tuple[subprocess.CompletedProcess[str], list[Output]]":
    """Run programs in an empty folder. Return the job, and the output of each program."""
    for number in range(len(programs)):
        (folder / str(number)).mkdir()
    ended = mpirun(ranks, ["-c", PROGRAM, *programs], cwd=folder, **job)
    found = []
    for number in range(len(programs)):
        files = [sorted((folder / str(number)).glob(f"*.{kind}")) for kind in ("out", "err")]
        texts = ("".join(file.read_text() for file in each) for each in files)
        found.append(Output(ended.stdout.count(f"finished {number}.") == ranks, *texts))
    return ended, found
