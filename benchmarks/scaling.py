"""Predicts training on more machines than you have, by a cost model of each backend that measurements can fit.

    python -m benchmarks.scaling --model bert-large --node-size 8 --link 100gbit
    python -m benchmarks.scaling --model gpt2-xl --stages 4 --microbatches 16 --schedule 1f1b
    python -m benchmarks.scaling --fit node2.json node4.json node5.json --fit-rig rig2x2.json

Runs without mpirun: it only computes. --fit reads files of `benchmarks.bandwidth --json`, fits the constants to them,
and reports the errors of the model by backend and size; and for each cluster the errors of a fit to all other clusters.
The predictions use the fitted constants of a node, and the network of --link. --stages divides the model among ranks:
the bubble, the messages between stages, and the all-reduce of each stage's replicas.
"""

import argparse
import importlib.util
import json
import re
import sys
from dataclasses import asdict, replace
from typing import Any

from allreduce.transport.cost import Machine, on_link
from benchmarks.lib import cli, outputs
from benchmarks.lib.columns import columns
from benchmarks.lib.results import FileError
from benchmarks.predicting import fitting
from benchmarks.predicting.forecast import BACKWARD, GAIN, MODELS, MOST_RANKS, WHOLE, Forecast, forecast
from benchmarks.predicting.pipeline import SCHEDULES, Plan

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
LINK_LATENCY = 5e-6  # of the network, if --link gives none
CAVEATS = (
    "The model knows no congestion between switches, no stragglers and no failures: beyond a few nodes it is a bound.",
    "Backends run on the CPU; gradients on a GPU are first copied to the host (at PCIe's speed), which is not counted.",
    "native is modelled as a tree between nodes; MPI libraries select among many algorithms, so its times are rough.",
)
STAGE_CAVEAT = (
    "All stages compute equally long, and messages between stages are hidden except the first and the last ones. The "
    "time of the schedule itself (PyTorch's: about 3 ms for each microbatch on a stage) is not counted."
)


def _predict(args: argparse.Namespace) -> int:
    if (args.fit or args.fit_rig) and importlib.util.find_spec("scipy") is None:
        raise FileError('--fit needs SciPy; pip install ".[bench]" in the checkout')
    plan = _plan(args)
    record: dict[str, Any] = {}
    fitted = _fit(args, record) if args.fit or args.fit_rig else Machine()
    bandwidth, latency = args.link
    machine = on_link(fitted, bandwidth / 8, latency)
    forecasts = [_forecast(args, name, machine) for name in args.model]
    staged = [_forecast(args, name, machine, plan) for name in args.model] if plan else []
    for found in forecasts:
        print("\n".join(_table(found, args)))
    for found in staged:
        print("\n".join(_stage_table(found, args)))
    print("\n".join(f"# {line}" for line in (*CAVEATS, *[STAGE_CAVEAT] * bool(plan))))
    if args.json:
        record |= {"machine": asdict(machine), "forecasts": [_plain(each) for each in forecasts]}
        record |= {"stages": [_plain(each) for each in staged]} if plan else {}
        outputs.write(args.json, json.dumps(record, indent=1) + "\n")
    return 0


def _plain(found: Forecast) -> dict[str, Any]:
    return {**asdict(found), "model": found.model.name}


def _forecast(args: argparse.Namespace, name: str, machine: Machine, plan: Plan = WHOLE) -> Forecast:
    model = MODELS[name]
    if args.step_time is not None:
        model = replace(model, step_seconds=args.step_time, source="given by --step-time")
    size, cores, most = DTYPES[args.dtype], args.cores or 0, args.max_ranks
    return forecast(model, machine, args.node_size, plan, itemsize=size, cores=cores, most=most, overlap=args.overlap)


