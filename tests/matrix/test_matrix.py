"""Random fits in which features meet, each against one process; `python -m tests.matrix` runs thousands."""

from collections import Counter

import pytest

from tests import launch
from tests.conftest import lacking
from tests.matrix.case import FOUND, case_of
from tests.matrix.jobs import outcomes

CASES, SEED = 50, 1


@pytest.mark.jobs
def test_fits_in_which_features_meet_are_those_of_one_process() -> None:
    for name in ("torch", "jax", "keras"):
        pytest.importorskip(name)
    found = [*range(-len(FOUND), 0)]
    try:
        came = list(outcomes(SEED, [*found, *range(CASES)]))
    except launch.MissingEnvironmentError as error:
        lacking(error)
    wrong = [f"{case_of(SEED, each.number)}\n{each.why}" for each in came if each.outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
    assert all(each.outcome == "right" for each in came if each.number in found)
    counts = Counter(each.outcome for each in came)
    assert counts.total() == CASES + len(FOUND)
    assert counts["right"] > CASES * 0.6
