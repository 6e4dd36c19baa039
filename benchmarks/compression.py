"""Compares the ways of sending less: compressed gradients, averages every H steps, and PyTorch's own.

    mpirun -n 4 python -m benchmarks.compression                                                 on these ranks
    sudo bash scripts/cluster_sim.sh 2x2 1gbit -- python -m benchmarks.compression               on two simulated hosts
    sudo GLOO_SOCKET_IFNAME=eth0 bash scripts/cluster_sim.sh 2x2 100mbit -- python -m benchmarks.compression training

It measures one of these:
  speed     milliseconds, bytes and error of averaging 16 MiB of dense layers' gradients, by each compression or exactly
  training  seconds until a model has the accuracy of uncompressed training; needs PyTorch
"""

import argparse
import sys
from datetime import datetime, timezone
from typing import Any

from allreduce import NAMES
from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks
from benchmarks.compressing import speed
from benchmarks.lib import cli, sizes
from benchmarks.lib.outputs import Screen

EPILOG = "Compression gains where the network is slow. On one host the ranks share memory: there it costs time."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", choices=("speed", "training"), default="speed", help="what to measure (default: speed)")
    add("--methods", type=cli.names, metavar="A,B", help="what to compare, such as none,int8 (default: all)")
    add("--backend", choices=NAMES, default="auto", metavar="NAME", help="the backend that sends (default: auto)")
    group = parser.add_argument_group("speed").add_argument
    group("--size", type=cli.size, default=16 << 20, metavar="BYTES", help="of the array (default: 16M)")
    group("--iters", type=cli.at_least(1), default=10, metavar="N", help="timed calls of each method (default: 10)")
    group("--warmup", type=cli.at_least(1), default=2, metavar="N", help="calls before them (default: 2)")
    group = parser.add_argument_group("training").add_argument
    group("--models", type=cli.names, default=["mlp", "conv"], metavar="A,B", help="(default: mlp,conv)")
    group("--steps", type=cli.at_least(1), metavar="N", help="of uncompressed training (default: 65, 200)")
    group("--every", type=cli.at_least(2), default=5, metavar="N", help="steps between evaluations (default: 5)")
    cli.add_json_option(parser)


def _run(topology: Topology, args: argparse.Namespace, screen: Screen) -> int:
    measured: Any = _training(topology) if args.what == "training" else speed
    if args.size < 4:
        raise on_all_ranks(OptionError(f"--size {sizes.show(args.size)}: one element has 4 bytes"), topology.world)
    args.methods = args.methods or list(measured.METHODS)
    record = _about(topology, args, screen)

    def write(found: dict[str, Any]) -> None:
        record.update(found)
        screen.write_record(record)

    measured.run(topology, args, screen, write)
    return 0


def _training(topology: Topology) -> Any:
    try:
        from benchmarks.compressing import training
    except ImportError as error:
        text = f"training needs PyTorch ({error}): pip install '.[torch]' in the checkout"
        raise on_all_ranks(OptionError(text), topology.world) from None
    return training


def _about(topology: Topology, args: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    return {
        "what": args.what,
        "ranks": topology.size,
        "node_sizes": list(topology.node_sizes),
        "backend": args.backend,
        "machine": identify(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": screen.command,
    }


main = cli.command("benchmarks.compression", __doc__, add_options, _run, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
