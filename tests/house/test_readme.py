"""The guides (every README.md): each program and command in them that two cores can run is run, as it stands, and
links and names of files lead somewhere.

Programs run under `mpirun -n 2`. Commands run in a folder that looks like a checkout whose .venv is there, after the
exports of the section "Under mpirun". Those that take minutes get options behind them that make them short.
"""

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from allreduce import NAMES
from benchmarks.lib.results import to_json
from tests import launch
from tests.benchmarks.made_runs import made_run
from tests.conftest import JobRunner, lacking

FOLDERS = ("allreduce", "trainers", "benchmarks", "scripts", "tests")
BESIDE = sorted(path for folder in FOLDERS for path in (launch.ROOT / folder).rglob("README.md"))
GUIDES = [Path("README.md"), *(path.relative_to(launch.ROOT) for path in BESIDE)]
LINKED = [*GUIDES, Path("CONTRIBUTING.md")]
TEXTS = [(launch.ROOT / guide).read_text() for guide in GUIDES]

INLINE = r"(?<!`)`((?:mpirun|bash|sudo|python -m [^\s`]+) [^`]+)`"  # a command with an argument

# What a program must print; a program that is not listed here fails.
PRINTS = {
    "loop.py": r"^largest error of a weight: 0\.0",
    "train.py": r"epoch  10  loss 0\.\d+.*\n{'loss': 0\.\d+, 'accuracy': 0\.9\d+} \d\n",
    "ddp.py": r"^loss 0\.0",
    "embedding.py": r"^loss \d\.\d+, rows in the last gradient: 4\d\d of 100000$",
    "mirrored.py": r"^loss of this rank's share: \d.*\n.*\w",
    "survives.py": r"^rank \d of 2: 499500\nrank \d of 2: 499500\n$",
    "goes_on_fit.py": r"epoch  10  loss 0\.\d+.*\n10 epochs, before the stop and after it\n",
    "outlives.py": r"^48 of 96 rows at the end, loss 0\.0",
    "looks.py": r"^\(120, 4\) \(30,\) ",
    "replica.py": r"epoch   5  loss 0\.\d+.*\n{'loss': 0\.\d+, 'accuracy': 0\.\d+}\n",
    "served.py": r"epoch  10  loss 0\.\d+.*\nupdates behind, and how many gradients: {0: \d+.*\naccuracy 0\.\d+\n",
    "everyone.py": "^$",
    "words.py": r"epoch  10  loss 0\.\d+ ",
    "watched.py": r"epoch   2  loss .* val_loss ",
    "jax_train.py": r"epoch  10  loss 0\.\d+.*\n{'loss': 0\.\d+, 'accuracy': 0\.9\d+}\n",
    "goes_on.py": r"^0 epochs before; loss 0\.",
}
# Why a command that begins so is not run.
SKIPPED = {
    "bash scripts/train.sh": "installs",
    "RANKS=2 bash scripts/train.sh": "installs",
    "bash scripts/test.sh": "installs, and runs these tests",
    "bash scripts/keep_going.sh": "test_keep_going.py runs it",
    "bash scripts/gpu_test.sh": "installs half a gigabyte, or needs a GPU; test_cuda.py runs it where there is none",
    "sbatch": "a cluster",
    "bash scripts/docs.sh": "installs; test_docs.py makes the pages",
    "mpirun -n 4 python scripts/torch_ddp.py": "torch_backend/test_jobs.py runs it",
    "mpirun -n 4 python scripts/torch_three_lines.py": "test_pytorch.py runs it",
    "mpirun -n 2 python -m tests.torch_backend.pytorch_suite": "a minute or two; torch_backend/test_jobs.py runs some",
    "mpirun -n 2 python scripts/with_": "test_frameworks.py runs it",
    "mpirun -n 2 python scripts/keras_digits.py": "test_keras.py runs it",
    "mpirun -n 4 python scripts/jax_digits.py": "test_jax.py runs it",
    "mpirun -n 4 python scripts/hvd_digits.py": "test_horovod.py runs it",
    "mpirun -n 2 python scripts/hvd_synthetic_benchmark.py": "test_horovod.py runs it",
    "mpirun -n 3 python -m tests.sequences": "minutes; test_sequences.py runs some",
    "python -m tests.fuzz": "minutes; test_fuzz.py runs a few",
    "mpirun -n 2 python -m benchmarks.jax_step": "half a minute; test_jax.py runs it",
    "mpirun -n 2 python -m benchmarks.checkpoint": "half a minute; benchmarks/test_runs.py runs it",
    "mpirun -n 2 python -m benchmarks.training_step": "minutes; test_pytorch.py runs it",
    "mpirun --with-ft": "test_lost_ranks.py loses ranks",
    "mpirun -n 4 python -m allreduce doctor": "its exit code says what it finds; test_doctor.py runs it",
    "sudo": "test_cluster_sim.py runs the rig",
    "module load": "a cluster",
    "mpirun -n 16": "a cluster",
    "mpirun --hostfile": "a cluster",
    "python3 -m venv": "installs",
    "srun": "a cluster",
    "mpirun -n 5 python -m benchmarks.strategies": "half a minute; benchmarks/test_strategies.py runs it",
    "for ": "minutes, and the rig",
    "mpirun --oversubscribe -n $n": "minutes, in a loop",
    "done": "the end of a loop",
    "python -m benchmarks.faults": "minutes; test_faults.py runs a few",
    "python -m tests.faults": "minutes; test_faults.py runs a few",
    "python -m benchmarks.scaling --fit": "takes the files of the commands before it",
    "python -m benchmarks.report": "takes files; benchmarks/test_report.py runs it",
}
# What makes a command short.
SHORTER = {
    "mpirun -n 4 python -m benchmarks.bandwidth": "-b 1K -e 1K -n 1 -w 0",
    "mpirun -n 2 python -m benchmarks.bandwidth": "-b 1K -e 1K -n 1 -w 0",
    "mpirun -n 4 python -m benchmarks.tune": "--sizes 1K --dtypes float -n 1 -w 0 --output t.json",
}


