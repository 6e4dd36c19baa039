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


def test_the_scripts_are_installed() -> None:
    if not SCRIPT.exists():
        lacking(f"{SCRIPT} is not installed; run scripts/test.sh")
    installed = {each.name: each.value for each in entry_points(group="console_scripts")}
    assert installed["allreduce"] == "allreduce_commands:main"
    assert installed["allreduce-train"] == "allreduce_commands:train"


HELPS = """
import allreduce_commands
for name in {arguments!r}:
    try:
        allreduce_commands.main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code, name
"""


def test_the_help_of_a_command_has_its_name() -> None:
    names = [name for name in allreduce_commands.COMMANDS if name != "step" or find_spec("torch")]
    done = run(*names, program=HELPS)
    assert done.returncode == 0, done.stderr
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert [re.findall(r"\ballreduce (\w+)", usage) for usage in usages] == [[name] for name in names]


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


def test_a_folder_in_the_working_directory_hides_nothing(tmp_path: Path) -> None:
    """Unlike `python -m trainers` there."""
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").touch()
    if not SCRIPT.exists():
        lacking(f"{SCRIPT} is not installed; run scripts/test.sh")
    done = subprocess.run([SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: allreduce-train")


def test_completion_has_the_options_of_all_commands() -> None:
    """Also without PyTorch, when benchmarks.training_step can't be imported."""
    pytest.importorskip("shtab")
    for program in (RUN, f"import sys; sys.modules['torch'] = None\n{RUN}"):
        done = run("--print-completion", "bash", program=program)
        assert done.returncode == 0, done.stderr
        for option in ("--backup-workers", "--peers", "--threshold", "--node-size"):
            assert option in done.stdout
    assert run("--print-completion", "cmd").returncode == 2


def test_completion_without_its_extra() -> None:
    done = run("--print-completion", "bash", program=f"import sys; sys.modules['shtab'] = None\n{RUN}")
    assert done.returncode == 2
    assert 'the extra "completion"' in done.stderr
