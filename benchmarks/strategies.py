"""Compares the training strategies on the same network, data and epochs, with and without a slow rank.

    mpirun -n 5 python -m benchmarks.strategies --json out.json

Computing a row takes a fixed time (--row-us): a rank sleeps for the rest of it, as if it had its own processor.
So the strategies differ only in waits and messages, even if ranks outnumber cores. The slow rank is rank 1, a worker in
every strategy. By default every rank is a simulated node, so that all data is sent in messages. Between hosts (those of
scripts/cluster_sim.sh too) the bytes that they send are counted.
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import all_values, on_all_ranks
from benchmarks.lib import cli, hosts
from benchmarks.lib.columns import columns
from benchmarks.lib.outputs import Screen
from trainers import NumpyNetwork, datasets
from trainers.cli import options
from trainers.trainer import Trainer

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
        staleness[s] gradients were s updates stale, over all epochs. megabytes: that all hosts send to others in an
        epoch; None on one host.
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
    megabytes: float | None

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

    def run(self, variant: Variant, slow: bool) -> Outcome:
        chosen = self._options(variant)
        servers = spread(all_values(self._world.world, self._world.node_index, "learn the nodes"), variant.servers)
        comm = MPI.Intracomm(self._world.world.Split(0, self._world.rank in servers))
        with Topology(comm, self._chosen.ranks_per_node or None, self._world.timeout) as topology:
            network = self._network(chosen, slow)
            with options.make_trainer(chosen, network, topology) as trainer:
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
        data, before = self._data, hosts.sent_bytes(self._world)
        given: dict[str, Any] = {"seed": chosen.seed, "progress": False}
        history = trainer.fit(data.x_train, data.y_train, chosen.epochs, chosen.batch_size, **given)
        after = hosts.sent_bytes(self._world)
        accuracy = trainer.evaluate(data.x_test, data.y_test)["accuracy"]
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
            None if before is None or after is None else (after - before) / chosen.epochs / 1e6,
        )


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


HEADS = ("s/epoch", "updates/s", "samples/s", "accuracy", "behind", "dropped", "MB/epoch")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each run; the runs with a slow rank come last."""
    ranks = {False: "equal", True: "one slow"}
    rows = [[each.variant, ranks[each.slow], *cells(each)] for each in sorted(outcomes, key=lambda each: each.slow)]
    return columns(["strategy", "ranks", *HEADS], rows, left=(0, 1))


def cells(outcome: Outcome) -> list[str]:
    """Return the cells of a run's line, for HEADS."""
    return [
        f"{outcome.seconds:.3f}",
        f"{outcome.updates_per_second:.0f}",
        f"{outcome.samples_per_second:.0f}",
        f"{outcome.accuracy:.4f}",
        f"{outcome.mean_staleness:.1f}" if outcome.staleness else "-",
        str(outcome.dropped),
        "-" if outcome.megabytes is None else f"{outcome.megabytes:.1f}",
    ]


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
    cli.add_json_option(parser)


def _run(topology: Topology, args: argparse.Namespace, screen: Screen) -> int:
    variants = lineup(args.only, topology.size)
    if not variants:
        error = OptionError(f"too few ranks for these strategies: {topology.size}; start more")
        raise on_all_ranks(error, topology.world)
    outcomes = _measure(topology, args, variants, screen)
    screen.say("#", *table(outcomes))
    options = {name: value for name, value in vars(args).items() if name != "json"}
    machine = {"machine": platform.machine(), "mpi": identify()["mpi"]}
    sizes = {"ranks": topology.size, "nodes": topology.nodes, "cores": topology.cores}
    runs = [each.as_dict() for each in outcomes]
    screen.write_record({**sizes, **machine, "options": options, "runs": runs})
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
            told = ", ".join(f"{head} {cell}" for head, cell in zip(HEADS, cells(outcome), strict=True))
            screen.say(f"# {number}/{len(runs)} {variant.name}{', one slow rank' * slow}: {told}")
            fastest = best.setdefault((variant, slow), outcome)
            best[variant, slow] = min(fastest, outcome, key=lambda each: each.seconds)
            bar.update()
    return list(best.values())


main = cli.command("benchmarks.strategies", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
