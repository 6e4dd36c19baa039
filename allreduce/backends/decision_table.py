"""The measured decision table of "auto": JSON that `python -m benchmarks.tune` writes, read as a rule.

A table belongs to one kind of machine (CPU model, cores, MPI library) and has an entry for each topology,
dtype and kind of memory that was measured: ranges of sizes, and the fastest backend of each.
"""

import json
import os
import stat
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays.memory_kinds import ALLOCATED, UNREGISTERED
from allreduce.machine import Machine, identify
from allreduce.topology import Topology
from allreduce.transport.control import root_value

ENVIRONMENT = "ALLREDUCE_TABLE"  # a path; empty: no table
MOST_BYTES = 1 << 24  # enough for a hundred thousand entries
FORMAT, VERSION = "allreduce decision table", 1
QUOTES = "'\""
MEMORY = {UNREGISTERED: "foreign", ALLOCATED: "allocated"}

Rule = Callable[[Topology, int, np.dtype, int], tuple[str, str]]


class TableError(ValueError):
    """A file is not a decision table of this version, or was measured on another kind of machine."""


class Key(NamedTuple):
    """The conditions for which an entry was measured."""

    node_sizes: tuple[int, ...]
    simulated: bool  # simulated nodes say nothing about real ones
    dtype: str
    memory: str  # "foreign" or "allocated"


class Step(NamedTuple):
    """A range of sizes: from the end of the previous range to `up_to` bytes, inclusive (None: no end)."""

    up_to: int | None
    backend: str


Entries = dict[Key, list[Step]]


def default_path() -> Path:
    """Return the path of this kind of machine's table, in $XDG_CACHE_HOME or ~/.cache. Local."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = zlib.crc32(json.dumps(identify(), sort_keys=True).encode())
    return cache / "allreduce" / f"decisions-{kind:08x}.json"


def table_path(given: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the given path, else the one in $ALLREDUCE_TABLE, else the default one; None for an empty path. Local."""
    path = os.environ.get(ENVIRONMENT) if given is None else os.fspath(given)
    if path is None:
        return default_path()
    return Path(path) if path else None


def dumps(entries: Entries) -> str:
    """Return the text of a table of this machine. Local."""
    listed = [
        {
            "ranks": sum(key.node_sizes),
            "nodes": len(key.node_sizes),
            **key._asdict(),
            "ranges": [{"up_to_bytes": step.up_to, "backend": step.backend} for step in steps],
        }
        for key, steps in sorted(entries.items())
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "machine": identify(), "entries": listed}, indent=1) + "\n"


