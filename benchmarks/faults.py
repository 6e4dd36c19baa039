"""Kills ranks of real jobs, again and again: a front of tests/faults, which only a checkout has.

python -m benchmarks.faults --runs 300      the same as python -m tests.faults --runs 300, from any folder
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fault framework of this checkout; the exit code."""
    if not (TESTS / "faults" / "__main__.py").exists():
        print(
            f"benchmarks.faults: error: there is no {TESTS / 'faults'}: faults are injected by the tests, which are in "
            "a checkout of the repository and not in the wheel; run it there",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(TESTS))
    return int(importlib.import_module("faults.__main__").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
