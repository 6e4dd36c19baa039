"""Collectives on trees of JAX arrays: outside of `jit`, inside of it, and through derivatives.

    grads = allreduce.jax.pmean(grads, reduce)  # the mean over all ranks: a new tree

They are ordered: all of a process run one after the other, in the order in which the program has them, compiled or not
(an ordered effect of JAX). So ranks that run the same program call the backend alike. The backend's own calls
(`reduce(array)`) are not in that order: before them comes jax.effects_barrier().
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

from allreduce.arrays import dtypes, ops
from allreduce.backend import AllReduce
from allreduce.engine.call import check_root
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

_KNOWS_BUFFERS = find_spec("jax.experimental.buffer_callback") is not None  # functions on XLA's memory; JAX 0.6.2
(_of_callbacks,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


# What takes every dtype, and keys of random numbers: the name of the backend's call.
_MOVES = {"all_gather": "stack", "broadcast": "broadcast"}


class _Order(type(_of_callbacks)):  # type: ignore[misc]
    """The effect by which JAX keeps collectives in order: a kind of io_callback's, which is ordered."""

    def __str__(self) -> str:
        return "allreduce"


with contextlib.suppress(ImportError, AttributeError):  # else jax.checkpoint refuses collectives, in words of its own
    from jax._src import effects

    effects.remat_allowed_effects.add_type(_Order)  # it keeps what a collective has given, and calls it once

_ORDERED = _Order()
_TOKEN = jax.make_jaxpr(jax.lax.create_token)().out_avals[0]

_met: weakref.WeakKeyDictionary[AllReduce, BaseException] = weakref.WeakKeyDictionary()  # the last error of each


class Collective(NamedTuple):
    """What a backend is to do with the arrays of one dtype. root: of "broadcast", and of the sum that is its gradient.

    names: of the arrays in the tree, by which ranks compare what they brought.
    """

    backend: AllReduce
    kind: str
    names: str
    root: int = 0

    def on_host(self, *arrays: np.ndarray) -> list[Any]:
        """Runs in a thread of XLA's, which copies the result before anything ordered goes on."""
        try:
            return self._run(arrays)
        except BaseException as error:
            _met[self.backend] = error
            raise

    def on_buffers(self, _: Any, *buffers: Any) -> tuple[()]:
        """The same, on XLA's own memory: a token and arrays, then a token and the places of the results."""
        half = len(buffers) // 2
        made = self.on_host(*map(np.asarray, buffers[1:half]))
        for place, array in zip(buffers[half + 1 :], made, strict=True):
            np.copyto(np.asarray(place), array)
        return ()

    def _run(self, arrays: tuple[np.ndarray, ...]) -> list[Any]:
        backend, kind = self.backend, self.kind
        call = _MOVES.get(kind, "all_reduce")
        return backend.on_arrays(call, f"{kind} {self.names}", arrays, op=kind, root=self.root)


def pmean(tree: Any, backend: AllReduce) -> Any:
    """The mean over all ranks of every array of a tree, of floating dtypes. Collective. Its gradient is a mean too."""
    return _call(tree, backend, "mean")


def psum(tree: Any, backend: AllReduce) -> Any:
    """The sum over all ranks. Collective. Its gradient is a sum too, as of the sum of all ranks' losses."""
    return _call(tree, backend, "sum")


def pmax(tree: Any, backend: AllReduce) -> Any:
    """The maximum over all ranks. Collective. It has no gradient."""
    return _call(tree, backend, "max")


def pmin(tree: Any, backend: AllReduce) -> Any:
    """The minimum over all ranks. Collective. It has no gradient."""
    return _call(tree, backend, "min")


def all_gather(tree: Any, backend: AllReduce) -> Any:
    """The arrays of all ranks, (ranks, *shape). Collective. Its gradient is this rank's part of the sum of all.

    tree: of arrays of any dtype, keys of random numbers too.
    """
    return _call(tree, backend, "all_gather")


