"""`create`, and the table of backends by name. A new backend is one file and one line here."""

import contextlib
import importlib
import inspect
import os
import time
import zlib
from functools import partial
from typing import Any

from allreduce import notices
from allreduce.backend import AllReduce, Config, TwoPhase
from allreduce.errors import AllReduceError, OptionError, UnavailableError, UnknownBackendError
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport.control import all_values, on_all_ranks
from allreduce.wrappers import options as compressions
from allreduce.wrappers.by_part import Divided
from allreduce.wrappers.exact import Exact, check_exact
from allreduce.wrappers.half import Halved
from allreduce.wrappers.options import ByPart, Compression, Given, Half, PowerSGD, Quantized
from allreduce.wrappers.powersgd import LowRank
from allreduce.wrappers.quantized import Quantizing
from allreduce.wrappers.traced import Traced

BACKENDS = {
    "ring": "allreduce.backends.ring:Ring",
    "halving_doubling": "allreduce.backends.halving_doubling:HalvingDoubling",
    "reduce_to_one": "allreduce.backends.reduce_to_one:ReduceToOne",
    "hierarchical_copy": "allreduce.backends.hierarchical_copy:HierarchicalCopy",
    "shared": "allreduce.backends.shared:Shared",
    "native": "allreduce.backends.native:Native",
    "nccl": "allreduce.backends.nccl:Nccl",
    "auto": "allreduce.backends.auto:Auto",
}
# of compress="auto": each loses more than the one before
CANDIDATES: tuple[Compression | None, ...] = (None, Half("bfloat16"), Quantized("int8"))
WORTH = 1.2
TRIAL_LENGTH, TRIALS = 1 << 20, 4  # elements; calls
OTHERS = {  # created by name only, and not in NAMES: they do not sum, so they can't replace the others
    "adasum": "allreduce.backends.adasum:Adasum",
}


def create(
    name: str,
    topology: Topology | None = None,
    *,
    check: str = "first",
    compress: Given = None,
    exact: bool = False,
    trace: str | os.PathLike[str] | Trace | None = None,
    **options: Any,
) -> AllReduce:
    """Create the backend `name` on the ranks of `topology`. Collective.

    name: one of `allreduce.NAMES`; or "adasum", which does not sum.
    topology: all ranks of MPI.COMM_WORLD when none is given; such a topology is closed with the backend.
    check: when the ranks compare a call's arguments in full: at the "first" call of a signature, "always" or "never"
        (see AllReduce).
    compress: sums of float32 and float64 are sent with fewer bits: "bfloat16", "float16", "int8", "float8",
        "powersgd:4" (the rank of the matrices), or an object of options (allreduce.Half, Quantized, PowerSGD). "auto"
        measures some of them here, and reports its choice. {"*.weight": "powersgd:4", "*": "int8"}: by the names of
        the parameters that `describe` gives, the first pattern that matches. On several nodes "hierarchical_copy" and
        "auto" compress only the messages between nodes. See allreduce.wrappers.options.
    exact: True: sums and means of floats have bits that depend on nothing but the data: not on the order, the number of
        ranks or nodes, the algorithm or its options. See allreduce.wrappers.exact.Exact.
    trace: records all calls (see allreduce.wrappers.traced.Traced): the path of a file for Perfetto, which `close`
        writes, or an allreduce.tracing.trace.Trace that is shared with other users.
    options: the backend's own options: root=0 of "reduce_to_one", node="shared" and cross="ring" of
        "hierarchical_copy".

    Raises on all ranks: UnknownBackendError, OptionError, UnavailableError (which says what is missing),
    DisagreementError when ranks ask for different backends.
    """
    if "comm" in options or not isinstance(topology, Topology | None):  # before anything is created, on all ranks
        given = "comm=" if "comm" in options else type(topology).__qualname__
        remedy = f"create({name!r}, topology=allreduce.Topology(comm))"
        raise OptionError(f"create({name!r}) takes an allreduce.Topology, not {given}: {remedy}")
    owned = topology is None
    topology = Topology() if topology is None else topology
    topology.check_open()
    error: AllReduceError | None = None
    try:
        backend_class = class_of(name)
        compression = compressions.parse(compress)
        arguments = _arguments(name, backend_class, check, options)
        check_exact(name, backend_class.sums, exact, compress)
        compressions.check(compression, name, backend_class.sums, backend_class.sums_half)
    except AllReduceError as refused:
        error = refused
    traced = "" if trace is None else ", trace=..."  # the paths of the ranks may differ; rank 0 writes
    shown = "".join(f", {key}={_shown(options[key])}" for key in sorted(options))
    sent = "" if compress is None or error else f", compress={compressions.shown(compress)}"
    sent += "" if exact is False else f", {exact=}"
    row = f"create({name!r}, check={check!r}{sent}{traced}{shown})"
    try:
        topology.agree([zlib.crc32(row.encode())], row, error)
        with topology.detector.translating_failures():
            if isinstance(compression, str):
                compression = _fastest(name, topology, options)
            backend = _compressed(backend_class, topology, arguments, compression, exact)
        backend.name = name
        if compression is not None:
            options = {**options, "compress": compression}
        if trace is not None:
            backend, options = _traced(backend, trace), {**options, "trace": trace}
    except AllReduceError:  # raised on all ranks, so they can close together
        if owned:
            topology.close()
        raise
    backend.config = Config(name, {"check": check, **({"exact": True} if exact else {}), **options})
    backend.owns_topology = owned
    return backend


