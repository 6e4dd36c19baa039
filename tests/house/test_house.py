"""The rules of the code that import-linter can't check, and the limits on its structure."""

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import allreduce
from allreduce.algorithms import BACKENDS, OTHERS
from tests import launch
from tests.conftest import lacking
from tests.docs.test_pages import PAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

# Limits. A change may lower one of these numbers. It may raise LINES by the lines of a new feature, and no other
# number. The comment after each is the aim. Small changes need not: LINES has room for some.
ROOT_MODULES = {"allreduce": 9, "trainers": 14}  # 12 and 16: modules directly in the package's folder
LINES, ROOM = 57_312, 100  # 34,000: of .py and .sh in allreduce, trainers, benchmarks and scripts
METHODS = [
    ("allreduce/backend.py", "AllReduce", 20, 40),
    ("allreduce/algorithm.py", "Algorithm", 10, 11),
    ("trainers/replica.py", "Replica", 20, 20),  # learning_rates counts twice
]  # public, all
FINDINGS = dict.fromkeys(("SLF001", "C901", "PLR0912", "PLR0915"), 0)  # of ruff in the product, whatever noqa says

PACKAGES = ("allreduce", "trainers", "benchmarks")
FOLDERS = {".ci", "allreduce", "benchmarks", "docs", "scripts", "tests", "trainers"}
PAGES_OF_THE_ROOT = {"CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"}
MODULES_OF_THE_ROOT = {"allreduce_commands.py", "allreduce_torch_autoload.py", "setup.py"}
TOP_LEVEL = FOLDERS | PAGES_OF_THE_ROOT | MODULES_OF_THE_ROOT | {".gitignore", "Dockerfile", "pyproject.toml"}

CORE = {"numpy", "mpi4py", "ml_dtypes"}
LAZY = {"cupy", "psutil", "threadpoolctl"}  # inside functions only
TORCH = {"torch"}  # in allreduce/torch_backend/, which nothing else imports
JAX = {"jax"}  # in allreduce/jax, which nothing else imports

WORLD = (
    "allreduce/topology.py",
    "allreduce/health/abort.py",
    "allreduce/transport/processes.py",
)  # its default, and the whole job
PYPROJECT = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())


def relative(path: Path) -> str:
    return path.relative_to(launch.ROOT).as_posix()


PATHS = [path for package in PACKAGES for path in sorted((launch.ROOT / package).rglob("*.py"))]
TEXTS = {relative(path): path.read_text() for path in PATHS}


@functools.cache
def code() -> dict[str, ast.Module]:
    """The code of each module; not when the file is collected, which each worker of pytest-xdist does."""
    return {name: ast.parse(text) for name, text in TEXTS.items()}


def test_no_package_imports_a_module_that_imports_it() -> None:
    """import-linter's contract `circles` compares the entries of a folder, without the folder's __init__.py."""
    graph = pytest.importorskip("grimp").build_graph(*PACKAGES, cache_dir=None)
    above = [
        (module, package)
        for module in sorted(graph.modules)
        for package in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{package}.")
    ]
    assert ("allreduce.__main__", "allreduce") in above
    assert [pair for pair in above if graph.chain_exists(importer=pair[1], imported=pair[0])] == []


