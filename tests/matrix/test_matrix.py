"""Random fits in which features meet, each against one process; `python -m tests.matrix` runs thousands."""

import importlib.util
from collections import Counter

import pytest

from tests import launch
from tests.conftest import lacking
from tests.matrix import refused
from tests.matrix.case import FIXED, FOUND, MOST_RANKS, TRANSFORMS, case_of
from tests.matrix.jobs import outcomes, ranks_of
from trainers.strategies.transforms import chosen

SEED = 1
FEW = {"jax": 3, "keras": 3}  # ranks: the import of these takes each rank seconds
CASES = [each for each in range(60) if ranks_of(case := case_of(SEED, each)) <= FEW.get(case.framework, MOST_RANKS)]


def test_every_transform_is_drawn() -> None:
    names = [kind.__name__ for kind in chosen.TRANSFORMS]
    assert sorted(TRANSFORMS) == sorted(names)
    table = (launch.ROOT / "docs/run/loop.md").read_text()
    assert [name for name in names if f"\n| `{name}(" not in table] == []


@pytest.mark.jobs
def test_fits_in_which_features_meet_are_those_of_one_process() -> None:
    """All pairs of features, and random combinations."""
    missing = [name for name in ("torch", "jax", "keras") if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"{missing} are not installed here")
    try:
        came = list(outcomes(SEED, [*FIXED, *CASES]))
    except launch.MissingEnvironmentError as error:
        lacking(error)
    wrong = [f"{case_of(SEED, each.number)}\n{each.why}" for each in came if each.outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
    assert all(each.outcome == "right" for each in came if -len(FOUND) <= each.number < 0)
    assert len(came) == len(FIXED) + len(CASES)
    assert Counter(each.outcome for each in came)["right"] > len(came) * 0.6
    fixed = [each for each in came if each.number < 0]
    assert refused.page(fixed) == refused.PAGE.read_text(), "write it anew: python -m tests.matrix --refused"
    pairs = refused.listed()
    unexplained = [
        f"{case}\n{each.why}"
        for each in came
        if each.outcome == "refused" and not refused.explained(case := case_of(SEED, each.number), pairs)
    ]
    assert not unexplained, "\n".join(unexplained)
