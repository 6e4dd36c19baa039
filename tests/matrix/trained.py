"""The training of a case with this library, on all ranks of a topology."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import allreduce
from tests.matrix import alone
from tests.matrix.alone import HIDDEN, RATES
from tests.matrix.case import CLASSES, FEATURES, MIRRORED, OPTIMIZER, Case
from trainers import (
    EMA,
    Accumulate,
    CentralStorageTrainer,
    Checkpoint,
    ClipNorm,
    Exact,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Schedule,
    Sharded,
    SkipNotFinite,
    SpareReplicasTrainer,
    load_shards,
)
from trainers.callbacks import Callback
from trainers.replica import Replica

MICRO_BATCH = 4


class StopAt(Callback):
    """Stops a fit after a step of the training, on one rank, which may not see all steps before it."""

    reads_model = False  # else LocalSGD would end its round after each epoch

    def __init__(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = epoch * self._steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.stop_training |= self._before + batch + 1 >= self._step


def numpy_replica(case: Case) -> Replica:
    sizes = [FEATURES, HIDDEN, CLASSES]
    return NumpyNetwork(sizes, activation="tanh", optimizer=case.update, seed=case.seed, lr=RATES[case.update])


def torch_replica(case: Case) -> Replica:
    import torch

    from trainers.replicas.pytorch import TorchReplica

    module, optimizer = alone.torch_model(case)
    return TorchReplica(module, torch.nn.CrossEntropyLoss(), optimizer)


def jax_replica(case: Case) -> Replica:
    from trainers.replicas.jax import JaxReplica

    params, apply, loss, optimizer = alone.jax_model(case)
    return JaxReplica(apply, loss, params, optimizer)


def keras_replica(case: Case) -> Replica:
    from trainers.replicas.keras import KerasReplica

    return KerasReplica(*alone.keras_model(case))


REPLICAS: dict[str, Callable[[Case], Replica]] = {
    "numpy": numpy_replica,
    "torch": torch_replica,
    "jax": jax_replica,
    "keras": keras_replica,
}


def transforms_of(case: Case) -> list[Any]:
    """Return the transforms of a fit."""
    numbers = case.numbers
    made: dict[str, Callable[[], Any]] = {
        "ClipNorm": lambda: ClipNorm(numbers["ClipNorm"]),
        "Accumulate": lambda: Accumulate(numbers["Accumulate"]),
        "EMA": lambda: EMA(numbers["EMA"]),
        "SkipNotFinite": SkipNotFinite,
        "Schedule": lambda: Schedule(*numbers["Schedule"]),
    }
    return [made[name]() for name in case.transforms]


def average_of(case: Case) -> Any:
    return {"": None, "Exact": Exact(MICRO_BATCH), "LocalSGD": LocalSGD(case.numbers["every"])}[case.average]


def trainer_of(case: Case, topology: allreduce.Topology) -> Any:
    """Return a trainer on a new replica. Collective."""
    replica = REPLICAS[case.framework](case)
    if case.owner == "central":
        return CentralStorageTrainer(replica, topology, storage=case.seed % topology.size)
    if case.owner == "servers":
        servers: Any = (0,) if case.seed % 3 == 2 else 1 + case.seed % (topology.size - 1)
        return ParameterServerTrainer(replica, topology, updates="sync", servers=servers)
    if case.owner == "spare":
        return SpareReplicasTrainer(replica, topology, spare=0)
    assert case.owner in MIRRORED
    update = {"replicated": "replicated", "sharded": "sharded", "copies": Sharded(copies=min(2, topology.size))}
    more = {"update": update[case.owner], "average": average_of(case), "compress": case.compress or None}
    return MirroredTrainer(replica, case.backend, topology, **more)


class Stream:
    """A loader without a length: a part of the rows of each batch; all of them if it is the only part."""

    def __init__(self, case: Case, part: int = 0, parts: int = 1) -> None:
        self._case, self._part, self._parts, self._epoch = case, part, parts, 0
        self._epochs = case.batches()

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for x, y, weights in self._epochs[self._epoch]:
            own = self._case.share(len(x), self._parts, self._part) if self._parts > 1 else slice(None)
            yield (x[own], y[own], *[weights[own]] * self._case.weighs)


class Batches(Stream):
    """A loader with a length."""

    def __len__(self) -> int:
        return len(self._epochs[0])


def source_of(case: Case, trainer: Any, topology: allreduce.Topology, folder: str) -> tuple[tuple[Any, ...], dict]:
    """Return the data of a fit and its options. Collective."""
    if case.loader == "arrays":
        weights = {"sample_weight": case.weights} if case.weighs else {}
        return case.data, {"batch_size": case.batch_size, "shuffle": case.shuffle, "seed": case.seed} | weights
    if case.loader == "shards":
        if topology.rank == 0:
            write_shards(case, folder)
        topology.world.Barrier()
        shards = load_shards(os.path.join(folder, "part-*.npz"), topology=topology)
        return (shards.train,), {"batch_size": case.batch_size, "shuffle": case.shuffle, "seed": case.seed}
    part, parts = trainer.strategy.part, trainer.strategy.parts
    if case.loader == "divided" and part is None:
        return (Loader(None, "divided"),), {}
    if case.loader == "divided":
        return (Loader(Batches(case, part, parts), "divided"),), {}
    if case.loader == "whole":
        return (Loader(Batches(case), "whole"),), {}
    return (Loader(Stream(case), "whole", case.steps),), {}


def write_shards(case: Case, folder: str) -> None:
    """Write the rows as files, with a row to test in each."""
    x, y = case.data
    for number, rows in enumerate(case.files()):
        test = {"x_test": np.zeros((1, FEATURES), x.dtype), "y_test": np.arange(1)}
        np.savez(os.path.join(folder, f"part-{number}.npz"), x_train=x[rows], y_train=y[rows], **test)


def beginning(case: Case) -> np.ndarray:
    """Return the parameters before the training."""
    if case.framework == "torch":
        module, _ = alone.torch_model(case)
        return np.concatenate([each.detach().numpy().reshape(-1) for each in module.parameters()])
    return np.array(REPLICAS[case.framework](case).state()["parameters"])


def train(case: Case, ranks: allreduce.Topology, resumes: bool, folder: str) -> tuple[np.ndarray, Any, Any]:
    """Train up to the stop of a case, or to its end. resumes: from the checkpoint of the stop.

    Returns the parameters, their average or None, and the history or None. Collective.
    """
    if case.owner in OPTIMIZER:
        from tests.matrix import loop

        return loop.train(case, ranks, resumes, os.path.join(folder, "state")), None, None
    stops = [StopAt(case.stop, case.steps)] if case.stop and not resumes and ranks.rank == case.stopper else []
    kept = None
    if case.stop:
        kept = Checkpoint(os.path.join(folder, "run"), "1 step", same_data=False)
    with trainer_of(case, ranks) as trainer:
        data, options = source_of(case, trainer, ranks, folder)
        history = trainer.fit(
            *data, epochs=case.epochs, **options, transforms=transforms_of(case), callbacks=stops,
            checkpoint=kept, resume=resumes, progress=False,
        )  # fmt: skip
        hashes = trainer.parameters_sha256()
    assert len(set(hashes)) == 1, f"the ranks have different parameters: {hashes}"
    state = trainer.replica.state()
    return np.array(state["parameters"]), state.get("ema"), history
