"""The state of the random numbers that programs draw without a generator of their own: Python's and NumPy's.

A data set that augments its rows, or a replica that drops units, may draw from them. A replica brings its framework's.
"""

import random

import numpy as np

WORDS = 624  # of the generator's state
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
    """Go on with what `take` returned. Anything else raises one of a few usual errors, before anything is changed."""
    version, *words = state[PYTHON].tolist()
    gauss = state[f"{PYTHON}.gauss"].tolist()
    place, has_gauss, *keys = state[NUMPY].tolist()
    (cached,) = state[f"{NUMPY}.gauss"].tolist()
    if len(keys) != WORDS or not 0 <= place <= WORDS or has_gauss not in (0, 1):
        raise ValueError(f"NumPy's random state has {len(keys)} words, the next of them {place}")  # it would be read
    numbers = np.array(keys, np.uint32)
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    np.random.set_state(("MT19937", numbers, place, has_gauss, cached))
