"""From the names on a command line to the contenders that can take part."""

import difflib
from collections.abc import Sequence

import numpy as np

import allreduce
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import raise_together
from benchmarks.measuring.contenders import Contender, of_backend
from benchmarks.measuring.peers import PEERS

ALL = "all"  # in place of the names of backends: those that work here


def check_names(topology: Topology, option: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Refuse unknown names, with the nearest known one. Collective."""
    unknown = [name for name in asked if name not in known]
    error = None
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        error = OptionError(f"{option} {unknown[0]}: no such name; {hint}there are: {', '.join(known)}")
    raise_together(topology.world, error)


def gather(
    topology: Topology,
    names: Sequence[str],
    peers: Sequence[str],
    dtype: np.dtype,
    op: str,
    *,
    optional: bool,
    dtype_asked: bool = True,
    compress: str | None = None,
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders, and those that can't take part with the reason. Collective.

    names: backends; those that don't work here, or not with this dtype, are left out when they are
        `optional`, and an error otherwise.
    dtype_asked: False when nobody asked for this dtype: those that can't reduce it are left out too.
    compress: of all backends, as `allreduce.create` takes it.
    """
    check_names(topology, "--backends", names, allreduce.NAMES)
    check_names(topology, "--peers", peers, list(PEERS))
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            found.append(of_backend(allreduce.create(name, topology, compress=compress), op))
        except (UnavailableError, OptionError) as error:
            if not optional:
                raise
            skipped[name] = str(error)
    found += [PEERS[name](topology, op) for name in peers]
    for contender in list(found):
        reason = contender.refuse(dtype)
        if reason is None:
            continue
        if dtype_asked and (not optional or contender.name in peers):
            raise_together(topology.world, OptionError(f"{contender.name} can't take part: {reason}"))
        found.remove(contender)
        contender.close()
        skipped[contender.name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise_together(topology.world, None if found else OptionError(f"nothing to measure with {dtype}: {why}"))
    return found, skipped
