"""The house's rules that import-linter can't hold."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import launch
import pytest

PACKAGES = ("allreduce", "trainers", "benchmarks")
FILES = [path for package in PACKAGES for path in sorted((launch.ROOT / package).rglob("*.py"))]
CORE = {"numpy", "mpi4py", "ml_dtypes"}
LAZY = {"cupy"}  # inside functions only
TORCH = {"torch", "allreduce_torch_autoload"}  # in allreduce/torch_backend/, which nothing else imports


def relative(path: Path) -> str:
    return path.relative_to(launch.ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def third_party(names: Iterator[str]) -> set[str]:
    return {name for name in names if name not in sys.stdlib_module_names and name not in PACKAGES}


def test_there_are_files() -> None:
    assert {"allreduce/ring.py", "allreduce/topology.py"} <= set(map(relative, FILES))


@pytest.mark.parametrize("path", [path for path in FILES if relative(path).startswith("allreduce/")], ids=relative)
def test_core_imports_three_packages(path: Path) -> None:
    tree = ast.parse(path.read_text())
    core = CORE | (TORCH if "torch_backend" in path.parts else set())
    assert third_party(imports(tree)) <= core | LAZY
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert third_party(imports(ast.Module(at_once, []))) <= core


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_world_is_named_in_one_place(path: Path) -> None:
    """Code, not comments: the names that the file uses."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert "COMM_WORLD" not in names or relative(path) == "allreduce/topology.py"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_pickle_and_no_path_of_one_machine(path: Path) -> None:
    text = path.read_text()
    assert not {"pickle", "cPickle", "dill", "shelve", "joblib"} & set(imports(ast.parse(text)))
    assert "allow_pickle=True" not in text
    assert not re.search(r"[\"'](/home/|/root/|/work/|/Users/|/tmp/)", text)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
