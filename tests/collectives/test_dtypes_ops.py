"""The two tables: element types and operations."""

import numpy as np
import pytest

from allreduce.arrays import dtypes
from allreduce.errors import UnsupportedDtypeError

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
