"""The command `doctor`: its options, the checks of all ranks, and its report.

A check gathers facts on each rank, and yields findings from the facts of all ranks (`CHECKS`). If gathering fails on a
rank, its error is a finding, so that no rank waits for it.
"""

import argparse
import json
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from allreduce.doctor import host, network, pairs
from allreduce.doctor.findings import Finding, Needs, Rank, exit_code, grouped, named, problem, report
from allreduce.errors import OptionError
from allreduce.files import replacing, writable
from allreduce.health import abort
from allreduce.topology import Topology
from allreduce.transport.control import all_values, together

ABOUT = "checks whether these hosts are fit for training, and says what to change"
DEFAULT_PARAMETERS = 25_000_000  # a ResNet-50's
DEFAULT_SECONDS = 10.0
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
STANDARD_OUTPUT = "-"
MORE = """\
Run it as the training will be run, under the same launcher, with as many ranks on the same hosts:
  mpirun -n 4 python -m allreduce doctor
  srun -N 2 --ntasks-per-node 8 python -m allreduce doctor --parameters 350M --json doctor.json
Without a launcher (python -m allreduce doctor) it checks this machine only.

A finding is ok, a warning (training works, but something makes it slow or fragile) or a problem (something does not
work). A finding that is not ok has advice below it. The exit code is that of the worst finding: 0 all is ok, 1 there
are warnings, 2 there are problems, or the doctor could not run (ranks can't connect, say); 64 means bad options.
"""


class Check(NamedTuple):
    """A part of the examination."""

    area: str  # the heading of its findings
    gather: Callable[[Topology], Any]  # returns this rank's facts
    judge: Callable[[Sequence[Rank], Needs], Iterable[Finding]]  # pure; Rank.facts holds this check's facts


CHECKS = {
    "mpi": Check("MPI", host.gather_mpi, host.judge_mpi),
    "cores": Check("cores", host.gather_cores, host.judge_cores),
    "memory": Check("memory", host.gather_memory, host.judge_memory),
    "gpus": Check("GPUs", host.gather_gpus, host.judge_gpus),
    "versions": Check("versions", host.gather_versions, host.judge_versions),
    "network": Check("network", network.gather, network.judge),
}
FAILED = "failed"  # in place of the facts of a check that failed


class Examination(NamedTuple):
    """The facts, findings and measurements; the same on all ranks."""

    ranks: list[Rank]
    findings: list[Finding]
    results: pairs.Results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parameters", type=parameters, metavar="N",
        help="parameters of the model to be trained, such as 350M, for the checks of /dev/shm and memory (default: "
        "25M); if given, too little memory is a problem, not only a warning",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all facts and findings; - writes them to standard output")
    parser.add_argument(
        "--seconds", type=seconds, default=DEFAULT_SECONDS, metavar="S",
        help=f"longest time to measure pairs of ranks; 0 skips that (default: {DEFAULT_SECONDS:g})",
    )  # fmt: skip


def run(chosen: argparse.Namespace, topology: Topology) -> int:
    """Examine, report on rank 0, and return the exit code, the same on all ranks. Collective."""

    def on_first(step: Callable[..., object], *arguments: Any) -> None:
        together(topology.world, lambda: step(*arguments) if topology.rank == 0 else None)

    on_first(check_target, chosen.json)
    title, shown = f"allreduce doctor: {topology}", sys.stderr if chosen.json == STANDARD_OUTPUT else sys.stdout
    on_first(partial(print, title, file=shown, flush=True))  # the examination takes some seconds
    needs = Needs(chosen.parameters or DEFAULT_PARAMETERS, asked=chosen.parameters is not None)
    found = examine(topology, needs, chosen.seconds)
    on_first(write, title, found, chosen.json)
    on_first(partial(print, report(found.findings), end="", file=shown, flush=True))
    code = exit_code(found.findings)
    if found.results.unreachable:  # messages to these ranks are pending, so MPI_Finalize would not return
        abort.end_job("some ranks don't answer\n", code)
    return code


# The examination


def examine(topology: Topology, needs: Needs, seconds: float) -> Examination:
    """Run all checks. Collective. seconds: to measure pairs; 0 skips that."""
    comm = topology.private()
    hosts = all_values(comm, socket.gethostname(), "gather host names")
    facts = {key: _gathered(check, topology) for key, check in CHECKS.items()}
    ranks = ranks_of(hosts, all_values(comm, [topology.node_index, facts], "gather the facts of all ranks"))
    rounds = pairs.plan([rank.node for rank in ranks]) * pairs.SWEEPS if seconds else []
    results = pairs.measure(comm, rounds, seconds)
    return Examination(ranks, judge(ranks, needs, results), results)


