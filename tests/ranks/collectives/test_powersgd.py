"""PowerSGD on all backends and nodes: the same bits on all ranks, and errors that later calls send."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Part, PowerSGD, errors, notices
from allreduce.backend import AllReduce
from tests.ranks.collectives.lossy import residual, same_bits
from tests.ranks.grid import shapes
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 2 3 5, mpich 2"

WORLD = MPI.COMM_WORLD
rank, size = WORLD.rank, WORLD.size
several = pytest.mark.skipif(size == 1, reason="one rank sends nothing")
PARTS = [Part("w", 3, (60, 5, 8)), Part("b", 2403, (60,)), Part("v", 2463, (30, 40)), Part("c", 3663, (2, 3))]
LENGTH = 3700
NAMES = ("ring", "native", "shared", "auto")
CASES = [(name, None) for name in NAMES] + [
    (name, shape) for name in ("hierarchical_copy", "auto") for key, shape in shapes(size).items() if key != "flat"
]


def gradient(step: int, of: int = rank, dtype: str = "float32", length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng([step, of]).normal(size=length).astype(dtype)


def described(reduce: AllReduce, dtype: str = "float32") -> np.ndarray:
    array = reduce.allocate(LENGTH, dtype)
    reduce.describe(array, PARTS)
    return array


def reference(parts: list[np.ndarray], start: np.ndarray) -> np.ndarray:
    """Return the mean as PowerSGD sends it, in float64. parts: of every rank, with their errors."""
    whole = np.mean(parts, axis=0)
    left = np.linalg.qr(whole @ start)[0]
    return left @ (whole.T @ left).T


@several
@pytest.mark.every_pair
@pytest.mark.parametrize(("name", "nodes"), CASES)
def test_against_a_reference(name: str, nodes: Any, topology_of: Any) -> None:
    with allreduce.create(name, topology_of(nodes), compress=PowerSGD(3, start_powerSGD_iter=0)) as reduce:
        array = described(reduce)
        rows, columns = 60, 40
        errors_ = [np.zeros((rows, columns)) for _ in range(size)]
        for step in range(4):
            start = next((each for key, each in reduce.state().items() if "factor/3/" in key), None)
            array[:] = gradient(step)
            reduce(array, "mean")
            found = array[3:2403].reshape(rows, columns)
            parts = [gradient(step, of)[3:2403].reshape(rows, columns) + errors_[of] for of in range(size)]
            wanted = found if start is None else reference(parts, start.T.astype(float))
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            assert np.linalg.matrix_rank(found, tol=1e-3) == 3
            errors_ = [each - found for each in parts]


@several
@pytest.mark.parametrize("wide", [3, 7, 50])
def test_a_high_rank_is_exact(wide: int, flat: allreduce.Topology) -> None:
    options = PowerSGD(7, start_powerSGD_iter=0, min_compression_rate=0)
    with allreduce.create("ring", flat, compress=options) as reduce:
        for shape in ((7, wide), (wide, 7)):
            array = gradient(0, length=7 * wide).reshape(shape)
            right = np.mean([gradient(0, of, length=7 * wide) for of in range(size)], axis=0).reshape(shape)
            reduce(array, "mean")
            np.testing.assert_allclose(array, right, atol=1e-5)
            same_bits(array)


@several
@pytest.mark.parametrize("feedback", [True, False])
def test_a_low_rank_sum_is_found(feedback: bool, flat: allreduce.Topology) -> None:
    """Gradients of rank 2 are sent exactly, also without error feedback."""
    options = PowerSGD(2, start_powerSGD_iter=0, use_error_feedback=feedback)
    rng = np.random.default_rng(5)
    basis = rng.normal(size=(2, 40))
    with allreduce.create("shared", flat, compress=options) as reduce:
        array = described(reduce)
        for _ in range(3):
            tables = [rng.normal(size=(60, 2)) @ basis for _ in range(size)]
            array[:] = 0
            array[3:2403] = tables[rank].ravel()
            reduce(array, "mean")
            np.testing.assert_allclose(array[3:2403], np.mean(tables, axis=0).ravel(), atol=1e-4)
        array[:] = gradient(0)
        reduce(array, "mean")
        assert any(WORLD.allgather(residual(reduce, array).any())) == feedback


@several
@pytest.mark.parametrize("name", ["ring", "shared"])
def test_not_finite(name: str, flat: allreduce.Topology) -> None:
    with allreduce.create(name, flat, compress=PowerSGD(2, start_powerSGD_iter=0)) as reduce:
        array = described(reduce)
        array[:] = gradient(0)
        reduce(array, "mean")
        array[:] = gradient(1)
        if rank == size - 1:
            array[100] = np.inf
        reduce(array, "mean")
        assert np.isnan(array[3:2403]).all()
        assert np.isfinite(array[2403:]).all()
        assert np.isfinite(residual(reduce, array)).all()
        array[:] = gradient(2)
        reduce(array, "mean")
        same_bits(array)
        assert np.isfinite(array).all()
        array[:] = 0
        reduce.reset()
        reduce(array, "mean")
        assert (array == 0).all()
        array[:] = gradient(3)
        reduce(array, "mean")
        assert (array[3:2403] != 0).all()  # a zero gradient does not end the compression


@several
def test_arrays_that_are_not_compressed(flat: allreduce.Topology, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    with allreduce.create("ring", flat, compress=PowerSGD(2, start_powerSGD_iter=0)) as reduce:
        vector = gradient(0)
        reduce(vector, "mean")
        right = np.mean([gradient(0, of) for of in range(size)], axis=0)
        np.testing.assert_allclose(vector, right, atol=1e-5)
        reduce(vector, "max")
        counts = np.full((40, 40), rank)
        reduce(counts, "sum")
        assert (counts == sum(range(size))).all()
        table = gradient(0, length=3600).reshape(60, 60)
        reduce(table, "mean")
        assert np.linalg.matrix_rank(table, tol=1e-4) == 2
        same_bits(table)
    with allreduce.create("ring", flat, compress=PowerSGD(41, start_powerSGD_iter=0)) as reduce:
        reduce(described(reduce), "mean")
    text = " ".join(record.getMessage() for record in caplog.records)
    assert rank or "describe" in text or "sent uncompressed" in text
    assert rank or "the rank 41 is above the rows or columns" in text


@several
@pytest.mark.parametrize("name", ["ring", "shared"])
def test_a_state_that_one_rank_forgets(name: str, flat: allreduce.Topology) -> None:
    """All ranks raise the same error; after a reset on all of them the calls go on."""
    with allreduce.create(name, flat, compress=PowerSGD(2, start_powerSGD_iter=0)) as reduce:
        array = described(reduce)
        for _ in range(2):
            array[:] = gradient(1)
            reduce(array)
        if rank == size - 1:
            reduce.reset(array)
        raised_everywhere(WORLD, errors.DisagreementError, lambda: reduce(array))
        reduce.reset(array)
        reduce(array)
        same_bits(array)
