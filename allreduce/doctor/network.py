"""Checks of the network between hosts: shared networks, InfiniBand."""

import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from allreduce.doctor.findings import EXTRA, Finding, Needs, Rank, by_node, ok, some, warning
from allreduce.process import variables
from allreduce.topology import Topology

INFINIBAND = Path("/sys/class/infiniband")
PATIENCE_SECONDS = 12.0


class Interface(TypedDict):
    """A network interface with an IPv4 address."""

    name: str
    address: str
    network: str  # "10.0.0.0/24"
    speed: int | None  # Mb/s, where the system knows it


def gather(topology: Topology) -> dict[str, Any] | None:
    """Return the facts of each node's first rank; None on other ranks."""
    if topology.node_rank:
        return None
    return {
        "interfaces": interfaces(),
        "infiniband": sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else [],
    }


def judge(ranks: Sequence[Rank], needs: Needs) -> Iterator[Finding]:
    leaders = _leaders(ranks)
    if len(by_node(ranks)) > 1 and leaders:
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


def link_speed(ranks: Sequence[Rank]) -> float | None:
    """Return bytes a second of the fastest network that all hosts share; None if unknown."""
    shared = _shared_networks(_leaders(ranks))
    return max(map(_slowest, shared.values()), default=0) * 1e6 / 8 or None


def _leaders(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the first rank of each node; only these have facts."""
    return [rank for rank in ranks if rank.facts is not None]


def _up(rank: Rank) -> list[Interface]:
    return rank.facts["interfaces"] or []


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


def interfaces() -> list[Interface] | None:
    """Return this host's interfaces with IPv4, but for the loopback; None without psutil."""
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
        if each.family == socket.AF_INET and not ipaddress.ip_address(each.address).is_loopback
    ]


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
    shown = ", ".join(f"{each['name']} in {each['network']}" for each in found) or f"no known network ({EXTRA})"
    include = found[0]["network"] if found else "NETWORK"
    return (
        "allreduce doctor: the ranks are not connected yet: MPI can't connect some, or a host is slow to start.\n"
        f"  This host, {host}, has {shown}.\n"
        "  -> a firewall between the hosts must let all ports through; where hosts also have networks that are\n"
        "     not connected (of containers or virtual machines), name the one that they share; with Open MPI by\n"
        f"     mpirun --mca btl_tcp_if_include {include} --prtemca prte_if_include {include}\n"
    )
