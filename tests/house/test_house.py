"""The house's rules that import-linter can't hold."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import allreduce
from allreduce.registry import BACKENDS, OTHERS
from tests import launch
from tests.house.test_readme import GUIDES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

PACKAGES = ("allreduce", "trainers", "benchmarks")
FILES = [path for package in PACKAGES for path in sorted((launch.ROOT / package).rglob("*.py"))]
CORE = {"numpy", "mpi4py", "ml_dtypes"}
LAZY = {"cupy"}  # inside functions only
TORCH = {"torch"}  # in allreduce/torch_backend/, which nothing else imports
JAX = {"jax"}  # in allreduce/jax.py, which nothing else imports

WORLD = (
    "allreduce/topology.py",
    "allreduce/health/abort.py",
    "allreduce/transport/processes.py",
)  # its default, and the whole job
PYPROJECT = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())


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
    assert {"allreduce/backends/ring.py", "allreduce/topology.py"} <= set(map(relative, FILES))


@pytest.mark.parametrize("path", [path for path in FILES if relative(path).startswith("allreduce/")], ids=relative)
def test_core_imports_three_packages(path: Path) -> None:
    tree = ast.parse(path.read_text())
    core = CORE | (TORCH if "torch_backend" in path.parts else JAX if path.name == "jax.py" else set())
    assert third_party(imports(tree)) <= core | LAZY
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert third_party(imports(ast.Module(at_once, []))) <= core


def names(tree: ast.AST) -> set[str]:
    """The names that code uses or imports; comments and docstrings don't count."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return used


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_world_is_named_in_one_place(path: Path) -> None:
    assert "COMM_WORLD" not in names(ast.parse(path.read_text())) or relative(path) in WORLD


@pytest.mark.parametrize(
    "code", ["MPI.COMM_WORLD.rank", "from mpi4py.MPI import COMM_WORLD", "from mpi4py.MPI import COMM_WORLD as w"]
)
def test_world_is_seen_in_each_spelling(code: str) -> None:
    assert "COMM_WORLD" in names(ast.parse(code))
    assert "COMM_WORLD" not in names(ast.parse(f'"""{code}"""'))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_pickle_and_no_path_of_one_machine(path: Path) -> None:
    text = path.read_text()
    assert not {"pickle", "cPickle", "dill", "shelve", "joblib"} & set(imports(ast.parse(text)))
    assert "allow_pickle=True" not in text
    assert not re.search(r"torch\.load\((?!.*weights_only=True)", text)
    assert not re.search(r"[\"']/(home|root|work|Users|tmp)/", text)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_requests_are_completed_one_by_one(path: Path) -> None:
    """See allreduce.transport.wait.all_done."""
    several = {"Waitall", "Waitsome", "Waitany", "Testall", "Testsome", "Testany"}
    assert not several & names(ast.parse(path.read_text()))


# Calls in which MPI waits for other ranks, and who may make them bare: what is below a backend, and backends, whose
# calls are watched. Everybody else does so inside of `with waiting(...)`.
WAITS = {"Barrier", "Bcast", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
         "Gather", "Gatherv", "Allgather", "Allgatherv", "Scatter", "Scatterv", "Alltoall", "Alltoallv", "Alltoallw",
         "Send", "Ssend", "Recv", "Sendrecv", "Probe", "Mprobe", "Dup", "Split", "Split_type", "Create_group",
         "Agree", "Shrink", "Spawn"}  # fmt: skip
BELOW = ("allreduce/transport/", "allreduce/health/", "allreduce/engine/", "allreduce/backends/", "allreduce/moves.py")
WATCHED = {("allreduce/topology.py", "_connect"), ("allreduce/nodes.py", "divide")}  # called in `with waiting(...)`
PICKLES = {"allreduce", "reduce", "bcast", "allgather", "gather", "scatter", "alltoall", "scan", "exscan", "barrier",
           "send", "ssend", "isend", "recv", "irecv", "sendrecv", "mrecv"}  # fmt: skip
