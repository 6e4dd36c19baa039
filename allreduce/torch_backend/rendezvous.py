"""How the ranks of `mpirun` find rank 0's store, so that init_process_group needs no environment variables."""

import fcntl
import importlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from allreduce.errors import UnavailableError
from allreduce.process import variables
from allreduce.topology import Topology
from allreduce.transport.control import on_all, raise_together, root_value, together

CONNECT_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
# Environment variables that tell Open MPI, libfabric (MPICH) and UCX which networks to use, or not to use
INCLUDE = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "FI_SOCKETS_IFACE", "UCX_NET_DEVICES")
EXCLUDE = ("OMPI_MCA_btl_tcp_if_exclude",)
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface

Found = tuple[dist.Store, int, int]
Handler = Callable[..., Iterator[Found]]


# The variables that torchrun sets for scripts -> the variables of MPI launchers with the same values
_LAUNCHERS = {
    "RANK": variables.RANK,
    "WORLD_SIZE": variables.SIZE,
    "LOCAL_RANK": variables.LOCAL_RANK,
    "LOCAL_WORLD_SIZE": variables.LOCAL_SIZE,
}
_STORE = ("MASTER_ADDR", "MASTER_PORT")  # the address of rank 0's store


def set_environment_from_launcher() -> None:
    """Set the variables that torchrun sets, where they are not set: RANK, WORLD_SIZE, LOCAL_RANK, ... Local.

    `rendezvous` sets those that the launcher does not provide.
    """
    for name, launchers in _LAUNCHERS.items():
        if value := variables.first(launchers):
            os.environ.setdefault(name, value)


def install_env_handler() -> None:
    """Replace PyTorch's env:// handler: values missing from the environment come from MPI. Local."""
    # torch.distributed.rendezvous is also a function, which hides the module
    module = importlib.import_module("torch.distributed.rendezvous")
    original = module._rendezvous_handlers["env"]

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **rest: Any) -> Iterator[Found]:
        if all(name in os.environ for name in (*_STORE, "RANK", "WORLD_SIZE")):
            return original(url, timeout=timeout, **rest)
        return rendezvous(url, timeout, original)

    module._rendezvous_handlers["env"] = handler


def rendezvous(url: str, timeout: timedelta, original: Handler) -> Iterator[Found]:
    """Yield (store, rank, world size) from MPI. Collective over all ranks of the job.

    url: "env://", with ?rank=0&world_size=2 if the program passes them. original: PyTorch's env:// handler, used if
    MASTER_ADDR and MASTER_PORT are set.
    """
    with Topology() as topology:
        numbers = (topology.rank, topology.size, topology.node_rank, topology.node_size)
        for name, number in zip(_LAUNCHERS, numbers, strict=True):
            os.environ.setdefault(name, str(number))
        store = None if all(name in os.environ for name in _STORE) else store_of_rank_0(topology, timeout)
    if store is None:
        yield from original(url, timeout=timeout)
        return
    given = parse_qs(urlparse(url).query)
    yield store, int(given.get("rank", [numbers[0]])[0]), int(given.get("world_size", [numbers[1]])[0])
    raise RuntimeError("a second rendezvous is not possible under mpirun: restart the program")


def store_of_rank_0(topology: Topology, timeout: timedelta) -> dist.Store:
    """Create rank 0's TCPStore on the first of its addresses that every node can connect to. Collective."""
    world = topology.world
    listeners = together(world, lambda: _listeners(topology.host.size == topology.size) if topology.rank == 0 else [])
    try:
        mine = [_address(each) for each in listeners]
        addresses: list[tuple[str, int]] = root_value(world, mine, "learn where rank 0's store can be")
        found = next((at for at, address in enumerate(addresses) if _all_reach(topology, address)), None)
        tried = ", ".join(address for address, _ in addresses) or "no address but the loopback's"
        error = UnavailableError(
            f"the store of rank 0 can't be reached from all hosts; tried on rank 0's host: {tried}. Set MASTER_ADDR to "
            "an address of rank 0's host that all hosts reach, and MASTER_PORT to a free port"
        )
        raise_together(world, error if found is None else None)
        assert found is not None
        server = together(world, lambda: _serve(listeners[found], timeout) if listeners else None)
    finally:
        for each in listeners:
            each.close()
    return server or dist.TCPStore(*addresses[found], None, False, timeout)


def _listeners(locally: bool) -> list[socket.socket]:
    """Open a listening socket on each candidate address of the store, best first.

    The store has no authentication. So it listens on loopback if all ranks share a machine, otherwise on a single
    network.
    """
    found = []
    for address in [LOOPBACK] if locally else _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # the host's name may resolve to another host's address
            found.append(socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN))
    return found


def _address(listener: socket.socket) -> tuple[str, int]:
    address, port, *_ = listener.getsockname()
    return address, port


def _all_reach(topology: Topology, address: tuple[str, int]) -> bool:
    """Return whether one rank of every node can connect to a socket of rank 0. Collective."""
    reached = topology.node_rank > 0
    if not reached:
        with suppress(OSError):
            socket.create_connection((address[0], address[1]), timeout=CONNECT_SECONDS).close()
            reached = True
    return on_all(topology.world, reached, "see whether all nodes reach rank 0's store")


def _serve(listener: socket.socket, timeout: timedelta) -> dist.TCPStore:
    """Create a store on the socket `listener`, which it then owns."""
    address, port = _address(listener)
    file = listener.detach()
    serve = partial(dist.TCPStore, address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=file)
    try:
        return serve()
    except NotImplementedError:  # the libuv store of some versions (PyTorch 2.7) takes no open socket
        return serve(use_libuv=False)


def _addresses() -> list[str]:
    """Return this host's non-loopback addresses, best first; only those that MPI is configured to use, if any are."""
    named = []
    with suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        named = [str(entry[4][0]) for entry in entries if "%" not in str(entry[4][0])]
    interfaces = {each: name for _, name in socket.if_nameindex() if (each := _address_of(name))}
    found = [each for each in dict.fromkeys([*named, *interfaces]) if not ipaddress.ip_address(each).is_loopback]
    found = [each for each in found if not _listed(EXCLUDE, each, interfaces.get(each))]
    return [each for each in found if _listed(INCLUDE, each, interfaces.get(each))] or found


def _listed(variables: Sequence[str], address: str, interface: str | None) -> bool:
    """Whether one of these variables names an address, by its interface ("eth0") or its network ("10.0.0.0/24")."""
    for entry in ",".join(os.environ.get(name, "") for name in variables).split(","):
        if interface is not None and entry.strip() == interface:
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(address) in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
