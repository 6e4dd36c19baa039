"""The primitive of all collectives: the rules by which JAX compiles, orders, differentiates and batches them."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.backend import AllReduce
from allreduce.call.call import check_root
from allreduce.errors import OptionError, UnavailableError, UnsupportedDtypeError, UnsupportedOpError
from allreduce.jax.collective import KINDS, Collective, last_errors

try:
    import jax
    from jax.experimental import io_callback
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
except ImportError as error:
    raise ImportError(
        f'allreduce.jax needs JAX, which can\'t be imported ({error}): pip install ".[jax]" in the checkout'
    ) from error

# whether callbacks can get XLA's buffers: JAX 0.6.2 and later
KNOWS_BUFFERS = find_spec("jax.experimental.buffer_callback") is not None
(_of_callbacks,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


class _Order(type(_of_callbacks)):  # type: ignore[misc]
    """The effect by which JAX keeps collectives in order: a subclass of io_callback's ordered effect."""

    def __str__(self) -> str:
        return "allreduce"


with contextlib.suppress(ImportError, AttributeError):  # without this jax.checkpoint refuses collectives
    from jax._src import effects

    effects.remat_allowed_effects.add_type(_Order)  # checkpoint saves a collective's result instead of calling it again

_ORDERED = _Order()
_TOKEN = jax.make_jaxpr(jax.lax.create_token)().out_avals[0]


@contextlib.contextmanager
def named_errors(backend: AllReduce) -> Iterator[None]:
    """Context manager: replace the JaxRuntimeError of compiled code by the error of `backend`'s call that caused it.

    Wait for compiled code inside it: jax.block_until_ready(...).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        met = last_errors.pop(backend, None)
        if met is None:
            raise
        raise met from error


def call(tree: Any, backend: AllReduce, kind: str, op: str = "sum", root: int = 0) -> Any:
    """Run a collective on the arrays of a tree, one call for each dtype; return a new tree. See Collective.

    Invalid arguments raise OptionError, UnsupportedDtypeError or UnsupportedOpError on this rank, before anything runs.
    Inside a compiled function, errors of the call itself arrive as JAX's JaxRuntimeError, with the error's name and
    text in it; see `named_errors`.
    """
    if not isinstance(backend, AllReduce):
        raise OptionError(f"pass a backend, allreduce.create(...), not {type(backend).__qualname__}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UnavailableError(
            "JAX collectives run in an XLA thread, but MPI was initialized without MPI_THREAD_SERIALIZED"
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = ", ".join(jax.tree_util.keystr(path) or "*" for path, _ in leaves)  # addresses may be in `structure`
    collective = Collective(backend, kind, f"{kind} {names}", op, check_root(root, backend.size))
    arrays = [jax.numpy.asarray(leaf) for _, leaf in leaves]
    for array in arrays:
        _check(collective, array.shape, array.dtype)
    found = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        alike = [array for array in arrays if array.dtype == dtype]
        found[dtype] = iter(_primitive.bind(*alike, collective=collective))
    return jax.tree.unflatten(structure, [next(found[array.dtype]) for array in arrays])


def _check(collective: Collective, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise an error if the collective can't take an array of this shape and dtype."""
    backend, kind = collective.backend, KINDS[collective.kind]
    if kind.takes_rows and shape[:1] != (backend.size,):
        raise OptionError(
            f"{collective.text} takes arrays with a row for each rank: their first axis has the length {backend.size}, "
            f"but this one has the shape {shape}"
        )
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise UnsupportedDtypeError(f"{collective.text} takes no PRNG keys: pass jax.random.key_data(key)")
    if kind.moves:
        dtypes.check_no_references(dtype)
    else:
        backend.check_dtype(dtype)
        ops.resolve(collective.op, dtype, backend.size)


# The rules of the primitive

_primitive = Primitive("allreduce")
_primitive.multiple_results = True


def _abstract(*arrays: Any, collective: Collective) -> tuple[list[Any], set[Any]]:
    return [array.update(shape=collective.shape(array.shape)) for array in arrays], {_ORDERED}


