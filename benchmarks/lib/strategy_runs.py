"""The same network, data and epochs under each strategy, with and without a slow rank, and the bytes that travel."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.control import all_values
from trainers import NumpyNetwork, datasets
from trainers.cli import options
from trainers.trainer import Trainer
from trainers.watching.callback import Callback, Logs


class Traffic:
    """Bytes that this rank has sent, by receiver. comm: of all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._group = comm.Get_group()
        self.sent = np.zeros(comm.size)

    def places(self, comm: MPI.Comm) -> Sequence[int]:
        """The ranks, in all ranks' communicator, of those of another one."""
        group = comm.Get_group()
        try:
            return MPI.Group.Translate_ranks(group, range(group.size), self._group)
        finally:
            group.Free()

    def through(self, sent: np.ndarray) -> np.ndarray:
        """The bytes through each rank, sent and received, of what all ranks have `sent`. Collective."""
        table = np.empty((self._comm.size, self._comm.size))
        self._comm.Allgather(sent, table)
        return table.sum(0) + table.sum(1)


class CountedComm(MPI.Intracomm):
    """Counts point-to-point messages; of collectives Allreduce and broadcasts, as a ring and a chain would send them.

    Duplicates and parts of it count too. What ranks write into memory that they share is no message.
    """

    _traffic: Traffic | None = None
    _places: Sequence[int] = ()

    @classmethod
    def of(cls, comm: MPI.Comm, traffic: Traffic | None) -> "CountedComm":
        """A communicator, under the same handle, that adds to `traffic`."""
        made = cls(comm)
        made._traffic = traffic
        made._places = traffic.places(comm) if traffic is not None and comm != MPI.COMM_NULL else ()
        return made

    def _count(self, buffer: Any, dest: int, share: float = 1.0) -> None:
        if self._traffic is not None:
            self._traffic.sent[self._places[dest]] += share * nbytes(buffer)

    def Dup(self, *args: Any, **options: Any) -> Any:  # noqa: N802, MPI's names
        return CountedComm.of(super().Dup(*args, **options), self._traffic)

    def Split(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return CountedComm.of(super().Split(*args, **options), self._traffic)

    def Split_type(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return CountedComm.of(super().Split_type(*args, **options), self._traffic)

    def Send(self, buf: Any, dest: int, *args: Any, **options: Any) -> None:  # noqa: N802
        self._count(buf, dest)
        super().Send(buf, dest, *args, **options)

    def Isend(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        self._count(buf, dest)
        return super().Isend(buf, dest, *args, **options)

    def Issend(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        self._count(buf, dest)
        return super().Issend(buf, dest, *args, **options)

    def Send_init(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802
        request = _CountedRequest(super().Send_init(buf, dest, *args, **options))
        request.told = lambda: self._count(buf, dest)
        return request

    def Allreduce(self, sendbuf: Any, recvbuf: Any, *args: Any, **options: Any) -> None:  # noqa: N802
        if self.size > 1:
            self._count(recvbuf, (self.rank + 1) % self.size, 2 * (self.size - 1) / self.size)
        super().Allreduce(sendbuf, recvbuf, *args, **options)

    def _count_broadcast(self, buf: Any, root: int) -> None:
        following = (self.rank + 1) % self.size
        if following != root:
            self._count(buf, following)

    def Bcast(self, buf: Any, root: int = 0) -> None:  # noqa: N802
        self._count_broadcast(buf, root)
        super().Bcast(buf, root)

    def Ibcast(self, buf: Any, root: int = 0) -> Any:  # noqa: N802
        self._count_broadcast(buf, root)
        return super().Ibcast(buf, root)


class _CountedRequest(MPI.Prequest):
    """Counts each time that it is started."""

    told: Any = None

    def Start(self) -> None:  # noqa: N802
        self.told()
        super().Start()


def nbytes(buffer: Any) -> int:
    """The bytes of what MPI is given: an array, or (array, count, datatype) and shorter forms of it."""
    if not isinstance(buffer, tuple | list):
        return memoryview(buffer).nbytes
    if len(buffer) == 3 and isinstance(buffer[1], int):
        return buffer[1] * buffer[2].Get_size()
    return memoryview(buffer[0]).nbytes


SLOW_RANK = 1  # a worker under every strategy


@dataclass(frozen=True)
class Variant:
    """A strategy with its options, as the command line takes them.

    servers: how many it needs. least: of ranks. spare: how many ranks' rows a step leaves out.
    """

    name: str
    arguments: tuple[str, ...]
    servers: int = 0
    least: int = 2
    spare: int = 0


def _served(name: str, servers: int, *more: str) -> Variant:
    arguments = ("--strategy", "parameter_server", "--servers", str(servers), *more)
    return Variant(name, arguments, servers, servers + 2)


VARIANTS = [
    Variant("mirrored", ()),
    Variant("central storage", ("--strategy", "central_storage")),
    Variant("1 spare replica", ("--strategy", "spare_replicas", "--spare", "1"), least=3, spare=1),
    _served("1 server, sync", 1, "--updates", "sync"),
    _served("2 servers, sync", 2, "--updates", "sync"),
    _served("1 server, async", 1),
    _served("2 servers, async", 2),
    _served("1 server, async, scale", 1, "--stale", "scale"),
]


@dataclass(frozen=True)
class Outcome:
    """What one run has shown.

    slow: whether one rank was slow. workers: ranks that computed. seconds: of an epoch, the median.
    updates_per_second: of the parameters. samples_per_second: whose gradients were used. staleness: how many gradients
    were so many updates behind, over all epochs. megabytes: an epoch, through the busiest rank, which is `busiest`.
    """

    variant: str
    slow: bool
    workers: int
    seconds: float
    updates_per_second: float
    samples_per_second: float
    accuracy: float
    staleness: tuple[int, ...]
    dropped: int
    megabytes: float
    busiest: int

    @property
    def mean_staleness(self) -> float:
        gradients = sum(self.staleness)
        return sum(behind * count for behind, count in enumerate(self.staleness)) / gradients if gradients else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "staleness": list(self.staleness), "mean_staleness": self.mean_staleness}


class PacedNetwork(NumpyNetwork):
    """Takes a fixed time for each row, as an accelerator of its own would, however many ranks share the cores.

    pace: seconds a row; the rest of them is slept.
    """

    pace = 0.0

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        begin = time.perf_counter()
        values = super().gradients(x, y, share)
        rest = len(x) * self.pace - (time.perf_counter() - begin)
        if rest > 0:
            time.sleep(rest)
        return values


class Bench:
    """Runs variants on the ranks of a topology. Collective."""

    def __init__(self, topology: Topology, chosen: argparse.Namespace) -> None:
        self._world, self._chosen = topology, chosen
        self._data = datasets.load(chosen.data)
        self._traffic = Traffic(topology.world)

    def run(self, variant: Variant, slow: bool) -> Outcome:
        chosen = self._options(variant)
        servers = spread(all_values(self._world.world, self._world.node_index, "learn the nodes"), variant.servers)
        comm = CountedComm.of(self._world.world, self._traffic).Split(0, self._world.rank in servers)
        with Topology(comm, self._chosen.ranks_per_node or None, self._world.timeout) as topology:
            network = self._network(chosen, slow)
            with options.make_trainer(chosen, network, topology, variant.servers) as trainer:
                outcome = self._fit(trainer, variant, slow, chosen)
        comm.Free()
        return outcome

    def _options(self, variant: Variant) -> argparse.Namespace:
        given = ["--data", self._chosen.data, "--epochs", self._chosen.epochs, "--batch-size", self._chosen.batch_size]
        given += ["--hidden", self._chosen.hidden, *variant.arguments]
        return options.parse([str(each) for each in given], shown=False)

    def _network(self, chosen: argparse.Namespace, slow: bool) -> PacedNetwork:
        data = self._data
        sizes = [data.features, *chosen.hidden, len(data.classes)]
        network = PacedNetwork(sizes, optimizer=chosen.optimizer, lr=chosen.lr, seed=chosen.seed)
        network.scale_input(data.shift, data.scale)
        network.pace = 1e-6 * self._chosen.row_us
        if slow and self._world.rank == SLOW_RANK:
            network.pace *= self._chosen.slow_factor
        return network

    def _fit(self, trainer: Trainer, variant: Variant, slow: bool, chosen: argparse.Namespace) -> Outcome:
        data, meter = self._data, _Meter(self._traffic)
        history = trainer.fit(
            data.x_train,
            data.y_train,
            chosen.epochs,
            chosen.batch_size,
            seed=chosen.seed,
            progress=False,
            callbacks=[meter],
        )
        accuracy = trainer.evaluate(data.x_test, data.y_test)["accuracy"]
        through = self._traffic.through(meter.sent) / chosen.epochs
        seconds = median(epoch.seconds for epoch in history)
        behind = [np.array(getattr(epoch, "staleness", ()), np.int64) for epoch in history]
        staleness = np.zeros(max(map(len, behind)), np.int64)
        for each in behind:
            staleness[: len(each)] += each
        steps = -(-len(data.x_train) // chosen.batch_size)
        updates = staleness.sum() / len(history) if staleness.size else steps
        used = len(data.x_train) * (1 - variant.spare / trainer.size)
        return Outcome(
            variant.name,
            slow,
            trainer.size - variant.servers,
            seconds,
            updates / seconds,
            used / seconds,
            accuracy,
            tuple(staleness.tolist()),
            sum(getattr(epoch, "dropped", 0) for epoch in history),
            through.max() / 1e6,
            int(through.argmax()),
        )


class _Meter(Callback):
    """What this rank has sent from the first to the last epoch."""

    reads_batches = False

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.sent = self._before = traffic.sent.copy()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch == 0:
            self._before = self._traffic.sent.copy()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.sent = self._traffic.sent - self._before


def spread(nodes: Sequence[int], servers: int) -> list[int]:
    """The ranks that are servers: the last ones, each on a node of its own where there are as many nodes.

    nodes: the node of each rank.
    """
    ranks = range(len(nodes))
    lasts = [rank for rank in ranks if nodes[rank] not in nodes[rank + 1 :]]
    return list((lasts if len(lasts) >= servers else ranks)[-servers:]) if servers else []


def lineup(names: Sequence[str], ranks: int) -> list[Variant]:
    """The variants of these names, all when there are none, that so many ranks can run."""
    return [each for each in VARIANTS if (not names or each.name in names) and each.least <= ranks]
