"""The training of a case with this library, on all ranks of a topology."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
import trainers
from tests.faults.points import die
from tests.matrix import alone
from tests.matrix.alone import HIDDEN, RATES
from tests.matrix.case import CLASS_WEIGHT, CLASSES, FEATURES, MIRRORED, OPTIMIZER, Case
from trainers.callbacks import Callback
from trainers.options.buckets import Buckets
from trainers.recovery.terminating import Terminated
from trainers.replica import Replica

MICRO_BATCH = 4


class At(Callback):
    """Acts after a step of the training, on a rank that may not see all steps before it."""

    reads_model = False  # else LocalSGD would end its round after each epoch

    def __init__(self, step: int, steps: int) -> None:
        self.step, self.steps = step, steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before = epoch * self.steps


class StopAt(At):
    """Stops a fit by an attribute, or by SIGTERM."""

    def __init__(self, step: int, steps: int, sigterm: bool) -> None:
        super().__init__(step, steps)
        self.sigterm = sigterm

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.sigterm and self.before + batch + 1 >= self.step:
            os.kill(os.getpid(), signal.SIGTERM)  # seen at the end of the step, by a callback that comes first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.sigterm and self.before + batch + 1 >= self.step:
            self.trainer.stop_training = True


class DieAt(At):
    """Ends a rank when all have begun a step: at once, or when it has computed its gradients.

    comm: of the ranks that see each step; None if no rank sees all.
    """

    def __init__(self, case: Case, comm: Any, dies: bool) -> None:
        super().__init__(case.stop, case.steps)
        self.comm, self.dies, self.later = comm, dies, case.seed % 2 == 1 and case.owner != "servers"

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.before + batch < self.step or self.comm == MPI.COMM_NULL:
            return
        comm, self.comm = self.comm, MPI.COMM_NULL
        if comm is not None:
            comm.Barrier()
        if self.dies and self.later:
            replica = self.trainer.replica
            compute = replica.gradients
            replica.gradients = lambda *given: (compute(*given), die())
        elif self.dies:
            die()


def joined(x: Any) -> Any:
    """Return the features of the inputs of a model."""
    parts = (x["first"], x["rest"]) if isinstance(x, dict) else x
    return np.concatenate(parts, axis=1) if isinstance(parts, tuple) else x


class Joined(trainers.NumpyNetwork):
    """A network that takes its features in one array, in a dict, or in a tuple."""

    def gradients(self, x: Any, *rest: Any) -> Any:
        return super().gradients(joined(x), *rest)

    def evaluate(self, x: Any, *rest: Any) -> Any:
        return super().evaluate(joined(x), *rest)

    def check(self, x: Any, *rest: Any) -> None:
        super().check(joined(x), *rest)


def numpy_replica(case: Case) -> Replica:
    sizes = [FEATURES, HIDDEN, CLASSES]
    kind = Joined if case.inputs else trainers.NumpyNetwork
    return kind(sizes, activation="tanh", optimizer=case.update, seed=case.seed, lr=RATES[case.update])


def torch_replica(case: Case) -> Replica:
    import torch

    from trainers.replicas.pytorch import TorchReplica

    class Splits(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, first: Any, rest: Any) -> Any:
            return self.inner(torch.cat([first, rest], 1))

    module, (optimizer,) = alone.torch_model(case)
    return TorchReplica(Splits(module) if case.inputs else module, alone.torch_loss(case), optimizer)


def jax_replica(case: Case) -> Replica:
    import jax.numpy as jnp

    from trainers.replicas.jax import JaxReplica

    params, apply, loss, optimizer = alone.jax_model(case)

    def splits(params: Any, x: Any) -> Any:
        return apply(params, jnp.concatenate((x["first"], x["rest"]) if isinstance(x, dict) else x, 1))

    return JaxReplica(splits if case.inputs else apply, loss, params, optimizer)


def keras_replica(case: Case) -> Replica:
    from trainers.replicas.keras import KerasReplica

    return KerasReplica(*alone.keras_model(case, case.inputs))


REPLICAS: dict[str, Callable[[Case], Replica]] = {
    "numpy": numpy_replica,
    "torch": torch_replica,
    "jax": jax_replica,
    "keras": keras_replica,
}


def transforms_of(case: Case) -> list[Any]:
    return [getattr(trainers, name)(*case.arguments[name]) for name in case.transforms]


def average_of(case: Case) -> Any:
    return {"": None, "Exact": trainers.Exact(MICRO_BATCH), "LocalSGD": trainers.LocalSGD(case.every)}[case.average]


def trainer_of(case: Case, topology: allreduce.Topology) -> Any:
    """Return a trainer on a new replica. Collective."""
    replica = REPLICAS[case.framework](case)
    more: dict[str, Any] = {"on_failure": "continue"} if case.killed >= 0 else {}
    if case.owner == "central":
        return trainers.CentralStorageTrainer(replica, topology, storage=case.seed % topology.size, **more)
    if case.owner == "servers":
        more |= {"updates": "sync", "servers": [*case.servers(topology.size)]}
        return trainers.ParameterServerTrainer(replica, topology, **more)
    if case.owner == "spare":
        return trainers.SpareReplicasTrainer(replica, topology, spare=0, **more)
    assert case.owner in MIRRORED
    update = trainers.Sharded(copies=min(2, topology.size)) if case.owner == "copies" else case.owner
    more |= {"update": update, "average": average_of(case), "compress": case.compress or None}
    more |= {"buckets": Buckets(True, 1e-4, 1e-4)} if case.buckets else {}
    return trainers.MirroredTrainer(replica, case.backend, topology, **more)


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
            yield (inputs_of(self._case, x[own]), y[own], *[weights[own]] * self._case.weighs)


class Batches(Stream):
    """A loader with a length."""

    def __len__(self) -> int:
        return len(self._epochs[0])


class Rows:
    """A data set."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return self._case.rows

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        x, y = self._case.data
        return (inputs_of(self._case, x[row]), y[row], *[self._case.weights[row]] * self._case.weighs)