def blocks(language: str) -> list[str]:
    found = [re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in TEXTS]
    return [block for each in found for block in each]


def commands() -> list[str]:
    """Return the commands in shell blocks, and those in the text."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    inline = [span for text in TEXTS for span in re.findall(INLINE, text)]
    plain = [re.sub(r"\s+#.*| {2,}", " ", line).strip() for line in [*lines, *inline]]
    return list(dict.fromkeys(line for line in plain if line and line not in exports() and "..." not in line))


def exports() -> list[str]:
    """Return the commands of the section "Under mpirun", without comments."""
    block = next(block for block in blocks("bash") if "OMPI_ALLOW_RUN_AS_ROOT" in block)
    return [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]


def first_of(known: dict[str, str], command: str) -> str | None:
    return next((text for start, text in known.items() if command.startswith(start)), None)


def test_every_block_says_what_it_is() -> None:
    for text in TEXTS:
        fences = re.findall(r"^```(.*)$", text, re.MULTILINE)
        assert set(fences[::2]) <= {"python", "bash", "text", "diff"}
        assert set(fences[1::2]) <= {""}
    assert len(blocks("python")) >= 6
    assert len(commands()) >= 10


def test_the_lists_hold_nothing_that_is_gone() -> None:
    for start in (*SKIPPED, *SHORTER):
        assert any(command.startswith(start) for command in commands()), f"no command begins with {start!r}"
    assert {block.split()[1].rstrip(",") for block in blocks("python")} == set(PRINTS)


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)}


@pytest.mark.parametrize("guide", LINKED, ids=str)
def test_links_lead_somewhere(guide: Path) -> None:
    text = (launch.ROOT / guide).read_text()
    for link in re.findall(r"\]\((?!\w+:)([^)]+)\)", text):
        name, _, place = link.partition("#")
        target = launch.ROOT / guide.parent / name if name else launch.ROOT / guide
        assert target.is_file(), link
        assert not place or place in headings(target.read_text()), link


@pytest.mark.parametrize("guide", LINKED, ids=str)
def test_files_that_are_named_are_there(guide: Path) -> None:
    names = rf"\b(?:{'|'.join(FOLDERS)})/[\w/.]+\.(?:py|sh|sbatch|md|png)\b"
    for name in re.findall(names, (launch.ROOT / guide).read_text()):
        assert (launch.ROOT / name).is_file(), name


def test_every_variable_is_told() -> None:
    """Every environment variable is in the table of allreduce/doctor/README.md, and no other."""
    paths = [path for package in ("allreduce", "trainers") for path in (launch.ROOT / package).rglob("*.py")]
    used = {name for path in paths for name in re.findall(r"\b(?:ALLREDUCE|HOROVOD)_[A-Z_]+\b", path.read_text())}
    table = (launch.ROOT / "allreduce" / "doctor" / "README.md").read_text().partition("| variable |")[2]
    told = set(re.findall(r"\b(?:ALLREDUCE|HOROVOD)_[A-Z_]+\b", table.partition("\n\n")[0]))
    assert used == told


def test_every_backend_has_its_cost_in_the_table() -> None:
    table = (launch.ROOT / "allreduce/README.md").read_text().partition("| backend | steps |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(NAMES)


def test_the_front_page_is_short_and_leads_to_every_guide() -> None:
    assert len(TEXTS[0].splitlines()) <= 300
    assert {str(guide) for guide in GUIDES[1:]} <= set(re.findall(r"\]\(([^)#]+)", TEXTS[0]))


def messages() -> list[str]:
    """Return the messages in the first column of the table of messages, split at the dots."""
    (text,) = (text for text in TEXTS if "| message |" in text)
    table = text.partition("| message |")[2].partition("\n\n")[0]
    quoted = [span for row in table.splitlines()[2:] for span in re.findall("`([^`]+)`", row.split("|")[1])]
    return [piece.strip() for text in quoted for piece in re.split(r"\.\.\.|: ", text) if len(piece.strip()) > 1]


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_code(message: str) -> None:
    paths = [path for package in ("allreduce", "trainers") for path in (launch.ROOT / package).rglob("*.py")]
    assert any(message in path.read_text() for path in paths)


def framework(program: str) -> str:
    return "jax" if "import jax" in program else "torch" if "torch" in program else "numpy"


# Each program of a job, in a process of its own but for MPI and what is imported already.
ONE_AFTER_ANOTHER = """
import os, runpy, sys
from mpi4py import MPI
shown = os.dup(1), os.dup(2)
for name in sys.argv[1:]:
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{name}.{MPI.COMM_WORLD.rank}.{kind}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        sys.stdout.flush()
        for number in (1, 2):
            os.dup2(shown[number - 1], number)
    MPI.COMM_WORLD.Barrier()
    print(name, flush=True)
