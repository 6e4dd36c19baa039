"""The rows of tests/programs, without a job."""

from pathlib import Path

import pytest

from tests.programs import __main__ as programs
from tests.programs.catalog import Program

PROGRAM = Program("Made: up.py", "numpy", "up.py", shows="loss", refused="NotOfferedError", why="by name")


@pytest.mark.parametrize(
    ("gloo", "ours", "text", "expected"),
    [
        (("passed", ["1"]), ("passed", ["1"]), "passed | passed", True),
        (("passed", ["1"]), ("passed", ["2"]), "passed | differing: 2 in place of 1", False),
        (("passed", ["1"]), ("OSError: no", []), "passed | OSError: no", False),
        (("passed", ["1"]), ("NotOfferedError: no", []), "passed | refused: by name", True),
        (("OSError: no", []), ("OSError: no", []), "OSError: no | OSError: no", True),
        (("OSError: no", []), ("passed", ["1"]), "OSError: no | passed", True),
    ],
)
def test_a_row_says_how_a_program_ended(
    monkeypatch: pytest.MonkeyPatch, gloo: tuple, ours: tuple, text: str, expected: bool
) -> None:
    ends = {"gloo": gloo, "allreduce": ours}
    monkeypatch.setattr(programs, "run", lambda program, backend, ranks, work: ends[backend])
    row, good = programs.row(PROGRAM, Path(), 2)
    assert row.endswith(f" | 2 | {text} |")
    assert good == expected
