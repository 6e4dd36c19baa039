"""Arguments that take an integer, or a time, refuse True and False; the error names the argument."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology, create
from allreduce.errors import OptionError
from trainers import MirroredTrainer, NumpyNetwork
from trainers.callbacks import ModelCheckpoint
from trainers.errors import ArgumentError

X, Y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)


def fit(**given: Any) -> object:
    with Topology(MPI.COMM_SELF) as topology, MirroredTrainer(NumpyNetwork([4, 3]), topology=topology) as trainer:
        return trainer.fit(X, Y, progress=False, **{"epochs": 1, **given})


def backend(name: str, use: Callable[[Any], object], **options: Any) -> object:
    with Topology(MPI.COMM_SELF) as topology, create(name, topology, **options) as made:
        return use(made)


CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "fit(batch_size)": ("batch_size must be an integer >= 1, got True", lambda: fit(batch_size=True)),
    "fit(epochs)": ("epochs must be an integer >= 0, got True", lambda: fit(epochs=True)),
    "fit(seed)": ("seed must be an integer >= 0, got True", lambda: fit(seed=True)),
    "NumpyNetwork(seed)": ("seed must be an integer >= 0, got False", lambda: NumpyNetwork([4, 3], seed=False)),
    "NumpyNetwork(sizes)": (r"sizes=\[4, True\]", lambda: NumpyNetwork([4, True])),
    "NumpyNetwork(lr)": ("lr must be a number > 0.* got True", lambda: NumpyNetwork([4, 3], lr=True)),
    "ranks_per_node": ("ranks_per_node=True", lambda: Topology(MPI.COMM_SELF, ranks_per_node=True)),
    "ranks_per_node, a list": (r"ranks_per_node=\[True\]", lambda: Topology(MPI.COMM_SELF, ranks_per_node=[True])),
    "timeout": ("timeout must be a number of seconds > 0, got True", lambda: Topology(MPI.COMM_SELF, timeout=True)),
    "allocate": (
        "length must be an integer from 0 to .*, got True",
        lambda: backend("ring", lambda made: made.allocate(True, "float32")),
    ),
    "broadcast": (
        "root must be a rank of this topology, 0 to 0, got False",
        lambda: backend("ring", lambda made: made.broadcast(np.zeros(3), False)),
    ),
    "broadcast of a tree": (
        "root must be a rank of this topology, 0 to 0, got False",
        lambda: backend("ring", lambda made: made.broadcast({"a": np.zeros(3)}, False)),
    ),
    "reduce_to_one": (
        "root must be a rank of this topology, 0 to 0, got False",
        lambda: backend("reduce_to_one", repr, root=False),
    ),
    "ModelCheckpoint": (
        "initial_value_threshold.*True",
        lambda: ModelCheckpoint("model.npz", initial_value_threshold=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_true_is_no_number(case: str) -> None:
    text, call = CASES[case]
    with pytest.raises((ArgumentError, OptionError), match=text):
        call()


def test_numbers_of_numpy_are_as_good_and_a_limit_may_be_infinite() -> None:
    for timeout in (np.float64(30), np.int64(30), float("inf"), None):
        ranks = Topology(MPI.COMM_SELF, ranks_per_node=np.int64(1), timeout=timeout)
        with ranks, create("ring", ranks, check=np.bool_(True)) as made:
            assert made.allocate(np.int32(3), "float32").size == 3
