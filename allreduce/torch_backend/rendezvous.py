"""How the ranks of `mpirun` find each other's store, so that init_process_group needs no environment variables."""

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from allreduce.errors import UnavailableError
from allreduce.messages.agreement import raise_together, root_value
from allreduce.topology import Topology

CONNECT_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface

Found = tuple[dist.Store, int, int]
Handler = Callable[..., Iterator[Found]]


# What torchrun tells scripts, and where Open MPI's, MPICH's and Intel's launchers say it of a process.
_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def set_environment_from_launcher() -> None:
    """Tell scripts what torchrun would tell them, where nothing else has: RANK, WORLD_SIZE, LOCAL_RANK, ...

    Communicates nothing: what a launcher does not say comes with `rendezvous`.
    """
    for name, variables in _LAUNCHERS.items():
        for variable in variables:
            if variable in os.environ:
                os.environ.setdefault(name, os.environ[variable])


def _set_environment(topology: Topology) -> None:
    """The same, from MPI itself."""
    os.environ.setdefault("RANK", str(topology.rank))
    os.environ.setdefault("WORLD_SIZE", str(topology.size))
    os.environ.setdefault("LOCAL_RANK", str(topology.node_rank))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(topology.node_size))


def rendezvous(url: str, timeout: timedelta, original: Handler) -> Iterator[Found]:
    """The store, this rank and the number of ranks, from MPI. Collective over all ranks of mpirun.

    url: "env://", with ?rank=0&world_size=2 where the program says so itself.
    original: PyTorch's own handler of env://, for programs that are told where rank 0 is.
    """
    with Topology() as topology:
        _set_environment(topology)
        told = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
        store = None if told else _meet(topology, timeout)
        rank, size = topology.rank, topology.size
    if store is None:
        yield from original(url, timeout=timeout)
        return
    given = parse_qs(urlparse(url).query)
    yield store, int(given.get("rank", [rank])[0]), int(given.get("world_size", [size])[0])
    raise RuntimeError("ranks of one mpirun can't meet again: start the program anew")


def _meet(topology: Topology, timeout: timedelta) -> dist.Store:
    """Rank 0 serves a TCPStore at a free port; the others take the first of its addresses that they reach."""
    server = None
    if topology.rank == 0:
        server = _serve(topology.nodes == 1, timeout)
    told = [server.port, _addresses()] if server else None
    port, addresses = root_value(topology.world, told, "learn where rank 0's store is")
    if topology.nodes == 1:
        addresses = [LOOPBACK]
    address = LOOPBACK if server else _reachable(addresses, port)
    raise_together(topology.world, None if address else _unreachable(addresses, port))
    assert address is not None
    return server or dist.TCPStore(address, port, None, False, timeout)


def _serve(locally: bool, timeout: timedelta) -> dist.TCPStore:
    """A store at a free port. It asks nobody who he is, so that of one machine's ranks listens to no other machine."""
    if not locally:
        return dist.TCPStore(LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
    listener = socket.create_server((LOOPBACK, 0))
    port, file = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(LOOPBACK, port, None, True, timeout, wait_for_workers=False, master_listen_fd=file)


def _addresses() -> list[str]:
    """This host's name and addresses, most promising first."""
    name = socket.gethostname()
    found = [name, socket.getfqdn()]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    found += [address for _, interface in socket.if_nameindex() if (address := _address_of(interface))]
    return [address for address in dict.fromkeys(found) if not address.startswith(("127.", "::1", "localhost"))]


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def _reachable(addresses: list[str], port: int) -> str | None:
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError:
            continue
        return address
    return None


def _unreachable(addresses: list[str], port: int) -> UnavailableError:
    return UnavailableError(
        f"the store of rank 0 can't be reached from {socket.gethostname()} at {', '.join(addresses)} (port {port}); "
        "set MASTER_ADDR to an address of rank 0's host that all hosts reach, and MASTER_PORT to a free port"
    )
