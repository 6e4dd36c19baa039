"""The measured table of "auto": written, read back, refused by name, and used."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.backends import decision_table as tables
from allreduce.backends.decision_table import Key, Step, TableError
from allreduce.machine import identify, mpi_library
from allreduce.registry import BACKENDS
from tests.conftest import JobRunner

PAIR = Key((2,), False, "float32", "foreign")
ENTRIES = {PAIR: [Step(4096, "native"), Step(None, "ring")], PAIR._replace(memory="allocated"): [Step(None, "shared")]}
ASK = """
import sys, allreduce, numpy as np
from allreduce.engine.call import UNREGISTERED
dtype, *paths = sys.argv[1:]
for path in paths or [None]:
    backend = allreduce.create("auto", table=path)
    for nbytes in (4096, 4100):
        name, why = backend._decide(nbytes, np.dtype(dtype), UNREGISTERED, backend._part)
        if backend.rank == backend.size - 1:
            print("chose", name)
    array = np.full(4096, backend.rank + 1, "float16")
    backend(array, "sum")
    assert (array == sum(range(backend.size + 1))).all()
    backend.close()
"""


def table(**changes: Any) -> str:
    """Return the text of a table of this machine, with changes at its top level."""
    return json.dumps({**json.loads(tables.dumps(ENTRIES)), **changes})


def entry(**changes: Any) -> dict[str, Any]:
    return {**json.loads(tables.dumps(ENTRIES))["entries"][0], **changes}


def test_written_and_read_back() -> None:
    assert tables.loads(tables.dumps(ENTRIES), identify(), BACKENDS) == ENTRIES


def test_identity_names_no_host() -> None:
    assert set(identify()) == {"cpu", "cores", "mpi"}
    assert identify()["cpu"]
    assert any(character.isdigit() for character in mpi_library())
    assert "\n" not in mpi_library()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        (table()[:-20], "not JSON"),
        ("[1]", "not a decision table"),
        (table(version=2), "version 2"),
        (table(machine={"cpu": "Other", "cores": 2, "mpi": "MPI"}), "another machine .cpu Other"),
        (table(machine=None), "another machine"),
        (table(entries={}) and table(entries=[7]), "malformed"),
        (table(entries=[entry(ranges=[])]), "malformed"),
        (table(entries=[entry(ranges=[{"up_to_bytes": 8, "backend": "ring"}])]), "no end"),
        (table(entries=[entry(ranges=[{"up_to_bytes": None, "backend": "auto"}])]), "'auto' can't be chosen"),
        (table(entries=[entry(ranges=[{"up_to_bytes": None, "backend": "rang"}])]), "'rang' can't be chosen"),
        (table(entries=[entry(ranges=[{"up_to_bytes": n, "backend": "ring"} for n in (9, 8, None)])]), "not in order"),
        (table(entries=[entry(node_sizes=["2"])]), "malformed"),
        (table(entries=[entry(memory="gpu")]), "malformed"),
    ],
)
def test_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(TableError, match=complaint):
        tables.loads(text, identify(), BACKENDS)


class Pair:
    """The properties of a topology of two ranks that a rule uses."""

    node_sizes, simulated, size, rank = (2,), False, 2, 0


def test_rule_looks_up_and_leaves_the_rest_to_the_builtin_rule() -> None:
    by_kind = {(key.dtype, key.memory): steps for key, steps in ENTRIES.items()}
    choose = tables._as_rule(by_kind, lambda *_: ("builtin", "why"))
    pair: Any = Pair()
    float32, float64 = np.dtype("float32"), np.dtype("float64")
    asked = [
        (1, UNREGISTERED),
        (4096, UNREGISTERED),
        (4097, UNREGISTERED),
        (1 << 40, UNREGISTERED),
        (1, ALLOCATED),
        (1, GPU),
    ]
    chosen = [choose(pair, nbytes, float32, memory)[0] for nbytes, memory in asked]
    assert chosen == ["native", "native", "ring", "ring", "shared", "builtin"]
    assert choose(pair, 1, float64, UNREGISTERED)[0] == "builtin"
    why = [choose(pair, nbytes, float32, memory)[1] for nbytes, memory in asked[1:5]]
    assert [text.removeprefix("measured fastest for ") for text in why] == [
        "sizes up to 4096 bytes of float32 in foreign memory",
        "sizes above 4096 bytes of float32 in foreign memory",
        "sizes above 4096 bytes of float32 in foreign memory",
        "all sizes of float32 in allocated memory",
    ]


def test_where_the_table_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tables.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = tables.table_path()
    assert default is not None
    assert default.parent == tmp_path / "allreduce"
    monkeypatch.setenv(tables.ENVIRONMENT, "/a/table")
    assert tables.table_path() == Path("/a/table")
    assert tables.table_path("/given") == Path("/given")
    assert tables.table_path("") is None


def ask(
    mpirun: JobRunner, tmp_path: Path, *tables: Path, dtype: str = "float32", **env: Any
) -> tuple[list[str], list[str]]:
    """Return the backends that auto selects for 4096 and 4100 bytes on two ranks with each table in turn, and its
    messages."""
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    variables = {"XDG_CACHE_HOME": str(tmp_path), **{key: str(value) for key, value in env.items()}}
    job = mpirun(2, [script, dtype, *tables], env=variables)
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stderr.splitlines() if '"auto" decides' in line]
    return job.stdout.replace("chose ", "").split(), said


@pytest.fixture
def table_file(mpirun: JobRunner, tmp_path: Path) -> Path:
    """A table for this machine under Open MPI, whatever MPI runs these tests."""
    code = "from tests.collectives.test_decision_table import ENTRIES, tables; print(tables.dumps(ENTRIES))"
    job = mpirun(1, ["-c", code])
    path = tmp_path / "table.json"
    path.write_text(job.stdout)
    return path


def test_auto_uses_a_table_and_says_it_once(mpirun: JobRunner, tmp_path: Path, table_file: Path) -> None:
    for chosen, said in (
        ask(mpirun, tmp_path, table_file),
        ask(mpirun, tmp_path, ALLREDUCE_TABLE=table_file),
    ):
        assert chosen == ["native", "ring"]
        assert said == [f'allreduce: "auto" decides by the measured table {table_file}']


def test_auto_does_without_a_table_that_it_cannot_use(mpirun: JobRunner, tmp_path: Path, table_file: Path) -> None:
    builtin, said = ask(mpirun, tmp_path)
    assert said == []  # that there is none is no news
    corrupt, foreign = tmp_path / "corrupt.json", tmp_path / "foreign.json"
    corrupt.write_text(table_file.read_text()[:100])
    foreign.write_text(table_file.read_text().replace('"cores": ', '"cores": 99'))
    os.mkfifo(tmp_path / "pipe")
    refused = {corrupt: "not JSON", foreign: "another machine", tmp_path: "Is a directory"}
    refused |= {tmp_path / "pipe": "not a regular file", Path("/dev/zero"): "not a regular file"}
    chosen, said = ask(mpirun, tmp_path, *refused)
    assert chosen == builtin * len(refused)
    for line, (path, complaint) in zip(said, refused.items(), strict=True):
        assert f"the table {path} is refused: " in line
        assert complaint in line


def test_auto_never_lets_native_sum_halves(mpirun: JobRunner, tmp_path: Path, table_file: Path) -> None:
    """A table edited by hand can't make results wrong."""
    table_file.write_text(table_file.read_text().replace("float32", "float16").replace('"ring"', '"native"'))
    chosen, _ = ask(mpirun, tmp_path, table_file, dtype="float16")
    assert "native" not in chosen
