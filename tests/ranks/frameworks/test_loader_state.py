"""fit(loader) resumes in the middle of an epoch with the same bits: torchdata, grain, torch, and other loaders."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce
from allreduce.transport import control
from tests.ranks.training.fits import data, network
from trainers import Loader, MirroredTrainer, ParameterServerTrainer
from trainers.errors import CheckpointError, DataError
from trainers.fit.checkpointing import Checkpoint

torch = pytest.importorskip("torch")
Make = Callable[[int, int], Any]  # of a loader, from the rank and the number of ranks


class Augmented:
    """Rows whose values are random numbers of the global generators."""

    def __init__(self, rank: int, ranks: int) -> None:
        x, y = data()
        self.x, self.y = x[rank::ranks], y[rank::ranks]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        scale = np.float32(1 + 0.1 * (np.random.rand() + random.random() + torch.rand(1).item()))
        return self.x[row] * scale, self.y[row]


def rows_of(rank: int, ranks: int) -> list[Any]:
    x, y = data()
    return list(zip(x[rank::ranks], y[rank::ranks], strict=True))


def torchdata(rank: int, ranks: int, workers: int = 2, **options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    rows = rows_of(rank, ranks) if workers else Augmented(rank, ranks)
    return loaders.StatefulDataLoader(rows, batch_size=3 + rank, shuffle=True, num_workers=workers, **options)


def grain(rank: int, ranks: int, workers: int) -> Any:
    module, flags = pytest.importorskip("grain"), pytest.importorskip("absl.flags")
    flags.FLAGS(["test"])
    rows = rows_of(rank, ranks)
    sampler = module.samplers.IndexSampler(len(rows), module.sharding.NoSharding(), True, num_epochs=1, seed=rank)
    options = module.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    batches = [module.transforms.Batch(3)]
    return module.DataLoader(
        data_source=rows, sampler=sampler, operations=batches, worker_count=workers, read_options=options
    )


def grain_dataset(rank: int, ranks: int) -> Any:
    module = pytest.importorskip("grain")
    rows = module.MapDataset.source(rows_of(rank, ranks)).shuffle(seed=rank).repeat()
    return rows.to_iter_dataset(module.ReadOptions(num_threads=1, prefetch_buffer_size=2)).batch(3)


class Counts:
    """An iterator of the user's with a state of many types. It is endless, and can't be iterated again."""

    def __init__(self, rank: int) -> None:
        self.numbers, self.read, self.rank = np.random.default_rng(rank), 0, rank

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        x, y = data()
        self.read += 1
        rows = self.numbers.integers(0, len(x), 2 + self.rank)
        return x[rows], y[rows]

    def state_dict(self) -> Any:
        of_torch = torch.arange(3, dtype=torch.bfloat16)
        return {
            "numbers": self.numbers.bit_generator.state,
            7: (self.read, b"\x00\xff", [None, of_torch, np.float64(2)]),
        }

    def load_state_dict(self, state: Any) -> None:
        self.read, one, (_, of_torch, two) = state[7]
        assert (one, of_torch.tolist(), of_torch.dtype, two) == (b"\x00\xff", [0, 1, 2], torch.bfloat16, 2.0)
        self.numbers.bit_generator.state = state["numbers"]


MAKE: dict[str, Make] = {
    "torchdata": torchdata,
    "torchdata, augmented": lambda rank, ranks: torchdata(rank, ranks, 0),
    "torchdata, endless": lambda rank, ranks: torchdata(rank, ranks, 0),
    "torch, augmented": lambda rank, ranks: torch.utils.data.DataLoader(Augmented(rank, ranks), 4, shuffle=True),
    "grain": lambda rank, ranks: grain(rank, ranks, 1),
    "grain, threads": lambda rank, ranks: grain(rank, ranks, 0),
    "grain dataset": grain_dataset,
    "iterator": lambda rank, ranks: Counts(rank),
}


def seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fitted(
    topology: allreduce.Topology, make: Make, folder: Path, resume: bool, steps: Any = None, **options: Any
) -> list[Any]:
    """Return the hashes and losses of a fit."""
    with MirroredTrainer(network(), "ring", topology) as trainer:
        checkpoint = Checkpoint(str(folder), "1 step", keep=99)
        loader = Loader(make(topology.rank, topology.size), rows="divided", steps=steps)
        history = trainer.fit(loader, checkpoint=checkpoint, resume=resume, **options)
        return [trainer.steps, trainer.parameters_sha256(), [epoch.loss for epoch in history]]


def leave(topology: allreduce.Topology, folder: Path, steps: int) -> None:
    """Remove the checkpoints after `steps` steps, as if the job had been killed then."""

    def remove() -> None:
        for name in os.listdir(folder):
            if int("".join(filter(str.isdigit, name))) > steps:
                os.unlink(folder / name)

    control.together(topology.world, lambda: remove() if topology.rank == 0 else None)


WORKERS = ("grain", "torchdata")  # with processes of their own, which take a third of the time of all


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.expensive if name in WORKERS else ()) for name in MAKE]
)
def test_a_fit_resumes_with_the_same_bits(
    name: str, flat: allreduce.Topology, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of the first and the second epoch, between them, and after the end of one rank's loader."""
    endless = name in ("iterator", "grain dataset", "torchdata, endless")
    options: dict[str, Any] = {"epochs": 1 if name == "grain" else 2, "steps": 7 if endless else None}
    seed_all(3 + flat.rank)
    whole = fitted(flat, MAKE[name], folder, False, progress=False, **options)
    for steps in (3,) if name == "grain" else (whole[0] - 2, whole[0] // 2, 3, whole[0] // 2 - 1):
        leave(flat, folder, steps)
        seed_all(100 + flat.rank)  # another process would have other states
        capfd.readouterr()
        assert fitted(flat, MAKE[name], folder, True, **options)[1:] == whole[1:], steps
    if flat.rank == 0:
        how = "the loaders are read again" if name.startswith("torch,") else "continue from their states"
        assert how in capfd.readouterr().out


@pytest.mark.parametrize("pause", [20, 10**9])
def test_a_loader_ends_earlier_on_one_rank(
    pause: int, flat: allreduce.Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written after a rank's loader has ended. pause: the last state may be of the pass before."""
    monkeypatch.setattr("trainers.fit.reader.PAUSE", pause)

    def make(rank: int, ranks: int) -> Any:
        rows = rows_of(0, 1)[: 4 if rank else 20]
        loaders = pytest.importorskip("torchdata.stateful_dataloader")
        return loaders.StatefulDataLoader(rows, batch_size=2, shuffle=True)

    seed_all(flat.rank)
    whole = fitted(flat, make, folder, False, epochs=2, progress=False)
    assert whole[0] == 20
    for steps in (15, 10, 5):
        leave(flat, folder, steps)
        seed_all(100 + flat.rank)
        assert fitted(flat, make, folder, True, epochs=2, progress=False)[1:] == whole[1:], steps


class Refuses:
    """A loader that takes no state, or whose state is an object of its own class (gives=False)."""

    def __init__(self, takes: bool = True, gives: bool = True) -> None:
        self.gives, self.takes = gives, takes

    def __iter__(self) -> Iterator[Any]:
        x, y = data()
        yield from [(x, y)] * 3

    def state_dict(self) -> Any:
        return {"at": [1 if self.gives else self]}

    def load_state_dict(self, state: Any) -> None:
        if not self.takes:
            raise ValueError("no such file")


def test_a_state_that_needs_pickle_is_refused(flat: allreduce.Topology, folder: Path) -> None:
    """Before the first step, and on all ranks. Without a checkpoint the state is not asked for."""
    loader = Loader(Refuses(gives=flat.rank < flat.size - 1), rows="divided")
    with MirroredTrainer(network(), "ring", flat) as trainer:
        with pytest.raises(CheckpointError, match=r"Refuses can't be in a checkpoint: a .*Refuses at \['at'\]\[0\]"):
            trainer.fit(loader, progress=False, checkpoint=str(folder))
        assert trainer.steps == 0
        trainer.fit(loader, epochs=1, progress=False)


def test_a_loader_that_does_not_take_its_state(flat: allreduce.Topology, folder: Path) -> None:
    fitted(flat, lambda *_: Refuses(), folder, False, epochs=1, progress=False)
    leave(flat, folder, 2)
    last = flat.size - 1
    loaders: dict[str, Make] = {
        "can't take its state of the checkpoint: ValueError: no such file": lambda rank, _: Refuses(rank != last),
        "a list takes none": lambda *_: [data()] * 3,
    }
    for words, make in loaders.items():
        with pytest.raises(CheckpointError, match=words):
            fitted(flat, make, folder, True, epochs=2, progress=False)


def test_a_loader_without_a_state_that_is_shorter_now(flat: allreduce.Topology, folder: Path) -> None:
    fitted(flat, lambda *_: [data()] * 4, folder, False, epochs=1, progress=False)
    leave(flat, folder, 3)
    with pytest.raises((CheckpointError, DataError), match="not the same loader"):
        fitted(flat, lambda *_: [data()] * 2, folder, True, epochs=2, progress=False)


def test_whole_batches_resume_on_another_number_of_ranks(flat: allreduce.Topology, folder: Path) -> None:
    """The state of any rank is good for all; a server has none."""
    from mpi4py import MPI

    if flat.size == 1:
        pytest.skip("needs two ranks")
    make: Any = lambda: torchdata(0, 1, 0)  # noqa: E731
    seed_all(5)
    with ParameterServerTrainer(network(), servers=[0], topology=flat, updates="sync") as trainer:
        options: dict[str, Any] = {"epochs": 2, "checkpoint": Checkpoint(str(folder), "1 step", keep=99)}
        trainer.fit(Loader(make() if flat.rank else None, rows="whole"), progress=False, **options)
        steps, whole = trainer.steps, trainer.replica.state()["parameters"].copy()
    leave(flat, folder, steps // 2 + 3)

    def alone() -> None:
        seed_all(100)
        with allreduce.Topology(MPI.COMM_SELF) as self, MirroredTrainer(network(), "ring", self) as trainer:
            trainer.fit(Loader(make(), rows="whole"), progress=False, resume=True, **options)
            np.testing.assert_allclose(trainer.replica.state()["parameters"], whole, rtol=1e-4, atol=1e-6)

    control.together(flat.world, lambda: alone() if flat.rank == 0 else None)
