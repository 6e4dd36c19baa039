"""Compares the ways of sending less: compressed gradients, averages every H steps, and PyTorch's own.

    mpirun -n 4 python -m benchmarks.compression                                     on these ranks
    sudo python -m benchmarks.compression --hosts 2 --ranks-per-host 2 --rate 1gbit  on two simulated hosts

It measures one of these:
  speed     milliseconds, bytes and error of averaging 16 MiB of an MLP's gradients, by each compression
  training  seconds until a model has the accuracy of uncompressed training; needs PyTorch
  exact     the SHA-256 of exactly trained parameters, on 1 rank to all, with each backend: the exit status is 1 if some
            differ
  steps     milliseconds of a training step with and without average=Exact()
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from allreduce import NAMES
from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks
from benchmarks.compressing import exact, picture, speed
from benchmarks.lib import cli, hosts, outputs, plot, sizes
from benchmarks.lib.outputs import Screen
from trainers.datasets.parser import Parser

Write = Callable[[dict[str, Any]], None]  # adds to the record, and writes it
Draw = Callable[[Mapping[str, Any]], Any]  # returns the picture of a record

NAME = "benchmarks.compression"
RATES = {"speed": "1gbit", "training": "100mbit", "exact": "1gbit", "steps": "1gbit"}  # of a host's link
EPILOG = """\
--hosts starts the ranks itself, by scripts/cluster_sim.sh: on hosts that it simulates on this Linux machine, with links
of --rate between them. It needs root. On a cluster, start this command with mpirun on several machines instead.
Compression gains where the network is slow. On one host the ranks share memory: there it costs time.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", choices=tuple(RATES), default="speed", help="what to measure (default: speed)")
    add(
        "--methods",
        type=cli.names,
        metavar="A,B",
        help="what to compare, such as none,int8; for exact: backends (default: all)",
    )
    add("--backend", choices=NAMES, default="auto", metavar="NAME", help="the backend that sends (default: auto)")
    _add_host_options(parser.add_argument_group("simulated hosts"))
    group = parser.add_argument_group("speed").add_argument
    group("--size", type=cli.size, default=16 << 20, metavar="BYTES", help="of the array (default: 16M)")
    group("--iters", type=cli.at_least(1), default=10, metavar="N", help="timed calls of each method (default: 10)")
    group("--warmup", type=cli.at_least(1), default=2, metavar="N", help="calls before them (default: 2)")
    group = parser.add_argument_group("training").add_argument
    group("--models", type=cli.names, default=["mlp", "conv"], metavar="A,B", help="(default: mlp,conv)")
    group("--steps", type=cli.at_least(1), metavar="N", help="of uncompressed training (default: 65, 200)")
    group("--every", type=cli.at_least(2), default=5, metavar="N", help="steps between evaluations (default: 5)")
    group = parser.add_argument_group("exact").add_argument
    group("--epochs", type=cli.at_least(1), default=5, metavar="N", help="(default: 5)")
    group = parser.add_argument_group("steps").add_argument
    group("--batch", type=cli.at_least(1), default=128, metavar="N", help="rows of a batch (default: 128)")
    numbers = cli.several(cli.at_least(1))
    group("--layers", type=numbers, default=[2048] * 3, metavar="N,N", help="hidden ones (default: 2048,2048,2048)")
    group("--micro-batches", type=numbers, default=[8, 16, 64], metavar="N,N", help="(default: 8,16,64)")
    cli.add_json_option(parser)
    add("--plot", metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")


def _add_host_options(group: Any) -> None:
    add = group.add_argument
    add("--hosts", type=cli.at_least(1, most=250), metavar="N", help="start the ranks on N simulated hosts; needs root")
    add("--ranks-per-host", type=cli.at_least(1), default=2, metavar="N", help="(default: 2)")
    add("--rate", metavar="RATE", help=f"of each host's link, such as 100mbit ({_rates()})")


def _rates() -> str:
    return "default: " + ", ".join(f"{rate} for {what}" for what, rate in RATES.items())


def _run(given: Sequence[str], topology: Topology, args: argparse.Namespace, screen: Screen) -> int:
    if args.hosts:
        return _start_on_hosts(given, topology, args)
    record = {**_about(topology, args, screen)}

    def write(found: dict[str, Any]) -> None:
        record.update(found)
        screen.write_record(record)

    if args.what in ("exact", "steps"):
        if args.plot:
            raise on_all_ranks(OptionError(f"--plot: {args.what} has no picture"), topology.world)
        if args.what == "exact":
            return 0 if exact.run(topology, args, screen, write) else 1
        exact.run_steps(topology, args, screen, write)
        return 0
    if args.what == "training":
        draw = _train(topology, args, screen, write)
    else:
        draw = _measure_calls(topology, args, screen, write)
    if args.plot and topology.rank == 0:
        outputs.write(args.plot, plot.content(draw(record), plot.kind_of(args.plot)))
    return 0


def _measure_calls(topology: Topology, args: argparse.Namespace, screen: Screen, write: Write) -> Draw:
    if args.size < 4:
        raise on_all_ranks(OptionError(f"--size {sizes.show(args.size)}: one element has 4 bytes"), topology.world)
    args.methods = args.methods or list(speed.METHODS)
    write(speed.run(topology, args, screen))
    return picture.of_speed


def _train(topology: Topology, args: argparse.Namespace, screen: Screen, write: Write) -> Draw:
    try:
        from benchmarks.compressing import training
    except ImportError as error:
        text = f"training needs PyTorch ({error}): pip install '.[torch]' in the checkout"
        raise on_all_ranks(OptionError(text), topology.world) from None
    args.methods = args.methods or list(training.METHODS)
    training.run(topology, args, screen, write)
    return picture.of_training


def _start_on_hosts(given: Sequence[str], topology: Topology, args: argparse.Namespace) -> int:
    """Run this command on simulated hosts, without the options that describe them."""
    if topology.size > 1:
        raise on_all_ranks(OptionError("--hosts starts the ranks itself; leave out mpirun"), topology.world)
    parser = Parser(add_help=False)
    _add_host_options(parser)
    _, rest = parser.parse_known_args(given)
    return hosts.start(args.hosts, args.ranks_per_host, args.rate or RATES[args.what], ["-m", NAME, *rest])


def _about(topology: Topology, args: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    return {
        "what": args.what,
        "ranks": topology.size,
        "node_sizes": list(topology.node_sizes),
        "rate": hosts.simulated_rate(),
        "backend": args.backend,
        "machine": identify(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": screen.command,
    }


def main(arguments: Sequence[str] | None = None, program: str = f"python -m {NAME}") -> int:
    """Run the command line; returns the exit code. Collective."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return cli.command(NAME, __doc__, add_options, partial(_run, given), EPILOG)(given, program)


if __name__ == "__main__":
    sys.exit(main())
