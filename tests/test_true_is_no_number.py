"""True and False are no numbers: arguments that take an integer, or a time, refuse them by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology, create, trees
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


CASES: dict[str, Callable[[], object]] = {
    "batch_size=True": lambda: fit(batch_size=True),
    "epochs=True": lambda: fit(epochs=True),
    "seed=True": lambda: fit(seed=True),
    "seed=False": lambda: NumpyNetwork([4, 3], seed=False),
    r"sizes=\[4, True\]": lambda: NumpyNetwork([4, True]),
    "lr=True": lambda: NumpyNetwork([4, 3], lr=True),
    "ranks_per_node=True": lambda: Topology(MPI.COMM_SELF, ranks_per_node=True),
    r"ranks_per_node=\[True\]": lambda: Topology(MPI.COMM_SELF, ranks_per_node=[True]),
    "timeout=True": lambda: Topology(MPI.COMM_SELF, timeout=True),
    "length=True": lambda: backend("ring", lambda made: made.allocate(True, "float32")),
    "root=False": lambda: backend("ring", lambda made: made.broadcast(np.zeros(3), False)),
    "root=False is no rank": lambda: backend("ring", lambda made: trees.broadcast(made, {"a": np.zeros(3)}, False)),
    "root=False is no rank of": lambda: backend("reduce_to_one", repr, root=False),
    "initial_value_threshold=True": lambda: ModelCheckpoint("model.npz", initial_value_threshold=True),
}


@pytest.mark.parametrize("text", CASES)
def test_true_is_no_number(text: str) -> None:
    with pytest.raises((ArgumentError, OptionError), match=text):
        CASES[text]()
