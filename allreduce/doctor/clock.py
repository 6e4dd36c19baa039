"""The clocks of the hosts: by how much they differ from that of rank 0."""

import time
from collections.abc import Sequence

from allreduce.doctor.findings import OK, WARNING, Finding, Rank, by_node, some
from allreduce.topology import Topology
from allreduce.tracing import clocks

AREA = "clocks"
SKEW_SECONDS = 0.1
BILLION = 1e9


def measure(topology: Topology) -> list[float]:
    """The seconds by which the clock of each node's first rank is ahead of rank 0's; on rank 0. Collective."""
    comm = topology.cross  # that of the first ranks is theirs alone
    if topology.node_rank or comm.size == 1:
        return []
    return [heard.ahead / BILLION for heard in clocks.compare(comm, time.time_ns)]


def judge(ranks: Sequence[Rank], ahead: Sequence[float]) -> list[Finding]:
    """ahead: by node, as `measure` gives it; nothing for one node."""
    if not ahead:
        return [Finding(AREA, "skew", OK, "one host has one clock")]
    hosts = [here[0].host for _, here in sorted(by_node(ranks).items())]
    wrong = [f"{host} by {skew:+.3g} s" for host, skew in zip(hosts, ahead, strict=True) if abs(skew) > SKEW_SECONDS]
    if wrong:
        advice = "run chronyd or ntpd on all hosts: times of files, of logs and of deadlines are off by as much"
        return [Finding(AREA, "skew", WARNING, f"clocks differ from that of {hosts[0]}: {some(wrong)}", advice)]
    most = max(map(abs, ahead))
    text = f"at most {1000 * most:.3g} ms between hosts" if most else "no difference between hosts that can be measured"
    return [Finding(AREA, "skew", OK, text)]
