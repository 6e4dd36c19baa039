"""Fixtures and hooks that all tests share. Tests that run on several ranks are in ranks/; test_ranks.py starts them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests import changed, launch

JobRunner = Callable[..., "subprocess.CompletedProcess[str]"]
LAUNCHES = pytest.StashKey[launch.Launches]()
LONG_SECONDS = 60  # a run that takes longer says where its time went
MOST_FILES = 20
LONGEST_JOBS = ("test_ranks[openmpi-2ranks]", "test_ranks[openmpi-3ranks]", "test_ranks[openmpi-5ranks]")


def lacking(reason: object) -> None:
    """Skip, or fail where nothing may be missing (scripts/test.sh sets ALLREDUCE_TEST_REQUIRE=1)."""
    if os.environ.get("ALLREDUCE_TEST_REQUIRE") == "1":
        pytest.fail(str(reason), pytrace=False)
    pytest.skip(str(reason))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script: jobs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "rank_driver: runs the tests in ranks/; -k and -m are left to those")
    config.addinivalue_line(
        "markers", "expensive: takes long and seldom finds a defect; `scripts/test.sh --all` runs it"
    )
    config.addinivalue_line("markers", "jobs: starts jobs of several ranks, which `scripts/test.sh --quick` leaves out")
    if config.stash.get(LAUNCHES, None) is None:
        config.stash[LAUNCHES] = launch.Launches()
        sys.addaudithook(config.stash[LAUNCHES].check)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that starts a job without the mark `jobs` fails in every run, because a quick run would start it too."""
    launches = item.config.stash[LAUNCHES]
    marked = any(item.get_closest_marker(mark) for mark in ("jobs", "rank_driver"))
    launches.unmarked = "" if marked or launch.ROOT / "tests" / "ranks" in item.path.parents else item.nodeid
    try:
        return (yield)
    finally:
        launches.unmarked = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add the jobs that a test has started to its last report."""
    launches = item.config.stash[LAUNCHES]
    if call.when == "teardown" and launches.jobs:
        item.user_properties += [("jobs", launches.jobs), ("ranks", launches.ranks)]
        launches.jobs = launches.ranks = 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Keep -k and -m from deselecting the driver, which passes them on to the tests inside. Leave expensive tests out
    of a standard run."""
    check_names(items)
    if os.environ.get("ALLREDUCE_TEST_STANDARD"):
        left_out = [item for item in items if item.get_closest_marker("expensive")]
        if os.environ.get("ALLREDUCE_TEST_CHANGED"):
            left_out = [item for item in left_out if not changed.about(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    drivers = [item for item in items if item.get_closest_marker("rank_driver")]
    items[:] = [item for item in items if item not in drivers]
    for item in items:
        if "mpirun" in getattr(item, "fixturenames", ()):
            item.add_marker("jobs")
    yield
    items.extend(drivers)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, which hands out one file after the other
        longest_first(items)


def check_names(items: list[pytest.Item]) -> None:
    """pytest-xdist needs the same names of tests in each of its processes; the text of a set differs between them."""
    for item in items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, (set, frozenset)) and len(value) > 1 and str(value) in item.name:
                raise pytest.UsageError(f"{item.nodeid}: a set is no name of a test; give ids= in a fixed order")


def longest_first(items: list[pytest.Item]) -> None:
    """The driver's jobs in turn with the files whose jobs take longest, so that no worker is left with a long one at
    the end, and so that few of the driver's jobs run at a time."""
    jobs: Counter[Path] = Counter()
    for item in items:
        if item.get_closest_marker("jobs"):  # the import of a framework, on each rank, takes longer than most jobs
            jobs[item.path] += 8 if re.search("torch|frameworks|programs", str(item.path)) else 1
    drivers = [item for item in items if item.get_closest_marker("rank_driver")]
    drivers.sort(key=lambda item: LONGEST_JOBS.index(item.name) if item.name in LONGEST_JOBS else len(LONGEST_JOBS))
    files: dict[Path, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: -jobs[item.path]):
        if item not in drivers:
            files.setdefault(item.path, []).append(item)
    in_turn = zip_longest([[item] for item in drivers], files.values(), fillvalue=[])
    items[:] = chain.from_iterable(chain.from_iterable(in_turn))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile: hand out one file after the other, but each of the driver's jobs by itself, because the
    jobs together take half of the time of a run."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "::test_ranks[" in nodeid else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time of a long run went, and how many jobs it has started."""
    spent = seconds_by_file(terminalreporter.stats)
    workers = getattr(terminalreporter.config.option, "numprocesses", None)  # of pytest-xdist
    if spent.total() >= LONG_SECONDS:
        at_once = f", {workers} files at a time" if workers else ""
        terminalreporter.section(f"where the time went (seconds{at_once})")
        for name, seconds in spent.most_common(MOST_FILES):
            terminalreporter.line(f"{seconds:7.1f}  {name}")
        started = Counter[str]()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                started.update({name: dict(report.user_properties).get(name, 0) for name in ("jobs", "ranks")})
        terminalreporter.line(f"{started['jobs']} jobs were started, of {started['ranks']} processes")


def seconds_by_file(stats: Mapping[str, Sequence[Any]]) -> Counter[str]:
    """Return the seconds of each file of serial tests, and instead of the driver's those of each file on ranks in each
    job."""
    spent: Counter[str] = Counter()
    for report in chain.from_iterable(stats.values()):
        if not isinstance(report, pytest.TestReport):
            continue
        file, _, test = report.nodeid.partition("::")
        inside: Any = dict(report.user_properties).get("seconds", {}) if report.when == "call" else {}
        spent.update({f"{name} in {test}": seconds for name, seconds in inside.items()})
        spent[f"{test}: starting and ending" if inside else file] += report.duration - sum(inside.values())
    return spent


@pytest.fixture
def mpirun() -> JobRunner:
    """`mpirun(ranks, args, mpi="openmpi", timeout=60, env=None, cwd=None)`; see launch.mpirun.

    The args are those of python: `mpirun(2, ["-m", "trainers", "--data", "iris"])`. It returns a
    CompletedProcess with returncode, stdout and stderr.
    """

    def run(ranks: int, args: list[Any], **options: Any) -> "subprocess.CompletedProcess[str]":
        try:
            return launch.mpirun(ranks, args, **options)
        except launch.MissingEnvironmentError as error:
            lacking(error)
            raise

    return run


Program = tuple[str | Path, list[str], str | Path]  # a module with a function `main`, or a file; arguments; folder


def in_one_job(
    ranks: int, programs: Sequence[Program], folder: Path, *, whole: bool = True, **job: Any
) -> list[list[dict[str, Any]]]:
    """Run programs in turn; return, for each program and rank, its "code", "stdout" and "stderr" (see one_job.py).

    whole: a program that ends the job is an error; else it, and those after it, have the code None.
    """
    given, found = folder / "cases", folder / "outcomes"
    given.write_text(json.dumps(programs, default=str))
    found.mkdir()  # new, so that no outcome of a former job is there

    def outcome(number: int, rank: int) -> dict[str, Any]:
        paths = [found / f"{number}.{rank}.{kind}" for kind in ("out", "err", "code")]
        out, err, code = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        return {"code": json.loads(code or "null"), "stdout": out, "stderr": err}

    def outcomes() -> list[list[dict[str, Any]]]:
        return [[outcome(number, rank) for rank in range(ranks)] for number in range(len(programs))]

    try:
        ended = launch.mpirun(ranks, ["-m", "tests.one_job", given, found], **job)
    except launch.MissingEnvironmentError as error:
        lacking(error)
    except launch.JobTimeoutError as error:
        raise launch.JobTimeoutError(f"{error}\n{outcomes()}") from None
    came = outcomes()
    complete = all(rank["code"] is not None for each in came for rank in each)
    assert ended.returncode == 0 or not (whole or complete), f"{ended.stderr}\n{came}"
    return came
