"""The trainers of a random sequence: their arguments, and the arguments that must be refused."""

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

import allreduce
from allreduce.errors import UnavailableError
from allreduce.transport import ulfm
from tests.backends import ON_CPU, SHARDED
from tests.sequences.calls import Calls, FailureError, Folder, Side
from tests.sequences.models import OPTIMIZERS, Model, State, numpy_network
from trainers import CentralStorageTrainer, MirroredTrainer, ParameterServerTrainer, Sharded, SpareReplicasTrainer
from trainers.trainer import Trainer

Make = Callable[..., Trainer]


def names() -> list[str]:
    """Return the backends that average on the CPU."""
    return [name for name in allreduce.available() if name in ON_CPU]


class Making(Calls):
    """Collective. torch: whether PyTorch is installed. without: names of actions to leave out."""

    def __init__(
        self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool, torch: bool, without: tuple[str, ...] = ()
    ) -> None:
        super().__init__(comm, seed, folder, verbose)
        self.torch, self.without = torch, without
        self.models: list[Model] = []
        self.sides: list[Side] = []
        self.folders: dict[str, Folder] = {}
        self.files: dict[str, tuple[str, State]] = {}
        self.topologies: list[allreduce.Topology] = []
        self.reused: dict[str, Any] = {}

    def topology(self) -> allreduce.Topology:
        """Return a topology that trainers share."""
        if not self.topologies or self.chance(0.15):
            nodes = self.pick(None, None, 2, 1)
            self.note(f"Topology(ranks_per_node={nodes})")
            made = self.well("Topology", lambda: allreduce.Topology(ranks_per_node=nodes))
            self.topologies.append(made)
        return self.pick(*self.topologies)

    def free_model(self) -> Model:
        """Return a model that no trainer uses now."""
        free = [model for model in self.models if all(model is not side.model for side in self.sides)]
        if free and self.chance(0.8):
            return self.pick(*free)
        kind = "torch" if self.torch and self.chance(0.35) else "numpy"
        self.models.append(Model(kind, self.pick(*OPTIMIZERS), self.draw.randrange(100)))
        return self.models[-1]

    def make(self) -> None:
        model = self.free_model()
        name, make = self.kind_of_trainer()
        topology = self.topology() if self.chance(0.7) or "backend" in name else None
        survives = ulfm.in_force() and self.chance(0.5)
        options = {"on_failure": "continue"} if survives else {}
        self.note(f"make {name} on {model.name}, {'own' if topology is None else 'shared'} topology {options or ''}")
        if self.chance(0.1):
            self.make_refused(model, topology)
        trainer, error = self.call("make", lambda: make(model.replica, topology, **options))
        if isinstance(error, UnavailableError) and "shared" in name:  # simulated nodes
            return
        if error is not None:
            raise FailureError(f"make {name}: {error!r}") from error
        side = Side(name, trainer, model)
        self.sides.append(side)
        self.compare(side)

    def make_refused(self, model: Model, topology: allreduce.Topology | None) -> None:
        victim = self.draw.randrange(self.size)
        other, replica = numpy_network("sgd", 1), model.replica

        def wrong(*choices: Any) -> Any:
            return choices[self.rank == victim]

        tries = [
            lambda: MirroredTrainer(replica, wrong("ring", "rong"), topology),
            lambda: MirroredTrainer(replica, "ring", topology, update=wrong("replicated", "shared")),
            lambda: CentralStorageTrainer(replica, topology, storage=wrong(0, self.size)),
            lambda: ParameterServerTrainer(replica, topology, servers=wrong(1, 0)),
            lambda: ParameterServerTrainer(replica, topology, updates=wrong("sync", "sink")),
            lambda: SpareReplicasTrainer(replica, topology, spare=wrong(0, self.size)),
            lambda: MirroredTrainer(wrong(replica, other), "ring", topology, update="sharded"),
        ]
        number = self.draw.randrange(len(tries) - (self.size == 1 or model.name.startswith("numpy sgd")))
        self.note(f"  refused making {number} on rank {victim}")
        errors = "ArgumentError", "UnknownBackendError", "DisagreementError", "OptionError"
        self.refused("refused making", tries[number], *errors)

    def kind_of_trainer(self) -> tuple[str, Make]:
        kinds = ["mirrored", "sharded", "central", "backend"] + (["sync", "async", "spare"] if self.size > 1 else [])
        return getattr(self, f"_{self.pick(*kinds)}")()  # type: ignore[no-any-return]

    def _mirrored(self) -> tuple[str, Make]:
        backend = self.pick(*names())
        return f"MirroredTrainer({backend})", lambda replica, ranks, **more: MirroredTrainer(
            replica, backend, ranks, **more
        )

    def _sharded(self) -> tuple[str, Make]:
        backend, copies = self.pick(*SHARDED), self.pick(1, 1, 2)
        options = {"update": Sharded(copies=min(copies, self.size))}
        return f"MirroredTrainer({backend}, {options})", lambda replica, ranks, **more: MirroredTrainer(
            replica, backend, ranks, **options, **more
        )

    def _backend(self) -> tuple[str, Make]:
        backend = self.pick("ring", "shared", "hierarchical_copy")
        update = self.pick("replicated", "sharded") if backend != "hierarchical_copy" else "replicated"
        return f"MirroredTrainer(backend {backend}, {update})", lambda replica, ranks, **more: MirroredTrainer(
            replica, allreduce.create(backend, ranks), update=update, **more
        )

    def _central(self) -> tuple[str, Make]:
        options = {"storage": self.draw.randrange(self.size), "copies": min(self.pick(1, 1, 2), self.size)}
        return f"CentralStorageTrainer({options})", lambda replica, ranks, **more: CentralStorageTrainer(
            replica, ranks, **options, **more
        )

    def _spare(self) -> tuple[str, Make]:
        spare = self.pick(0, 0, 1)
        return f"SpareReplicasTrainer({spare=})", lambda replica, ranks, **more: SpareReplicasTrainer(
            replica, ranks, spare=spare, **more
        )

    def _sync(self, updates: str = "sync", **more: Any) -> tuple[str, Make]:
        servers = self.pick(1, self.size - 1, (0,))
        ranks = min(self.pick(1, 1, 2), 1 if servers == self.size - 1 else self.size - 1)
        options = {"updates": updates, "servers": servers, "ranks_per_worker": ranks, **more}
        return f"ParameterServerTrainer({options})", lambda replica, ranks, **more: ParameterServerTrainer(
            replica, ranks, **options, **more
        )

    def _async(self) -> tuple[str, Make]:
        options: list[dict[str, Any]] = [
            {},
            {"stale": "scale", "learning_rate": "divide"},
            {"stale": "drop", "max_staleness": 1},
            {"max_staleness": 0},
            {"warm_up": 1},
        ]
        return self._sync("async", **self.pick(*options))
