"""The network between hosts: interfaces that all of them have in common, host names that lead somewhere."""

import fcntl
import ipaddress
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from allreduce.doctor.findings import OK, WARNING, Finding, Needs, Place, Rank, by_node, some

AREA = "network"
ADDRESS, MASK = 0x8915, 0x891B  # SIOCGIFADDR and SIOCGIFNETMASK of Linux
NAME_SECONDS = 3.0  # how long a name server has for its answer
DEVICES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")


class Interface(TypedDict):
    """One with an IPv4 address."""

    name: str
    address: str
    network: str  # "10.0.0.0/24"
    speed: int | None  # Mb/s, where the system knows it


def look(place: Place) -> dict[str, Any] | None:
    """Of the first rank of each node; the others are in the same place."""
    if place.topology.node_rank:
        return None
    first = place.hosts[0]
    return {
        "name": socket.gethostname(),
        "interfaces": interfaces(),
        "infiniband": sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else [],
        "resolves": resolved(socket.gethostname()),
        "first": first,
        "first_resolves": resolved(first),
    }


def judge(ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    leaders = [rank for rank in ranks if rank.facts["network"] is not None]
    if not leaders:
        return []
    if len(by_node(ranks)) == 1:
        return [_names(leaders, False)]
    return [_common(leaders), *_same_addresses(leaders), *_infiniband(leaders), _names(leaders, True)]


def speed(ranks: Sequence[Rank]) -> float | None:
    """Bytes a second of the fastest interface that all hosts have in common, where that is known."""
    leaders = [rank for rank in ranks if rank.facts["network"] is not None]
    common = _shared_networks(leaders)
    speeds = [
        min(each["speed"] or 0 for rank in leaders for each in _up(rank) if each["network"] == network)
        for network in common
    ]
    return max(speeds, default=0) * 1e6 / 8 or None


def _up(rank: Rank) -> list[Interface]:
    """The interfaces that may lead to other hosts."""
    found = rank.facts["network"]["interfaces"]
    return [each for each in found if not ipaddress.ip_address(each["address"]).is_loopback]


def _shared_networks(leaders: Sequence[Rank]) -> list[str]:
    """The networks that all hosts are in, each with an address of its own."""
    networks = [{each["network"] for each in _up(rank)} for rank in leaders]
    twice = {address for address, hosts in _owners(leaders).items() if len(hosts) > 1}
    confused = {each["network"] for rank in leaders for each in _up(rank) if each["address"] in twice}
    return sorted(set.intersection(*networks) - confused) if networks else []


def _owners(leaders: Sequence[Rank]) -> dict[str, list[str]]:
    """The hosts that have each address."""
    owners: dict[str, list[str]] = {}
    for rank in leaders:
        for each in _up(rank):
            owners.setdefault(each["address"], []).append(rank.host)
    return owners


def _common(leaders: Sequence[Rank]) -> Finding:
    common = _shared_networks(leaders)
    if not common:
        texts = [f"{rank.host}: {_interface_list(_up(rank))}" for rank in leaders]
        advice = "fine where a router joins them; if ranks wait for each other at the start, ask your administrator"
        return Finding(AREA, "interfaces", WARNING, f"the hosts have no network in common ({some(texts)})", advice)
    texts = []
    for network in common:
        names = Counter(each["name"] for rank in leaders for each in _up(rank) if each["network"] == network)
        speeds = [each["speed"] or 0 for rank in leaders for each in _up(rank) if each["network"] == network]
        shown = f", {min(speeds) / 1000:g} Gb/s" if min(speeds) else ""
        texts.append(f"{network} ({'/'.join(names)}{shown})")
    return Finding(AREA, "interfaces", OK, f"all hosts are in {some(texts)}")


def _interface_list(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{each['name']} {each['address']}" for each in interfaces) or "none"


def _same_addresses(leaders: Sequence[Rank]) -> list[Finding]:
    """Bridges of containers have the same address everywhere; MPI may try them, and wait for ever."""
    twice = {address: hosts for address, hosts in _owners(leaders).items() if len(hosts) > 1}
    if not twice:
        return []
    names = sorted({each["name"] for rank in leaders for each in _up(rank) if each["address"] in twice})
    text = some([f"{address} is the address of {' and '.join(hosts[:2])}" for address, hosts in twice.items()])
    advice = f"keep MPI away from them: mpirun --mca btl_tcp_if_exclude lo,{','.join(names)} (Open MPI)"
    return [Finding(AREA, "same addresses", WARNING, f"{text} ({', '.join(names)})", advice)]


def _infiniband(leaders: Sequence[Rank]) -> list[Finding]:
    having = [rank for rank in leaders if rank.facts["network"]["infiniband"]]
    if not having:
        return []
    if len(having) == len(leaders):
        return [Finding(AREA, "InfiniBand", OK, ", ".join(having[0].facts["network"]["infiniband"]))]
    lacking = [rank.host for rank in leaders if rank not in having]
    advice = "MPI falls back to the slower network for these hosts: leave them out, or have their adapters seen to"
    return [Finding(AREA, "InfiniBand", WARNING, f"missing on {some(lacking, ', ')}", advice)]


def _names(leaders: Sequence[Rank], several: bool) -> Finding:
    """gloo, and PyTorch's stores, go by host names; MPI does not."""
    lost = [rank.host for rank in leaders if not rank.facts["network"]["resolves"]]
    if lost:
        advice = "PyTorch's gloo and TCPStore go by names: add `ADDRESS NAME` of each host to /etc/hosts of all"
        return Finding(AREA, "host names", WARNING, f"{some(lost, ', ')}: its own name leads nowhere", advice)
    if not several:
        text = f"{leaders[0].facts['network']['name']} is {leaders[0].facts['network']['resolves']}"
        return Finding(AREA, "host names", OK, text)
    first = leaders[0].facts["network"]["first"]
    blind = [rank.host for rank in leaders if not rank.facts["network"]["first_resolves"]]
    if blind:
        advice = f"PyTorch's stores are on {first}: give its address (MASTER_ADDR), or name it in /etc/hosts"
        return Finding(AREA, "host names", WARNING, f"{some(blind, ', ')} can't resolve {first}", advice)
    looped = [rank.host for rank in leaders if ipaddress.ip_address(rank.facts["network"]["resolves"]).is_loopback]
    if looped:
        text = f"{some(looped, ', ')}: its own name leads to itself alone (127...)"
        advice = "gloo would listen where no other host comes: set GLOO_SOCKET_IFNAME, or mend /etc/hosts"
        return Finding(AREA, "host names", WARNING, text, advice)
    return Finding(AREA, "host names", OK, f"every host resolves its own, and that of rank 0 ({first})")


def resolved(name: str) -> str:
    """The IPv4 address of a host's name; nothing when it has none, or none in time."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except (OSError, UnicodeError):
            return

    asking = threading.Thread(target=ask, daemon=True)  # an answer can't be waited for with a limit
    asking.start()
    asking.join(NAME_SECONDS)
    return found[0] if found else ""


def interfaces() -> list[Interface]:
    """This host's, in the system's order."""
    found: list[Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_asked(asking, request, name) for request in (ADDRESS, MASK))
            except OSError:  # no IPv4 address
                continue
            network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False))
            found.append({"name": name, "address": address, "network": network, "speed": _speed(name)})
    return found


def _asked(asking: socket.socket, request: int, name: str) -> str:
    answer = fcntl.ioctl(asking.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _speed(name: str) -> int | None:
    try:
        speed = int((DEVICES / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
