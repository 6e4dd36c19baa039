"""The constants of the cost formulas for the ranks of a topology: measured here, or read from a file.

The file is JSON that `python -m benchmarks.tune` writes. It belongs to one kind of machine (CPU model, cores, MPI
library) and has the constants of each topology that was measured. With a file equal programs get equal bits, because
"auto" selects the same algorithms in each run.
"""

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import cost, notices
from allreduce.arrays.chunks import chunk
from allreduce.cost import Layout, Machine
from allreduce.errors import UnavailableError
from allreduce.machine import MachineKind, identify
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, root_value
from allreduce.transport.shared_segment import PAGE_BYTES, STAGING_BYTES, shared_rows
from allreduce.transport.wait import wait

ENVIRONMENT = "ALLREDUCE_TABLE"  # a path; empty: no file
MOST_BYTES = 1 << 24
FORMAT, VERSION = "allreduce constants", 1
QUOTES = "'\""
MOST_RANKS, LONGEST = 1 << 31, 3600.0  # in a file
FIELDS = tuple(Machine.__dataclass_fields__)
TRIES = 5  # of each time; the median counts
BYTES = 512 * 1024  # of the long messages and arrays
MIDDLE = 2 * cost.EAGER  # bytes of messages with a handshake
SHORT = 8  # bytes of the short ones
OPERATIONS = 16  # the Python code of an algorithm takes about so many times an operation on a short array


# The layout


def layout_of(topology: Topology) -> Layout:
    """Return the layout of a topology's ranks, the same on all of them. Collective."""
    found = np.array([topology.cma.works, topology.cores, -topology.sharing], np.int64)
    cma, cores, sharing = combine(topology.world, found, "learn the layout of the ranks", MPI.MIN).tolist()
    return Layout(topology.node_sizes, cma=bool(cma), cores=cores, sharing=-sharing)


# Measuring


class Measured:
    """A service of a topology: its constants, measured when they are first needed. The constructor is collective."""

    def __init__(self, topology: Topology) -> None:
        self.machine = measure(topology)

    def close(self) -> None:
        """Do nothing: constants hold no resources."""

    abandon = close


def measure(topology: Topology, tries: int = TRIES) -> Machine:
    """Measure the constants in some milliseconds; the same on all ranks: those of the slowest rank. Collective.

    Ranks that share a core wait for it in these messages and barriers too, so `switch` is 0. Constants that the
    topology has no use for (messages inside nodes of one rank) keep their defaults.
    """
    at = layout_of(topology)
    with _communicators(topology) as (world, node):
        mine = _in_node(topology, node, at, tries) if node.size > 1 else {}
        mine |= _between_nodes(topology, world, tries) if topology.nodes > 1 else {}
        native = [_seconds(_all_reduce(world, nbytes), tries) for nbytes in (SHORT, BYTES)]
        values = np.array([mine.get(name, 0.0) for name in FIELDS] + native)
        *agreed, short, long = combine(world, values, "agree on the constants", MPI.MAX).tolist()
    found = {name: value for name, value in zip(FIELDS, agreed, strict=True) if value > 0}
    machine = replace(Machine(), **{"switch": 0.0, **found})
    return _rounded(_with_native(machine, at, short, long))


def _with_native(machine: Machine, at: Layout, short: float, long: float) -> Machine:
    """Return the constants with those of the MPI library's all-reduce, whose times are given."""
    steps = cost.rounds(at.largest)
    across = cost.rounds(at.nodes) * machine.net_alpha
    if steps:
        machine = replace(machine, native_alpha=max(short - across, short / 4) / steps)
    least, one = (cost.library(BYTES, at, replace(machine, native=times)) for times in (0.0, 1.0))
    return replace(machine, native=max((long - least) / (one - least), 0.01))


def _in_node(topology: Topology, node: MPI.Intracomm, at: Layout, tries: int) -> dict[str, float]:
    """Measure barriers, memory and messages of the ranks of a node. Collective over the node."""
    rank, ranks, per_core = node.rank, node.size, at.per_core
    memory = _rows(node)
    rows = list(memory.view(np.float32))
    mine = chunk(rows[0].size, ranks, rank)

    def add(part: slice) -> None:
        first, second, *others = (row[part] for row in rows)
        np.add(first, second, out=first)
        for other in others:
            np.add(first, other, out=first)
        for other in (second, *others):
            np.copyto(other, first)
        node.Barrier()

    def bare() -> None:
        first = rows[rank][:2]
        np.add(first, first, out=first)

    fence, operation = _seconds(node.Barrier, tries), _seconds(bare, tries)
    little, all_of_it = (_seconds(partial(add, part), tries) for part in (slice(mine.start, mine.start + 2), mine))
    share = (ranks - 1) / ranks * rows[0].nbytes * per_core
    other = (rank + 1) % ranks
    buffer, source = np.empty_like(memory[0]), np.zeros_like(memory[0])
    addresses = all_values(node, topology.cma.address(source) if at.cma else 0, "share addresses")
    if all(addresses):
        copy = _seconds(lambda: topology.cma.read(other, addresses[other], buffer), tries)
    else:
        copy = _seconds(lambda: np.copyto(buffer, memory[other]), tries)
    node.Barrier()  # the others have read `source`
    found = {
        "call": operation * OPERATIONS,
        "fence": fence / cost.rounds(ranks),
        "gamma": max(all_of_it - little, 1e-9) / share,
        "copy": copy / buffer.nbytes / per_core,
    }
    partner = rank ^ 1
    if partner < ranks:
        short, middle, long = (_swap(node, partner, nbytes, tries) for nbytes in (SHORT, MIDDLE, BYTES))
        beta = max(long - max(short, middle), 1e-9) / BYTES
        found |= {"alpha": short, "beta": beta / per_core, "handshake": max(middle - short - beta * MIDDLE, 0.0)}
    return found