def broadcast(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """The arrays of rank `root`. Collective. Its gradient is the sum of all ranks' on `root`, zero elsewhere.

    tree: as of `all_gather`.
    """
    return _call(tree, backend, "broadcast", check_root(root, backend.size))


@contextlib.contextmanager
def named_errors(backend: AllReduce) -> Iterator[None]:
    """Inside of `with` a JaxRuntimeError, of compiled code in which a call of `backend` failed, is that call's error.

    Whatever was compiled has to be waited for in here: jax.block_until_ready(...).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        met = _met.pop(backend, None)
        if met is None:
            raise
        raise met from error


def _call(tree: Any, backend: AllReduce, kind: str, root: int = 0) -> Any:
    """Do `kind` with the arrays of a tree; those of a dtype go together.

    Raises on this rank what can be seen before anything runs: OptionError, UnsupportedDtypeError, UnsupportedOpError.
    Inside of a function that the caller has compiled, what ranks find out together comes as JAX's JaxRuntimeError, with
    the error's name and text in it; see `named_errors`.
    """
    if not isinstance(backend, AllReduce):
        raise OptionError(f"a backend is needed, allreduce.create(...), not {type(backend).__qualname__}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UnavailableError("collectives of JAX run in a thread of XLA's, and this MPI was started for one thread")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [jax.numpy.asarray(leaf) for _, leaf in leaves]
    keys = {}  # of random numbers: what they were made by
    if kind in _MOVES:
        for number, array in enumerate(arrays):
            if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                keys[number] = jax.random.key_impl(array)
                arrays[number] = jax.random.key_data(array)
    names = ", ".join(jax.tree_util.keystr(path) or "*" for path, _ in leaves)  # addresses may be in `structure`
    for array in arrays:
        if kind in _MOVES:
            dtypes.refuse_references(array.dtype)
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


# The primitive: what JAX has to know about such a call

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
    """context: of jit, of shard_map, of pmap; each knows the number of devices by another name."""
    mesh, axes = getattr(context, "mesh", None), getattr(context, "axis_env", None)
    counts = getattr(context, "num_devices", 1), getattr(mesh, "size", 1), getattr(axes, "nreps", 1)
    if max(counts) > 1:
        raise UnavailableError(
            f"collectives of allreduce.jax work on one device of each rank, and this program runs on {max(counts)}: "
            "bring the arrays to one of them first (jax.device_put, or array.addressable_data(0) of what jax.lax.pmean "
            "has made equal on them), or start one rank for each device"
        )


def _call_on_buffers(ctx: Any, token: Any, arrays: tuple[Any, ...], collective: Collective) -> Any:
    """What jax.experimental.buffer_callback does, in order: results lie where the arguments were, if these may go.

    So they need no new memory, whose first touch costs more than the reduction where it is large.
    """
    ctx.module_context.add_host_callback(collective.on_buffers)
    number = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    ctx = dataclasses.replace(ctx, avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    same = {} if collective.kind == "all_gather" else {place: place for place in range(1, len(arrays) + 1)}
    lower = jax.ffi.ffi_lowering("xla_buffer_python_cpu_callback", has_side_effect=True, operand_output_aliases=same)
    return lower(ctx, token, *arrays, index=number)


def _eager(*arrays: Any, collective: Collective) -> list[Any]:
    """Outside of `jit` it is compiled by itself: so it is in the same order as what else was compiled."""
    with named_errors(collective.backend), jax.disable_jit(False):
        return jax.block_until_ready(_alone(*arrays, collective=collective))


@functools.partial(jax.jit, static_argnames="collective")
def _alone(*arrays: Any, collective: Collective) -> list[Any]:
    return _primitive.bind(*arrays, collective=collective)


def _derive(primals: Any, tangents: Any, *, collective: Collective) -> tuple[list[Any], list[Any]]:
    """All but the extremes are linear."""
    made = _primitive.bind(*primals, collective=collective)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return made, [ad.Zero.from_primal_value(array) for array in made]
    if collective.kind in ("max", "min"):
        raise UnsupportedOpError(
            f"p{collective.kind} has no derivative; put jax.lax.stop_gradient(...) round what is given to it"
        )
    return made, _primitive.bind(*map(ad.instantiate_zeros, tangents), collective=collective)


def _transpose(slopes: Any, *arrays: Any, collective: Collective) -> list[Any]:
    """The derivative of the sum of all ranks' losses by this rank's arrays, where all run the same program."""
    rank, kind = collective.backend.rank, collective.kind
    given = [ad.instantiate_zeros(slope) for slope in slopes]
    if kind in ("sum", "mean"):
        return _primitive.bind(*given, collective=collective)
    summed = _primitive.bind(*given, collective=collective._replace(kind="sum"))
    if kind == "all_gather":
        return [array[rank] for array in summed]
    return [array if rank == collective.root else jax.numpy.zeros_like(array) for array in summed]


def _batch(arrays: Any, axes: Any, *, collective: Collective) -> tuple[list[Any], list[Any]]:
    """Elements are reduced one by one, so what jax.vmap has stacked is reduced as it is."""
    moved = 1 if collective.kind == "all_gather" else 0
    found = _primitive.bind(*arrays, collective=collective)
    return found, [axis if axis is None else axis + moved for axis in axes]


_primitive.def_impl(_eager)
_primitive.def_effectful_abstract_eval(_abstract)
_uncached = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(_primitive, _lower, **_uncached)  # a callback belongs to one module; JAX 0.6 caches none
ad.primitive_jvps[_primitive] = _derive
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
