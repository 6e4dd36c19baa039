"""Checks of the network between hosts: shared networks, resolvable host names, clocks."""

import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from allreduce.doctor.findings import EXTRA, Finding, Needs, Rank, by_node, ok, some, warning
from allreduce.process import variables
from allreduce.topology import Topology
from allreduce.tracing import clocks

NAME_SECONDS = 3.0  # for the answer of a name server
INFINIBAND = Path("/sys/class/infiniband")
SKEW_SECONDS = 0.1
BILLION = 1e9
PATIENCE_SECONDS = 12.0


class Interface(TypedDict):
    """A network interface with an IPv4 address."""

    name: str
    address: str
    network: str  # "10.0.0.0/24"
    speed: int | None  # Mb/s, where the system knows it


def gather(topology: Topology, first: str) -> dict[str, Any] | None:
    """Return the facts of each node's first rank; None on other ranks. first: the host name of rank 0."""
    if topology.node_rank:
        return None
    return {
        "name": socket.gethostname(),
        "interfaces": interfaces(),
        "infiniband": sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else [],
        "resolves": resolved(socket.gethostname()),
        "first": first,
        "first_resolves": resolved(first),
    }


def judge(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    leaders = _leaders(ranks)
    several = len(by_node(ranks)) > 1
    if leaders and several:
        if all(rank.facts["interfaces"] is not None for rank in leaders):
            yield _common(leaders)
            yield from _same_addresses(leaders)
        else:
            yield ok("interfaces", f"unknown; {EXTRA} lists them")
        having = [rank for rank in leaders if rank.facts["infiniband"]]
        lacking = [rank.host for rank in leaders if not rank.facts["infiniband"]]
        if having and lacking:
            advice = "MPI falls back to the slower network for them: leave them out, or have their adapters checked"
            yield warning("InfiniBand", f"missing on {some(lacking, ', ')}", advice)
        elif having:
            yield ok("InfiniBand", ", ".join(having[0].facts["infiniband"]))
    if leaders:
        yield _names(leaders, several)


def link_speed(ranks: Sequence[Rank]) -> float | None:
    """Return bytes a second of the fastest network that all hosts share; None if unknown."""
    shared = _shared_networks(_leaders(ranks))
    return max(map(_slowest, shared.values()), default=0) * 1e6 / 8 or None


def _leaders(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the first rank of each node; only these have facts."""
    return [rank for rank in ranks if rank.facts is not None]


def _up(rank: Rank) -> list[Interface]:
    """Return the interfaces that are not loopback."""
    return [each for each in rank.facts["interfaces"] or [] if not ipaddress.ip_address(each["address"]).is_loopback]


def _slowest(interfaces: Sequence[Interface]) -> int:
    """Return the lowest speed in Mb/s; 0 if one is unknown."""
    return min(each["speed"] or 0 for each in interfaces)


def _shared_networks(leaders: Sequence[Rank]) -> dict[str, list[Interface]]:
    """Return the networks that all hosts are in, each with a different address, and the hosts' interfaces in each."""
    every = [each for rank in leaders for each in _up(rank)]
    names = set.intersection(*({each["network"] for each in _up(rank)} for rank in leaders)) if leaders else set()
    twice = _addresses_of_several(leaders)
    names -= {each["network"] for each in every if each["address"] in twice}
    return {name: [each for each in every if each["network"] == name] for name in sorted(names)}


def _addresses_of_several(leaders: Sequence[Rank]) -> dict[str, list[str]]:
    """Return the hosts of each address that several hosts have."""
    owners: dict[str, list[str]] = {}
    for rank in leaders:
        for each in _up(rank):
            owners.setdefault(each["address"], []).append(rank.host)
    return {address: hosts for address, hosts in owners.items() if len(hosts) > 1}


def _common(leaders: Sequence[Rank]) -> Finding:
    texts = []
    for network, members in _shared_networks(leaders).items():
        slowest = _slowest(members)
        names = "/".join(dict.fromkeys(each["name"] for each in members))
        texts.append(f"{network} ({names}{f', {slowest / 1000:g} Gb/s' if slowest else ''})")
    if texts:
        return ok("interfaces", f"all hosts are in {some(texts)}")
    lists = [", ".join(f"{each['name']} {each['address']}" for each in _up(rank)) for rank in leaders]
    texts = [f"{rank.host}: {shown or 'none'}" for rank, shown in zip(leaders, lists, strict=True)]
    advice = "fine where a router joins them; if ranks wait for each other at the start, ask your administrator"
    return warning("interfaces", f"the hosts have no network in common ({some(texts)})", advice)


def _same_addresses(leaders: Sequence[Rank]) -> Iterator[Finding]:
    """Find addresses that several hosts have (container bridges): MPI may try them, and wait for ever."""
    if twice := _addresses_of_several(leaders):
        names = sorted({each["name"] for rank in leaders for each in _up(rank) if each["address"] in twice})
        text = some([f"{address} is the address of {' and '.join(hosts[:2])}" for address, hosts in twice.items()])
        advice = f"keep MPI away from them: mpirun --mca btl_tcp_if_exclude lo,{','.join(names)} (Open MPI)"
        yield warning("same addresses", f"{text} ({', '.join(names)})", advice)


def _names(leaders: Sequence[Rank], several: bool) -> Finding:
    """Check host names, which gloo and PyTorch's stores use; MPI does not."""
    facts, first = leaders[0].facts, leaders[0].facts["first"]
    if not several and facts["resolves"]:
        return ok("host names", f"{facts['name']} is {facts['resolves']}")
    for fails, text, advice in (
        (
            lambda own: not own["resolves"],
            "its own host name does not resolve",
            "PyTorch's gloo and TCPStore use host names: add `ADDRESS NAME` of each host to /etc/hosts of all",
        ),
        (
            lambda own: not own["first_resolves"],
            f"the name of rank 0's host, {first}, does not resolve",
            f"PyTorch's stores are on {first}: give its address (MASTER_ADDR), or name it in /etc/hosts",
        ),
        (
            lambda own: ipaddress.ip_address(own["resolves"]).is_loopback,
            "its own host name resolves to a loopback address (127...)",
            "gloo would listen on loopback only: set GLOO_SOCKET_IFNAME, or fix /etc/hosts",
        ),
    ):
        if hosts := [rank.host for rank in leaders if fails(rank.facts)]:
            return warning("host names", f"{some(hosts, ', ')}: {text}", advice)
    return ok("host names", f"every host resolves its own, and that of rank 0 ({first})")


def resolved(name: str) -> str:
    """Return the IPv4 address of a host name; "" if it has none, or none in time."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except (OSError, UnicodeError):
            return

    asking = threading.Thread(target=ask, daemon=True)  # gethostbyname has no time limit
    asking.start()
    asking.join(NAME_SECONDS)
    return found[0] if found else ""


def interfaces() -> list[Interface] | None:
    """Return this host's interfaces with IPv4; None without psutil."""
    try:
        import psutil
    except ImportError:
        return None
    states = psutil.net_if_stats()
    return [
        {
            "name": name,
            "address": each.address,
            "network": str(ipaddress.ip_network(f"{each.address}/{each.netmask or 32}", strict=False)),
            "speed": (states[name].speed if name in states else 0) or None,
        }
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    ]


# Clocks


def compare_clocks(topology: Topology, first: str) -> list[float]:
    """Return the seconds by which each node's clock is ahead of rank 0's, on rank 0; [] elsewhere. Collective."""
    comm = topology.cross  # of the first ranks of nodes
    if topology.node_rank or comm.size == 1:
        return []
    return [offset.ahead / BILLION for offset in clocks.compare(comm, time.time_ns)]


def judge_clocks(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    hosts = [here[0].host for here in sorted(by_node(ranks), key=lambda here: here[0].node)]
    ahead = dict(zip(hosts, ranks[0].facts, strict=False))
    wrong = [f"{host} by {skew:+.3g} s" for host, skew in ahead.items() if abs(skew) > SKEW_SECONDS]
    most = max(map(abs, ahead.values()), default=0.0)
    if wrong:
        advice = "run chronyd or ntpd on all hosts: times of files, logs and deadlines are wrong by as much"
        yield warning("skew", f"clocks differ from that of {hosts[0]}: {some(wrong)}", advice)
    elif most:
        yield ok("skew", f"at most {1000 * most:.3g} ms between hosts")
    else:
        yield ok("skew", "no difference that can be measured" if ahead else "one host has one clock")


# Before the ranks are connected


@contextmanager
def advise_if_late(seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Context manager: if the body takes longer than `seconds`, rank 0 prints `connecting_advice`. Local."""
    timer = threading.Timer(seconds, _print_advice)
    timer.daemon = True
    if variables.first(variables.ANY_RANK, "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_advice() -> None:
    try:
        found = interfaces()
    except OSError:  # in a sandbox, say
        found = None
    sys.stderr.write(connecting_advice(socket.gethostname(), found or []))
    sys.stderr.flush()


def connecting_advice(host: str, found: Sequence[Interface]) -> str:
    """Return text on why ranks may be unable to connect, and what to do."""
    own = [each for each in found if not each["network"].startswith("127.")]
    shown = ", ".join(f"{each['name']} in {each['network']}" for each in own) or f"no known network ({EXTRA})"
    include = own[0]["network"] if own else "NETWORK"
    return (
        "allreduce doctor: the ranks are not connected yet: MPI can't connect some, or a host is slow to start.\n"
        f"  This host, {host}, has {shown}.\n"
        "  -> a firewall between the hosts must let all ports through; where hosts also have networks that are\n"
        "     not connected (of containers or virtual machines), name the one that they share; with Open MPI by\n"
        f"     mpirun --mca btl_tcp_if_include {include} --prtemca prte_if_include {include}\n"
    )
