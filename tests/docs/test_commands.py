"""The site's commands: those in the pages' shell blocks that two cores can run are run, as they stand.

They run in a folder with a few files that commands name. Long commands get options that make them short. A command that
can't run here has a line in SKIPPED, which says why.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.lib.results import to_json
from tests import launch
from tests.benchmarks.made_runs import made_run
from tests.conftest import lacking

DOCS = launch.ROOT / "docs"
BLOCK = re.compile(r"^( *)(`{3,})(?:\{code-block\} )?(?:bash|sh)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
CONTINUED = re.compile(r"\s*(?:\\|(?<=&&))\n\s*")  # a command goes on in the next line
# Why a command that begins so is not run.
SKIPPED = {
    ".venv/bin/pip": "installs",
    ". venv": "installs",
    "bash scripts/docs.sh": "installs",
    "bash scripts/keep_going.sh": "test_keep_going.py runs it",
    "bash scripts/test.sh": "installs, and runs these tests",
    "bash scripts/train.sh": "installs",
    "RANKS=2 bash scripts/train.sh": "installs",
    "conda": "installs",
    "for ": "minutes",
    "done": "the end of a loop",
    "kill": "sends a signal to other programs",
    "kubectl": "a cluster",
    "module load": "a cluster",
    "mpiexec": "several hosts",
    "mpirun --hostfile hosts -n 8": "several hosts",
    "mpirun --oversubscribe -n $n": "minutes, in a loop",
    "mpirun --with-ft": "test_lost_ranks.py loses ranks",
    "mpirun -n 3 --oversubscribe python -m benchmarks.bandwidth --backends NAME": "a name to fill in",
    "mpirun -n 3 --oversubscribe python -m pytest": "the tests run it",
    "mpirun -n 4 python -m allreduce doctor": "its exit code says what it finds; test_doctor.py runs it",
    "mpirun -n 5 python -m benchmarks.strategies": "half a minute; test_strategies.py runs it",
    "pip install": "installs",
    "pkill": "sends a signal to other programs",
    "python -m benchmarks.scaling --fit": "takes the files of the commands before it",
    "python -m pytest": "the tests run it",
    "python3 -m venv": "installs",
    "salloc": "a cluster",
    "sbatch": "a cluster",
    "source .venv": "sets the environment",
    "srun": "a cluster",
    "sudo": "test_cluster_sim.py runs the rig; root",
}
# Options that make a command short.
SHORTER = {
    "mpirun -n 4 --oversubscribe python -m trainers --epochs 300": "--epochs 2",
    "mpirun -n 3 --oversubscribe python -m trainers --epochs 300": "--epochs 2",
    "mpirun -n 2 python -m benchmarks.bandwidth": "-b 1K -e 1K -n 1 -w 0",
    "mpirun -n 4 python -m benchmarks.bandwidth": "-b 1K -e 1K -n 1 -w 0",
    "mpirun -n 4 python -m benchmarks.tune": "--sizes 1K --dtypes float -n 1 -w 0 --output t.json",
}
VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def commands() -> list[str]:
    """Each command of the pages once; programs of docs/programs are test_programs.py's."""
    texts = [path.read_text() for path in sorted(DOCS.rglob("*.md"))]
    blocks = [CONTINUED.sub(" ", match[2]) for text in texts for match in map(re.Match.groups, BLOCK.finditer(text))]
    lines = [re.sub(r"(?:^|\s+)#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    wanted = [line for line in lines if line and not line.startswith((":", "export ", "#"))]
    return [line for line in dict.fromkeys(wanted) if not re.search(r" python \w+\.py| [A-Z]+$|^python train.py", line)]


def first_of(known: dict[str, str], command: str) -> str | None:
    return next((text for start, text in known.items() if command.startswith(start)), None)


def test_the_lists_hold_nothing_that_is_gone() -> None:
    for start in (*SKIPPED, *SHORTER):
        assert any(command.startswith(start) for command in commands()), f"no command begins with {start!r}"


@pytest.mark.jobs
@pytest.mark.parametrize("command", commands())
def test_command(tmp_path: Path, command: str) -> None:
    why = first_of(SKIPPED, command)
    if why:
        pytest.skip(why)
    try:
        environment = launch.environment("openmpi")
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return
    for name in ("before.json", "after.json"):
        (tmp_path / name).write_text(to_json(made_run()))
    (tmp_path / "trace.json").write_text(json.dumps([{"ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0}]))
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(launch.ROOT)}
    job = subprocess.run(
        ["bash", "-c", f"{command} {first_of(SHORTER, command) or ''}"],
        cwd=tmp_path,
        env={**os.environ, **VARIABLES, **caches, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
