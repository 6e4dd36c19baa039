"""Interchangeable AllReduce backends over MPI, for NumPy and CuPy arrays.

    import allreduce

    with allreduce.create("auto") as reduce:
        grads = reduce.allocate(1_000_000, "float32")  # where the backend reduces without a copy
        reduce(grads, op="mean")  # in place, on every rank

The backend allocates the memory of the gradients, and averages them there over all ranks.
"""

from allreduce.process import start

start.start()  # starts MPI, before modules that use it are imported

from allreduce.health import abort  # noqa: E402

abort.install()  # an error in an import below, and before the first Topology, ends the job too

from allreduce.algorithm import Algorithm, Context, TwoPhase, Work  # noqa: E402
from allreduce.algorithms import BACKENDS, register  # noqa: E402
from allreduce.arrays.compression import Half, PowerSGD, Quantized  # noqa: E402
from allreduce.arrays.parts import Part  # noqa: E402
from allreduce.backend import AllReduce  # noqa: E402
from allreduce.elastic import standby  # noqa: E402
from allreduce.registry import available, create  # noqa: E402
from allreduce.topology import Topology  # noqa: E402
from allreduce.tracing.trace import Trace  # noqa: E402

__version__ = "0.2.0"  # pyproject.toml and CHANGELOG.md follow it

NAMES = tuple(BACKENDS)
"""Every backend's name; `available()` returns the backends that work here."""

__all__ = [
    "NAMES",
    "Algorithm",
    "AllReduce",
    "Context",
    "Half",
    "Part",
    "PowerSGD",
    "Quantized",
    "Topology",
    "Trace",
    "TwoPhase",
    "Work",
    "available",
    "create",
    "register",
    "standby",
]
