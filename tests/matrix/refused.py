"""The table of refused combinations in the documentation: which pairs of features the trainers refuse."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests import launch
from tests.matrix.case import Case, case_of
from tests.matrix.jobs import Outcome

PAGE = launch.ROOT / "docs" / "trouble" / "combinations.md"
HEAD = """# Refused combinations

These features exclude each other: all ranks raise the error, before anything is trained. All other pairs are compared
with a training in one process, and so are random combinations of more features. `python -m tests.matrix --refused`
writes this page.

`CentralStorageTrainer` and `ParameterServerTrainer` have no `average=`, `allreduce=` of gradients, `compress=` and
`buckets=`. With `MirroredOptimizer` your loop reads the rows and keeps a moving average of the parameters, if any.

| features | error |
|---|---|
"""
SEVERAL = "several nodes"


def refused_pairs(outcomes: Iterable[Outcome]) -> dict[frozenset[str], str]:
    """Return the features of the refused pairs with the errors; of pairs that contain a refused feature, only that."""
    found = {frozenset(_features(case_of(0, each.number))): each.why for each in outcomes if each.outcome == "refused"}
    return {pair: why for pair, why in found.items() if not any(other < pair for other in found)}


def _features(case: Case) -> list[str]:
    """Return the features of a case of PAIRS, without those of the first case."""
    return [name for name in case.features() if name != f'allreduce="{Case.backend}"']


def page(outcomes: Iterable[Outcome]) -> str:
    """Return the text of the page."""
    rows = [
        f"| {' with '.join(_code(name) for name in sorted(pair, key=str.casefold))} | {_shown(why)} |\n"
        for pair, why in refused_pairs(outcomes).items()
    ]
    return HEAD + "".join(sorted(rows, key=str.casefold))


def _code(name: str) -> str:
    return name if " " in name else f"`{name}`"


def _shown(why: str) -> str:
    """Return an error for a cell of a table, without the sizes of buckets, which the matrix chooses."""
    line = re.sub(r", (?:first_)?mb=[\d.e-]+", "", why.splitlines()[0])
    return re.sub(r"^(\w+): ", r"`\1`: ", line).replace("|", r"\|")


def listed(path: Path = PAGE) -> list[set[str]]:
    """Return the sets of features that the page lists."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    return [{name.strip("`") for name in row[2:].partition(" | ")[0].split(" with ")} for row in rows]


def explained(case: Case, pairs: Sequence[set[str]]) -> bool:
    """Whether the page tells that this case is refused."""
    return any(pair <= set(case.features()) for pair in pairs)
