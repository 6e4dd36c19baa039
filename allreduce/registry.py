"""`create`, which makes the backends of users. allreduce.algorithms has the table of algorithms by name."""

import contextlib
import inspect
import os
import zlib
from typing import Any

from allreduce import algorithms, notices
from allreduce.algorithm import Algorithm, Context
from allreduce.algorithms import class_of, load
from allreduce.algorithms.compressed.exact import Exact, check_exact
from allreduce.arrays import compression as compressions
from allreduce.arrays.arguments import is_flag
from allreduce.arrays.compression import Compression, Given, Half, PowerSGD, Quantized
from allreduce.backend import AllReduce, Config
from allreduce.errors import AllReduceError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.tracing.recorder import record
from allreduce.tracing.trace import Trace
from allreduce.transport.control import on_all_ranks

COMPRESSED: dict[type[Compression], str] = {
    Half: "allreduce.algorithms.compressed.half:SixteenBits",
    Quantized: "allreduce.algorithms.compressed.quantized:EightBits",
    PowerSGD: "allreduce.algorithms.compressed.powersgd:LowRank",
}


def create(
    name: str | type[Algorithm],
    topology: Topology | None = None,
    *,
    check: bool = True,
    compress: Given = None,
    exact: bool = False,
    trace: str | os.PathLike[str] | Trace | None = None,
    **options: Any,
) -> AllReduce:
    """Create the backend `name` on the ranks of `topology`. Collective.

    name: one of `allreduce.NAMES`; or "adasum", which does not sum; or a name given to `register`; or a class that
        derives from allreduce.Algorithm.
    topology: all ranks of MPI.COMM_WORLD when none is given; such a topology is closed with the backend.
    check: False: on several nodes no calls are compared, which saves a small all-reduce between the nodes in each call.
        On one node the ranks compare each call in shared memory in any case.
    compress: sums of float32 and float64 are sent with fewer bits: "bfloat16", "float16", "int8",
        "powersgd:4" (the rank of the matrices), or an object of options (allreduce.Half, Quantized, PowerSGD). On
        several nodes "hierarchical_copy" and "auto" compress only the messages between nodes, except by PowerSGD. See
        allreduce.arrays.compression.
    exact: True: sums and means of floats have bits that depend on nothing but the data: not on the order, the number of
        ranks or nodes, the algorithm or its options. See allreduce.algorithms.compressed.exact.Exact.
    trace: records all calls: the path of a file for Perfetto, which `close` writes, or an
        allreduce.tracing.trace.Trace that is shared with other users.
    options: the algorithm's own options: root=0 of "reduce_to_one", node="shared" and cross="ring" of
        "hierarchical_copy", table=None and measure=True of "auto".

    Raises on all ranks: UnknownBackendError, OptionError, UnavailableError (which says what is missing),
    DisagreementError when ranks ask for different backends or options.
    """
    if "comm" in options or not isinstance(topology, Topology | None):  # before anything is created, on all ranks
        given = "comm=" if "comm" in options else type(topology).__qualname__
        remedy = f"create({name!r}, topology=allreduce.Topology(comm))"
        raise OptionError(f"create({name!r}) takes an allreduce.Topology, not {given}: {remedy}")
    owned = topology is None
    topology = Topology() if topology is None else topology
    topology.check_open()
    error: AllReduceError | None = None
    compression = None
    try:
        kind = class_of(name)
        if not is_flag(check):
            raise OptionError(f"check={check!r}: use True or False")
        check = bool(check)  # not NumPy's: the ranks compare its text
        compression = compressions.parse(compress)
        _check_options(name, kind, options)
        called = name if isinstance(name, str) else name.__qualname__
        check_exact(called, kind.sums, exact, compress)
        compressions.check(compression, called, kind.sums, kind.sums_half)
    except AllReduceError as refused:
        error = refused
    traced = "" if trace is None else ", trace=..."  # the paths of the ranks may differ; rank 0 writes
    shown = "".join(f", {key}={_shown(options[key])}" for key in sorted(options))
    sent = "" if compress is None or error else f", compress={compressions.shown(compress)}"
    sent += "" if exact is False else f", {exact=}"
    row = f"create({_shown(name)}, check={check!r}{sent}{traced}{shown})"
    kept: dict[str, Any] = {"check": check, **options}
    kept |= {key: value for key, value in (("compress", compression), ("exact", exact), ("trace", trace)) if value}
    try:
        topology.agree([zlib.crc32(row.encode())], row, error)
        with topology.detector.translating_failures():
            backend = AllReduce(
                topology, Config(name, kept), lambda context: _whole(name, context, compression, exact, options), _part
            )
            if trace is not None:
                _trace(backend, trace)
    except AllReduceError:  # raised on all ranks, so they can close together
        if owned:
            topology.close()
        raise
    if owned:
        backend.cleanup.append(lambda together: topology.close() if together else None)
    return backend


def _whole(
    name: str | type[Algorithm], context: Context, compression: Compression | None, exact: bool, options: dict[str, Any]
) -> Algorithm:
    """Return an algorithm that compresses, or sums exactly, or neither. Collective."""
    kind = class_of(name)
    if compression is not None and compression.between_nodes and kind.between_nodes and context.layout.nodes > 1:
        return _made(kind, context, {**options, "compress": compression})
    inner = _made(kind, context, options)
    if compression is not None:
        return load(COMPRESSED[type(compression)])(context, inner=inner, options=compression)  # type: ignore[call-arg]
    return Exact(context, inner=inner) if exact else inner


def _part(name: str, context: Context, compress: Compression | None = None, **options: Any) -> Algorithm:
    """Return an algorithm for another one; see Context.make. Collective."""
    if name in algorithms.OTHERS:
        raise OptionError(f"{name!r} does not sum, so it can't be a part of another backend; use one of the others")
    kind = class_of(name)
    compressions.check(compress, name, kind.sums, kind.sums_half)
    return _whole(name, context, compress, False, options)


def _made(kind: type[Algorithm], context: Context, options: dict[str, Any]) -> Algorithm:
    try:
        return kind(context, **options)
    except AllReduceError as error:
        if getattr(error, "ranks", None) is None and isinstance(error, OptionError | UnavailableError):
            on_all_ranks(error, context.comm)  # all ranks have the same arguments, so all refuse them
        raise


def _trace(backend: AllReduce, trace: str | os.PathLike[str] | Trace) -> None:
    try:
        record(backend, trace)
    except AllReduceError:  # on all ranks
        backend.close()
        raise


def available(topology: Topology | None = None) -> tuple[str, ...]:
    """The names of the backends that work on the ranks of `topology` (all ranks by default). Collective."""
    if topology is None:
        with Topology() as topology:
            return available(topology)
    usable = []
    for name in algorithms.BACKENDS:
        with contextlib.suppress(UnavailableError):
            create(name, topology).close()
            usable.append(name)
    return tuple(usable)


def _shown(value: object) -> str:
    """Format an option's value without memory addresses, so that the text is equal on all ranks."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, str | int | float | tuple | os.PathLike) or value is None:
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _check_options(name: str | type[Algorithm], kind: type[Algorithm], options: dict[str, Any]) -> None:
    """Raise OptionError for options that the constructor of an algorithm does not take. Local."""
    offered = [each for each in inspect.signature(kind).parameters if each not in ("context", "compress")]
    for option in options:
        if option not in offered:
            offered += ["check", "compress", "exact", "trace"]
            hint = notices.near(option, [*offered, "topology"]) or "."
            raise OptionError(f"backend {name!r} has no option {option!r}{hint} Its options are: {', '.join(offered)}")
