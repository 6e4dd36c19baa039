"""The command by which a program was started, and the numbers of processes that were started behind it."""

import pytest
from mpi4py import MPI

from allreduce import ending
from allreduce.errors import UnavailableError
from allreduce.program import Program


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["train.py", "-m", "5"], Program((), "", "train.py", ("-m", "5"))),
        (["-u", "-W", "ignore", "-Xdev", "train.py"], Program(("-u", "-W", "ignore", "-Xdev"), "", "train.py", ())),
        (["-m", "trainers", "--data", "iris"], Program((), "-m", "trainers", ("--data", "iris"))),
        (["-uc", "import x", "-c"], Program(("-u",), "-c", "import x", ("-c",))),
        (["-mtrainers"], Program((), "-m", "trainers", ())),
        (["--check-hash-based-pycs", "never", "a"], Program(("--check-hash-based-pycs", "never"), "", "a", ())),
    ],
)
def test_a_command_of_python(command: list[str], program: Program) -> None:
    assert Program.parse(command) == program
    assert Program.parse(program.command) == program


@pytest.mark.parametrize("command", [[], ["-i"], ["-"], ["-u", "-W", "ignore"]])
def test_no_command_that_can_be_run_again(command: list[str]) -> None:
    with pytest.raises(UnavailableError, match="can be run again"):
        Program.parse(command)


def test_processes_that_were_started_later_have_numbers_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_numbered", [])
    assert ending.world_ranks(MPI.COMM_SELF) == (0,)
    ending.here.cache_clear()
    ending.become(7)
    try:
        assert ending.here() == (7, 8)
        ending.know(MPI.COMM_SELF, [7], 9)
        assert ending.world_ranks(MPI.COMM_SELF) == (7,)
        assert ending.here() == (7, 9)
    finally:
        ending.here.cache_clear()