@pytest.mark.parametrize("package", ROOT_MODULES)
def test_the_root_of_a_package_has_few_modules(package: str) -> None:
    modules = {path.stem for path in (launch.ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= ROOT_MODULES[package], sorted(modules)


def test_the_product_has_few_lines() -> None:
    paths = [path for folder in (*PACKAGES, "scripts") for path in (launch.ROOT / folder).rglob("*")]
    lines = sum(path.read_text().count("\n") for path in paths if path.suffix in (".py", ".sh"))
    remedy = "delete what the change makes superfluous; a new feature raises LINES by its own lines"
    assert lines <= LINES + ROOM, f"{lines} lines, and the limit is {LINES + ROOM}: {remedy} (CONTRIBUTING.md)"


def test_no_class_name_of_the_core_is_defined_twice() -> None:
    names = Counter(
        node.name
        for path, tree in code().items()
        if path.startswith("allreduce/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("path", "name", "method", "most"),
    [
        ("trainers/trainer.py", "Trainer", "fit", 14),
        ("trainers/mirrored.py", "MirroredTrainer", "__init__", 8),
        ("trainers/pytorch/optimizer.py", "MirroredOptimizer", "__init__", 10),
    ],
)
def test_options_are_objects_and_not_arguments(path: str, name: str, method: str, most: int) -> None:
    (tree,) = (node for node in code()[path].body if isinstance(node, ast.ClassDef) and node.name == name)
    (made,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == method)
    assert len([*made.args.args, *made.args.kwonlyargs]) - 1 <= most  # without self


@pytest.mark.parametrize(("path", "name", "public", "every"), METHODS)
def test_the_classes_of_the_core_are_small(path: str, name: str, public: int, every: int) -> None:
    (tree,) = (node for node in code()[path].body if isinstance(node, ast.ClassDef) and node.name == name)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert (len([each for each in names if each[0] != "_"]) <= public, len(names) <= every) == (True, True), names


def test_a_replica_has_few_methods_that_can_be_written() -> None:
    (tree,) = (node for node in code()["trainers/replica.py"].body if getattr(node, "name", "") == "Replica")
    assert isinstance(tree, ast.ClassDef)
    methods = {node.name: list(map(ast.unparse, node.decorator_list)) for node in tree.body if hasattr(node, "args")}
    assert len([name for name, decorators in methods.items() if "final" not in decorators]) <= 12, list(methods)


def test_ruff_finds_little() -> None:
    """Uses of another object's private members, and functions that do not fit a screen."""
    if importlib.util.find_spec("ruff") is None:
        lacking("ruff is not installed here")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--ignore-noqa", "--exit-zero"]
    command += ["--output-format", "json", "--select", ",".join(FINDINGS), *PACKAGES, "scripts"]
    done = subprocess.run(command, cwd=launch.ROOT, capture_output=True, text=True, timeout=120, check=True)
    findings = json.loads(done.stdout)
    found = Counter(finding["code"] for finding in findings)
    places = [f"{finding['code']} {finding['filename']}:{finding['location']['row']}" for finding in findings]
    assert {code: found[code] for code in FINDINGS if found[code] > FINDINGS[code]} == {}, "\n".join(places)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def third_party(names: Iterator[str]) -> set[str]:
    return {name for name in names if name not in sys.stdlib_module_names and name not in PACKAGES}


def test_there_are_files() -> None:
    assert {"allreduce/algorithms/ring.py", "allreduce/topology.py"} <= set(code())


def test_core_imports_three_packages() -> None:
    for name, tree in code().items():
        if name.startswith("allreduce/"):
            torch, jax = name.startswith("allreduce/torch_backend/"), name.startswith("allreduce/jax/")
            core = CORE | (TORCH if torch else JAX if jax else set())
            assert third_party(imports(tree)) <= core | LAZY, name
            at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert third_party(imports(ast.Module(at_once, []))) <= core, name


def names(tree: ast.AST) -> set[str]:
    """Return the names that code uses or imports, without comments and docstrings."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return used


def test_world_is_named_in_one_place() -> None:
    assert {name for name, tree in code().items() if "COMM_WORLD" in names(tree)} <= set(WORLD)


@pytest.mark.parametrize(
    "code", ["MPI.COMM_WORLD.rank", "from mpi4py.MPI import COMM_WORLD", "from mpi4py.MPI import COMM_WORLD as w"]
)
def test_world_is_seen_in_each_spelling(code: str) -> None:
    assert "COMM_WORLD" in names(ast.parse(code))
    assert "COMM_WORLD" not in names(ast.parse(f'"""{code}"""'))


def test_the_top_level_has_no_other_names() -> None:
    """The output of a run, which names paths of one machine, was once committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=launch.ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout by git")
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} == TOP_LEVEL


def test_no_pickle_and_no_path_of_one_machine() -> None:
    for name, text in TEXTS.items():
        # trainers.run brings a function of the user's to ranks that it starts, and their results back; keeps no pickle
        pickles = {"pickle"} if name == "trainers/cli/run.py" else set()
        assert pickles >= {"pickle", "cPickle", "dill", "shelve", "joblib"} & set(imports(code()[name])), name
        assert "allow_pickle=True" not in text, name
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), name
        assert not re.search(r"[\"']/(home|root|work|Users|tmp)/", text), name


def test_requests_are_completed_one_by_one() -> None:
    """See allreduce.transport.wait.all_done."""
    several = {"Waitall", "Waitsome", "Waitany", "Testall", "Testsome", "Testany"}
    assert {name: several & names(tree) for name, tree in code().items() if several & names(tree)} == {}


# Calls in which MPI waits for other ranks, and who may make them bare: what is below a backend, and backends, whose
# calls are watched. Everybody else does so inside of `with waiting(...)`.
WAITS = {"Barrier", "Bcast", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
         "Gather", "Gatherv", "Allgather", "Allgatherv", "Scatter", "Scatterv", "Alltoall", "Alltoallv", "Alltoallw",
         "Send", "Ssend", "Recv", "Sendrecv", "Probe", "Mprobe", "Dup", "Split", "Split_type", "Create_group",
         "Agree", "Shrink", "Spawn"}  # fmt: skip
BELOW = ("allreduce/transport/", "allreduce/health/", "allreduce/call/", "allreduce/algorithms/")
MEASURING = "allreduce/tuning/measuring.py"
WATCHED = {  # called in `with waiting(...)`
    ("allreduce/topology.py", "_connect"),
    (MEASURING, "barrier"),
    (MEASURING, "_all_reduce"),
}
PICKLES = {"allreduce", "reduce", "bcast", "allgather", "gather", "scatter", "alltoall", "scan", "exscan", "barrier",
           "send", "ssend", "isend", "recv", "irecv", "sendrecv", "mrecv"}  # fmt: skip
COMMUNICATOR = re.compile(r"(^|[._])(comm|world|node|cross|control|real|local|part|messages|COMM_\w+)$")


def is_waiting(node: ast.With) -> bool:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func) in ("waiting", "self._waiting") for call in calls)


