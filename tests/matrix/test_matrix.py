"""Random fits in which features meet, each against one process; `python -m tests.matrix` runs thousands."""

import importlib.util
from collections import Counter

import pytest

from tests import launch
from tests.conftest import lacking
from tests.matrix import refused
from tests.matrix.case import FIXED, FOUND, MOST_RANKS, TRANSFORMS, case_of, merged
from tests.matrix.jobs import outcomes
from trainers.strategies.transforms import chosen

SEED = 1
FEW = {"jax": 2, "keras": 3}  # ranks: the import of these takes each rank seconds
DRAWN = [each for each in range(90) if (case := case_of(SEED, each)).needed <= FEW.get(case.framework, MOST_RANKS)]


def test_every_transform_is_drawn() -> None:
    names = [kind.__name__ for kind in chosen.TRANSFORMS]
    assert sorted(TRANSFORMS) == sorted(names)
    table = (launch.ROOT / "docs/run/loop.md").read_text()
    assert [name for name in names if f"\n| `{name}(" not in table] == []


@pytest.mark.jobs
def test_fits_in_which_features_meet_are_those_of_one_process() -> None:
    """All pairs of features, several in a case, and random combinations."""
    missing = [name for name in ("torch", "jax", "keras") if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"{missing} are not installed here")
    pairs, found, many = refused.listed(), range(-len(FOUND), 0), [FIXED[0] - 1 - each for each in range(len(merged()))]
    fixed = {each: case_of(SEED, each) for each in FIXED}
    alone = [each for each, case in fixed.items() if case.compress or refused.explained(case, pairs)]
    numbers = [*sorted({*found, *alone}), *many, *DRAWN]
    assert len(numbers) >= 200
    try:
        came = list(outcomes(SEED, numbers))
    except launch.MissingEnvironmentError as error:
        lacking(error)
    wrong = [f"{case_of(SEED, each.number)}\n{each.why}" for each in came if each.outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
    assert all(each.outcome == "right" for each in came if each.number in found)
    assert len(came) == len(numbers)
    assert Counter(each.outcome for each in came)["right"] > len(came) * 0.6
    written = refused.page(each for each in came if each.number in FIXED)
    assert written == refused.PAGE.read_text(), "write it anew: python -m tests.matrix --refused"
    unexplained = [
        f"{case}\n{each.why}"
        for each in came
        if each.outcome == "refused" and not refused.explained(case := case_of(SEED, each.number), pairs)
    ]
    assert not unexplained, "\n".join(unexplained)
