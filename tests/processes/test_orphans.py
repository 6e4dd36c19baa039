"""Child processes of a killed rank end with it, so that none of them keeps the job's output open."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch

# A rank starts children, writes their process numbers to a file, and is killed.
PROGRAM = """
import multiprocessing, os, signal, sys, time
import allreduce

def work(started):
    assert allreduce.NAMES
    started.put(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    if len(sys.argv) > 3:
        context.set_forkserver_preload([])  # then the children import the library, not the server
    queue = context.Queue()
    for _ in range(2):
        context.Process(target=work, args=(queue,), daemon=True).start()
    numbers = [queue.get() for _ in range(2)]
    with open(sys.argv[2], "w") as file:
        file.write(" ".join(map(str, numbers)))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", [["spawn"], ["forkserver"], ["forkserver", "none"]], ids=" ".join)
def test_children_end_with_a_killed_rank(tmp_path: Path, options: list[str]) -> None:
    method, *preloaded = options
    script, numbers = tmp_path / "program.py", tmp_path / "numbers"
    script.write_text(PROGRAM)
    command = [sys.executable, script, method, numbers, *preloaded]
    env = launch.variables("orphans")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            told, errors = job.communicate(timeout=120)  # the end of the output, which the children have too
        except subprocess.TimeoutExpired:
            job.kill()
            for number in numbers.read_text().split() if numbers.exists() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            raise
    assert job.returncode == -signal.SIGKILL, errors
    assert told == ""
    assert len(numbers.read_text().split()) == 2
    assert "Traceback" not in errors
