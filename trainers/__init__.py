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
    from trainers.central_storage import CentralStorageTrainer
    from trainers.cli import roles
    from trainers.cli.run import run
    from trainers.data import Samples
    from trainers.fit.checkpointing import Checkpoint
    from trainers.fit.shards import load_shards
    from trainers.mirrored import MirroredTrainer
    from trainers.options.average import Exact, LocalSGD, OuterSGD, Sharded
    from trainers.options.loader import Loader
    from trainers.parameter_server import ParameterServerTrainer
    from trainers.recovery.terminating import Terminated, Terminating
    from trainers.replica import Replica
    from trainers.replicas.numpy.categories import CategoryNetwork, load_network, network_of
    from trainers.replicas.numpy.network import NumpyNetwork
    from trainers.spare_replicas import SpareReplicasTrainer
    from trainers.strategies.transforms.accumulate import Accumulate
    from trainers.strategies.transforms.clip import ClipNorm
    from trainers.strategies.transforms.ema import EMA
    from trainers.strategies.transforms.schedule import Schedule
    from trainers.strategies.transforms.skip import SkipNotFinite
    from trainers.watching.history import Epoch, History
    from trainers.watching.logs import log_to

__all__ = [
    "EMA",
    "Accumulate",
    "CategoryNetwork",
    "CentralStorageTrainer",
    "Checkpoint",
    "ClipNorm",
    "EnsembleModel",
    "EnsembleTrainer",
    "Epoch",
    "Exact",
    "History",
    "Loader",
    "LocalSGD",
    "MirroredTrainer",
    "NumpyNetwork",
    "OuterSGD",
    "ParameterServerTrainer",
    "Replica",
    "Samples",
    "Schedule",
    "Sharded",
    "SkipNotFinite",
    "SpareReplicasTrainer",
    "Terminated",
    "Terminating",
    "load_network",
    "load_shards",
    "log_to",
    "network_of",
    "roles",
    "run",
]

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
    "roles": "trainers.cli.roles",
    "run": "trainers.cli.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainers' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, name, module)  # roles is the module itself
