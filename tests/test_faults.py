"""The drivers of tests/faults, in short: random programs with an injected disagreement, and the table of leaks."""

import sys
from pathlib import Path

import launch
import pytest
from conftest import JobRunner, lacking

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import programs
import random_programs

LEAKS = Path(__file__).parent / "faults" / "leaks.py"


def run_programs(mpi: str, *arguments: str) -> int:
    try:
        return programs.main(["--mpi", mpi, *arguments])
    except launch.MissingEnvironmentError as error:
        lacking(error)
        raise


@pytest.mark.jobs
@pytest.mark.parametrize("mpi", launch.MPIS)
def test_no_program_is_wrong_or_hangs_or_ends_in_a_raw_error(mpi: str) -> None:
    """Its table and the numbers of bad programs are in the captured output."""
    assert run_programs(mpi, "--programs", "40", "--seed", "7", "--timeout", "2", "--limit", "30", "--jobs", "3") == 0


@pytest.mark.jobs
def test_a_program_that_hangs_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """With a time-out that does not come in time."""
    two = ["--kinds", "asleep", "--checks", "always", "--programs", "2", "--seed", "3", "--timeout", "500"]
    assert run_programs("openmpi", *two, "--limit", "4") == 1
    assert "hang: --only 3000000 (asleep, check always)" in capsys.readouterr().out


def test_every_program_but_those_of_kind_none_has_one_rank_that_differs() -> None:
    for seed in range(500):
        program = random_programs.make(seed)
        assert (program.calls == program.injected) == (program.kind == "none"), str(program)
        assert program == random_programs.make(seed)


def test_what_is_right_is_told_from_the_calls_of_all_ranks() -> None:
    call = random_programs.Call("reduce", length=3, dtype="float32", op="sum")
    other = random_programs.Call("reduce", length=3, dtype="float32", op="max")
    program = random_programs.Program(0, 2, "first", None, False, "op", 1, (call, call), (call, other))
    sides = [random_programs.values(call, rank, 0) for rank in range(2)]
    right = random_programs.expected(program, call, 0)
    assert right is not None
    assert right.tolist() == (sides[0] + sides[1]).tolist()
    assert random_programs.expected(program, call, 1) is None  # a sum and a maximum
    assert random_programs.expected(program, call, 2) is None  # no rank has a third call


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_nothing_leaks(mpirun: JobRunner, mpi: str) -> None:
    job = mpirun(2, [LEAKS, "--scale", "0.01"], mpi=mpi, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "nothing grew" in job.stdout
