"""Child processes of a killed rank end with it, so that none of them keeps the job's output open."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch


@pytest.mark.parametrize("options", [["spawn"], ["forkserver"], ["forkserver", "none"]], ids=" ".join)
def test_children_end_with_a_killed_rank(tmp_path: Path, options: list[str]) -> None:
    method, *preloaded = options
    numbers = tmp_path / "numbers"
    command = [sys.executable, "-m", "tests.processes.orphans_job", method, str(numbers), *preloaded]
    env = {**os.environ, "PYTHONPATH": str(launch.ROOT)}
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
