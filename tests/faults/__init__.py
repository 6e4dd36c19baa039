"""Faults, injected into real jobs: what is drawn, what one rank runs, how a job is driven, and what became of it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))  # `launch`, for whoever is started by python -m


def job_of(name: str) -> list[str]:
    """What a rank runs of a program in `moments`, as arguments of python."""
    return ["-m", f"tests.faults.moments.{name}"]
