"""Several hosts: simulated on this machine by scripts/cluster_sim.sh; and the bytes that the real or simulated hosts
send."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.transport.control import combine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cluster_sim.sh"
INTERFACE = "eth0"  # of a simulated host
RATE = "ALLREDUCE_BENCHMARKS_RATE"  # tells the ranks of simulated hosts the rate of their links
LAUNCHERS = ("OMPI_COMM", "PMI", "PRTE")  # beginnings of the variables of the launcher that started this process


def start(hosts: int, ranks_per_host: int, rate: str, command: Sequence[str]) -> int:
    """Run `python command...` on every rank of simulated hosts; returns its exit code, 2 if there can't be hosts.

    rate: of each host's link, as tc writes it: "1gbit". Each rank computes with its share of this machine's cores,
    unless OMP_NUM_THREADS says otherwise. The job ends with this process. Raises OptionError outside of a checkout.
    """
    if not SCRIPT.exists():
        raise OptionError(f"--hosts needs {SCRIPT}; run this in a checkout, since the wheel has no scripts")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    threads = max(1, (os.cpu_count() or 1) // (hosts * ranks_per_host))
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), inherited.get("PYTHONPATH")))),
        **inherited,
        RATE: rate,
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), inherited.get("PATH", ""))),
    }
    line = ["bash", str(SCRIPT), f"{hosts}x{ranks_per_host}", rate, "--", sys.executable, *command]
    try:
        job = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *line], env=variables)
    except FileNotFoundError:
        raise OptionError("--hosts needs Linux and the tool setpriv (apt-get install util-linux)") from None
    while True:
        try:
            return job.wait()
        except KeyboardInterrupt:
            continue  # the script has the signal too, and ends the job in order


def simulated_rate() -> str | None:
    """Return the rate of the links of the simulated host on which this process runs; None elsewhere. Local."""
    return os.environ.get(RATE)


def sent_bytes(topology: Topology) -> int | None:
    """Return the bytes that all hosts have sent to other hosts so far, with the headers of packets. Collective.

    Counted by the system, so other programs' bytes count too. None where all ranks are on one host.
    """
    if topology.nodes == 1 or topology.simulated:
        return None
    mine = interface_bytes() if topology.node_rank == 0 else 0
    return int(combine(topology.world, np.array([mine], np.int64), "count the bytes that hosts have sent")[0])


def interface_bytes(path: str = "/proc/self/net/dev") -> int:
    """Return the bytes that this host has sent over its network interfaces, except the loopback. Local."""
    total = 0
    with open(path) as file:
        for line in list(file)[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != "lo":
                total += int(numbers.split()[8])
    return total
