"""Collectives on trees of JAX arrays: outside `jit`, inside `jit`, and through derivatives.

    grads = allreduce.jax.pmean(grads, reduce)  # the mean over all ranks: a new tree

Collectives are an ordered effect of JAX: a process runs them one after the other in program order, compiled or not. So
ranks that run the same program make the same calls. Direct calls of the backend (`reduce(array)`) are not part of that
order: call jax.effects_barrier() before them.
"""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops, trees
from allreduce.backend import AllReduce
from allreduce.call.call import check_root
from allreduce.errors import OptionError, UnavailableError, UnsupportedOpError

try:
    import jax
    from jax.experimental import io_callback
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
except ImportError as error:
    raise ImportError(
        f'allreduce.jax needs JAX, which can\'t be imported ({error}): pip install ".[jax]" in the checkout'
    ) from error

__all__ = ["all_gather", "broadcast", "named_errors", "pmax", "pmean", "pmin", "psum"]

# whether callbacks can get XLA's buffers: JAX 0.6.2 and later
_KNOWS_BUFFERS = find_spec("jax.experimental.buffer_callback") is not None
(_of_callbacks,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


_MOVES = ("all_gather", "broadcast")  # collectives that take every dtype and PRNG keys


class _Order(type(_of_callbacks)):  # type: ignore[misc]
    """The effect by which JAX keeps collectives in order: a subclass of io_callback's ordered effect."""

    def __str__(self) -> str:
        return "allreduce"


with contextlib.suppress(ImportError, AttributeError):  # without this jax.checkpoint refuses collectives
    from jax._src import effects

    effects.remat_allowed_effects.add_type(_Order)  # checkpoint saves a collective's result instead of calling it again

_ORDERED = _Order()
_TOKEN = jax.make_jaxpr(jax.lax.create_token)().out_avals[0]

# backend -> its last error
_last_errors: weakref.WeakKeyDictionary[AllReduce, BaseException] = weakref.WeakKeyDictionary()


class Collective(NamedTuple):
    """A collective on the arrays of one dtype. root: of "broadcast", also in its gradient.

    names: paths of the arrays in the tree, which the ranks compare.
    """

    backend: AllReduce
    kind: str
    names: str
    root: int = 0

    def on_host(self, *arrays: np.ndarray) -> list[Any]:
        """Run the collective; return new arrays or views of the backend's memory.

        XLA calls it in its own thread, and copies the result before the next ordered call.
        """
        backend, kind = self.backend, self.kind
        tree = trees.Named(f"{kind} {self.names}", [*arrays])
        try:
            if kind != "broadcast":
                return (backend.stack(tree) if kind == "all_gather" else backend.reduced(tree, kind)).arrays
            tree = tree._replace(arrays=[np.array(array) for array in arrays])
            backend.broadcast(tree, self.root)
            return tree.arrays
        except BaseException as error:
            _last_errors[backend] = error
            raise

    def on_buffers(self, _: Any, *buffers: Any) -> tuple[()]:
        """Run the collective on XLA's buffers: a token and the arguments, then a token and the results."""
        half = len(buffers) // 2
        made = self.on_host(*map(np.asarray, buffers[1:half]))
        for place, array in zip(buffers[half + 1 :], made, strict=True):
            np.copyto(np.asarray(place), array)
        return ()


def pmean(tree: Any, backend: AllReduce) -> Any:
    """Return the mean over all ranks of each array of a tree (floating dtypes), as a new tree. Collective.

    The gradient is the mean of the ranks' gradients.
    """
    return _call(tree, backend, "mean")


def psum(tree: Any, backend: AllReduce) -> Any:
    """Return the sum over all ranks of each array of a tree. Collective. The gradient is the ranks' sum, too."""
    return _call(tree, backend, "sum")


def pmax(tree: Any, backend: AllReduce) -> Any:
    """Return the maximum over all ranks of each array of a tree. Collective. No derivative: UnsupportedOpError."""
    return _call(tree, backend, "max")


def pmin(tree: Any, backend: AllReduce) -> Any:
    """Return the minimum over all ranks of each array of a tree. Collective. No derivative: UnsupportedOpError."""
    return _call(tree, backend, "min")


def all_gather(tree: Any, backend: AllReduce) -> Any:
    """Stack each array of a tree over all ranks: shape (size, *shape). Collective.

    tree: of arrays of any dtype, PRNG keys too. The gradient is this rank's slice of the sum of the ranks' gradients.
    """
    return _call(tree, backend, "all_gather")


def broadcast(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """Return rank `root`'s arrays. Collective. Raises OptionError for an invalid root.

    tree: see `all_gather`. The gradient is the sum of the ranks' gradients on `root`, zero elsewhere.
    """
    return _call(tree, backend, "broadcast", check_root(root, backend.size))


@contextlib.contextmanager
def named_errors(backend: AllReduce) -> Iterator[None]:
    """Context manager: replace the JaxRuntimeError of compiled code by the error of `backend`'s call that caused it.

    Wait for compiled code inside it: jax.block_until_ready(...).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        met = _last_errors.pop(backend, None)
        if met is None:
            raise
        raise met from error


def _call(tree: Any, backend: AllReduce, kind: str, root: int = 0) -> Any:
    """Run a collective on the arrays of a tree, one call for each dtype; return a new tree.

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
    arrays = [jax.numpy.asarray(leaf) for _, leaf in leaves]
    keys = {}  # array number -> PRNG implementation of a key array
    if kind in _MOVES:
        for number, array in enumerate(arrays):
            if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                keys[number] = jax.random.key_impl(array)
                arrays[number] = jax.random.key_data(array)
    names = ", ".join(jax.tree_util.keystr(path) or "*" for path, _ in leaves)  # addresses may be in `structure`
    for array in arrays:
        if kind in _MOVES:
            dtypes.check_no_references(array.dtype)
        else:
            backend.check_dtype(array.dtype)
            ops.resolve(kind, array.dtype, backend.size)
    made: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        numbers = [number for number, array in enumerate(arrays) if array.dtype == dtype]
        collective = Collective(backend, kind, names, root)
        found = _primitive.bind(*(arrays[number] for number in numbers), collective=collective)
        for number, array in zip(numbers, found, strict=True):
            made[number] = jax.random.wrap_key_data(array, impl=keys[number]) if number in keys else array
    return jax.tree.unflatten(structure, made)


# The primitive: the rules by which JAX handles such a call

_primitive = Primitive("allreduce")
_primitive.multiple_results = True


def _abstract(*arrays: Any, collective: Collective) -> tuple[list[Any], set[Any]]:
    first = (collective.backend.size,) if collective.kind == "all_gather" else ()
    return [array.update(shape=(*first, *array.shape)) for array in arrays], {_ORDERED}


def _lower(ctx: Any, *arrays: Any, collective: Collective) -> Any:
    _check_devices(ctx.module_context.axis_context)
    token = ctx.tokens_in.get(_ORDERED)
    if _KNOWS_BUFFERS and tuple(ctx.module_context.platforms) == ("cpu",):
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
    same = {} if collective.kind == "all_gather" else {place: place for place in range(1, len(arrays) + 1)}
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
    """JVP rule. All collectives but max and min are linear."""
    made = _primitive.bind(*primals, collective=collective)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return made, [ad.Zero.from_primal_value(array) for array in made]
    if collective.kind in ("max", "min"):
        raise UnsupportedOpError(f"p{collective.kind} has no derivative; pass jax.lax.stop_gradient(x) to it")
    return made, _primitive.bind(*map(ad.instantiate_zeros, tangents), collective=collective)


def _transpose(slopes: Any, *arrays: Any, collective: Collective) -> list[Any]:
    """Transpose rule: the gradient of the sum of all ranks' losses with respect to this rank's arrays.

    All ranks must run the same program.
    """
    rank, kind = collective.backend.rank, collective.kind
    given = [ad.instantiate_zeros(slope) for slope in slopes]
    if kind in ("sum", "mean"):
        return _primitive.bind(*given, collective=collective)
    summed = _primitive.bind(*given, collective=collective._replace(kind="sum"))
    if kind == "all_gather":
        return [array[rank] for array in summed]
    return [array if rank == collective.root else jax.numpy.zeros_like(array) for array in summed]


def _batch(arrays: Any, axes: Any, *, collective: Collective) -> tuple[list[Any], list[Any]]:
    """Batching rule: collectives work element by element, so an array batched by jax.vmap is passed on unchanged."""
    moved = 1 if collective.kind == "all_gather" else 0
    found = _primitive.bind(*arrays, collective=collective)
    return found, [axis if axis is None else axis + moved for axis in axes]


_primitive.def_impl(_eager)
_primitive.def_effectful_abstract_eval(_abstract)
_uncached = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(_primitive, _lower, **_uncached)  # a callback belongs to one module; JAX 0.6 caches no lowerings
ad.primitive_jvps[_primitive] = _derive
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
