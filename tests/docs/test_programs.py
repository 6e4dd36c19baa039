"""The site's whole programs: each runs under mpirun, as its page says, and prints the output that its page promises.

docs/programs/expected.json has an entry for each program, by its path in that folder:

    "torch_ddp.py": {"ranks": 2, "needs": ["torch"], "output": "^test accuracy 0\\.9"}

ranks: the number of ranks; programs of before/ run on 1 unless they say otherwise.
output: a regular expression, of several lines (re.MULTILINE), found in what the ranks print, one rank after the other.
needs: packages without which the test is skipped.
quiet: true if nothing may be printed to stderr.

Programs of equal ranks run one after the other in one job, those that need packages in a second one, because importing
the frameworks takes longer than most programs. A program that has one of these keys has a job of its own:

again: a second run in the same folder (which resumes, say): keys that differ from the first run's.
arguments: the program's command line.
env: environment variables.
mpirun: options of mpirun; known is ["--with-ft", "ulfm"].
python: options of python before the program, for example ["-m", "torch.distributed.run", "--standalone"].
"""

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.conftest import JobRunner, Program, in_one_job, lacking

FOLDER = launch.ROOT / "docs" / "programs"
PROGRAMS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
ALONE = {"again", "arguments", "env", "mpirun", "python"}  # keys of programs with a job of their own
KEYS = ALONE | {"needs", "output", "quiet", "ranks"}
EXPENSIVE = {"accelerate", "equinox", "flax", "horovod", "jax", "keras", "lightning", "transformers"}
UNTESTED = {"equinox", "flax", "horovod"}  # packages that no extra of this project installs
ABORTED = "terminate called without an active exception"  # PyTorch's gloo sometimes, at the end of a process
NO_NAMES = "[c10d] The hostname of the client socket cannot be retrieved"  # in a network without names
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"}
SECONDS = 60  # for one program
TERMINATED = 143  # the exit code after SIGTERM, on a page that says so
Outputs = dict[str, list[dict[str, Any]]]  # of each program, on each rank


def ranks_of(program: str) -> int:
    entry = EXPECTED[program]
    return entry.get("ranks", 1) if program.startswith("before/") else entry["ranks"]


def group_of(program: str) -> tuple[int, bool]:
    """Equal for programs that may run in one job."""
    return ranks_of(program), bool(EXPECTED[program].get("needs"))


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    """Of the programs of the groups that have run."""
    return {}


def skip_without(packages: list[str]) -> None:
    for package in packages:
        if find_spec(package):
            continue
        if package in UNTESTED:
            pytest.skip(f"{package} is not installed")
        lacking(f"{package} is not installed")


def test_every_program_has_an_entry() -> None:
    assert sorted(EXPECTED) == PROGRAMS
    for program, entry in EXPECTED.items():
        assert entry.keys() <= KEYS, program
        re.compile(entry["output"])
        if not program.startswith("before/"):
            assert "ranks" in entry, program


@pytest.mark.parametrize("program", [program for program in PROGRAMS if not program.startswith("before/")])
def test_a_program_says_how_it_is_run(program: str) -> None:
    text = (FOLDER / program).read_text()
    assert text.startswith('"""'), "it begins with a docstring"
    said = text.split('"""')[1]
    name = re.escape(Path(program).name)
    assert re.search(rf"^\s*(?:[A-Z_]+=\S+ )*mpirun .*-n \d+ python .*\b{name}\b", said, re.MULTILINE), said


def marked(program: str) -> Any:
    """Mark the programs before their conversion, those of the frameworks whose import takes longest, and those that
    import PyTorch in another job than that of two ranks."""
    needs = {*EXPECTED[program].get("needs", [])}
    other_job = "torch" in needs and (ALONE & EXPECTED[program].keys() or ranks_of(program) != 2)
    expensive = program.startswith("before/") or EXPENSIVE & needs or other_job
    return pytest.param(program, marks=pytest.mark.expensive if expensive else ())


@pytest.mark.parametrize("program", [marked(program) for program in PROGRAMS])
def test_program(
    mpirun: JobRunner,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    outputs: Outputs,
    program: str,
) -> None:
    entry = EXPECTED[program]
    skip_without(entry.get("needs", []))
    if ALONE & entry.keys():
        run_alone(mpirun, tmp_path, program)
        return
    if program not in outputs:
        items = [item for item in request.session.items if getattr(item, "function", None) is request.function]
        chosen = [item.callspec.params["program"] for item in items]  # no expensive ones in most runs
        others = {each for each in chosen if not ALONE & EXPECTED[each].keys()}
        others = {each for each in others if all(map(find_spec, EXPECTED[each].get("needs", [])))}
        group = sorted(each for each in others if group_of(each) == group_of(program))
        run_group(tmp_path, group, outputs)
    printed, errors = ("".join(rank[kind] for rank in outputs[program]) for kind in ("stdout", "stderr"))
    codes = {rank["code"] for rank in outputs[program]}
    assert codes <= {0, TERMINATED}, printed + errors or "it was not run: another program ended the job"
    assert re.search(entry["output"], printed, re.MULTILINE), printed
    told = [line for line in errors.splitlines() if NO_NAMES not in line]
    assert not (told and entry.get("quiet")), errors
    assert "Traceback" not in errors, errors


def run_alone(mpirun: JobRunner, folder: Path, program: str) -> None:
    first = {"ranks": ranks_of(program), **EXPECTED[program]}
    for entry in (first, first | first["again"]) if "again" in first else (first,):
        given = [*entry.get("python", []), FOLDER / program, *entry.get("arguments", [])]
        ulfm = "mpirun" in entry
        assert not ulfm or entry["mpirun"] == ["--with-ft", "ulfm"], "an option that this test doesn't know"
        env = QUIET | entry.get("env", {})
        for _ in range(3):
            job = mpirun(entry["ranks"], given, cwd=folder, env=env, ulfm=ulfm, timeout=2 * SECONDS)
            if job.returncode == 0 or ABORTED not in job.stderr:
                break
        check(job)
        assert re.search(entry["output"], job.stdout, re.MULTILINE), job.stdout


def run_group(folder: Path, programs: list[str], outputs: Outputs) -> None:
    """Run programs in one job, and add what they print to `outputs`."""
    lines: list[Program] = [(FOLDER / program, [], folder / str(number)) for number, program in enumerate(programs)]
    for _, _, here in lines:
        Path(here).mkdir()
    seconds = SECONDS * (1 + len(programs))
    found = in_one_job(ranks_of(programs[0]), lines, folder, whole=False, env=QUIET, timeout=seconds)
    outputs.update(zip(programs, found, strict=True))


def check(job: "subprocess.CompletedProcess[str]") -> None:
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Traceback" not in job.stderr, job.stderr


NOTEBOOK = launch.ROOT / "scripts" / "train.ipynb"


@pytest.mark.expensive
@pytest.mark.jobs
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cloudpickle", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # without results in the repository
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(launch.ROOT), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(launch.ROOT)}}).execute()
    by_id = {cell.id: cell for cell in notebook.cells}
    (accuracy,) = [output for output in by_id["train"].outputs if output.output_type == "execute_result"]
    assert float(accuracy.data["text/plain"]) > 0.8
    assert "epoch   5" in "".join(output.get("text", "") for output in by_id["train"].outputs)
    assert any("image/png" in output.get("data", {}) for output in by_id["plot"].outputs)
