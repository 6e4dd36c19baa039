"""The option precision="bfloat16" of replicas: its checks."""

from trainers.arguments import name_error, require
from trainers.errors import ArgumentError

PRECISIONS = ("float32", "bfloat16")


def lower_precision(precision: str | None, dtype: str) -> bool:
    """Return whether to compute with bfloat16; precision: the option. dtype: of the parameters.

    Raises ArgumentError for an unknown precision, and for one that does not suit the parameters.
    """
    if precision is None:
        return False
    if precision == "float16":
        raise ArgumentError(
            'precision="float16": gradients below 6e-8 become zero in float16 unless losses are scaled, which replicas '
            'do not do; use precision="bfloat16", which has the range of float32'
        )
    require(name_error("precision", precision, PRECISIONS))
    if dtype != "float32":
        raise ArgumentError(
            f'precision="{precision}" trains float32 parameters, and these are {dtype}: convert them to float32, or '
            "leave out precision, to compute with their dtype"
        )
    return precision == "bfloat16"
