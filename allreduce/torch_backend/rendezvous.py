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
from allreduce.topology import Topology
from allreduce.transport.control import on_all, raise_together, root_value, together

CONNECT_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
# Where Open MPI, libfabric (MPICH) and UCX are told the interfaces or networks that they use between hosts, or not.
INCLUDE = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "FI_SOCKETS_IFACE", "UCX_NET_DEVICES")
EXCLUDE = ("OMPI_MCA_btl_tcp_if_exclude",)
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface

Found = tuple[dist.Store, int, int]
Handler = Callable[..., Iterator[Found]]


# The variables that torchrun sets for scripts, and those of Open MPI's, MPICH's and Intel's launchers.
_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_STORE = ("MASTER_ADDR", "MASTER_PORT")  # where rank 0 is, in the environment


def set_environment_from_launcher() -> None:
    """Set the variables that torchrun sets, where they are not set: RANK, WORLD_SIZE, LOCAL_RANK, ... Local.

    Those that no launcher tells are set by `rendezvous`.
    """
    for name, variables in _LAUNCHERS.items():
        for variable in variables:
            if variable in os.environ:
                os.environ.setdefault(name, os.environ[variable])


def serve_environment() -> None:
    """Have PyTorch's handler of env:// get from MPI what the environment does not have."""
    module = importlib.import_module("torch.distributed.rendezvous")  # by name: a function hides it
    original = module._rendezvous_handlers["env"]

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **rest: Any) -> Iterator[Found]:
        if all(name in os.environ for name in (*_STORE, "RANK", "WORLD_SIZE")):
            return original(url, timeout=timeout, **rest)
        return rendezvous(url, timeout, original)

    module._rendezvous_handlers["env"] = handler


def rendezvous(url: str, timeout: timedelta, original: Handler) -> Iterator[Found]:
    """The store, this rank and the number of ranks, from MPI. Collective over all ranks of mpirun.

    url: "env://", with ?rank=0&world_size=2 where the program says so itself.
    original: PyTorch's own handler of env://, for programs that are told where rank 0 is.
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
    raise RuntimeError("ranks of one mpirun can't meet again: start the program anew")


def store_of_rank_0(topology: Topology, timeout: timedelta) -> dist.Store:
    """The store of rank 0, a TCPStore on the first of its addresses that every node reaches. Collective."""
    world = topology.world
    listeners = together(world, lambda: _listeners(topology.host.size == topology.size) if topology.rank == 0 else [])
    try:
        mine = [_address(each) for each in listeners]
        addresses: list[tuple[str, int]] = root_value(world, mine, "learn where rank 0's store can be")
        found = next((at for at, address in enumerate(addresses) if _all_reach(topology, address)), None)
        raise_together(world, _unreachable(addresses) if found is None else None)
        assert found is not None
        server = together(world, lambda: _serve(listeners[found], timeout) if listeners else None)
    finally:
        for each in listeners:
            each.close()
    return server or dist.TCPStore(*addresses[found], None, False, timeout)


def _listeners(locally: bool) -> list[socket.socket]:
    """A socket at a free port of each address that the store may have, most promising first.

    The store asks nobody for a password. So the store of one machine's ranks listens to no other machine, and the store
    of several hosts listens on one network alone.
    """
    found = []
    for address in [LOOPBACK] if locally else _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # the host's name may lead to an address of another host
            found.append(socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN))
    return found


def _address(listener: socket.socket) -> tuple[str, int]:
    address, port, *_ = listener.getsockname()
    return address, port


def _all_reach(topology: Topology, address: tuple[str, int]) -> bool:
    """Whether one rank of every node can connect to a socket of rank 0's. Collective."""
    reached = topology.node_rank > 0
    if not reached:
        with suppress(OSError):
            socket.create_connection((address[0], address[1]), timeout=CONNECT_SECONDS).close()
            reached = True
    return on_all(topology.world, reached, "see whether all nodes reach rank 0's store")


def _serve(listener: socket.socket, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on `listener`, which belongs to the store then."""
    address, port = _address(listener)
    file = listener.detach()
    serve = partial(dist.TCPStore, address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=file)
    try:
        return serve()
    except NotImplementedError:  # the newer kind of store of PyTorch 2.7, say, takes no socket that is open already
        return serve(use_libuv=False)


def _addresses() -> list[str]:
    """This host's addresses but the loopback's, most promising first; where MPI is told interfaces, those alone."""
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


def _unreachable(addresses: Sequence[tuple[str, int]]) -> UnavailableError:
    tried = ", ".join(address for address, _ in addresses) or "no address but the loopback's"
    return UnavailableError(
        f"the store of rank 0 can't be reached from all hosts; tried on rank 0's host: {tried}. Set MASTER_ADDR to an "
        "address of rank 0's host that all hosts reach, and MASTER_PORT to a free port"
    )
