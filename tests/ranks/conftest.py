"""pytest on several ranks at once: every rank runs every test, and all agree about its outcome.

Run by tests/test_ranks.py, or by hand: mpirun -n 4 python -m pytest tests/ranks -k ring

A test that fails on one rank fails on all. Only rank 0 prints; it shows the traceback of the rank that failed. A test
that hangs ends the job, with the stacks of all ranks.
"""

import faulthandler
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

import allreduce  # prepares the environment of MPI, so it comes first

# isort: split
import numpy as np
from mpi4py import MPI

from tests.ranks import jobs, pairs

MPIS = {"Open MPI": "openmpi", "MPICH": "mpich"}
JOB = MPIS[MPI.get_vendor()[0]], MPI.COMM_WORLD.size
WATCHDOG_SECONDS = float(os.environ.get("ALLREDUCE_TEST_WATCHDOG", "90"))


OUTCOMES = ("passed", "skipped", "failed")


class Ranks:
    """The harness's own communicator and counters; its messages can't match those of a test."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.stderr = os.dup(2)  # outside of a test pytest does not capture it
        self.collected = self.ran = 0
        self._extremes = np.zeros(2, int)  # the largest outcome of all ranks, and the negative of the smallest
        self.seconds: Counter[str] = Counter()  # by test file
        self.failure = ""  # this rank's, until the others have heard of it

    def agree_on(self, report: pytest.TestReport) -> None:
        """Give `report` the outcome that all ranks share."""
        self.failure = report.longreprtext if report.failed else ""
        outcome = OUTCOMES.index(report.outcome)
        self._extremes[:] = outcome, -outcome
        self.comm.Allreduce(MPI.IN_PLACE, self._extremes, MPI.MAX)  # thousands of times, so one call, without pickle
        if not report.failed and self._extremes[0] == -self._extremes[1]:
            return
        sides = self.comm.allgather((report.outcome, self.failure))
        self.failure = ""
        outcomes = [outcome for outcome, _ in sides]
        failures = [
            f"rank {rank}: {text or outcome}" for rank, (outcome, text) in enumerate(sides) if outcome != "passed"
        ]
        report.outcome = "failed"
        report.longrepr = "\n".join([f"outcome on the ranks: {', '.join(outcomes)}", failures[0], *_others(failures)])

    def watch(self, test: str) -> threading.Timer:
        """End the job when `test` takes too long: first every rank shows its stacks, then it aborts."""
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, file=self.stderr)
        timer = threading.Timer(WATCHDOG_SECONDS + 3, self._abort, [test])
        timer.daemon = True
        timer.start()
        return timer

    def _abort(self, test: str) -> None:
        text = f"rank {self.comm.rank}: {test} did not end in {WATCHDOG_SECONDS:.0f} s\n"
        if self.failure:
            text += f"rank {self.comm.rank} had failed, the others did not follow:\n{self.failure}\n"
        os.write(self.stderr, text.encode())
        threading.Event().wait(2)  # for the others' stacks
        self.comm.Abort(1)


def _others(failures: list[str]) -> list[str]:
    return [f"and {len(failures) - 1} ranks more"] if len(failures) > 1 else []


RANKS = pytest.StashKey[Ranks]()


@pytest.hookimpl(trylast=True)  # after the terminal reporter was registered
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_pair: has values that 2 ranks lack, so each job runs all their pairs")
    ranks = config.stash[RANKS] = Ranks()
    if ranks.comm.rank:
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that run in other jobs, unless they are named, and those of PyTorch where it is missing."""
    if not collection_path.name.startswith("test_") or jobs.HERE not in collection_path.parents:
        return None
    lacks = collection_path.parent.name in ("pytorch", "torch_backend") and find_spec("torch") is None
    return True if lacks or JOB[1] not in jobs.jobs(collection_path).get(JOB[0], ()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.extra_keyword_matches.update(os.environ.get("ALLREDUCE_TEST_WORDS", "").split())
    if "ALLREDUCE_TEST_REPORTS" in os.environ and not config.option.keyword:
        every_pair = {
            item.nodeid.partition("[")[0]
            for item in items
            if JOB == ("openmpi", 2) or item.get_closest_marker("every_pair")
        }
        names = [item.nodeid for item in items]
        chosen = pairs.chosen(names, f"{JOB}", every_pair, own_pairs=JOB[0] == "openmpi")  # all by hand, or with -k
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that all ranks run the same tests; otherwise they would wait for each other for ever."""
    ranks = session.config.stash[RANKS]
    ranks.collected = len(session.items)
    digest = zlib.crc32("\n".join(item.nodeid for item in session.items).encode())
    if len(set(ranks.comm.allgather(digest))) > 1:
        pytest.exit("the ranks collected different tests", returncode=3)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    timer = item.config.stash[RANKS].watch(item.nodeid)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    ranks = item.config.stash[RANKS]
    ranks.agree_on(report)
    ranks.ran += report.when == "call" and not report.skipped
    ranks.seconds["/".join(item.path.parts[-2:])] += report.duration
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks = session.config.stash[RANKS]
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # the driver calls it skipped
    folder = os.environ.get("ALLREDUCE_TEST_REPORTS")
    if folder:
        counts = {"rank": ranks.comm.rank, "collected": ranks.collected, "ran": ranks.ran, "seconds": ranks.seconds}
        Path(folder, f"rank{ranks.comm.rank}.json").write_text(json.dumps(counts))


def pytest_unconfigure(config: pytest.Config) -> None:
    sys.stdout.flush()
    config.stash[RANKS].comm.Barrier()  # mpirun kills all when one ends with a code, so let rank 0 print first


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep existing objects out of the tests' gc.collect(), which PyTorch's million objects would slow down."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world() -> MPI.Intracomm:
    """A duplicate of all ranks for the tests' own messages."""
    return MPI.COMM_WORLD.Dup()


Shape = int | tuple[int, ...] | None


@pytest.fixture(scope="session")
def topology_of() -> Generator[Callable[[Shape], allreduce.Topology]]:
    """`topology_of(ranks_per_node)`: one topology of each shape for the whole run."""
    made: dict[Shape, allreduce.Topology] = {}

    def get(shape: Shape = None) -> allreduce.Topology:
        if shape not in made:
            made[shape] = allreduce.Topology(ranks_per_node=shape)
        return made[shape]

    yield get
    for topology in made.values():
        topology.close()


@pytest.fixture
def flat(topology_of: Callable[[Shape], allreduce.Topology]) -> allreduce.Topology:
    """The topology of all ranks as they really are: one node here."""
    return topology_of(None)


@pytest.fixture
def folder(world: MPI.Intracomm) -> Generator[Path]:
    """One folder for all ranks; the test creates it."""
    made = Path(world.bcast(tempfile.mkdtemp() if world.rank == 0 else None))
    yield made / "run"
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(made)
