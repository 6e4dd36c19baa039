"""Exported files (.onnx): the graph of each kind of replica, the columns of a table, int8, errors, and metadata."""

from contextlib import suppress

import pytest

from trainers.datasets.columns import Category, Columns, Number
from trainers.errors import ModelFileError
from trainers.export.metadata import Exported

COLUMNS = Columns([Number("age", 40.0, 0.1, True), Category("job", ("cook", "smith"))], "label", ["no", "yes"])


def test_metadata_are_read_as_they_were_written() -> None:
    given = Exported("NumpyNetwork", ("no", "yes"), True, COLUMNS, int8=True, accuracy={"int8": 0.5}, rows=7)
    assert Exported.read("a.onnx", given.as_properties()) == given


@pytest.mark.parametrize("name", sorted(Exported("x").as_properties()))
@pytest.mark.parametrize("text", [None, "", "[1]", "{", '{"classes": 1}', "[" * 100_000, "12", '"x"'])
def test_hostile_metadata_are_refused_or_read(name: str, text: str | None) -> None:
    properties = Exported("NumpyNetwork", ("no",), True, COLUMNS).as_properties()
    properties |= {} if text is None else {name: text}
    if text is None:
        del properties[name]
    with suppress(ModelFileError):
        Exported.read("a.onnx", properties).as_properties()
