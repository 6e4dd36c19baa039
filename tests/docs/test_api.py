"""The site's pages on the API, on measuring and on trouble: every public name, error, environment variable and finding
of the doctor stands there, what stands there exists, and the programs print what the pages say.
"""

import ast
import importlib
import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import launch
from tests.conftest import JobRunner, in_one_job, lacking
from trainers.trainer import Trainer
from trainers.watching.callback import Callback

DOCS = launch.ROOT / "docs"
API = sorted(path for path in (DOCS / "api").glob("*.md") if path.stem != "index")
PAGES = [*API, *sorted((DOCS / "measure").glob("*.md")), *sorted((DOCS / "trouble").glob("*.md"))]
MODULES = [  # all public modules, with the packages that they need
    ("allreduce", ""),
    ("allreduce.errors", ""),
    ("allreduce.jax", "jax"),
    ("allreduce.torch_backend", "torch"),
    ("trainers", ""),
    ("trainers.errors", ""),
    ("trainers.callbacks", ""),
    ("trainers.datasets", ""),
    ("trainers.pytorch", "torch"),
    ("trainers.keras", "keras"),
]
TARGET = re.compile(r"^\s*\.\. (?:auto\w+|py:data):: ([\w.]+)(\(.*\))?$", re.MULTILINE)
PROGRAM = re.compile(
    r"^```python\n# (?P<name>\S+\.py)\n(?P<text>.*?)^```\n\n"
    r"`mpirun (?P<ulfm>--with-ft ulfm )?-n (?P<ranks>\d) python (?P=name)` prints[^\n]*:\n\n"
    r"^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COLUMNS = 94  # of a block of code on a wide page
FRAMEWORKS = ("keras", "torch", "jax")


class Program(NamedTuple):
    """A program of a page. text: without the line of its name. output: of all ranks; "..." stands for any text."""

    name: str
    text: str
    ulfm: bool
    ranks: int
    output: str

    @property
    def framework(self) -> str:
        return next((name for name in FRAMEWORKS if re.search(rf"^(?:import|from) .*\b{name}\b", self.text, re.M)), "")


def programs() -> list[Program]:
    found = [match for page in PAGES for match in PROGRAM.finditer(page.read_text())]
    return [
        Program(each["name"], each["text"], bool(each["ulfm"]), int(each["ranks"]), each["output"]) for each in found
    ]


def resolve(target: str) -> Any:
    """The object of this name, whose first parts are a module."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not target.startswith(str(error.name)):
                raise
            continue
        for name in parts[end:]:
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        return found
    raise AssertionError(target)


def needed(target: str) -> str:
    """The package without which a target can't be imported."""
    return next((name for name in FRAMEWORKS if f".{name}" in target.replace("pytorch", "torch")), "")


def importable(package: str) -> bool:
    if package == "keras":
        os.environ.setdefault("KERAS_BACKEND", "torch")
    return not package or find_spec(package) is not None


def targets() -> list[tuple[str, str]]:
    """Every documented name, with the arguments if the page gives them."""
    found = [match.groups() for page in PAGES for match in TARGET.finditer(page.read_text())]
    return [(name, arguments or "") for name, arguments in found]


def public(module: Any) -> list[str]:
    """The names in __all__; without it the functions, or, of a module of errors, the classes."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    kind = inspect.isclass if module.__name__.endswith(".errors") else inspect.isfunction
    found = [name for name, each in vars(module).items() if kind(each) and each.__module__ == module.__name__]
    return [name for name in found if not name.startswith("_")]


@pytest.mark.parametrize(("module", "package"), MODULES)
def test_every_public_name_has_a_page(module: str, package: str) -> None:
    if not importable(package):
        lacking(f"{package} is not installed")
    documented = {name for name, _ in targets()}
    objects = [resolve(name) for name in documented if importable(needed(name))]
    loaded = importlib.import_module(module)
    missing = [
        name
        for name in public(loaded)
        if not any(each == f"{module}.{name}" or each.startswith(f"{module}.{name}.") for each in documented)
        and not any(getattr(loaded, name) is each for each in objects)
    ]
    assert missing == []


def test_arguments_on_a_page_are_those_of_the_code() -> None:
    """Where the page gives them, because others are internal."""
    for target, arguments in targets():
        if arguments and importable(needed(target)):
            given = inspect.signature(eval(f"lambda {arguments[1:-1]}: None")).parameters
            real = inspect.signature(resolve(target)).parameters
            assert {name: each.default for name, each in given.items()} == {name: real[name].default for name in given}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_page_says_what_is_collective_and_its_code_is_not_cut(page: Path) -> None:
    text = page.read_text()
    if page in API:
        assert re.search(r"\{bdg-\w+\}`(collective|local)`", text)
        assert text.count("\n") <= 160
        assert f"]({page.name})" in (DOCS / "api" / "index.md").read_text()
    blocks = re.findall(r"^```(?!\{eval-rst\}).+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS] == []


def test_horovods_names() -> None:
    if not importable("torch"):
        lacking("torch is not installed")
    hvd = importlib.import_module("trainers.horovod.torch")
    told = set(re.findall(r"`(\w+)(?:\(\))?`", (DOCS / "api" / "hvd.md").read_text()))
    assert set(hvd.__all__) - told == set()


def test_docstrings_of_a_trainer_and_of_the_events_of_callbacks() -> None:
    for method in (Trainer.fit, Trainer.evaluate, Trainer.predict, Trainer.save, Trainer.load, Trainer.edit):
        assert (method.__doc__ or "").partition("\n")[0].endswith("Collective."), method
    assert [name for name, each in vars(Callback).items() if name.startswith("on_") and not each.__doc__] == []


# Trouble


def rows(page: str) -> set[str]:
    """What stands in backticks in the first column of the tables of a page."""
    text = (DOCS / "trouble" / page).read_text()
    return {name for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall("`([^`]+)`", row)}


def test_every_error_has_a_cause_and_a_remedy() -> None:
    assert set(public(importlib.import_module("allreduce.errors"))) <= rows("errors.md")
    assert set(public(importlib.import_module("trainers.errors"))) <= rows("trainer_errors.md")


def test_every_variable_is_explained() -> None:
    paths = [path for package in ("allreduce", "trainers") for path in (launch.ROOT / package).rglob("*.py")]
    used = {name for path in paths for name in re.findall(r"\b(?:ALLREDUCE|HOROVOD)_[A-Z_]+\b", path.read_text())}
    launchers = importlib.import_module("allreduce.process.variables")
    lists = [launchers.ANY_RANK, launchers.SIZE, launchers.LOCAL_RANK, launchers.LOCAL_SIZE]
    used = used.union(*lists)
    used |= {variable for variable, *_ in importlib.import_module("allreduce.process.launcher").LAUNCHERS}
    assert rows("variables.md") == used


def test_messages_are_those_of_the_code() -> None:
    paths = [path for package in ("allreduce", "trainers") for path in (launch.ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in paths)
    pieces = [piece.strip() for text in rows("messages.md") for piece in re.split(r"\.\.\.|: ", text)]
    assert len(pieces) > 10
    assert [piece for piece in pieces if piece not in code] == []


def doctors_findings() -> set[str]:
    """The names of the findings in the code of the doctor, as far as they are constant."""
    found = set()
    for path in (launch.ROOT / "allreduce" / "doctor").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            place = {"ok": 0, "warning": 0, "problem": 0, "alike": 0, "Finding": 1}.get(call.func.id)
            if place is not None and len(call.args) > place and isinstance(name := call.args[place], ast.Constant):
                found.add(str(name.value))
    return found


def test_every_finding_of_the_doctor_is_explained() -> None:
    assert len(doctors_findings()) > 10
    assert doctors_findings() - rows("doctor.md") == set()


# Programs


def jobs() -> list[list[Program]]:
    """Programs that can run in one job, because starting a job takes longer than most of them."""
    found: dict[Any, list[Program]] = {}
    for each in programs():
        found.setdefault(each.name if each.ulfm else (each.framework, each.ranks), []).append(each)
    return list(found.values())


def test_programs_are_found() -> None:
    texts = [page.read_text() for page in PAGES]
    fences = sum(len(re.findall(r"^```python\n# \S+\.py\n", text, re.MULTILINE)) for text in texts)
    assert fences == len(programs()) == len({each.name for each in programs()})
    assert fences >= len(API) * 0.8
    assert sum(len(re.findall(r"^```python\n", text, re.MULTILINE)) for text in texts) == fences


def marked(job: list[Program]) -> Any:
    """Mark the programs of the frameworks whose import takes longest."""
    expensive = job[0].framework in ("torch", "jax", "keras")
    name = f"{job[0].name}+{len(job) - 1}"
    return pytest.param(job, marks=pytest.mark.expensive if expensive else (), id=name)


@pytest.mark.jobs
@pytest.mark.parametrize("job", [marked(job) for job in jobs()])
def test_programs(mpirun: JobRunner, tmp_path: Path, job: list[Program]) -> None:
    first = job[0]
    if not importable(first.framework):
        lacking(f"{first.framework} is not installed")
    paths = [tmp_path / each.name for each in job]
    for path, each in zip(paths, job, strict=True):
        path.write_text(each.text)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "ALLREDUCE_TIMEOUT_SECONDS": "60", "KERAS_BACKEND": "torch"}
    options: dict[str, Any] = {"timeout": 240, "env": quiet}
    if first.ulfm:
        texts = [mpirun(first.ranks, [first.name], cwd=tmp_path, ulfm=True, **options).stdout]
    else:
        lines: list[Any] = [(path, [], path.with_suffix("")) for path in paths]
        for _, _, here in lines:
            here.mkdir()
        outputs = in_one_job(first.ranks, lines, tmp_path, **options)
        assert all(rank["code"] in (0, 143) for each in outputs for rank in each), outputs
        texts = ["".join(rank["stdout"] for rank in each) for each in outputs]
    for each, printed in zip(job, texts, strict=True):
        expected = r"[\s\S]*?".join(map(re.escape, each.output.split("...")))
        assert re.fullmatch(expected, printed), f"{each.name} printed\n{printed}"


def test_console_scripts() -> None:
    told = set(re.findall(r"`allreduce ([a-z]+)`", (DOCS / "api" / "commands.md").read_text()))
    assert told == set(importlib.import_module("allreduce_commands").COMMANDS)