def bare_waits(node: ast.AST, path: str) -> Iterator[str]:
    """Return calls of MPI that wait for other ranks without the stall detector."""
    if isinstance(node, ast.With) and is_waiting(node):
        return
    if isinstance(node, ast.FunctionDef) and (path, node.name) in WATCHED:
        return
    if isinstance(node, ast.Attribute) and node.attr in WAITS and ast.unparse(node.value) != "go":
        yield f"{ast.unparse(node)} in line {node.lineno}"
    for child in ast.iter_child_nodes(node):
        yield from bare_waits(child, path)


def pickling(tree: ast.AST) -> list[str]:
    """Return mpi4py's calls for objects, which send pickles, and other code that sends pickles."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in attributes
        if node.attr == "pickle" or (node.attr in PICKLES and COMMUNICATOR.search(ast.unparse(node.value)))
    ]


def test_every_wait_is_watched() -> None:
    watched = {name: tree for name, tree in code().items() if not name.startswith(("benchmarks/", *BELOW))}
    assert {name: waits for name, tree in watched.items() if (waits := list(bare_waits(tree, name)))} == {}


def test_no_object_is_sent() -> None:
    """Reading a pickle from another rank, perhaps of another version, can run any code."""
    assert {name: calls for name, tree in code().items() if (calls := pickling(tree))} == {}


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
    """A package that is missing in pyproject.toml exists in the checkout but not in a wheel."""
    found = {relative(path.parent).replace("/", ".") for path in PATHS if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


MODULES = sorted({where.partition(":")[0] for where in {**BACKENDS, **OTHERS}.values()})


@pytest.mark.parametrize("module", MODULES)
def test_every_backend_is_kept_apart(module: str) -> None:
    """Also backends that are newer than the contract in pyproject.toml: a new backend is one file and one line."""
    text = launch.ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    others = "|".join(re.escape(other) for other in MODULES if other != module)
    assert re.findall(rf"(?:import|from) (?:{others})\b", text) == []


def test_no_word_of_a_package_on_an_index() -> None:
    """The package is on no index: users install a checkout, by pip install ".[torch]"."""
    scripts = [path for path in (launch.ROOT / "scripts").iterdir() if path.is_file()]
    paths = [*PATHS, *scripts, *PAGES]
    assert [relative(path) for path in paths if "allreduce[" in path.read_text()] == []


def test_one_version_everywhere() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "allreduce.__version__"}
    released = re.findall(r"^## \[(\d[^\]]*)\]", (launch.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == allreduce.__version__
    assert f"\nversion: {allreduce.__version__}\n" in (launch.ROOT / "CITATION.cff").read_text()


# One of each: the modules of a package that define or use the thing, which a second one would do as well


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Return the name of each called function or method, and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def orders(tree: ast.Module) -> bool:
    """Whether a class decides in what order the ranks' calls run, or changes how another one does."""
    bases = {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    return bool(bases & {"Queue", "Worker", "Announcements"}) or any(name == "Announcements" for name, _ in calls(tree))


def compares(tree: ast.Module) -> bool:
    """Whether a function learns that the ranks' numbers differ: by the least of x and -x."""
    return any(name.lower() == "iallreduce" and "MPI.MIN" in map(ast.unparse, call.args) for name, call in calls(tree))


def waits(tree: ast.Module) -> bool:
    """Whether a loop waits for a request: it polls one, or the function that it was given."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    return any(
        name in ("Test", "sched_yield") or ast.unparse(call) == "done()" for loop in loops for name, call in calls(loop)
    )


def retries(tree: ast.Module) -> bool:
    """Whether a loop repeats work until all ranks have finished it."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    return any(name == "finished" for loop in loops for name, _ in calls(loop))


def keeps_memory(tree: ast.Module) -> bool:
    """Whether a table has an entry for an array as long as the array lives."""
    found = [ast.unparse(call) for name, call in calls(tree) if name == "finalize"]
    return any("id(" in text or ".pop" in text for text in found)


def divides(tree: ast.Module) -> bool:
    """Whether parameters are divided among the ranks, which keep copies of each other's parts."""
    return any(name == "Backup" for name, _ in calls(tree))


def averages(tree: ast.Module) -> bool:
    """Whether a function has the order of a step: the owners update the parameters, then share them."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any({"update", "share"} <= {name for name, _ in calls(each)} for each in functions)


def loads(tree: ast.Module) -> bool:
    """Whether a generator yields the batches of an epoch, one a step."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns is not None]
    yielding = [each for each in functions if any(isinstance(node, ast.Yield) for node in ast.walk(each))]
    return any(re.match(r"\w+\[Batch\b", ast.unparse(each.returns or each)) for each in yielding)


def places(tree: ast.Module) -> bool:
    """Whether a class represents the position of a training: it has an epoch and a step."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return any({"epoch", "step"} <= set(fields(each)) for each in classes)


def fields(of: ast.ClassDef) -> Iterator[str]:
    """Return the names of the attributes of a class that it declares, or sets in itself, without an underscore."""
    for node in ast.walk(of):
        if isinstance(node, ast.AnnAssign) and node in of.body:
            yield ast.unparse(node.target).removeprefix("_")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr.removeprefix("_")


def encodes(tree: ast.Module) -> bool:
    """Whether a table has the names by which values are written, and the types that read them."""
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return any({"list", "tuple"} <= set(map(ast.unparse, table.values)) for table in tables)


ONE = [
    (orders, ["allreduce/call/queue.py"]),
    # of a rendezvous, and of the message by which all others agree
    (compares, ["allreduce/call/executor.py", "allreduce/transport/control.py"]),
    (waits, ["allreduce/transport/wait.py"]),
    (retries, ["allreduce/elastic/retry.py"]),
    (keeps_memory, ["allreduce/memory/allocations.py"]),
    (divides, ["trainers/state/sharded.py"]),
    (averages, ["trainers/state/owners.py"]),
    (loads, ["trainers/data.py"]),
    (places, ["trainers/files/checkpoint.py"]),
    (encodes, ["trainers/files/values.py"]),
]


@pytest.mark.parametrize(("does", "where"), ONE, ids=lambda each: getattr(each, "__name__", ""))
def test_one_of_each(does: Any, where: list[str]) -> None:
    package = where[0].partition("/")[0]
    assert [name for name, tree in sorted(code().items()) if name.startswith(package) and does(tree)] == where


@pytest.mark.parametrize(
    ("does", "text"),
    [
        (orders, "class Mine(Queue): ..."),
        (orders, "calls = announcements.Announcements(0, 2)"),
        (compares, "comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN)"),
        (waits, "while not request.Test(): time.sleep(1)"),
        (waits, "while True:\n  if done(): break"),
        (retries, "while not topology.finished(ok): topology = topology.survivors()"),
        (keeps_memory, "weakref.finalize(tensor, self._known.pop, key, None)"),
        (divides, "self.backup = backup.Backup(comm, 0, [[0, 5]])"),
        (averages, "def step(self):\n  self.owners.update()\n  self.share()"),
        (loads, "def epoch(self) -> Iterator[Batch]:\n  yield self.batch(0)"),
        (places, "class Position(NamedTuple):\n  epoch: int\n  step: int"),
        (places, "class Fit:\n  def __init__(self): self._epoch, self._step = 0, 0"),
        (encodes, "KINDS = {'list': list, 'tuple': tuple}"),
    ],
)
def test_a_second_one_is_seen(does: Any, text: str) -> None:
    assert does(ast.parse(text))


def test_each_promise_names_its_tests() -> None:
    promises = re.split(r"^(?:- |#)", (launch.ROOT / "docs/start/promises.md").read_text(), flags=re.MULTILINE)
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promise) for promise in promises]
    assert sum(map(bool, named)) >= 20
    tests = [test for found in named for test in found]
    missing = [name for path, name in tests if f"def {name}(" not in (launch.ROOT / path).read_text()]
    assert missing == []
