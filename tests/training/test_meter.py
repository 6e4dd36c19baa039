"""NormMeter: the norms of an epoch, when steps are taken back."""

import numpy as np
import pytest

from trainers.watching.meter import NormMeter


def meter_of(*norms: float) -> NormMeter:
    meter = NormMeter()
    meter.on_epoch_begin(0)
    for norm in norms:
        meter.set(norm)
        meter.on_train_batch_end(0)
    return meter


@pytest.mark.parametrize("last", [0.0, 1e20, np.inf, np.nan, 0.3])
def test_a_step_taken_back_leaves_nothing(last: float) -> None:
    meter = meter_of(0.1, 0.2, last)
    meter.step_back()
    assert meter.sums().tobytes() == meter_of(0.1, 0.2).sums().tobytes()


def test_a_left_out_step_counts_for_nothing() -> None:
    meter = meter_of(0.1)
    meter.on_train_batch_end(1)
    assert meter.sums().tolist() == [0.1, 1]
    meter.step_back()
    assert meter.sums().tolist() == [0.1, 1]


def test_a_loaded_state_has_no_step_to_take_back() -> None:
    meter = meter_of(0.1, 0.2)
    other = meter_of(5.0)
    other.load_state({name: np.asarray(value) for name, value in meter.state().items()})
    other.step_back()
    assert other.sums().tobytes() == meter.sums().tobytes()
