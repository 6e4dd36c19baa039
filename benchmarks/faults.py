"""Runs the fault tests of tests/faults, which kill ranks of real jobs. Needs a checkout.

python -m benchmarks.faults --runs 300              the same as python -m tests.faults --runs 300, from any folder
python -m benchmarks.faults --hours 1 --mtbf 30     one training, of which a rank is killed every 30 s on average
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fault tests of this checkout; returns the exit code."""
    if not (ROOT / "tests" / "faults").exists():
        problem = f"there is no {ROOT / 'tests' / 'faults'}; run this in a checkout, since the wheel has no tests"
        print(f"benchmarks.faults: error: {problem}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    return int(importlib.import_module("tests.faults.__main__").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
