"""What is said when the ranks don't even meet: before that nothing can be gathered."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from allreduce.doctor import network

PATIENCE_SECONDS = 12.0
NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # in which launchers say a process's rank


@contextmanager
def said_when_late(seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Around the first contact of the ranks: after so many seconds rank 0 says what may be in the way. Local."""
    number = next((os.environ[name] for name in NUMBERS if name in os.environ), "0")
    timer = threading.Timer(seconds, _say)
    timer.daemon = True
    if number == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say() -> None:
    try:
        interfaces = network.interfaces()
    except OSError:  # a sandbox, say, that does not tell
        interfaces = []
    sys.stderr.write(advice(socket.gethostname(), interfaces))
    sys.stderr.flush()


def advice(host: str, interfaces: list[network.Interface]) -> str:
    """What may be in the way, and what to do about it."""
    own = [each for each in interfaces if not each["network"].startswith("127.")]
    shown = ", ".join(f"{each['name']} in {each['network']}" for each in own) or "no network"
    include = own[0]["network"] if own else "NETWORK"
    return (
        "allreduce doctor: the ranks have not met yet. MPI can't connect some of them, or a host is slow to start.\n"
        f"  This host, {host}, has {shown}.\n"
        "  -> a firewall between the hosts must let all ports through; where hosts have networks that lead nowhere\n"
        "     (of containers and virtual machines, say), name the one that all of them are in, in Open MPI by\n"
        f"     mpirun --mca btl_tcp_if_include {include} --prtemca prte_if_include {include}\n"
    )