def _compressed(
    kind: type[AllReduce], topology: Topology, arguments: dict[str, Any], compression: Compression | None, exact: bool
) -> AllReduce:
    """Create a backend that compresses, or sums exactly, or neither. Collective."""
    if compression is None and not exact:
        return _constructed(kind, topology, arguments)
    if compression is None:
        return _exact(_constructed(kind, topology, arguments), arguments["check"])
    if compression.between_nodes and kind.between_nodes and topology.nodes > 1:
        return _constructed(kind, topology, {**arguments, "compress": compression})
    inner = _constructed(kind, topology, arguments)
    try:
        return _wrapped(inner, compression, arguments["check"])
    except AllReduceError:  # on all ranks
        inner.close()
        raise


def _wrapped(inner: AllReduce, compression: Compression, check: str, owns_inner: bool = True) -> AllReduce:
    """Return a backend that compresses the arrays that `inner` reduces. Collective."""
    wrappers: dict[type[Compression], Any] = {Half: Halved, Quantized: Quantizing, PowerSGD: LowRank, ByPart: Divided}
    kind = wrappers[type(compression)]
    options: dict[str, Any] = {"options": compression, "check": check, "owns_inner": owns_inner}
    if kind is Divided:
        options["make"] = partial(_wrapped, inner, check="never", owns_inner=False)
    return kind(inner.topology, inner=inner, **options)


def _exact(inner: AllReduce, check: str) -> AllReduce:
    """Return a backend that sums floats exactly by `inner`. Collective."""
    try:
        return Exact(inner.topology, inner=inner, check=check)
    except AllReduceError:  # on all ranks
        inner.close()
        raise


def _fastest(name: str, topology: Topology, options: dict[str, Any]) -> Compression | None:
    """Measure compressions on these ranks, and return the options of the fastest, or None for none. Collective.

    A compression that loses more must be WORTH times as fast as the best of those that lose less. Rank 0 reports the
    times of the slowest rank.
    """
    if topology.size == 1:
        return None
    times: list[tuple[Compression | None, float]] = []
    for compression in CANDIDATES:
        if not isinstance(compression, Half) or class_of(name).sums_half:
            with create(name, topology, check="never", compress=compression, **options) as backend:
                mine = _seconds(backend)
            times.append((compression, max(all_values(topology.world, mine, "compare compressions"))))
    best, least = times[0]
    for compression, seconds in times[1:]:
        if seconds * WORTH < least:
            best, least = compression, seconds
    shown = ", ".join(f"{seconds * 1000:.1f} ms {f'as {each}' if each else 'uncompressed'}" for each, seconds in times)
    size = f"{TRIAL_LENGTH * 4 >> 20} MiB of float32"
    notices.once(topology.rank, f'compress="auto" selects {best or "no compression"}: {size} take {shown}')
    return best


