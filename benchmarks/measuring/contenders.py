"""Who takes part: backends of this library, and peers, each as a thing that reduces an array."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from allreduce.backend import AllReduce
from allreduce.errors import UnsupportedDtypeError


def _nothing() -> None:
    pass


def _accept(dtype: np.dtype) -> str | None:
    return None


@dataclass
class Contender:
    """call reduces a 1-D array in place, on all ranks; allocate is missing where memory can't be asked for."""

    name: str
    call: Callable[[np.ndarray], None]
    allocate: Callable[[int, np.dtype], np.ndarray] | None = None
    refuse: Callable[[np.dtype], str | None] = _accept  # why it can't reduce a dtype
    close: Callable[[], Any] = _nothing  # collective


def of_backend(backend: AllReduce, op: str) -> Contender:
    """A backend as a contender. NumPy arrays are measured, in the memory that the backend gives for them."""

    def refuse(dtype: np.dtype) -> str | None:
        try:
            backend.check_dtype(dtype)
        except UnsupportedDtypeError as error:
            return str(error)
        return None

    allocate = partial(backend.allocate, device="cpu")
    return Contender(backend.name, partial(backend, op=op), allocate, refuse, backend.close)