def _gathered(check: Check, topology: Topology) -> Any:
    """Return a check's facts on this rank, or its error: if it were raised, the other ranks would wait for this one."""
    try:
        return check.gather(topology)
    except Exception as error:
        return {FAILED: f"{type(error).__name__}: {error}"}


def ranks_of(hosts: Sequence[str], reports: Sequence[Any]) -> list[Rank]:
    """Return the ranks, on nodes with different names: containers may all have the same host name."""
    host_of = {node: host for (node, _), host in zip(reports, hosts, strict=True)}
    times = Counter(host_of.values())
    names = {node: f"{host}#{node}" if times[host] > 1 else host for node, host in host_of.items()}
    return [Rank(rank, node, names[node], facts) for rank, (node, facts) in enumerate(reports)]


def judge(ranks: Sequence[Rank], needs: Needs, results: pairs.Results) -> list[Finding]:
    """Return the findings from the facts and measurements of all ranks. Pure."""
    findings: list[Finding] = []
    for key, check in CHECKS.items():
        findings += (found._replace(area=check.area) for found in judge_one(key, ranks, needs))
    well, _ = _facts_of("network", ranks)
    of_pairs = pairs.judge(ranks, needs, results, network.link_speed(well))
    return findings + [found._replace(area="pairs of ranks") for found in of_pairs]


def judge_one(key: str, ranks: Sequence[Rank], needs: Needs) -> Iterable[Finding]:
    """Yield the findings of one check."""
    well, failed = _facts_of(key, ranks)
    if well:
        yield from CHECKS[key].judge(well, needs)
    for text, some in grouped(failed, lambda rank: rank.facts[FAILED]).items():
        yield problem("check", f"failed on {named(some)}: {text}", "please report this, with its text")


def _facts_of(key: str, ranks: Sequence[Rank]) -> tuple[list[Rank], list[Rank]]:
    """Return the ranks with one check's facts only: those on which it worked, and those on which it failed."""
    every = [rank._replace(facts=rank.facts[key]) for rank in ranks]
    failed = [rank for rank in every if isinstance(rank.facts, dict) and FAILED in rank.facts]
    return [rank for rank in every if rank not in failed], failed


# The report


def check_target(path: str | None) -> None:
    """Raise OptionError if the JSON can't be written, before the examination."""
    if path is not None and path != STANDARD_OUTPUT and not (path and writable(path)):
        raise OptionError(f"--json {path}: this file can't be written; give a file in a folder that exists")


def write(title: str, found: Examination, json_path: str | None) -> None:
    """Write the JSON, if it is asked for. Raises OptionError if that fails."""
    if json_path == STANDARD_OUTPUT:
        print(as_json(title, found), end="", flush=True)
    elif json_path is not None:
        with replacing(json_path, "--json") as file:
            file.write(as_json(title, found))


def as_json(title: str, found: Examination) -> str:
    """Return everything that was found, as JSON."""
    content = {
        "title": title,
        "exit_code": exit_code(found.findings),
        "findings": [finding._asdict() for finding in found.findings],
        "ranks": [rank._asdict() for rank in found.ranks],
        "pairs": [
            {"ranks": pair[:2], "latency_s": pair.latency, "bytes_per_s": pair.bandwidth}
            for pair in found.results.measured
        ],
        "unreachable": found.results.unreachable,
    }
    return json.dumps(content, indent=2) + "\n"


# Options


def parameters(text: str) -> int:
    """Parse a number of parameters, for argparse: 25000000, 25M, 1.5B."""
    unit = text[-1:].upper()
    with suppress(ValueError):
        value = float(text.removesuffix(text[-1:] if unit in UNITS else "").replace("_", "")) * UNITS.get(unit, 1)
        if 1 <= value <= 10**15:
            return round(value)
    raise argparse.ArgumentTypeError(f"must be a number of parameters such as 350M, 1.5B or 25000000, got {text!r}")


def seconds(text: str) -> float:
    """Parse a time in seconds, for argparse."""
    with suppress(ValueError):
        if 0 <= float(text) <= 3600:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 3600, got {text!r}")
