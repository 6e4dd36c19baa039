"""Colours and marks that stay with a backend, in pictures and in pages."""

import zlib

COLOURS = {
    "native": "#4d4d4d",
    "shared": "#d62728",
    "ring": "#1f77b4",
    "hierarchical_copy": "#2ca02c",
    "halving_doubling": "#9467bd",
    "reduce_to_one": "#a0662f",
    "auto": "#ff8c00",
    "nccl": "#76b900",
    "gloo": "#e377c2",
    "mpi4py": "#9a9a9a",
}
_SPARE = ("#17becf", "#bcbd22", "#003f5c", "#7a5195", "#ef5675", "#008080")
# matplotlib's mark, plotly's mark
_MARKS = (("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"))


def colour(backend: str) -> str:
    """The colour of a backend, the same in every run."""
    return COLOURS.get(backend) or _SPARE[zlib.crc32(backend.encode()) % len(_SPARE)]


def mark(backend: str) -> tuple[str, str]:
    """The backend's mark in matplotlib and in plotly: colours alone don't reach every reader."""
    known = list(COLOURS)
    index = known.index(backend) if backend in known else zlib.crc32(backend.encode())
    return _MARKS[index % len(_MARKS)]


def width(backend: str) -> float:
    """Lines that readers look for first are thicker."""
    return 2.6 if backend in ("native", "auto") else 1.8
