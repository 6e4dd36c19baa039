"""Which cases of a test with many parameters a job runs: so many that each pair of values of two parameters is there.

A fault shows itself in one value, or in two that come together, hardly ever in three alone. 2 ranks of Open MPI run all
cases.
"""

import itertools
import zlib

Pair = tuple[tuple[int, str], ...]


def chosen(tests: list[str], job: str) -> set[str]:
    """Return the names of the tests that a job runs: all of a test with one or two parameters, otherwise a choice.

    A part of a name in brackets counts as a parameter: "test_grid[ring-twos-float32]" has three. A test whose names
    have different numbers of parts runs whole.
    """
    cases: dict[str, dict[str, list[str]]] = {}
    for test in tests:
        function, _, values = test.partition("[")
        cases.setdefault(function, {})[test] = values.removesuffix("]").split("-")
    found: set[str] = set()
    for each in cases.values():
        found |= covering(each, job) if len({len(parts) for parts in each.values()}) == 1 else each.keys()
    return found


def covering(cases: dict[str, list[str]], job: str) -> set[str]:
    """Return the names of few cases that have, together, each pair of values that any case has."""
    pairs: dict[str, set[Pair]] = {
        name: {*itertools.combinations(enumerate(parts), min(2, len(parts)))} for name, parts in cases.items()
    }
    # Cases of equal worth are taken in another order in each job, so the jobs together run most cases.
    order = sorted(pairs, key=lambda name: zlib.crc32(f"{job} {name}".encode()))
    missing = set[Pair]().union(*pairs.values())
    found: set[str] = set()
    while missing:
        best = max(order, key=lambda name: len(pairs[name] & missing))
        found.add(best)
        missing -= pairs[best]
    return found
