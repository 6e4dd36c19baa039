"""Compares the training strategies on the same network, data and epochs, with and without a slow rank.

    mpirun -n 5 python -m benchmarks.strategies --json out.json --plot out.png

Computing a row takes a fixed time (--row-us): a rank sleeps for the rest of it, as if it had its own processor.
So the strategies differ only in waits and messages, even if ranks outnumber cores. The slow rank is rank 1, a worker in
every strategy. By default every rank is a simulated node, so that all data is sent in messages, which are counted (an
MPI_Allreduce as a ring would send it).
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import all_values, on_all_ranks
from benchmarks.lib import cli, outputs, plot
from benchmarks.lib.outputs import Screen
from trainers import NumpyNetwork, datasets
from trainers.cli import options
from trainers.trainer import Trainer
from trainers.watching.callback import Callback, Logs

# Counting the bytes that are sent


class Traffic:
    """The bytes that this rank has sent to each other rank. comm: the communicator of all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._group = comm.Get_group()
        self.sent = np.zeros(comm.size)

    def world_ranks(self, comm: MPI.Comm) -> Sequence[int]:
        """Return the ranks of `comm` as ranks of the communicator of all ranks."""
        group = comm.Get_group()
        try:
            return MPI.Group.Translate_ranks(group, range(group.size), self._group)
        finally:
            group.Free()

    def through(self, sent: np.ndarray) -> np.ndarray:
        """Return the bytes that each rank has sent and received. sent: by this rank, to each other one. Collective."""
        table = np.empty((self._comm.size, self._comm.size))
        self._comm.Allgather(sent, table)
        return table.sum(0) + table.sum(1)


class CountedComm(MPI.Intracomm):
    """A communicator that counts bytes sent: messages, and Allreduce (as a ring) and broadcasts (as a chain).

    Communicators made from it count too. Writes to shared memory are not counted.
    """

    _traffic: Traffic
    _world_ranks: Sequence[int] = ()

    @classmethod
    def of(cls, comm: MPI.Comm, traffic: Traffic) -> "CountedComm":
        """Return a communicator with the same handle that adds to `traffic`."""
        made = cls(comm)
        made._traffic = traffic
        made._world_ranks = traffic.world_ranks(comm) if comm != MPI.COMM_NULL else ()
        return made

    def counted(self, made: MPI.Comm) -> "CountedComm":
        """Return a communicator that was made from this one, as one that counts too."""
        return CountedComm.of(made, self._traffic)

    def count_message(self, buffer: Any, dest: int, share: float = 1.0) -> None:
        """Count a message: `share` times the bytes of `buffer`."""
        self._traffic.sent[self._world_ranks[dest]] += share * nbytes(buffer)

    def Send_init(self, buf: Any, dest: int, *args: Any, **options: Any) -> Any:  # noqa: N802, MPI's names
        request = _CountedRequest(super().Send_init(buf, dest, *args, **options))
        request.count = lambda: self.count_message(buf, dest)
        return request

    def Allreduce(self, sendbuf: Any, recvbuf: Any, *args: Any, **options: Any) -> None:  # noqa: N802
        if self.size > 1:
            self.count_message(recvbuf, (self.rank + 1) % self.size, 2 * (self.size - 1) / self.size)
        super().Allreduce(sendbuf, recvbuf, *args, **options)


def _making(plain: Any, comm: CountedComm, *args: Any, **options: Any) -> Any:
    return comm.counted(plain(comm, *args, **options))


def _sending(plain: Any, comm: CountedComm, buf: Any, dest: int, *args: Any, **options: Any) -> Any:
    comm.count_message(buf, dest)
    return plain(comm, buf, dest, *args, **options)


def _broadcasting(plain: Any, comm: CountedComm, buf: Any, root: int = 0) -> Any:
    following = (comm.rank + 1) % comm.size
    if following != root:
        comm.count_message(buf, following)
    return plain(comm, buf, root)