def _seconds(backend: AllReduce) -> float:
    """Return the shortest time of some calls with TRIAL_LENGTH elements. Collective."""
    array = backend.allocate(TRIAL_LENGTH, "float32")
    found = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        backend(array, "sum")
        found.append(time.perf_counter() - begin)
    return min(found[1:])  # the first call allocates


def _constructed(kind: type[AllReduce], topology: Topology, arguments: dict[str, Any]) -> AllReduce:
    try:
        return kind(topology, **arguments)
    except AllReduceError as error:
        if error.ranks is None and isinstance(error, OptionError | UnavailableError):
            on_all_ranks(error, topology.world)  # all ranks have the same arguments, so all refuse them
        raise


def _traced(backend: AllReduce, trace: str | os.PathLike[str] | Trace) -> AllReduce:
    """Wrap `backend`, so that its calls are recorded; closing the wrapper closes the backend. Collective."""
    try:
        return Traced(backend.topology, inner=backend, trace=trace, owns_inner=True)
    except AllReduceError:  # on all ranks
        backend.close()
        raise


def two_phase() -> tuple[str, ...]:
    """The names of the backends with the two phases reduce_scatter and all_gather. Local."""
    return tuple(name for name in BACKENDS if issubclass(class_of(name), TwoPhase))


def available(topology: Topology | None = None) -> tuple[str, ...]:
    """The names of the backends that work on the ranks of `topology` (all ranks by default). Collective."""
    if topology is None:
        with Topology() as topology:
            return available(topology)
    usable = []
    for name in BACKENDS:
        with contextlib.suppress(UnavailableError):
            create(name, topology).close()
            usable.append(name)
    return tuple(usable)


def _shown(value: object) -> str:
    """Format an option's value without memory addresses, so that the text is equal on all ranks."""
    if isinstance(value, str | int | float | tuple | os.PathLike) or value is None:
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def class_of(name: str) -> type[AllReduce]:
    """Return the class of a backend, whose attributes say what it can do. Local. Raises UnknownBackendError."""
    backends = {**BACKENDS, **OTHERS}
    if not isinstance(name, str) or name not in backends:
        hint = notices.near(str(name), backends) or "."
        raise UnknownBackendError(f"no backend is called {name!r}{hint} The backends are: {', '.join(BACKENDS)}")
    module, _, attribute = backends[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _arguments(name: str, backend_class: type[AllReduce], check: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's keyword arguments: `make` and `names` are added for backends composed of others."""
    given = {"make": _part}
    taken = [each for each in inspect.signature(backend_class).parameters if each not in ("topology", "compress")]
    offered = [each for each in taken if each not in given]
    for option in options:
        if option not in offered:
            offered += ["compress", "exact", "trace"]
            hint = notices.near(option, [*offered, "topology"]) or "."
            raise OptionError(f"backend {name!r} has no option {option!r}{hint} Its options are: {', '.join(offered)}")
    return {"check": check, **{each: value for each, value in given.items() if each in taken}, **options}


def _part(name: str, topology: Topology, check: str = "never", compress: Given = None) -> AllReduce:
    """Create a part of a composed backend. Collective."""
    if name in OTHERS:
        raise OptionError(f"{name!r} does not sum, so it can't be a part of another backend; use one of the others")
    return create(name, topology, check=check, compress=compress)