def _lower(ctx: Any, *arrays: Any, collective: Collective) -> Any:
    _check_devices(ctx.module_context.axis_context)
    token = ctx.tokens_in.get(_ORDERED)
    if KNOWS_BUFFERS and tuple(ctx.module_context.platforms) == ("cpu",):
        token, *found = _call_on_buffers(ctx, token, arrays, collective)
    else:
        found, token, _ = mlir.emit_python_callback(
            ctx, collective.on_host, token, list(arrays), ctx.avals_in, ctx.avals_out, has_side_effect=True
        )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDERED: token})))
    return found


def _check_devices(context: Any) -> None:
    """Raise UnavailableError if the program runs on several devices.

    context: of jit, shard_map or pmap; each names the device count differently.
    """
    mesh, axes = getattr(context, "mesh", None), getattr(context, "axis_env", None)
    counts = getattr(context, "num_devices", 1), getattr(mesh, "size", 1), getattr(axes, "nreps", 1)
    if max(counts) > 1:
        raise UnavailableError(
            f"collectives of allreduce.jax work on one device of each rank, and this program runs on {max(counts)}: "
            "move the arrays to one of them first (jax.device_put, or array.addressable_data(0) of an array that "
            "jax.lax.pmean made equal on them), or start one rank for each device"
        )


def _call_on_buffers(ctx: Any, token: Any, arrays: tuple[Any, ...], collective: Collective) -> Any:
    """Lower to a callback on XLA's buffers, as jax.experimental.buffer_callback does, but ordered.

    Results reuse the arguments' memory where XLA allows it: the first touch of large new memory costs more than the
    reduction.
    """
    ctx.module_context.add_host_callback(collective.on_buffers)
    number = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    ctx = dataclasses.replace(ctx, avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    kind, places = KINDS[collective.kind], range(1, len(arrays) + 1)
    same = {place: place for place in places if kind.takes_rows == kind.gives_rows}
    lower = jax.ffi.ffi_lowering("xla_buffer_python_cpu_callback", has_side_effect=True, operand_output_aliases=same)
    return lower(ctx, token, *arrays, index=number)


def _eager(*arrays: Any, collective: Collective) -> list[Any]:
    """Run a collective outside `jit`, compiled separately, so that it stays ordered with compiled collectives."""
    with named_errors(collective.backend), jax.disable_jit(False):
        return jax.block_until_ready(_alone(*arrays, collective=collective))


@functools.partial(jax.jit, static_argnames="collective")
def _alone(*arrays: Any, collective: Collective) -> list[Any]:
    return _primitive.bind(*arrays, collective=collective)


def _derive(primals: Any, tangents: Any, *, collective: Collective) -> tuple[list[Any], list[Any]]:
    """JVP rule. Sums, means and moves are linear, other reductions have no derivative."""
    made = _primitive.bind(*primals, collective=collective)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return made, [ad.Zero.from_primal_value(array) for array in made]
    if collective.transposed() is None:
        raise UnsupportedOpError(f"{collective.text} has no derivative; pass jax.lax.stop_gradient(x) to it")
    return made, _primitive.bind(*map(ad.instantiate_zeros, tangents), collective=collective)


def _transpose(slopes: Any, *arrays: Any, collective: Collective) -> list[Any]:
    """Transpose rule: the gradient of the sum of all ranks' losses with respect to this rank's arrays.

    All ranks must run the same program.
    """
    given = [ad.instantiate_zeros(slope) for slope in slopes]
    found = _primitive.bind(*given, collective=collective.transposed())
    if collective.kind != "broadcast" or collective.backend.rank == collective.root:
        return found
    return [jax.numpy.zeros_like(array) for array in found]


def _batch(arrays: Any, axes: Any, *, collective: Collective) -> tuple[list[Any], list[Any]]:
    """Batching rule: collectives work element by element, so an array batched by jax.vmap is passed on as it is; an
    axis with a row for each rank stays the first one."""
    kind = KINDS[collective.kind]
    given = [
        jax.numpy.moveaxis(array, 0, 1) if kind.takes_rows and axis == 0 else array
        for array, axis in zip(arrays, axes, strict=True)
    ]
    moved = kind.gives_rows - kind.takes_rows
    found = _primitive.bind(*given, collective=collective)
    return found, [axis if axis is None else max(axis, kind.takes_rows) + moved for axis in axes]


_primitive.def_impl(_eager)
_primitive.def_effectful_abstract_eval(_abstract)
_uncached = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(_primitive, _lower, **_uncached)  # a callback belongs to one module; JAX 0.6 caches no lowerings
ad.primitive_jvps[_primitive] = _derive
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