def _plan(args: argparse.Namespace) -> Plan | None:
    """Return how --stages divides the model; None without it. Raises FileError if the options don't fit together."""
    if args.stages is None:
        given = next((name for name in ("microbatches", "schedule", "chunks") if getattr(args, name) is not None), None)
        if given:
            raise FileError(f"--{given} needs --stages: the number of ranks that divide the model")
        return None
    schedule, microbatches = args.schedule or "1f1b", args.microbatches or 4 * args.stages
    chunks = args.chunks or (2 if schedule == "interleaved" else 1)
    if chunks > 1 and schedule != "interleaved":
        raise FileError(f"--chunks {chunks} needs --schedule interleaved, not {schedule}")
    if schedule != "gpipe" and microbatches < args.stages:
        raise FileError(f"{schedule} needs --microbatches {args.stages} or more, as many as stages")
    return Plan(args.stages, microbatches, schedule, chunks)


# ---- Fitting ----


def _fit(args: argparse.Namespace, record: dict[str, Any]) -> Machine:
    points, runs = fitting.read(args.fit or [])
    more, rigs = fitting.read(args.fit_rig or [], one_machine=True)
    cores = {int(run.machine["cores"]) for run in runs + rigs if run.machine.get("cores")}
    if len(cores) > 1:
        raise FileError(
            f"the files are of machines with {' and '.join(map(str, sorted(cores)))} cores; fit one at a time"
        )
    start = Machine()
    points = points + more
    machine = fitting.fit(points, start)
    places = fitting.by_place(points, machine, start)
    errors = fitting.errors(points, machine)
    print("\n".join(fitting.lines(points, machine, errors, places)))
    record["fit"] = {
        "constants": asdict(machine),
        "points": len(points),
        "median_error": errors["overall"],
        "median_error_flat": errors.get("flat"),
        "median_error_rig": errors.get("rig"),
        "places": [asdict(place) for place in places],
        "cells": [asdict(each) for each in fitting.by_size(points, machine)],
        "not_fitted": fitting.untouched(points, machine),
    }
    return machine


# ---- Predictions ----


def _setting(args: argparse.Namespace) -> str:
    bandwidth, latency = args.link
    return f"nodes of {args.node_size}, {bandwidth / 1e9:g} Gb/s and {latency * 1e6:g} us between them, {args.dtype}"


def _table(found: Forecast, args: argparse.Namespace) -> list[str]:
    model, rows = found.model, []
    for row in found.rows[1:]:
        others = sorted((value, name) for name, value in row.seconds.items() if name != row.winner)
        rest = ", ".join(f"{name} {_milliseconds(value)}" for value, name in others)
        gains = f"{row.speedup:.4g}", f"{row.efficiency:.0%}", f"{row.efficiency_overlapped:.0%}"
        best = _milliseconds(row.seconds[row.winner])
        rows.append((row.ranks, row.nodes, row.winner, best, f"{row.step * 1e3:.1f}", *gains, rest))
    heads = ["ranks", "nodes", "winner", "all-reduce(ms)", "step(ms)", "speedup", "eff.", "overlap", "others(ms)"]
    if found.saturation is None:
        saturation = f"none up to {found.rows[-1].ranks} ranks (doubling still gains {GAIN:.0%} or more)"
    else:
        saturation = f"{found.saturation} ranks: doubling them gains less than {GAIN:.0%}"
    return [
        "#",
        f"# {model.title}: {model.parameters / 1e6:.1f} M parameters, {found.gradient_bytes / 1e6:.0f} MB of gradients,"
        f" {model.step_seconds * 1e3:.0f} ms a step",
        f"#   {model.source}",
        f"# {_setting(args)}; efficiency without overlap, and with {args.overlap:.0%} of the step to hide behind",
        *columns(heads, rows, left=(2, 8)),
        f"# saturation: {saturation}; at least half efficient up to {_ranks(found.efficient or 0)}",
        f"# one rank's batch divided among all (strong scaling): the shortest step is at {_ranks(found.best_strong)}",
    ]


