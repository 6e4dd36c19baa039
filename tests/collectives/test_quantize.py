"""Codes of int8 with a scale for each block, which are unbiased over seeds."""

import numpy as np
import pytest

from allreduce import kernels
from allreduce.arrays import quantize
from allreduce.arrays.quantize import PIECE, Quantizer

pytestmark = pytest.mark.skipif(kernels.status() != "C", reason=f"arrays are computed by {kernels.status()}")

LENGTHS = [1, 7, 255, 256, 257, 5000, PIECE, PIECE + 1, 2 * PIECE + 777]


def encoded(quantizer, values, **options):
    """Return the scales and codes of `values`, what is decoded, and the error."""
    message, error = np.full(quantizer.nbytes(values.size), 0xAA, np.uint8), np.full_like(values, 9)
    with np.errstate(all="ignore"):
        quantizer.encode(values, message, error, **options)
    scales = message[: 4 * quantizer.blocks(values.size)].view(np.float32)
    decoded = np.full_like(values, 7)
    with np.errstate(all="ignore"):
        quantizer.decode(message, decoded)
    return scales, message[scales.nbytes :], decoded, error


def of_elements(scales, quantizer, length):
    return np.repeat(scales, quantizer.block)[:length]


def gradients(length, spread=3.0, seed=0):
    """Values whose magnitudes differ by many powers of two, and some zeros."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=length) * np.exp(spread * rng.normal(size=length))
    return np.where(rng.random(length) < 0.1, 0, values).astype(np.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_scales_and_errors(length):
    quantizer = Quantizer()
    values = gradients(length)
    scales, codes, decoded, error = encoded(quantizer, values)
    blocks = [values[start : start + quantizer.block] for start in range(0, length, quantizer.block)]
    largest = np.array([np.abs(block).max() for block in blocks])
    assert codes.size == length
    np.testing.assert_allclose(scales, np.maximum(largest, 2.0**-119) / 127, rtol=1e-6)
    assert (np.abs(error) <= of_elements(scales, quantizer, length)).all()  # the code above or below
    assert codes.view(np.int8).min() >= -127
    unit = of_elements(scales, quantizer, length)
    assert (np.abs(values - decoded - error) <= 2.0**-20 * unit).all(), "original = sent + error"
    total = gradients(length, seed=1)
    wanted = total + decoded
    message = np.concatenate([scales.view(np.uint8), codes])
    quantizer.add(message, total)
    np.testing.assert_array_equal(total, wanted)
    double = np.empty(length)
    quantizer.decode(message, double)
    np.testing.assert_array_equal(double, decoded)


def test_extreme_magnitudes():
    for size in (2.0**127, 1e30, 1e12, 1.0, 1e-30, 1e-38):
        values = (np.linspace(-1, 1, 300) * np.float64(size)).astype(np.float32)
        _, _, decoded, error = encoded(Quantizer(100), values)
        assert np.isfinite(decoded).all(), size
        assert (np.abs(error) <= np.maximum(size / 14, 2.0**-126)).all(), size
    zeros = np.zeros(300, np.float32)
    _, _, decoded, error = encoded(Quantizer(100), zeros)
    assert not decoded.any()
    assert not error.any()


def test_codes_are_unbiased_over_seeds():
    values = np.array([0.001, 0.25, -0.25, 0.5, 3.3, -77.9, 126.99, -126.99, 127, -127, 0], np.float32)
    quantizer, seeds = Quantizer(), 4000
    found = np.empty((seeds, values.size))
    for seed in range(seeds):
        quantizer.seed(seed, 1)
        found[seed] = encoded(quantizer, values)[2]
    assert ((np.abs(found - values)) < 1).all()
    fraction = values % 1
    deviation = np.sqrt(fraction * (1 - fraction) / seeds)
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - values), 5 * deviation + 1e-6)
    quarter, half = found[:, 1] > 0, found[:, 3] > 0
    assert abs(np.corrcoef(quarter, half)[0, 1]) < 0.1, "the elements of a block are rounded independently"


def test_codes_round_up_with_the_probability_of_the_fraction():
    """Over all places of the table, not one of which comes twice."""
    table = quantize._random_numbers()
    assert np.unique(table[: quantize.LARGEST_RANDOM]).size == quantize.LARGEST_RANDOM
    for fraction in (0.25, 1 / 3, 2.0**-14):
        ups = np.floor(np.float32(100 + fraction) + table[: quantize.LARGEST_RANDOM]) - 100
        assert abs(ups.mean() - fraction) <= 2.0**-16
