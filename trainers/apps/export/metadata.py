"""What an exported file (.onnx) contains: the names of its inputs, outputs and metadata. Needs no package.

Inputs, all of them with a free number of rows as the first axis, BATCH:
- A model of a table has one input for each column, named as the column, in the order of `columns`, of shape (rows,):
  double for numbers, NaN where the value is missing; string for categories, without spaces around. A missing value, or
  a value that training has not met, may be any other string, such as "".
- Any other model has one input INPUT, the raw rows as `predict` takes them: scaling is inside. A model of several
  inputs has one for each: the keys of the dict, or INPUT_0, INPUT_1 ... of a tuple. float32, or int64 for integers.

Outputs:
- A classifier: LABEL, (rows,), the name of the class as a string, or its number as int64 if `classes` is empty; and
  PROBABILITIES, (rows, classes) float32.
- Any other model: OUTPUT, as `predict` returns it, float32; of several outputs OUTPUT_0 ..., or the keys of the dict.

Metadata (`metadata_props` in the file, `session.get_modelmeta().custom_metadata_map` in onnxruntime) are the texts that
`Exported.as_properties` returns. `Exported.read` makes an Exported of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.datasets.columns import Columns
from trainers.errors import ModelFileError

FORMAT = "1"
PREFIX = "trainers."  # of the names in the metadata
PRODUCER = "trainers"  # producer_name of the file

BATCH = "batch"  # the name of the free axis
INPUT, OUTPUT = "x", "output"
LABEL, PROBABILITIES = "label", "probabilities"


@dataclass(frozen=True)
class Exported:
    """What the metadata of an exported file tells.

    kind: the class of the replica, such as "NumpyNetwork".
    classes: the names of the classes by number; empty if they have none, or if the model is no classifier.
    classifies: whether the outputs are LABEL and PROBABILITIES.
    columns: of the table on which the model was trained, or None. They are the inputs.
    average: whether the parameters are the moving average that EMA keeps.
    rows: the number of rows on which the file was compared with the replica. difference: the largest one found.
    """

    kind: str
    classes: tuple[str, ...] = ()
    classifies: bool = False
    columns: Columns | None = None
    average: bool = False
    rows: int = 0
    difference: float = 0.0

    def __str__(self) -> str:
        texts = ["the moving average"] if self.average else []
        texts += [f"checked on {self.rows} rows, which differ by {self.difference:.1e}"]
        return ", ".join(texts)

    def as_properties(self) -> dict[str, str]:
        """Return the metadata, texts by name."""
        held: dict[str, Any] = {
            "kind": self.kind,
            "classes": list(self.classes),
            "classifies": self.classifies,
            "columns": None if self.columns is None else self.columns.as_dict(),
            "average": self.average,
            "rows": self.rows,
            "difference": self.difference,
        }
        return {f"{PREFIX}format": FORMAT} | {f"{PREFIX}{name}": json.dumps(value) for name, value in held.items()}

    @staticmethod
    def wrote(properties: Mapping[str, str]) -> bool:
        """Return whether metadata are those of a file of `export`, of any version."""
        return f"{PREFIX}format" in properties

    @classmethod
    def read(cls, path: str, properties: Mapping[str, str]) -> "Exported":
        """Return what the metadata of the file at `path` tells. Raises ModelFileError if `export` did not write it."""
        found = properties.get(f"{PREFIX}format")
        if found != FORMAT:
            raise ModelFileError(
                f"{path} was not written by trainer.export(), or by another version of it: the metadata "
                f"{PREFIX}format is {found!r}, and this version reads {FORMAT!r}"
            )
        try:
            held = {name: json.loads(properties[f"{PREFIX}{name}"]) for name in cls.__dataclass_fields__}
            columns, classes = held["columns"], held["classes"]
            texts, flags = [held["kind"], *classes], [held["classifies"], held["average"]]
            measured = [held["rows"], held["difference"]]
            if not (
                isinstance(classes, list) and _all(texts, str) and _all(flags, bool) and _all(measured, int | float)
            ):
                raise ValueError(f"a value of another type in {held}")
            held |= {"classes": tuple(classes), "columns": None if columns is None else Columns.from_dict(columns)}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ModelFileError(f"the metadata of {path} are damaged: {error!r}") from error
        return cls(**held)


def _all(values: list[Any], kind: Any) -> bool:
    return all(isinstance(each, kind) and (kind is bool or not isinstance(each, bool)) for each in values)
