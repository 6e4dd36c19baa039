"""The two tables: element types and operations."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.errors import UnsupportedDtypeError, UnsupportedOpError

NAMES = ("float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8", "int8", "bool")


def test_table_is_whole() -> None:
    assert {str(dtype) for dtype in dtypes.TYPES} == set(NAMES)
    rows = dtypes.TYPES.values()
    assert len({row.code for row in rows}) == len(NAMES)
    assert len({row.nccl for row in rows}) == len(NAMES) - 1  # NCCL has no truth values; bytes do
    for dtype, row in dtypes.TYPES.items():
        assert dtypes.wire(np.zeros(2, dtype)).dtype.itemsize == dtype.itemsize
        assert row.accumulator.itemsize == (4 if dtypes.is_half(dtype) else dtype.itemsize)


@pytest.mark.parametrize("name", NAMES)
def test_parse(name: str) -> None:
    dtype = dtypes.parse(name)
    assert str(dtype) == name
    assert dtypes.parse(dtype) == dtypes.parse(dtype.type) == dtype
    assert dtypes.is_half(dtype) == name.endswith("float16")


@pytest.mark.parametrize("bad", ["float31", "complex64", "U5", object, np.uint16, ">f8", [1], "float8_e4m3fn"])
def test_parse_refuses_by_name(bad: object) -> None:
    with pytest.raises(UnsupportedDtypeError, match=r"use one of float32, .*, bfloat16, uint8, int8, bool"):
        dtypes.parse(bad)


def test_wire_is_the_same_memory() -> None:
    for name in NAMES:
        array = np.zeros(5, dtypes.parse(name))
        wire = dtypes.wire(array)
        assert np.shares_memory(wire, array)
        assert wire.nbytes == array.nbytes
        MPI.Get_address(wire)
        memoryview(wire)  # what MPI's buffer interface reads; ml_dtypes arrays of their own refuse it


def test_operations() -> None:
    assert tuple(ops.OPS) == ("sum", "mean", "max", "min", "prod")
    assert len({op.code for op in ops.OPS.values()}) == 5
    pair = np.array([2.0, 3.0]), np.array([4.0, -1.0])
    wanted = {"sum": [6, 2], "mean": [6, 2], "max": [4, 3], "min": [2, -1], "prod": [8, -3]}
    for name, op in ops.OPS.items():
        assert op.combine(*pair).tolist() == wanted[name]


def test_mean_is_one_multiplication_at_the_end() -> None:
    mean = ops.resolve("mean", np.dtype("float64"), 8)
    piece = np.array([8.0, 16.0])
    mean.unscaled().finish(piece)
    assert piece.tolist() == [8, 16]
    mean.finish(piece)
    assert piece.tolist() == [1, 2]
    assert ops.OPS["mean"].scale is None  # the table itself is not touched


def test_average_is_another_name_of_mean() -> None:
    assert ops.resolve("average", np.dtype("float32"), 4) == ops.resolve("mean", np.dtype("float32"), 4)


def test_mean_of_bfloat16() -> None:
    assert ops.resolve("mean", np.dtype(ml_dtypes.bfloat16), 2).scale == 0.5


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8", "bool"])
def test_no_mean_of_integers(dtype: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f'op "mean" is not defined for {dtype}: use "sum"'):
        ops.resolve("mean", np.dtype(dtype), 2)


@pytest.mark.parametrize("name", ["avg", "SUM", None, 3, ["sum"]])
def test_unknown_operation(name: object) -> None:
    with pytest.raises(UnsupportedOpError, match="use one of sum, mean, max, min, prod"):
        ops.resolve(name, np.dtype("float32"), 2)  # type: ignore[arg-type]