def inputs_of(case: Case, x: np.ndarray) -> Any:
    """Return the inputs of the model."""
    first, rest = x[..., :1], x[..., 1:]
    return {"dict": {"rest": rest, "first": first}, "tuple": (first, rest)}.get(case.inputs, x)


def source_of(case: Case, trainer: Any, topology: allreduce.Topology, folder: str) -> tuple[tuple[Any, ...], dict]:
    """Return the data of a fit and its options. Collective."""
    more: dict[str, Any] = {"class_weight": CLASS_WEIGHT} if case.classes else {}
    shuffled = {"batch_size": case.batch_size, "shuffle": case.shuffle, "seed": case.seed}
    if case.loader == "arrays":
        x, y = case.data
        more |= {"sample_weight": case.weights} if case.weighs else {}
        return (inputs_of(case, x), y), shuffled | more
    if case.loader == "dataset":
        return (trainers.Loader(Rows(case), prefetch=case.seed % 2 == 0),), shuffled | more
    if case.loader == "shards":
        if topology.rank == 0:
            write_shards(case, folder)
        topology.world.Barrier()
        shards = trainers.load_shards(os.path.join(folder, "part-*.npz"), topology=topology)
        return (shards.train,), shuffled
    part, parts = trainer.strategy.part, trainer.strategy.parts
    if case.loader == "divided" and part is None:
        return (trainers.Loader(None, "divided"),), more
    if case.loader == "divided":
        return (trainers.Loader(Batches(case, part, parts), "divided"),), more
    if case.loader == "whole":
        return (trainers.Loader(Batches(case), "whole"),), more
    return (trainers.Loader(Stream(case), "whole", case.steps),), more


def write_shards(case: Case, folder: str) -> None:
    """Write the rows as files, with a row to test in each."""
    x, y = case.data
    for number, rows in enumerate(case.files()):
        test = {"x_test": np.zeros((1, FEATURES), x.dtype), "y_test": np.arange(1)}
        np.savez(os.path.join(folder, f"part-{number}.npz"), x_train=x[rows], y_train=y[rows], **test)


def beginning(case: Case) -> np.ndarray:
    """Return the parameters before the training."""
    if case.framework == "torch":
        return alone.TorchAlone(case).flat()
    return np.array(REPLICAS[case.framework](case).state()["parameters"])


def train(case: Case, ranks: allreduce.Topology, resumes: bool, folder: str) -> tuple[np.ndarray, Any, Any]:
    """Train up to the stop of a case, or to its end. resumes: from the checkpoint of the stop.

    Returns the parameters, their average or None, and the history or None. Collective.
    """
    if case.owner in OPTIMIZER:
        from tests.matrix import loop

        return loop.train(case, ranks, resumes, os.path.join(folder, "state")), None, None
    kept = None
    if case.stop:
        kept = trainers.Checkpoint(os.path.join(folder, "run"), "1 step", same_data=False)
    with trainer_of(case, ranks) as trainer:
        data, options = source_of(case, trainer, ranks, folder)
        options |= {"epochs": case.epochs, "transforms": transforms_of(case), "progress": False}
        history = None
        with suppress(Terminated):
            callbacks = [] if resumes else callbacks_of(case, ranks)
            history = trainer.fit(*data, **options, callbacks=callbacks, checkpoint=kept, resume=resumes)
        hashes = trainer.parameters_sha256()
        weights = None if case.loss else case.weights
        scores = trainer.evaluate(inputs_of(case, case.data[0]), case.data[1], sample_weight=weights)
    assert len(set(hashes)) == 1, f"the ranks have different parameters: {hashes}"
    found = trainer.replica.state()
    parameters, average = np.array(found["parameters"]), found.get("ema")
    wanted = alone.loss_of(case, parameters if average is None else average)
    assert np.isclose(scores["loss"], wanted, rtol=1e-4, equal_nan=True), f"evaluated as {scores}, and is {wanted}"
    return parameters, average, history


def callbacks_of(case: Case, ranks: allreduce.Topology) -> list[Callback]:
    """Return what stops a fit, or ends a rank. Collective."""
    if case.killed >= 0:
        apart = case.average == "LocalSGD" or case.owner in ("spare", "servers")
        return [DieAt(case, None if apart else ranks.private(), ranks.rank == case.killed)]
    stops = case.stop and ranks.rank == case.stopper
    sigterm = case.seed % 3 == 0
    return [StopAt(case.stop, case.steps, sigterm)] if stops else []