def _bound(counting: Any, plain: Any) -> Callable[..., Any]:
    return lambda comm, *args, **options: counting(plain, comm, *args, **options)


COUNTED: dict[Callable[..., Any], tuple[str, ...]] = {
    _making: ("Dup", "Split", "Split_type"),
    _sending: ("Send", "Isend", "Issend"),
    _broadcasting: ("Bcast", "Ibcast"),
}
for counting, names in COUNTED.items():
    for each in names:
        setattr(CountedComm, each, _bound(counting, getattr(MPI.Intracomm, each)))


class _CountedRequest(MPI.Prequest):
    """Calls `count` at each start."""

    count: Any = None

    def Start(self) -> None:  # noqa: N802
        self.count()
        super().Start()


def nbytes(buffer: Any) -> int:
    """Return the bytes of a buffer of MPI: an array, or (array, count, datatype) and shorter forms of it."""
    if not isinstance(buffer, tuple | list):
        return memoryview(buffer).nbytes
    if len(buffer) == 3 and isinstance(buffer[1], int):
        return buffer[1] * buffer[2].Get_size()
    return memoryview(buffer[0]).nbytes


# The runs

SLOW_RANK = 1  # a worker in every strategy


@dataclass(frozen=True)
class Variant:
    """A strategy with its options, as the command line takes them.

    servers: the number of servers. least: the smallest number of ranks. spare: the number of ranks whose rows a step
        leaves out.
    """

    name: str
    arguments: tuple[str, ...]
    servers: int = 0
    least: int = 2
    spare: int = 0


def _served(name: str, servers: int, *more: str, least: int = 2) -> Variant:
    """least: the smallest number of ranks that compute."""
    arguments = ("--strategy", "parameter_server", "--servers", str(servers), *more)
    return Variant(name, arguments, servers, servers + least)


VARIANTS = [
    Variant("mirrored", ()),
    Variant("central storage", ("--strategy", "central_storage")),
    Variant("1 spare replica", ("--strategy", "spare_replicas", "--backup-workers", "1"), least=3, spare=1),
    _served("1 server, sync", 1, "--updates", "sync"),
    _served("2 servers, sync", 2, "--updates", "sync"),
    _served("1 server, async", 1),
    _served("2 servers, async", 2),
    _served("1 server, async, scale", 1, "--stale", "scale"),
    _served("1 server, async, pairs", 1, "--ranks-per-worker", "2", least=4),
]


@dataclass(frozen=True)
class Outcome:
    """The results of one run.

    slow: whether one rank was slow. workers: the number of ranks that computed. seconds: the median time of an epoch.
        updates_per_second: of the parameters. samples_per_second: of the samples whose gradients were used. staleness:
        staleness[s] gradients were s updates stale, over all epochs. megabytes: sent and received in an epoch by the
        rank `busiest`, the rank with the most.
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
    """A NumpyNetwork whose gradients take a fixed time per row, as if each rank had its own accelerator.

    pace: seconds per row; the rank sleeps for the rest of this time.
    """

    pace = 0.0

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float, weights: np.ndarray | None = None) -> Any:
        begin = time.perf_counter()
        values = super().gradients(x, y, share, weights)
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
        comm = CountedComm.of(self._world.world.Split(0, self._world.rank in servers), self._traffic)
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
        given: dict[str, Any] = {"seed": chosen.seed, "progress": False, "callbacks": [meter]}
        history = trainer.fit(data.x_train, data.y_train, chosen.epochs, chosen.batch_size, **given)
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
    """Measures the bytes that this rank sends between the beginning of the first and the end of the last epoch."""

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
    """Return the ranks of the servers: the last rank of each of the last nodes, or the last ranks if nodes are too few.

    nodes: the node of each rank.
    """
    ranks = range(len(nodes))
    lasts = [rank for rank in ranks if nodes[rank] not in nodes[rank + 1 :]]
    return list((lasts if len(lasts) >= servers else ranks)[-servers:]) if servers else []


def lineup(names: Sequence[str], ranks: int) -> list[Variant]:
    """Return the variants with these names (none: all) that `ranks` ranks can run."""
    return [each for each in VARIANTS if (not names or each.name in names) and each.least <= ranks]


# Output


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each run; the runs with a slow rank come last."""
    head = f"{'':<25}{'s/epoch':>8}{'updates/s':>11}{'samples/s':>11}{'accuracy':>10}{'behind':>8}{'dropped':>9}"
    lines = [f"# {head}{'MB/epoch':>10}{'MB/s':>8}  busiest"]
    for slow in (False, True):
        some = [each for each in outcomes if each.slow == slow]
        if some:
            lines.append(f"# {'one slow rank' if slow else 'equal ranks'}")
        lines += [row(each) for each in some]
    return lines


