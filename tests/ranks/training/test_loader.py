"""fit(loader): the training is that of one rank with all rows, for every strategy, however the batches are divided."""

import functools
from typing import Any

import numpy as np
import pytest

import allreduce
from tests.ranks.training.test_fit import data, network
from trainers import CentralStorageTrainer, MirroredTrainer, ParameterServerTrainer

Pair = tuple[np.ndarray, np.ndarray]
EPOCHS = 2
TRAINERS: dict[str, Any] = {
    "mirrored": functools.partial(MirroredTrainer, allreduce="ring"),
    "sharded": functools.partial(MirroredTrainer, allreduce="shared", update="sharded"),
    "central": CentralStorageTrainer,
    "servers": functools.partial(ParameterServerTrainer, updates="sync"),
}


def trainer_of(kind: str, topology: allreduce.Topology) -> Any:
    if kind == "servers" and topology.size == 1:
        pytest.skip("a server needs a worker")
    return TRAINERS[kind](network(), topology=topology)


def batches_of(parts: int, seed: int) -> list[list[Pair]]:
    """Return the batches of every part: uneven numbers of batches of uneven sizes; one part may have none."""
    random, (x, y), at = np.random.default_rng(seed), data(), 0
    counts = random.permutation([random.integers(2, 4), *random.integers(0, 4, parts - 1)])
    found: list[list[Pair]] = []
    for count in counts:
        found.append([])
        for rows in random.integers(1, 6, count):
            found[-1].append((x[at : at + rows], y[at : at + rows]))
            at += rows
    return found


def together(parts: list[list[Pair]]) -> list[Pair]:
    """Return the global batches."""
    steps = [[part[step] for part in parts if step < len(part)] for step in range(max(map(len, parts)))]
    return [(np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step])) for step in steps]


def one_rank(batches: list[Pair]) -> np.ndarray:
    """Train on the global batches without a trainer; returns the parameters."""
    replica = network()
    replica.bind(np.empty(replica.gradient_length, "float32"))
    for x, y in batches * EPOCHS:
        replica.gradients(x, y, 1.0)
        replica.update()
    return replica.state()["parameters"].copy()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", ["divided", "whole"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_loader_trains_as_one_rank_with_all_rows(kind: str, rows: str, seed: int, flat: allreduce.Topology) -> None:
    with trainer_of(kind, flat) as trainer:
        part, parts = trainer.strategy.part, trainer.strategy.parts
        divided = batches_of(parts, seed)
        batches = together(divided)
        own = batches if rows == "whole" else None if part is None else divided[part]
        history = trainer.fit(own, rows=rows, epochs=EPOCHS, progress=False)
        trainer.complete() if hasattr(trainer, "complete") else None
        assert trainer.steps == EPOCHS * len(batches)
        assert len(set(trainer.parameters_sha256())) == 1
        found = trainer.replica.state()["parameters"].copy()
    np.testing.assert_allclose(found, one_rank(batches), rtol=2e-4, atol=1e-6)
    assert history[-1].loss == pytest.approx(history[-1].loss)
