"""The file of constants: written, read back, refused by name, and used. The formulas: the cheapest algorithm."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allreduce import NAMES, algorithms
from allreduce.algorithms import class_of
from allreduce.files import ContentError
from allreduce.machine import identify, mpi_library
from allreduce.transport.cost import Layout, Machine
from allreduce.tuning import constants
from allreduce.tuning.constants import Key
from tests.conftest import JobRunner

MIB = 1 << 20
SLOW = Machine(call=1.0)  # of everything but "native", which has no Python code in its call
ENTRIES = {Key((2,), False): SLOW, Key((2, 2), True): Machine()}
ASK = """
import sys, allreduce, numpy as np
for path in sys.argv[1:] or [None]:
    with allreduce.create("auto", table=path, measure=False) as backend:
        array = backend.allocate(1 << 22, "float32")
        half = np.full(4096, backend.rank + 1, "float16")
        backend(half, "sum")
        assert (half == sum(range(backend.size + 1))).all()
        if backend.rank == backend.size - 1:
            print(backend.chosen(array), backend.chosen(half))
"""


def table(**changes: Any) -> str:
    """Return the text of a file of this machine, with changes at its top level."""
    return json.dumps({**json.loads(constants.dumps(ENTRIES)), **changes})


def entry(**changes: Any) -> dict[str, Any]:
    return {**json.loads(constants.dumps(ENTRIES))["entries"][0], **changes}


def values(**changes: Any) -> dict[str, Any]:
    return {**entry()["constants"], **changes}


def test_written_and_read_back() -> None:
    assert constants.loads(constants.dumps(ENTRIES), identify()) == ENTRIES


def test_identity_names_no_host() -> None:
    assert set(identify()) == {"cpu", "cores", "mpi"}
    assert identify()["cpu"]
    assert any(character.isdigit() for character in mpi_library())
    assert "\n" not in mpi_library()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "no constants of python -m benchmarks.tune"),
        (table(format="allreduce decision table"), "no constants of python -m benchmarks.tune"),
        (table(version=2), "version 2"),
        (table(machine={"cpu": "Other", "cores": 2, "mpi": "MPI"}), "another machine .*'cpu': 'Other'"),
        (table(entries=[entry(node_sizes=["2"])]), "malformed"),
        (table(entries=[entry(node_sizes=[])]), "malformed"),
        (table(entries=[entry(simulated=1)]), "malformed"),
        (table(entries=[entry(constants={})]), "malformed"),
        (table(entries=[entry(constants=values(alpha="1"))]), "malformed .*constants="),
        (table(entries=[entry(constants=values(alpha=True))]), "malformed .*constants="),
        (table(entries=[entry(constants=values(alpha=-1e-6))]), "malformed .*constants="),
        (table(entries=[entry(constants=values(alpha=float("nan")))]), "malformed .*constants="),
        (table(entries=[entry(constants=values(alpha=10**400))]), "malformed"),
    ],
)
def test_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ContentError, match=complaint):
        constants.loads(text, identify())


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(constants.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = constants.table_path()
    assert default is not None
    assert default.parent == tmp_path / "allreduce"
    monkeypatch.setenv(constants.ENVIRONMENT, "/a/table")
    assert constants.table_path() == Path("/a/table")
    assert constants.table_path("/given") == Path("/given")
    assert constants.table_path("") is None


def test_the_files_that_auto_uses(mpirun: JobRunner, tmp_path: Path) -> None:
    """By the constants of the first file "native" is the cheapest. It does not sum 16-bit floats, whatever a file says.
    Without a file auto measures."""
    script, right = tmp_path / "ask.py", tmp_path / "table.json"
    script.write_text(ASK)
    code = "from tests.collectives.test_constants import ENTRIES, constants; print(constants.dumps(ENTRIES))"
    right.write_text(mpirun(1, ["-c", code]).stdout)  # for this machine under Open MPI, whatever MPI runs these tests
    os.mkfifo(tmp_path / "pipe")
    refused = {tmp_path / "pipe": "not a regular file", Path("/dev/zero"): "not a regular file"}
    refused |= {tmp_path: "Is a directory"}
    for name, old, new, complaint in (
        ("corrupt", "}", "", "not JSON"),
        ("foreign", '"cores": ', '"cores": 99', "another machine"),
        ("other", "2\n", "3\n", "it has none for 2 ranks on 1 node"),
    ):
        (tmp_path / name).write_text(right.read_text().replace(old, new, 1))
        refused[tmp_path / name] = complaint

    def ask(*paths: Path, **env: str) -> tuple[list[str], list[str]]:
        job = mpirun(2, [script, *paths], env={"XDG_CACHE_HOME": str(tmp_path), **env})
        assert job.returncode == 0, job.stderr
        return job.stdout.splitlines(), [line for line in job.stderr.splitlines() if '"auto"' in line]

    uses = f'allreduce: "auto" selects by the constants of {right}'
    assert ask(ALLREDUCE_TABLE=str(right)) == (["native shared"], [uses])
    (_,), said = ask()
    assert said == []  # that there is none is no news
    chosen, (first, *others) = ask(right, right, *refused)
    assert (chosen[:2], len(chosen), first) == (["native shared"] * 2, 2 + len(refused), uses)
    for line, (path, complaint) in zip(others, refused.items(), strict=True):
        assert f'"auto" does not use the constants of {path}: ' in line
        assert complaint in line


# The formulas


def cheapest(nbytes: int, layout: Layout, machine: Machine | None = None) -> str:
    usable = [name for name in algorithms.with_cost() if layout.nodes == 1 or name != "shared"]
    return min(usable, key=lambda name: class_of(name).cost(nbytes, layout, machine or Machine()))


PAIR, FOUR, MANY = Layout((2,)), Layout((4,)), Layout((1,) * 64)


@pytest.mark.parametrize(
    ("nbytes", "layout", "names"),
    [
        (8, PAIR, ("native",)),
        (8, replace(PAIR, allocated=False), ("native",)),
        (8, MANY, ("native",)),
        (MIB, PAIR, ("shared",)),
        (MIB, FOUR, ("shared",)),
        (64 * MIB, replace(FOUR, allocated=False), ("shared",)),
        (64 * MIB, replace(FOUR, allocated=False, cma=False), ("ring", "native")),
        (64 * MIB, Layout((8,) * 4), ("hierarchical_copy",)),
        (64 * MIB, Layout((8, 8, 8, 7)), ("hierarchical_copy", "native")),
        (4 * MIB, Layout((1,) * 256), ("halving_doubling", "native")),
    ],
)
def test_the_cheapest(nbytes: int, layout: Layout, names: tuple[str, ...]) -> None:
    assert cheapest(nbytes, layout) in names


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_in_the_caches_take_less_than_half_of_cma(ranks: int) -> None:
    at = Layout((ranks,), allocated=False, by_c=True)
    seconds = [class_of("shared").cost(size, at, Machine()) for size in (MIB, 2 * MIB, 2 * MIB + 8)]
    assert seconds[0] < seconds[1] < seconds[2] / 2


def test_every_sum_has_a_cost() -> None:
    """But NCCL, which alone reduces CuPy arrays, and the one that selects."""
    assert {*NAMES} - {*algorithms.with_cost()} == {"nccl", "auto"}
    for name in algorithms.with_cost():
        assert 0 < class_of(name).cost(MIB, PAIR, Machine()) < float("inf"), name