def _stage_table(found: Forecast, args: argparse.Namespace) -> list[str]:
    plan, model, rows = found.plan, found.model, []
    for row in found.rows:
        times = f"{row.transfer * 1e3:.3f}", f"{row.pipeline * 1e3:.1f}"
        best = row.winner if row.replicas > 1 else "-", _milliseconds(row.seconds[row.winner])
        gains = f"{row.step * 1e3:.1f}", f"{row.speedup:.4g}", f"{row.efficiency:.0%}"
        rows.append((row.ranks, row.nodes, row.replicas, *times, *best, *gains))
    heads = ["ranks", "nodes", "replicas", "message(ms)", "pipeline(ms)", "winner", "all-reduce(ms)", "step(ms)"]
    chunks = f", {plan.chunks} chunks a rank" if plan.chunks > 1 else ""
    return [
        "#",
        f"# {model.title} in {plan.stages} stages, {plan.schedule}{chunks}, {plan.microbatches} microbatches of "
        f"{model.samples * plan.stages / plan.microbatches:g} samples: bubble {found.bubble:.1%}",
        f"#   a replica sends {plan.messages} messages of {found.message_bytes / 1e6:.3g} MB a step; "
        f"a stage has {found.gradient_bytes / 1e6:.0f} MB of gradients",
        f"# {_setting(args)}; a rank computes {model.step_seconds * 1e3:.0f} ms a step",
        *columns([*heads, "speedup", "eff."], rows, left=(5,)),
    ]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}"


# ---- Options ----


def _link(text: str) -> tuple[float, float]:
    """Return bits per second and seconds for "100gbit" or "100gbit,2us"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:,(\d+(?:\.\d+)?)(ns|us|ms))?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a rate such as 10gbit, or with a latency 100gbit,2us, got {text!r}")
    return float(match[1]) * _UNITS[match[2]], float(match[3]) * _TIMES[match[4]] if match[3] else LINK_LATENCY


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fit", nargs="+", metavar="FILE", help="runs of benchmarks.bandwidth --json to fit the constants to")
    add("--fit-rig", nargs="+", metavar="FILE", help="as --fit, of scripts/cluster_sim.sh: hosts share one machine")
    cli.add_some(parser, "--model", MODELS, default=["resnet50"])
    add("--step-time", type=cli.at_least(1e-6, float, 1e6), metavar="SECONDS", help="computing time of a step")
    add("--node-size", type=cli.at_least(1, int, 1024), default=8, metavar="N", help="ranks of a node (default 8)")
    add("--cores", type=cli.at_least(1, int, 4096), metavar="N", help="cores of a node (default: one a rank)")
    add("--link", type=_link, default=_link("100gbit"), metavar="RATE", help="a link: 100gbit (default) or 10gbit,20us")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="dtype in which gradients are sent")
    add(
        "--overlap",
        type=cli.at_least(0, float, 1),
        default=BACKWARD,
        metavar="F",
        help="part of a step that can hide the all-reduce (default 2/3, the backward pass)",
    )
    add(
        "--max-ranks",
        type=cli.at_least(2, int, 1 << 20),
        default=MOST_RANKS,
        metavar="N",
        help="predict up to (default 4096)",
    )
    add("--stages", type=cli.at_least(1, int, 1024), metavar="S", help="ranks that divide the model (pipeline stages)")
    add("--microbatches", type=cli.at_least(1, int, 1 << 16), metavar="M", help="of a replica's batch (default 4 S)")
    add("--schedule", choices=SCHEDULES, help="of the stages (default 1f1b)")
    add("--chunks", type=cli.at_least(1, int, 64), metavar="C", help="stages a rank, for interleaved (default 2)")
    add("--json", metavar="FILE", help="everything that is printed")


main = cli.serial_command("benchmarks.scaling", __doc__, add_options, _predict)


if __name__ == "__main__":
    sys.exit(main())