def row(outcome: Outcome) -> str:
    behind = f"{outcome.mean_staleness:.1f}" if outcome.staleness else "-"
    return (
        f"  {outcome.variant:<25}{outcome.seconds:>8.3f}{outcome.updates_per_second:>11.0f}"
        f"{outcome.samples_per_second:>11.0f}{outcome.accuracy:>10.4f}{behind:>8}{outcome.dropped:>9}"
        f"{outcome.megabytes:>10.1f}{outcome.megabytes / outcome.seconds:>8.1f}  rank {outcome.busiest}"
    )


EQUAL, SLOW = "#1f77b4", "#d62728"
PANELS = (
    ("seconds an epoch", lambda each: each.seconds, "{:.2f}"),
    ("updates a second", lambda each: each.updates_per_second, "{:.0f}"),
    ("accuracy on test data", lambda each: each.accuracy, "{:.3f}"),
    ("MB an epoch through the busiest rank", lambda each: each.megabytes, "{:.1f}"),
    ("mean updates behind", lambda each: each.mean_staleness, "{:.1f}"),
)


def draw(outcomes: Sequence[Outcome], title: str, kind: str = "png") -> bytes:
    """Return the picture as the content of a file. kind: "png", "svg" or "pdf"."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.variant for each in outcomes))
    figure = Figure(figsize=(15, 2.2 + 0.85 * len(names)), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True).flat
    for axis, (label, value, text) in zip(axes, PANELS, strict=False):
        _bars(axis, outcomes, names, value, text)
        axis.set_title(label, fontsize=11)
    _histogram(axes[len(PANELS)], outcomes, names)
    figure.suptitle(title, fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return plot.content(figure, kind)


def _bars(axis: Any, outcomes: Sequence[Outcome], names: list[str], value: Any, text: str) -> None:
    for slow, colour, label in ((False, EQUAL, "equal ranks"), (True, SLOW, "one slow rank")):
        some = [each for each in outcomes if each.slow == slow]
        places = [names.index(each.variant) + (0.2 if slow else -0.2) for each in some]
        values = [value(each) for each in some]
        texts = [text.format(each) for each in values]
        plot.bars(axis, names, values, texts, y=places, height=0.38, color=colour, label=label)


def _histogram(axis: Any, outcomes: Sequence[Outcome], names: list[str]) -> None:
    """Draw the histogram of staleness of each run as a row of squares."""
    most = max([len(each.staleness) for each in outcomes] or [0])
    for each in outcomes:
        place = names.index(each.variant) + (0.2 if each.slow else -0.2)
        total = max([*each.staleness, 1])
        for behind, count in enumerate(each.staleness):
            colour = SLOW if each.slow else EQUAL
            axis.barh(place, 0.95, 0.38, left=behind - 0.475, color=colour, alpha=count / total, linewidth=0)
    axis.set_xlim(-0.6, max(most, 1) - 0.4)
    axis.set_title("updates behind: the darker, the more gradients", fontsize=11)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cli.add_some(parser, "--only", [each.name for each in VARIANTS], ";")
    add("--data", default="digits", metavar="SET", help=f"{' or '.join(datasets.NAMES)}, or files (default: digits)")
    add("--epochs", type=cli.at_least(1), default=10, metavar="N", help="(default: 10)")
    add("--batch-size", type=cli.at_least(1), default=100, metavar="N", help="global (default: 100)")
    add("--hidden", default="256,128", metavar="N,N", help="sizes of the hidden layers (default: 256,128)")
    add("--seed", type=cli.at_least(0), default=0, metavar="N", help="(default: 0)")
    add(
        "--repeats", type=cli.at_least(1), default=1, metavar="N",
        help="run everything N times, in turns, and keep the fastest run of each (default: 1)",
    )  # fmt: skip
    add("--row-us", type=cli.at_least(0, float), default=500, metavar="US", help="time of a row (default: 500 us)")
    add(
        "--slow-factor", type=cli.at_least(0, float), default=5, metavar="X",
        help="factor on the time of a row on the slow rank; 0: no runs with a slow rank (default: 5)",
    )  # fmt: skip
    add(
        "--ranks-per-node", type=cli.at_least(0), default=1, metavar="N",
        help="simulate nodes of N ranks; 0: use the real nodes (default: 1)",
    )  # fmt: skip
    add("--plot", metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")
    cli.add_json_option(parser)


def _run(topology: Topology, args: argparse.Namespace, screen: Screen) -> int:
    variants = lineup(args.only, topology.size)
    if not variants:
        error = OptionError(f"too few ranks for these strategies: {topology.size}; start more")
        raise on_all_ranks(error, topology.world)
    outcomes = _measure(topology, args, variants, screen)
    screen.say("#", *table(outcomes))
    options = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
    machine = {"machine": platform.machine(), "mpi": identify()["mpi"]}
    sizes = {"ranks": topology.size, "nodes": topology.nodes, "cores": topology.cores}
    runs = [each.as_dict() for each in outcomes]
    screen.write_record({**sizes, **machine, "options": options, "runs": runs})
    if args.plot and topology.rank == 0:
        title = (
            f"{args.data}, {args.hidden} hidden units, batch {args.batch_size}, {args.epochs} epochs, "
            f"{topology.size} ranks; {args.row_us:g} us a row, {args.slow_factor:g} times that on the slow rank"
        )
        outputs.write(args.plot, draw(outcomes, title, plot.kind_of(args.plot)))
    return 0


def _measure(topology: Topology, args: argparse.Namespace, variants: list[Variant], screen: Screen) -> list[Outcome]:
    bench = Bench(topology, args)
    slows = (False, True) if args.slow_factor and topology.size > SLOW_RANK else (False,)
    screen.say(
        f"# {topology}; {args.epochs} epochs of {args.data}, batch {args.batch_size}, {args.hidden} hidden units"
    )
    screen.say(f"# a row takes {args.row_us:g} us, on the slow rank {args.slow_factor:g} times as long")
    left_out = [each.name for each in lineup(args.only, 1 << 20) if each not in variants]
    if left_out:
        screen.say(f"# too few ranks for: {', '.join(left_out)}")
    cases = [(variant, slow) for slow in slows for variant in variants]
    best: dict[tuple[Variant, bool], Outcome] = {}
    runs = args.repeats * cases
    with screen.bar(len(runs), "run") as bar:
        for number, (variant, slow) in enumerate(runs, 1):
            outcome = bench.run(variant, slow)
            screen.say(f"# {number}/{len(runs)}{' slow' if slow else ''}:{row(outcome)}")
            fastest = best.setdefault((variant, slow), outcome)
            best[variant, slow] = min(fastest, outcome, key=lambda each: each.seconds)
            bar.update()
    return list(best.values())


main = cli.command("benchmarks.strategies", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
