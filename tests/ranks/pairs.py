"""Which cases of a test with several parameters a job runs: so many that the jobs together have each pair of values.

A fault shows itself in one value, or in two that come together, hardly ever in three alone. The number of ranks and the
MPI count as values too. 2 ranks of Open MPI run each pair, so each other job runs each value once, and one of Open MPI
also the pairs with a value that 2 ranks do not have.
"""

import itertools
import zlib
from collections.abc import Collection

Values = tuple[tuple[int, str], ...]
OF_MORE_RANKS = {"flat", "twos", "uneven", "uneven hosts"}  # divisions that are others than those of 2 ranks
SEVERAL_NODES = {"ones", "twos", "uneven", "uneven hosts", "hosts of one"}
ONE_NODE = {"shared", "shared+staged"}  # backends that are refused on several nodes, so their tests are skipped there


def chosen(tests: list[str], job: str, every_pair: Collection[str] = (), own_pairs: bool = True) -> set[str]:
    """Return the names of the tests that a job runs: all of a test with one parameter, otherwise a choice.

    A part of a name in brackets counts as a parameter: "test_grid[ring-twos-float32]" has three. A test whose names
    have different numbers of parts runs whole. every_pair: tests of which each pair of values runs. own_pairs: whether
    the pairs run that 2 ranks do not have.
    """
    cases: dict[str, dict[str, list[str]]] = {}
    for test in tests:
        function, _, values = test.partition("[")
        parts = values.removesuffix("]").split("-")
        if ONE_NODE.isdisjoint(parts) or SEVERAL_NODES.isdisjoint(parts):
            cases.setdefault(function, {})[test] = parts
    found: set[str] = set()
    for function, each in cases.items():
        alike = len({len(parts) for parts in each.values()}) == 1
        found |= covering(each, job, function in every_pair, own_pairs) if alike else each.keys()
    return found


def covering(cases: dict[str, list[str]], job: str, every_pair: bool, own_pairs: bool) -> set[str]:
    """Return the names of few cases that have, together, what the job needs of the values that any case has."""
    needed = {name: needs(parts, every_pair, own_pairs) for name, parts in cases.items()}
    # Cases of equal worth are taken in another order in each job, so the jobs together run most cases.
    order = sorted(needed, key=lambda name: zlib.crc32(f"{job} {name}".encode()))
    missing = set[Values]().union(*needed.values())
    found: set[str] = set()
    while missing:
        best = max(order, key=lambda name: len(needed[name] & missing))
        found.add(best)
        missing -= needed[best]
    return found


def needs(parts: list[str], every_pair: bool, own_pairs: bool) -> set[Values]:
    """Return the values of a case, and its pairs that run. own_pairs: those that 2 ranks do not have are of other
    divisions into nodes, and of composed backends ("ring+root"), which have fewer dtypes there."""
    values = [*enumerate(parts)]

    def own(pair: Values) -> bool:
        return own_pairs and any(value in OF_MORE_RANKS or "+" in value for _, value in pair)

    pairs = [pair for pair in itertools.combinations(values, 2) if every_pair or own(pair)]
    return {*((value,) for value in values), *pairs}
