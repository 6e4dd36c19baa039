"""The tests and pages that `scripts/test.sh --changed` runs: those of the files that differ from the branch main.

    python -m tests.changed        # prints pytest's arguments, one a line

A test file that differs runs; so does one that imports a helper that differs. A module of the product runs the tests in
the folders of its package (FOLDERS), and every test file that names it. A page runs its commands, and a program of the
pages itself. Of expensive tests, those of a test file that differs run, and those of such a page or program. The rules
of the checkout (tests/house/test_house.py) always run.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = "tests/house/test_house.py"
FOLDERS = {  # the longest beginning counts; a folder stands for tests/NAME and tests/ranks/NAME
    "Dockerfile": ["house"],
    "allreduce": ["collectives"],
    "allreduce/doctor": ["doctor"],
    "allreduce/elastic": ["elastic"],
    "allreduce/health": ["health"],
    "allreduce/jax": ["frameworks"],
    "allreduce/process": ["processes"],
    "allreduce/torch_backend": ["torch_backend"],
    "benchmarks": ["benchmarks"],
    "docs": ["docs"],
    "scripts": ["house"],
    "tests/faults": ["faults"],
    "tests/fuzz": ["fuzz"],
    "tests/matrix": ["matrix"],
    "tests/sequences": ["sequences"],
    "trainers": ["training", "matrix"],
    "trainers/apps": ["apps"],
    "trainers/horovod": ["frameworks"],
    "trainers/keras": ["frameworks"],
    "trainers/pytorch": ["pytorch", "matrix"],
    "trainers/recovery": ["elastic", "training", "matrix"],
    "trainers/replicas/jax": ["frameworks"],
    "trainers/replicas/keras": ["frameworks"],
}


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed() -> list[str]:
    """Return the paths that differ from where this branch left main, also those that are not in a commit yet."""
    main = next(name for name in ("main", "origin/main") if git("branch", "--all", "--list", name, f"remotes/{name}"))
    base = git("merge-base", main, "HEAD")[0]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def of_file(path: str) -> set[str]:
    """Return the test files and tests of one path that differs."""
    name = Path(path).name
    if name.startswith("test_") and path.endswith(".py"):
        return {path} & {_name(file) for file in test_files()}
    if path.endswith(".md"):
        return {"tests/docs/test_api.py", "tests/docs/test_pages.py", "tests/docs/test_site.py"}
    if path.startswith("docs/programs/") and path.endswith(".py"):
        test = f"test_program[{path.removeprefix('docs/programs/')}]"
        return {f"tests/docs/test_programs.py::{test if (ROOT / path).exists() else 'test_every_program_has_an_entry'}"}
    beginnings = [each for each in FOLDERS if path == each or path.startswith(f"{each}/")]
    folders = FOLDERS[max(beginnings, key=len)] if beginnings else []
    found = {_name(file) for file in test_files() if set(file.parent.relative_to(ROOT / "tests").parts) & {*folders}}
    return found | set(naming(path)) if path.endswith((".py", ".sh")) else found


def naming(path: str) -> Iterable[str]:
    """Yield the test files that import a module, or name a script."""
    package, _, module = path.removesuffix(".py").replace("/", ".").rpartition(".")
    names = rf"\b{re.escape(package)}(\.| import .*\b){module}\b" if path.endswith(".py") else re.escape(path)
    for file in test_files():
        if re.search(names, file.read_text()):
            yield _name(file)


def about(test: str) -> bool:
    """Return whether a test, in the form of pytest, is in a file that differs, or its case is one that differs."""
    file, case = test.partition("::")[0], test.partition("[")[2][:-1]
    return bool({file, case, f"docs/programs/{case}"} & set(changed()))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tests() -> set[str]:
    """Return all test files, and tests in the form of pytest, of the paths that differ."""
    return {RULES}.union(*map(of_file, changed()))


def tests_on_ranks() -> list[str]:
    return sorted(name for name in tests() if name.startswith("tests/ranks/"))


def main() -> None:
    serial = sorted(name for name in tests() if not name.startswith("tests/ranks/"))
    file_too = [name for name in serial if "::" in name and name.partition("::")[0] in serial]
    print("tests/test_ranks.py", *(name for name in serial if name not in file_too), sep="\n")


if __name__ == "__main__":
    main()
