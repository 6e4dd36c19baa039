"""The console scripts `allreduce` and `allreduce-train`."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import allreduce_commands
from tests import launch
from tests.conftest import Program, in_one_job, lacking

SCRIPT = Path(sys.executable).parent / "allreduce-train"
RUN = "import sys, allreduce_commands; sys.exit(allreduce_commands.main({arguments!r}))"


def run(*arguments: str, program: str = RUN) -> "subprocess.CompletedProcess[str]":
    return launch.child(program.format(arguments=list(arguments)))


def test_the_scripts_are_installed(tmp_path: Path) -> None:
    """A folder in the working directory hides nothing, unlike for `python -m trainers` there."""
    if not SCRIPT.exists():
        lacking(f"{SCRIPT} is not installed; run scripts/test.sh")
    installed = {each.name: each.value for each in entry_points(group="console_scripts")}
    assert installed["allreduce"] == "allreduce_commands:main"
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").touch()
    done = subprocess.run([SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: allreduce-train")


@pytest.mark.jobs
def test_ranks_speak_once(tmp_path: Path) -> None:
    """The help of all commands; a mistyped command is an error on all ranks."""
    lines: list[Program] = [("allreduce_commands", arguments, tmp_path) for arguments in ([], ["benhc"])]
    helps, wrong = in_one_job(2, lines, tmp_path)
    assert [rank["code"] for rank in (*helps, *wrong)] == [0, 0, 2, 2]
    for name, command in allreduce_commands.COMMANDS.items():
        assert "".join(rank["stdout"] for rank in helps).count(f"  {name:<11} {command.about}\n") == 1
    told = "".join(rank["stderr"] for rank in wrong)
    assert told.count("allreduce: error: unknown command 'benhc'; did you mean 'bench'?") == 1


@pytest.mark.parametrize(("name", "package"), [("train", "trainers"), ("bench", "benchmarks")])
def test_a_folder_that_hides_a_package_is_named(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    done = run(name, program=f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN}")
    assert done.returncode == 2
    assert f"allreduce {name}: error: {tmp_path / package} hides the package '{package}'" in done.stderr
    assert "PYTHONPATH" in done.stderr


HELPS = """
import allreduce_commands, sys
if not {torch}:
    sys.modules["torch"] = None
for arguments in {arguments!r}:
    try:
        assert not allreduce_commands.main(arguments), arguments
    except SystemExit as ended:
        assert not ended.code, arguments
"""


@pytest.mark.parametrize("torch", [True, False])
def test_completion_and_help_have_all_commands(torch: bool) -> None:
    """Also without PyTorch, when benchmarks.training_step can't be imported."""
    pytest.importorskip("shtab")
    names = [name for name in allreduce_commands.COMMANDS if name != "step" or (torch and find_spec("torch"))]
    lines = [["--print-completion", "bash"], *([name, "--help"] for name in names)]
    done = launch.child(HELPS.format(torch=torch, arguments=lines))
    assert done.returncode == 0, done.stderr
    for option in ("--backup-workers", "--peers", "--threshold", "--node-size"):
        assert option in done.stdout.partition("usage: ")[0]
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert [re.findall(r"\ballreduce (\w+)", usage) for usage in usages] == [[name] for name in names]


@pytest.mark.parametrize(("shell", "before", "words"), [
    ("cmd", "", "--print-completion takes one of"),
    ("bash", "import sys; sys.modules['shtab'] = None\n", 'the extra "completion"'),
])  # fmt: skip
def test_completion_is_refused(shell: str, before: str, words: str) -> None:
    done = run("--print-completion", shell, program=before + RUN)
    assert done.returncode == 2
    assert words in done.stderr