def _rows(node: MPI.Intracomm) -> np.ndarray:
    """Return some memory for each rank, shared if it can be: else the times are of this rank's own memory."""
    nbytes = min(BYTES, STAGING_BYTES // node.size // PAGE_BYTES * PAGE_BYTES)
    try:
        return shared_rows(node, nbytes)
    except UnavailableError:  # on all ranks of the node
        return np.zeros((node.size, nbytes), np.uint8)


def _between_nodes(topology: Topology, world: MPI.Intracomm, tries: int) -> dict[str, float]:
    """Measure messages between the leaders of two nodes. Collective."""
    nodes = all_values(world, topology.node_index, "learn the nodes of the ranks")
    partner = topology.node_index ^ 1
    if topology.node_rank or partner >= topology.nodes:
        return {}
    short, long = (_swap(world, nodes.index(partner), nbytes, tries) for nbytes in (SHORT, BYTES))
    return {"net_alpha": short, "net_beta": max(long - short, 1e-9) / BYTES}


def _swap(comm: MPI.Intracomm, partner: int, nbytes: int, tries: int) -> float:
    """Return the time in which two ranks send each other a message, as the algorithms do."""
    sent, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return _seconds(lambda: wait(comm.Irecv(received, partner), comm.Isend(sent, partner)), tries)


def _all_reduce(comm: MPI.Intracomm, nbytes: int) -> Callable[[], object]:
    """Return a function that sums `nbytes` of float32 by the MPI library."""
    array = np.zeros(nbytes // 4, np.float32)
    return lambda: comm.Allreduce(MPI.IN_PLACE, array)


def _seconds(work: Callable[[], object], tries: int) -> float:
    """Return the median time of some calls, after one that is not counted."""
    work()
    times = []
    for _ in range(tries):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return median(times)


@contextmanager
def _communicators(topology: Topology) -> Iterator[tuple[MPI.Intracomm, MPI.Intracomm]]:
    """Context manager: communicators of all ranks and of this node's, for messages that meet no other user's."""
    world = topology.private()
    node = topology.own(world.Split(topology.node_index, world.rank), watch=True)
    yield world, node
    topology.release(node)
    topology.release(world)


def _rounded(machine: Machine) -> Machine:
    return Machine(**{name: float(f"{value:.3g}") for name, value in asdict(machine).items()})


# The file


class TableError(ValueError):
    """A file has no constants of this version, or they were measured on another kind of machine."""


class Key(NamedTuple):
    """The ranks for which constants were measured."""

    node_sizes: tuple[int, ...]
    simulated: bool  # simulated nodes say nothing about real ones


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


def loads(text: str, machine: MachineKind) -> Entries:
    """Return the entries of a file's text. Raises TableError."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is not JSON ({error})") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise TableError("it has no constants of python -m benchmarks.tune")
    if table.get("version") != VERSION:
        raise TableError(
            f"it has version {notices.shown(table.get('version'))} of the format, and this is version {VERSION}"
        )
    if table.get("machine") != machine:
        raise TableError(f"it was measured on another machine ({_words(table.get('machine'))}; here {_words(machine)})")
    try:
        return dict(_entry(**entry) for entry in table["entries"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TableError(f"an entry is malformed ({type(error).__name__}: {notices.shown(str(error), 200)})") from None


def _entry(node_sizes: list[int], simulated: bool, constants: dict[str, Any]) -> tuple[Key, Machine]:
    if (
        not node_sizes
        or not all(type(size) is int and 0 < size < MOST_RANKS for size in node_sizes)
        or type(simulated) is not bool
    ):
        raise ValueError(f"node_sizes {node_sizes}, simulated {simulated}")
    if set(constants) != set(FIELDS):
        raise ValueError(f"the constants are {', '.join(constants)}, not {', '.join(FIELDS)}")
    values = {name: float(value) for name, value in constants.items() if type(value) in (int, float)}
    if len(values) < len(FIELDS) or not all(0 <= value < LONGEST for value in values.values()):
        raise ValueError(f"constants that are no times: {constants}")
    return Key(tuple(node_sizes), simulated), Machine(**values)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError or ValueError. Only regular files up to MOST_BYTES are read.

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


@dataclass(frozen=True)
class Known:
    """Constants, and where they are from, in words."""

    machine: Machine
    source: str


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
        return Known(topology.service(Measured).machine, "measured here")
    return Known(Machine(), "by default")


def _read(topology: Topology, given: str | os.PathLike[str] | None) -> tuple[Machine | None, str]:
    """Return the constants that a file has for this topology, or None, and the notice about it."""
    path = None
    tune = f"mpirun -n {topology.size} python -m benchmarks.tune writes it"
    try:
        path = table_path(given)
        if path is None:
            return None, ""
        found = loads(read_text(path), identify()).get(key_of(topology))
    except FileNotFoundError:
        notices.log.debug("allreduce: there is no file of constants %s (%s)", path, tune)
        return None, ""
    except Exception as error:  # of any type: the other ranks wait for this one
        return None, f'"auto" does without the constants of {path or "the cache folder"}: {error}'
    if found is None:
        return None, f'"auto" does without the constants of {path}: it has none for {topology} ({tune})'
    return found, f'"auto" selects by the constants of {path}'


def _words(machine: object) -> str:
    """Format a machine read from a file, whose content is untrusted."""
    if not isinstance(machine, dict):
        return "unknown"
    parts = list(machine.items())[: len(MachineKind.__annotations__)]
    return ", ".join(f"{notices.shown(key)[1:-1]} {notices.shown(value).strip(QUOTES)}" for key, value in parts)
