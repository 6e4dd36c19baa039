"""MirroredTrainer(average=Exact()): parameters and histories have the bits of a training on one rank."""

import hashlib
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from tests.ranks.grid import shapes
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import on_last, stop
from trainers import ClipNorm, Exact, Loader, MirroredTrainer
from trainers.data import Samples
from trainers.errors import ArgumentError, DivergedError
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.state.adopt import complete

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
SHAPES = shapes(SIZE)
EPOCHS = 3
ROWS, BATCH, MICRO = 130, 37, 5  # batches of 7 and 2 micro-batches, and 5, 2 and 4 rows in the last ones


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 20)).astype("float32")
    return x, (x[:, 0] + x[:, 1] > 0).astype(np.int64)


def numpy_network(optimizer: str = "adam") -> NumpyNetwork:
    return NumpyNetwork([20, 300, 30, 2], optimizer=optimizer, seed=1)


def fitted(make: Callable[[], Any], topology: Any, **options: Any) -> tuple[str, list[Any]]:
    """Return the SHA-256 of the state and the losses of a training; both are equal on its ranks. Collective."""
    x, y = data()
    with MirroredTrainer(make(), topology=topology, average=Exact(micro_batch=MICRO), **options) as trainer:
        history = trainer.fit(x, y, EPOCHS, BATCH, progress=False, validation_data=(x[:57], y[:57]))
        assert len(set(trainer.parameters_sha256())) == 1
        complete(trainer.strategy)
        state = trainer.replica.state() if trainer.rank == 0 else {}
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
    timed = ("seconds", "samples_per_second", "communication_share")
    shown = [{name: value for name, value in each.as_dict().items() if name not in timed} for each in history]
    return topology.world.bcast(digest.hexdigest()), shown


def alone(make: Callable[[], Any]) -> tuple[str, list[Any]]:
    """The training on one rank; every rank does it."""
    with allreduce.Topology(MPI.COMM_SELF) as topology:
        return fitted(make, topology)


@pytest.mark.parametrize("kind", ["outlier", "infinite"])
def test_hostile_rows(kind: str, topology_of: Callable[..., allreduce.Topology]) -> None:
    """A row that is huge beside the others, and rows that are not finite."""
    x, y = data()
    transforms = [ClipNorm(1.0)] if kind == "outlier" else []
    if kind == "outlier":
        x[40] *= 1e30
    else:
        x[[40, 77]] = [[np.inf], [np.nan]]
    ways = [("ring", "flat", "replicated"), ("auto", next(reversed(SHAPES)), "sharded")]
    found = []
    with allreduce.Topology(MPI.COMM_SELF) as single:
        places = [(single, "auto", "replicated")]
        places += [(topology_of(SHAPES[shape]), name, update) for name, shape, update in ways]
        for topology, name, update in places:
            network = NumpyNetwork([20, 30, 2], optimizer="momentum", activation="relu", seed=1)
            with MirroredTrainer(network, name, topology, average=Exact(micro_batch=MICRO), update=update) as trainer:
                with np.errstate(all="ignore"), suppress(DivergedError):
                    trainer.fit(x, y, epochs=2, batch_size=BATCH, progress=False, transforms=transforms)
                found += trainer.parameters_sha256()
    assert len(set(found)) == 1


@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_torch(kind: str, topology_of: Callable[..., allreduce.Topology]) -> None:
    """Random numbers follow from the micro-batch; running statistics are averaged."""
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch.replica import TorchReplica

    def make() -> TorchReplica:
        torch.manual_seed(0)
        nn = torch.nn
        hidden = {"dropout": [nn.ReLU(), nn.Dropout(0.3)], "norm": [nn.BatchNorm1d(50), nn.ReLU()]}
        model = nn.Sequential(nn.Linear(20, 50), *hidden[kind], nn.Linear(50, 2))
        return TorchReplica(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2))

    expected = alone(make)
    for number, shape in enumerate(SHAPES):
        update = ("replicated", "sharded")[(number + (kind == "norm")) % 2]
        assert fitted(make, topology_of(SHAPES[shape]), update=update) == expected, (shape, update)


