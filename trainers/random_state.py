"""The state of the random numbers that programs draw without a generator of their own: Python's and NumPy's.

A data set that augments its rows, or a replica that drops units, may draw from them. A replica brings its framework's.
"""

import random

import numpy as np

PYTHON, NUMPY = "random.python", "random.numpy"


def take() -> dict[str, np.ndarray]:
    """The state as arrays."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        PYTHON: np.array([version, *words], np.int64),
        f"{PYTHON}.gauss": np.array([] if gauss is None else [gauss]),
        NUMPY: np.array([place, has_gauss, *keys], np.int64),
        f"{NUMPY}.gauss": np.array([cached]),
    }


def load(state: dict[str, np.ndarray]) -> None:
    """Go on with what `take` returned."""
    version, *words = state[PYTHON].tolist()
    gauss = state[f"{PYTHON}.gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    place, has_gauss, *keys = state[NUMPY].tolist()
    (cached,) = state[f"{NUMPY}.gauss"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), place, has_gauss, cached))