COMMUNICATOR = re.compile(r"(^|[._])(comm|world|node|cross|control|real|local|part|messages|COMM_\w+)$")


def is_waiting(node: ast.With) -> bool:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func) in ("waiting", "self._waiting") for call in calls)


def bare_waits(node: ast.AST, path: str) -> Iterator[str]:
    """Calls that wait for other ranks in MPI, where no watch sees it."""
    if isinstance(node, ast.With) and is_waiting(node):
        return
    if isinstance(node, ast.FunctionDef) and (path, node.name) in WATCHED:
        return
    if isinstance(node, ast.Attribute) and node.attr in WAITS and ast.unparse(node.value) != "go":
        yield f"{ast.unparse(node)} in line {node.lineno}"
    for child in ast.iter_child_nodes(node):
        yield from bare_waits(child, path)


def pickling(tree: ast.AST) -> list[str]:
    """mpi4py's calls for objects, which send pickles, and whoever sends such by hand."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in attributes
        if node.attr == "pickle" or (node.attr in PICKLES and COMMUNICATOR.search(ast.unparse(node.value)))
    ]


@pytest.mark.parametrize("path", [path for path in FILES if not relative(path).startswith("benchmarks/")], ids=relative)
def test_every_wait_is_watched(path: Path) -> None:
    if not relative(path).startswith(BELOW):
        assert list(bare_waits(ast.parse(path.read_text()), relative(path))) == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_object_is_sent(path: Path) -> None:
    """A pickle from another rank, perhaps of another version, runs what is in it."""
    assert pickling(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("code", "bare", "pickles"),
    [
        ("comm.Barrier()", True, False),
        ("with waiting(comm, 'x'):\n  comm.Barrier()", False, False),
        ("partial(self._comm.Allreduce, x)", True, False),
        ("topology.world.bcast(1)", False, True),
        ("self._comm.allgather(1)", False, True),
        ("MPI.pickle.loads(x)", False, True),
        ("self.allreduce(x)", False, False),
    ],
)
def test_waits_and_pickles_are_seen(code: str, bare: bool, pickles: bool) -> None:
    assert bool(list(bare_waits(ast.parse(code), "x"))) == bare
    assert bool(pickling(ast.parse(code))) == pickles


def test_every_package_is_installed() -> None:
    """A package that pyproject.toml forgets is there in the checkout and missing from a wheel."""
    folders = {relative(path.parent).replace("/", ".") for path in FILES if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders


MODULES = sorted({where.partition(":")[0] for where in {**BACKENDS, **OTHERS}.values()})


@pytest.mark.parametrize("module", MODULES)
def test_every_backend_is_kept_apart(module: str) -> None:
    """Also those that came after the contract in pyproject.toml: a new backend is one file and one line."""
    text = launch.ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    others = "|".join(re.escape(other) for other in MODULES if other != module)
    assert re.findall(rf"(?:import|from) (?:{others})\b", text) == []


def test_guides_are_filled_in() -> None:
    """A comment in a guide marks a place where text or figures are still to come."""
    for guide in GUIDES:
        assert re.findall(r"<!--.*?-->", (launch.ROOT / guide).read_text(), re.DOTALL) == [], guide


TOLD = [*FILES, *sorted((launch.ROOT / "scripts").iterdir()), *(launch.ROOT / guide for guide in GUIDES)]


@pytest.mark.parametrize("path", [path for path in TOLD if path.is_file()], ids=relative)
def test_no_word_of_a_package_on_an_index(path: Path) -> None:
    """The package is on no index: what can be installed is a checkout, by pip install ".[torch]"."""
    assert "allreduce[" not in path.read_text()


def test_one_version_everywhere() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "allreduce.__version__"}
    released = re.findall(r"^## \[(\d[^\]]*)\]", (launch.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == allreduce.__version__
