"""PowerSGD's arithmetic: orthonormal vectors, products whose bits depend on no BLAS, the division of a buffer."""

import numpy as np
import pytest

from allreduce import Part
from allreduce.arrays import low_rank
from allreduce.arrays.low_rank import Matrix
from allreduce.errors import OptionError
from allreduce.memory.allocations import Allocations


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_orthogonal(scale: float) -> None:
    vectors = (np.random.default_rng(0).normal(size=(6, 500)) * scale).astype("float32")
    vectors[2] = vectors[0] * 3 - vectors[1]  # depends on the others
    vectors[4] = 0
    before = vectors.copy()
    low_rank.orthogonalize(vectors)
    products = vectors.astype(float) @ vectors.T.astype(float)
    wanted = np.eye(6)
    wanted[4, 4] = 0
    np.testing.assert_allclose(products, wanted, atol=1e-6)
    back = before.astype(float) / scale @ vectors.T @ vectors
    np.testing.assert_allclose(back, before.astype(float) / scale, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 16, 40])
def test_products_are_exact_in_any_order(rank: int) -> None:
    rng = np.random.default_rng(rank)
    left, right = rng.normal(size=(rank, 33)).astype("float32"), rng.normal(size=(rank, 50)).astype("float32") * 1e-5
    one, other = low_rank.fixed_point(left), low_rank.fixed_point(right)
    whole = one.T @ other
    for order in (np.arange(rank + 1), rng.permutation(rank + 1)):
        total = np.zeros_like(whole)
        for number in order:
            total += one[number][:, None] * other[number]
        assert total.tobytes() == whole.tobytes()
    parts = np.concatenate([one[:, rows].T @ other for rows in (slice(0, 1), slice(1, 20), slice(20, 33))])
    assert parts.tobytes() == whole.tobytes()
    exact = left.T.astype(float) @ right
    assert np.abs(whole - exact).max() < 2.0**-20 * rank * np.abs(left).max() * np.abs(right).max()
    zero = low_rank.fixed_point(np.zeros_like(left)).T @ low_rank.fixed_point(-np.abs(right))
    assert not np.signbit(zero).any()
    for scale in (1e-37, 1e-39, 1e-45):  # as small as float32 has them
        small = (left * scale).astype("float32")
        np.testing.assert_allclose(low_rank.fixed_point(small)[:rank], small, rtol=1e-4, atol=scale * 1e-4)


def test_plan() -> None:
    long = low_rank.LONG + 1
    parts = (
        Part("w", 0, (40, 3, 10)),
        Part("b", 1200, (40,)),
        Part("small", 1240, (4, 4)),
        Part("v", 1260, (60, 50)),
        Part("table", 4260, (long,)),
    )
    plan = low_rank.plan(parts, 4260 + long, 4, 2)
    assert plan.matrices == [Matrix(0, 40, 30, 4), Matrix(1260, 60, 50, 4)]
    assert plan.short == [slice(1200, 1260)]
    assert plan.long == [slice(4260, 4260 + long)]
    everything = low_rank.plan(parts, 4260 + long, 8, 0)
    assert [each.rank for each in everything.matrices] == [8, 4, 8]


@pytest.mark.parametrize("columns", [1, 7, 100, low_rank.BLOCK + 3])
def test_tiles(columns: int) -> None:
    """They cover each element once, at its row and column."""
    matrix = Matrix(5, 11, columns, 1)
    size = 11 * columns
    values = np.arange(size + 9) - 5
    seen = np.zeros(size, int)
    for share in (slice(0, size // 3), slice(size // 3, size // 3), slice(size // 3, size)):
        for tile in low_rank.tiles(matrix, share):
            table = tile.of(values)
            rows, place = np.mgrid[tile.rows, tile.columns]
            assert (table == rows * columns + place).all()
            seen[table] += 1
    assert (seen == 1).all()


def test_a_lost_row_is_drawn_anew() -> None:
    matrix = Matrix(0, 9, 20, 2)
    held = np.zeros((2, 20), "float32")
    held[0] = 2e-38
    factor = low_rank.start_factor(held, matrix, held.dtype, [1, 2])
    assert 0.5 <= factor[0].max() < 1
    assert np.linalg.norm(factor[1]) > 1
    assert (factor == low_rank.start_factor(held, matrix, held.dtype, [1, 2])).all()
    assert (factor[1] != low_rank.start_factor(held, matrix, held.dtype, [1, 3])[1]).any()


def test_states_of_others() -> None:
    registry = Allocations()
    array = np.zeros(100, "float32")
    registry.describe(array)
    for name, shape in (
        ("1/residual", 100),
        ("0/residual", 99),
        ("0/factor/0/10x11", (2, 11)),
        ("0/factor/0/10x10", (2, 11)),
        ("0/factor/x", (2, 11)),
        ("0/calls", (2, 3)),
    ):
        with pytest.raises(OptionError, match="state of a compression"):
            registry.load_state({name: np.zeros(shape, int if "calls" in name else "float32")})
    state = {"0/factor/0/10x10": np.ones((2, 10), "float32"), "0/calls": np.array([[0, 7]])}
    registry.load_state(state)
    found = registry.state()
    assert found.keys() == state.keys()
    assert all((found[name] == state[name]).all() for name in state)
    registry.reset()
    assert registry.state() == {}
