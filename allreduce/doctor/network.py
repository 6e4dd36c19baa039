"""Checks of the network between hosts: InfiniBand; advice if the ranks do not connect."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from allreduce.doctor.findings import Finding, Needs, Rank, by_node, ok, some, warning
from allreduce.process import variables
from allreduce.topology import Topology

INFINIBAND = Path("/sys/class/infiniband")
PATIENCE_SECONDS = 12.0
ADVICE = """\
allreduce doctor: the ranks are not connected yet: MPI can't connect some, or a host is slow to start.
  -> a firewall between the hosts must let all ports through; where hosts also have networks that are
     not connected (of containers or virtual machines), name the one that they share; with Open MPI by
     mpirun --mca btl_tcp_if_include NETWORK --prtemca prte_if_include NETWORK, such as 10.0.0.0/24
"""


def gather(topology: Topology) -> list[str]:
    """Return the names of this host's InfiniBand adapters."""
    return sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def judge(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    first = [here[0] for here in by_node(ranks)]
    having = [rank for rank in first if rank.facts]
    lacking = [rank.host for rank in first if not rank.facts]
    if having and lacking:
        advice = "MPI falls back to the slower network for them: leave them out, or have their adapters checked"
        yield warning("InfiniBand", f"missing on {some(lacking, ', ')}", advice)
    elif having and len(first) > 1:
        yield ok("InfiniBand", ", ".join(having[0].facts))


@contextmanager
def advise_if_late(seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Context manager: if the body takes longer than `seconds`, rank 0 prints ADVICE. Local."""
    timer = threading.Timer(seconds, lambda: print(ADVICE, end="", file=sys.stderr, flush=True))
    timer.daemon = True
    if variables.first(variables.ANY_RANK, "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