def loads(text: str, machine: Machine, names: Collection[str]) -> Entries:
    """Return the entries of a table's text. Raises TableError. names: of the backends that it may contain."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is not JSON ({error})") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise TableError("it is not a decision table")
    if table.get("version") != VERSION:
        raise TableError(
            f"it has version {notices.shown(table.get('version'))} of the format, and this is version {VERSION}"
        )
    if table.get("machine") != machine:
        raise TableError(f"it was measured on another machine ({_words(table.get('machine'))}; here {_words(machine)})")
    try:
        return {_key(entry): _steps(entry["ranges"], names) for entry in table["entries"]}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TableError(f"an entry is malformed ({type(error).__name__}: {notices.shown(str(error), 200)})") from None


def rule_for(
    comm: MPI.Intracomm,
    topology: Topology,
    given: str | os.PathLike[str] | None,
    builtin: Rule,
    names: Collection[str],
) -> Rule:
    """Return the rule of this machine's table for `topology`, or `builtin` if there is none. Collective.

    Rank 0 reads the table, and logs which one it is or why it can't be used; a missing table is logged at debug level
    only. `builtin` decides calls that the table has no entry for (other dtypes, GPU arrays).
    """
    read, notice = _read(topology, given, names) if comm.rank == 0 else ({}, "")
    message = [[*key, steps] for key, steps in read.items()], notice
    listed, notice = root_value(comm, message, "learn how to choose a backend")
    entries = {(dtype, memory): [Step(*step) for step in steps] for dtype, memory, steps in listed}
    if comm.size > 1 and notice:
        notices.once(comm.rank, notice)
    return _as_rule(entries, builtin) if entries else builtin


def _as_rule(entries: dict[tuple[str, str], list[Step]], builtin: Rule) -> Rule:
    def choose(topology: Topology, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        steps = entries.get((str(dtype), MEMORY.get(memory, "")))
        if steps is None:
            return builtin(topology, nbytes, dtype, memory)
        index = next(index for index, step in enumerate(steps) if step.up_to is None or nbytes <= step.up_to)
        return steps[index].backend, f"measured fastest {_bounds(steps, index)} of {dtype} in {MEMORY[memory]} memory"

    return choose


def _bounds(steps: list[Step], index: int) -> str:
    """Format the sizes that a range covers."""
    end = steps[index].up_to
    if end is not None:
        return f"for sizes up to {end} bytes"
    return f"for sizes above {steps[index - 1].up_to} bytes" if index else "for all sizes"


def _read(
    topology: Topology, given: str | os.PathLike[str] | None, names: Collection[str]
) -> tuple[dict[tuple[str, str], list[Step]], str]:
    """Return the entries for this topology, by dtype and memory, and the notice about them."""
    rule = '"auto" decides by its built-in rule'
    path = None
    try:
        path = table_path(given)
        if path is None:
            return {}, rule
        entries = loads(read_text(path), identify(), names)
    except FileNotFoundError:
        tune = f"mpirun -n {topology.size} python -m benchmarks.tune measures one"
        notices.log.debug("allreduce: %s: there is no table %s (%s)", rule, path, tune)
        return {}, ""
    except Exception as error:  # of any type: the other ranks wait for this one
        return {}, f"{rule}: the table {path or 'in the cache folder'} is refused: {error}"
    mine = {(key.dtype, key.memory): steps for key, steps in entries.items() if key[:2] == topology_key(topology)}
    if not mine:
        return {}, f"{rule}: the table {path} has no entry for {topology} (python -m benchmarks.tune measures it)"
    return mine, f'"auto" decides by the measured table {path}'


def read_text(path: Path) -> str:
    """Return the text of a table's file. Raises OSError or ValueError. Only regular files up to MOST_BYTES are read.

    A pipe may block for ever, and a device never ends.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TableError("it is not a regular file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TableError(f"it has more than {MOST_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError(f"it is not text ({error})") from None


def topology_key(topology: Topology) -> tuple[tuple[int, ...], bool]:
    """Return the part of a Key that describes a topology."""
    return topology.node_sizes, topology.simulated


def _key(entry: dict[str, Any]) -> Key:
    node_sizes, simulated, dtype, memory = (entry[field] for field in Key._fields)
    if not all(type(size) is int and size > 0 for size in node_sizes) or type(simulated) is not bool:
        raise ValueError(f"node_sizes {node_sizes}, simulated {simulated}")
    if not isinstance(dtype, str) or memory not in MEMORY.values():
        raise ValueError(f"dtype {dtype!r}, memory {memory!r}")
    return Key(tuple(node_sizes), simulated, dtype, memory)


def _steps(ranges: list[dict[str, Any]], names: Collection[str]) -> list[Step]:
    steps = [Step(each["up_to_bytes"], each["backend"]) for each in ranges]
    bounds = [step.up_to for step in steps]
    if not bounds or bounds[-1] is not None or any(type(bound) is not int for bound in bounds[:-1]):
        raise ValueError("the last range must have no end, and all others must have one")
    if bounds[:-1] != sorted(set(bounds[:-1])):  # type: ignore[type-var]
        raise ValueError(f"the ranges are not in order: {bounds}")
    for step in steps:
        if step.backend not in names or step.backend == "auto":
            raise ValueError(f"backend {step.backend!r} can't be chosen")
    return steps


def _words(machine: object) -> str:
    """Format a machine read from a file, whose content is untrusted."""
    if not isinstance(machine, dict):
        return "unknown"
    parts = list(machine.items())[: len(Machine.__annotations__)]
    return ", ".join(f"{notices.shown(key)[1:-1]} {notices.shown(value).strip(QUOTES)}" for key, value in parts)