def test_statistics_that_depend_on_the_ranks_are_refused(flat: allreduce.Topology) -> None:
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch.replica import TorchReplica

    model = torch.nn.Sequential(torch.nn.Linear(20, 5), torch.nn.BatchNorm1d(5, momentum=None), torch.nn.Linear(5, 2))
    replica = TorchReplica(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with MirroredTrainer(replica, topology=flat, average=Exact()) as trainer:
        x, y = np.zeros((64, 20), "float32"), np.zeros(64, int)
        text = raised_everywhere(WORLD, ArgumentError, lambda: trainer.fit(x, y, batch_size=64, progress=False))
        assert "momentum=None" in text, text


def test_bad_input(flat: allreduce.Topology) -> None:
    def refused(text: str, kind: type[Exception] = ArgumentError, **options: Any) -> None:
        given = {"topology": flat, "average": Exact(), **options}
        found = raised_everywhere(WORLD, kind, lambda: MirroredTrainer(numpy_network(), **given))
        assert text in found, found

    refused("exclude each other", compress="bfloat16")
    with allreduce.create("ring", flat) as plain:
        refused("does not sum exactly", allreduce=plain, topology=None)
        refused("does not sum exactly", allreduce=plain.config)
    with allreduce.create("ring", flat, exact=True) as given:
        assert fitted(numpy_network, flat, allreduce=given) == alone(numpy_network)
    if SIZE > 1:
        refused("micro_batch=", errors.DisagreementError, average=Exact(2 + WORLD.rank))


class Padded:
    """A data set of rows of different lengths, which `collate` pads to the longest one."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(1 + row % 9, 0.1 * row, "float32"), np.int64(row % 2)

    @staticmethod
    def collate(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        longest = max(len(x) for x, _ in rows)
        return np.stack([np.pad(x, (0, longest - len(x))) for x, _ in rows]), np.stack([y for _, y in rows])


class MeanNetwork(NumpyNetwork):
    """A network on the mean of each row's features, of any number."""

    def _input(self, x: np.ndarray) -> Any:
        return super()._input(x.mean(axis=1, keepdims=True))

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:
        """Takes rows of any length."""


def test_padding_follows_the_micro_batch(flat: allreduce.Topology) -> None:
    """Micro-batches of different shapes are not joined, so the mean over the padding does not depend on the ranks."""
    found = []
    with allreduce.Topology(MPI.COMM_SELF) as single:
        for topology in (single, flat):
            replica = MeanNetwork([1, 9, 2], seed=1)
            with MirroredTrainer(replica, topology=topology, average=Exact(micro_batch=MICRO)) as trainer:
                trainer.fit(Loader(Padded(), collate=Padded.collate), epochs=2, batch_size=BATCH, progress=False)
                found += trainer.parameters_sha256()
    assert len(set(found)) == 1


class Noisy:
    """Rows (number of the row, noise of all generators)."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, row: int) -> tuple[Any, int]:
        import torch

        return torch.tensor([row, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float32), row % 3


class Noting(NumpyNetwork):
    """Notes the rows that it has trained on, by their numbers."""

    def __init__(self) -> None:
        super().__init__([4, 5, 3], seed=1)
        self.trained: list[np.ndarray] = []

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        self.trained += list(x.copy())
        return super().gradients(x, y, share)


def noisy_fit(replica: NumpyNetwork, topology: allreduce.Topology, **options: Any) -> list[str]:
    pytest.importorskip("torch")
    with MirroredTrainer(replica, topology=topology, average=Exact(micro_batch=4)) as trainer:
        trainer.fit(Noisy(), None, 2, 6, progress=False, **options)
        return trainer.parameters_sha256()


@pytest.mark.skipif(SIZE != 2, reason="two ranks are enough")
def test_resume_in_mid_epoch_on_other_ranks(flat: allreduce.Topology, folder: Path) -> None:
    """A row follows from the row and the epoch alone, so the bits do not depend on the ranks."""
    replica = Noting()
    wanted = set(noisy_fit(replica, flat))
    found = [row for each in WORLD.allgather([row.tolist() for row in replica.trained]) for row in each]
    expected = [Samples(Noisy()).take(np.arange(23), (0, epoch))[0].tolist() for epoch in range(2)]
    assert sorted(found) == sorted(row for epoch in expected for row in epoch)
    stopping = on_last("on_train_batch_end", stop, epoch=0)
    assert set(noisy_fit(Noting(), flat, checkpoint=str(folder), callbacks=stopping)) != wanted
    with allreduce.Topology(MPI.COMM_SELF) as single:
        again = noisy_fit(Noting(), single, checkpoint=str(folder), resume=True) if WORLD.rank == 0 else None
    assert set(WORLD.bcast(again)) == wanted
