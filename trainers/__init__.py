"""Data-parallel training: a trainer trains one replica per rank; a replica wraps a model of any framework.

    from trainers import MirroredTrainer, NumpyNetwork

    with MirroredTrainer(NumpyNetwork([64, 64, 32, 10]), allreduce="auto") as trainer:
        history = trainer.fit(x, y, epochs=10, batch_size=100)  # batch_size is the global batch
        trainer.save("model.npz")

The names are imported when they are first used, so that `NumpyNetwork.load("model.npz")` needs no MPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.central_storage import CentralStorageTrainer as CentralStorageTrainer
    from trainers.cli.run import run as run
    from trainers.data import Samples as Samples
    from trainers.fit.checkpointing import Checkpoint as Checkpoint
    from trainers.fit.shards import load_shards as load_shards
    from trainers.mirrored import MirroredTrainer as MirroredTrainer
    from trainers.options.average import Exact as Exact
    from trainers.options.average import LocalSGD as LocalSGD
    from trainers.options.average import OuterSGD as OuterSGD
    from trainers.options.average import Sharded as Sharded
    from trainers.options.loader import Loader as Loader
    from trainers.parameter_server import ParameterServerTrainer as ParameterServerTrainer
    from trainers.recovery.terminating import Terminated as Terminated
    from trainers.recovery.terminating import Terminating as Terminating
    from trainers.replica import Replica as Replica
    from trainers.replicas.numpy.categories import CategoryNetwork as CategoryNetwork
    from trainers.replicas.numpy.categories import load_network as load_network
    from trainers.replicas.numpy.categories import network_of as network_of
    from trainers.replicas.numpy.network import NumpyNetwork as NumpyNetwork
    from trainers.spare_replicas import SpareReplicasTrainer as SpareReplicasTrainer
    from trainers.strategies.transforms.accumulate import Accumulate as Accumulate
    from trainers.strategies.transforms.clip import ClipNorm as ClipNorm
    from trainers.strategies.transforms.ema import EMA as EMA
    from trainers.strategies.transforms.schedule import Schedule as Schedule
    from trainers.strategies.transforms.skip import SkipNotFinite as SkipNotFinite
    from trainers.watching.history import Epoch as Epoch
    from trainers.watching.history import History as History
    from trainers.watching.logs import log_to as log_to

_MODULES = {
    "EMA": "trainers.strategies.transforms.ema",
    "Accumulate": "trainers.strategies.transforms.accumulate",
    "CategoryNetwork": "trainers.replicas.numpy.categories",
    "CentralStorageTrainer": "trainers.central_storage",
    "Checkpoint": "trainers.fit.checkpointing",
    "ClipNorm": "trainers.strategies.transforms.clip",
    "EnsembleModel": "trainers.apps.ensemble.model",
    "EnsembleTrainer": "trainers.apps.ensemble.ensemble",
    "Epoch": "trainers.watching.history",
    "Exact": "trainers.options.average",
    "History": "trainers.watching.history",
    "Loader": "trainers.options.loader",
    "LocalSGD": "trainers.options.average",
    "MirroredTrainer": "trainers.mirrored",
    "NumpyNetwork": "trainers.replicas.numpy.network",
    "OuterSGD": "trainers.options.average",
    "ParameterServerTrainer": "trainers.parameter_server",
    "Replica": "trainers.replica",
    "Samples": "trainers.data",
    "Schedule": "trainers.strategies.transforms.schedule",
    "Sharded": "trainers.options.average",
    "SkipNotFinite": "trainers.strategies.transforms.skip",
    "SpareReplicasTrainer": "trainers.spare_replicas",
    "Terminated": "trainers.recovery.terminating",
    "Terminating": "trainers.recovery.terminating",
    "load_network": "trainers.replicas.numpy.categories",
    "load_shards": "trainers.fit.shards",
    "log_to": "trainers.watching.logs",
    "network_of": "trainers.replicas.numpy.categories",
    "run": "trainers.cli.run",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainers' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
