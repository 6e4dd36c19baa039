"""The constants of the cost formulas for the ranks of a topology: measured here, or read from a file.

The file is JSON that `python -m benchmarks.tune` writes. It belongs to one kind of machine (CPU model, cores, MPI
library) and has the constants of each topology that was measured. With a file equal programs get equal bits, because
"auto" selects the same algorithms in each run.
"""

import json
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from allreduce import notices
from allreduce.files import ContentError, json_of, read_text
from allreduce.machine import MachineKind, identify
from allreduce.topology import Topology
from allreduce.transport.control import root_value
from allreduce.transport.cost import Machine
from allreduce.tuning import measuring

ENVIRONMENT = "ALLREDUCE_TABLE"  # a path; empty: no file
MOST_BYTES = 1 << 24
FORMAT, VERSION = "allreduce constants", 1
MOST_RANKS, LONGEST = 1 << 31, 3600.0  # in a file
FIELDS = tuple(Machine.__dataclass_fields__)


class Key(NamedTuple):
    """The ranks for which constants were measured."""

    node_sizes: tuple[int, ...]
    simulated: bool  # simulated nodes say nothing about real ones


class Known(NamedTuple):
    """Constants, and where they are from, in words."""

    machine: Machine
    source: str


Entries = dict[Key, Machine]


def key_of(topology: Topology) -> Key:
    """Return the key of a topology's entry. Local."""
    return Key(topology.node_sizes, topology.simulated)


def default_path() -> Path:
    """Return the path of this kind of machine's file, in $XDG_CACHE_HOME or ~/.cache. Local."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = zlib.crc32(json.dumps(identify(), sort_keys=True).encode())
    return cache / "allreduce" / f"constants-{kind:08x}.json"


def table_path(given: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the given path, else the one in $ALLREDUCE_TABLE, else the default one; None for an empty path. Local."""
    path = os.environ.get(ENVIRONMENT) if given is None else os.fspath(given)
    if path is None:
        return default_path()
    return Path(path) if path else None


def dumps(entries: Entries) -> str:
    """Return the text of a file of this machine. Local."""
    listed = [{**key._asdict(), "constants": asdict(machine)} for key, machine in sorted(entries.items())]
    return json.dumps({"format": FORMAT, "version": VERSION, "machine": identify(), "entries": listed}, indent=1) + "\n"


def read(path: Path) -> Entries:
    """Return the entries of a file. Raises OSError or ContentError. Local."""
    return loads(read_text(path, MOST_BYTES), identify())


def loads(text: str, machine: MachineKind) -> Entries:
    """Return the entries of a file's text. Raises ContentError."""
    table = json_of(text, FORMAT, VERSION, "it has no constants of python -m benchmarks.tune")
    if table.get("machine") != machine:
        other = f"{notices.shown(str(table.get('machine')), 200)}; here {machine}"
        raise ContentError(f"it was measured on another machine ({other})")
    try:
        return dict(_entry(**entry) for entry in table["entries"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"{type(error).__name__}: {notices.shown(str(error), 200)}"
        raise ContentError(f"an entry is malformed ({text})") from None


def _entry(node_sizes: list[int], simulated: bool, constants: dict[str, float]) -> tuple[Key, Machine]:
    sizes = [type(size) is int and 0 < size < MOST_RANKS for size in node_sizes]
    constants = dict(constants)  # it may be anything
    times = [type(value) in (int, float) and 0 <= value < LONGEST for value in constants.values()]
    if not sizes or len(times) < len(FIELDS) or not all(sizes + times) or type(simulated) is not bool:
        raise ValueError(f"{node_sizes=}, {simulated=}, {constants=}")
    return Key(tuple(node_sizes), simulated), Machine(**constants)


def known(topology: Topology, given: str | os.PathLike[str] | None, measures: bool) -> Known:
    """Return the constants of a topology: from the file, else measured, else the defaults. Collective.

    given: the path of the file; see `table_path`. Rank 0 reads it, and logs which one it is or why it can't be used; a
    missing file is logged at debug level only. measures: False: without a file the defaults.
    """
    found, notice = _read(topology, given) if topology.rank == 0 else (None, "")
    message = None if found is None else list(asdict(found).values()), notice
    values, notice = root_value(topology.world, message, "learn the constants of the machine")
    if notice:
        notices.once(topology.rank, notice)
    if values is not None:
        return Known(Machine(*values), "from the file")
    if measures:
        return Known(topology.service(measuring.Measured).machine, "measured here")
    return Known(Machine(), "by default")


def _read(topology: Topology, given: str | os.PathLike[str] | None) -> tuple[Machine | None, str]:
    """Return the constants that a file has for this topology, or None, and the notice about it."""
    path = None
    tune = f"mpirun -n {topology.size} python -m benchmarks.tune writes it"
    try:
        path = table_path(given)
        if path is None:
            return None, ""
        found = read(path).get(key_of(topology))
    except FileNotFoundError:
        notices.log.debug("allreduce: there is no file of constants %s (%s)", path, tune)
        return None, ""
    except Exception as error:  # of any type: the other ranks wait for this one
        return None, f'"auto" does not use the constants of {path or "the cache folder"}: {error}'
    if found is None:
        return None, f'"auto" does not use the constants of {path}: it has none for {topology} ({tune})'
    return found, f'"auto" selects by the constants of {path}'
