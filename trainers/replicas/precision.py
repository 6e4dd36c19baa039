"""The option precision="bfloat16" of replicas: its checks, and the notice about slow processors."""

import re
from pathlib import Path

from trainers.arguments import name_error, require
from trainers.errors import ArgumentError

PRECISIONS = ("float32", "bfloat16")
CPUINFO = Path("/proc/cpuinfo")
FAST = re.compile(r"\b(avx512_bf16|amx_bf16|bf16|svebf16)\b")  # flags of processors that compute with bfloat16
SLOW = (
    'precision="bfloat16": this processor does not compute with bfloat16, so it converts every number, which takes '
    'longer than precision="float32"; the results are right'
)


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


def slow_notice(device: str) -> tuple[str, ...]:
    """Return the notice that this device computes slowly with bfloat16, if it is a CPU that does."""
    try:
        flags = CPUINFO.read_text() if device == "cpu" else ""
    except OSError:  # another operating system
        flags = ""
    return (SLOW,) if flags and not FAST.search(flags) else ()