"""


@pytest.mark.parametrize("wanted", ["numpy", "torch", "jax"])
def test_programs(mpirun: JobRunner, tmp_path: Path, wanted: str) -> None:
    """The programs of a framework run in one job, because importing it takes longer than most of them."""
    if not find_spec(wanted):
        lacking(f"{wanted} is not installed")
    programs = {text.split()[1].rstrip(","): text for text in blocks("python") if framework(text) == wanted}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # XLA complains of a compilation that takes long, on busy cores
    job = mpirun(2, ["-c", ONE_AFTER_ANOTHER, *programs], cwd=tmp_path, timeout=240, env=quiet)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stderr == ""
    for name in programs:
        out, err = (
            "".join((tmp_path / f"{name}.{rank}.{kind}").read_text() for rank in "01") for kind in ("out", "err")
        )
        assert re.search(PRINTS[name], out), f"{name}: {out}"
        # PyTorch's store has no names for addresses in a network of its own, in which scripts/test.sh runs.
        said = [line for line in err.splitlines() if "hostname of the client socket" not in line]
        assert said == [], f"{name}: {err}"


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
    (tmp_path / ".venv").symlink_to(environment)
    (tmp_path / "scripts").symlink_to(launch.ROOT / "scripts")
    for name in ("before.json", "after.json"):
        (tmp_path / name).write_text(to_json(made_run()))
    (tmp_path / "trace.json").write_text(json.dumps([{"ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0}]))
    short = first_of(SHORTER, command) or ""
    script = "\n".join(["set -e", *exports(), f"{command} {short}"])
    variables = {**os.environ, "PYTHONPATH": str(launch.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        variables.pop(name, None)
    job = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
