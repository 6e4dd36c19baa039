"""The collectives of allreduce.jax, against NumPy over all ranks' arrays."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from tests.frameworks.test_jax import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before JAX is imported
jax = pytest.importorskip("jax", reason="JAX is not installed in this environment")

import jax.numpy as jnp  # noqa: E402

import allreduce  # noqa: E402
import allreduce.jax as ours  # noqa: E402
from allreduce import errors  # noqa: E402
from allreduce.jax.primitive import KNOWS_BUFFERS  # noqa: E402
from tests.ranks.together import raised  # noqa: E402

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = size - 1
Wanted = Callable[[np.ndarray, int], Any]  # all ranks' arrays, stacked, and a rank -> the rank's result


def combined(combine: Callable[..., np.ndarray]) -> Wanted:
    return lambda table, _: combine(table, axis=0).astype(table.dtype)


# name: the call, whether it takes a row for each rank, the result
CALLS: dict[str, tuple[Callable[..., Any], bool, Wanted]] = {
    "psum": (ours.psum, False, combined(np.sum)),
    "pmax": (ours.pmax, False, combined(np.max)),
    "pmin": (ours.pmin, False, combined(np.min)),
    "pmean": (ours.pmean, False, combined(np.mean)),
    "all_gather": (ours.all_gather, False, lambda table, _: table),
    "broadcast": (ours.broadcast, False, lambda table, _: table[0]),
    "broadcast of the last": (partial(ours.broadcast, root=LAST), False, lambda table, _: table[LAST]),
    "psum_scatter": (ours.psum_scatter, True, lambda table, here: table[:, here].sum(0).astype(table.dtype)),
}
EACH = [name for name in CALLS if name not in ("pmax", "pmin", "broadcast")]  # with a derivative, a root of its own


@pytest.fixture(scope="module")
def auto(topology_of: Callable[[None], allreduce.Topology]) -> Iterator[Any]:
    with allreduce.create("auto", topology_of(None)) as made:
        yield made


def array_of(number: int, rows: bool, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> np.ndarray:
    """Return the array of a rank: small integers, which every dtype adds without rounding."""
    random = np.random.default_rng([number, rows, *shape])
    return random.integers(0, 5, (size,) * rows + shape).astype(dtype)


def everyone(rows: bool, *arguments: Any) -> np.ndarray:
    return np.stack([array_of(number, rows, *arguments) for number in range(size)])


@pytest.mark.parametrize("name", CALLS)
def test_values(auto: Any, name: str) -> None:
    """Eagerly and compiled, of a tree of several dtypes and shapes, also of no elements."""
    call, rows, wanted = CALLS[name]
    kinds = {"one": ((2, 3), "float32"), "count": ((), "int32"), "more": ((5,), "float32"), "none": ((0, 2), "float32")}
    kinds["half"] = ((4,), "bfloat16")
    if name == "pmean":
        del kinds["count"]
    mine = {key: jnp.asarray(array_of(rank, rows, *each)) for key, each in kinds.items()}
    for found in (call(mine, auto), jax.jit(partial(call, backend=auto))(mine)):
        for key, each in kinds.items():
            expected = wanted(everyone(rows, *each), rank)
            assert (found[key].dtype, found[key].shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found[key], expected, err_msg=key)
    assert call({}, auto) == {}


@pytest.mark.parametrize("name", ["ring", "native", "halving_doubling", "reduce_to_one"])
def test_reduce_scatter_of_backends(topology_of: Callable[[None], allreduce.Topology], name: str) -> None:
    """Backends whose ranks own equal slices of a buffer, in any order; others, or other slices; no two phases."""
    table = everyone(True)
    with allreduce.create(name, topology_of(None)) as backend:
        found = ours.psum_scatter({"a": table[rank], "b": table[rank][..., 0]}, backend)
        np.testing.assert_array_equal(found["a"], table[:, rank].sum(0))
        np.testing.assert_array_equal(found["b"], table[:, rank, :, 0].sum(0))


@pytest.mark.parametrize("name", EACH)
def test_derivatives(auto: Any, name: str) -> None:
    """The gradient of the sum of all ranks' losses; gradients of gradients; tangents."""
    call, rows, wanted = CALLS[name]
    mine, table = jnp.asarray(array_of(rank, rows)), everyone(rows)
    weights = [np.random.default_rng(number).integers(-3, 4, wanted(table, 0).shape) for number in range(size)]

    def loss(array: Any) -> Any:
        return (call(array, auto) ** 2 * weights[rank]).sum() / 2

    def of_all(number: int) -> np.ndarray:
        """The gradient at rank `number`, from the linear function of all ranks' arrays, element by element."""
        slopes = [wanted(table, each) * weights[each] for each in range(size)]
        found = np.zeros(table[number].shape)
        for index in np.ndindex(*found.shape):
            unit = np.zeros_like(table)
            unit[(number, *index)] = 1
            found[index] = sum((wanted(unit, each) * slopes[each]).sum() for each in range(size))
        return found

    gradient = of_all(rank)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(mine), gradient, rtol=1e-5)
    value, tangent = jax.jvp(lambda array: call(array, auto), (mine,), (mine * 2,))
    np.testing.assert_array_equal(value, wanted(table, rank))
    np.testing.assert_array_equal(tangent, 2 * wanted(table, rank))
    # the loss is quadratic: its second derivative in the direction of the arrays themselves is the gradient
    again = jax.jit(lambda array: jax.jvp(jax.grad(loss), (array,), (array,))[1])(mine)
    np.testing.assert_allclose(again, gradient, rtol=1e-5)
    reverse = jax.jit(jax.grad(lambda array: (jax.grad(loss)(array) * array).sum()))(mine)
    np.testing.assert_allclose(reverse, 2 * gradient, rtol=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_batches(auto: Any, name: str) -> None:
    """A call of a batch is a call for each of its entries, along any axis, also inside of another batch."""
    call, rows, wanted = CALLS[name]
    shape, axis = (2, 3), 1
    batches = [np.stack([array_of(number + 10 * batch, rows, shape) for batch in range(4)]) for number in range(size)]
    expected = np.stack([wanted(np.stack([each[batch] for each in batches]), rank) for batch in range(4)])
    mine = jnp.moveaxis(jnp.asarray(batches[rank]), 0, axis)
    found = jax.jit(jax.vmap(lambda array: call(array, auto), in_axes=axis))(mine)
    np.testing.assert_array_equal(found, expected)
    twice = jax.jit(jax.vmap(jax.vmap(lambda array: call(array, auto), in_axes=axis)))(jnp.stack([mine, mine * 2]))
    np.testing.assert_array_equal(twice, np.stack([expected, expected * 2]))
    other = jnp.asarray(batches[rank][0])  # which has no batches
    alone, same = jax.vmap(lambda array: call([array, other], auto), axis)(mine)
    np.testing.assert_array_equal(alone, expected)
    np.testing.assert_array_equal(same, np.stack([expected[0]] * 4))


def test_moves_of_every_dtype(auto: Any) -> None:
    """Collectives that compute nothing accept them, but no random keys."""
    kinds = ("uint16", "uint32", "int16", "complex64", "bool", "float8_e4m3fn", "float32")
    for name in ("broadcast of the last", "all_gather"):
        call, rows, wanted = CALLS[name]
        found = jax.jit(partial(call, backend=auto))({kind: array_of(rank, rows, (3,), kind) for kind in kinds})
        for kind in kinds:
            assert found[kind].dtype == kind
            np.testing.assert_array_equal(found[kind], wanted(everyone(rows, (3,), kind), rank))
    for call in (ours.broadcast, ours.all_gather, ours.psum):
        with pytest.raises(errors.UnsupportedDtypeError, match="key_data"):
            call(jax.random.key(3), auto)
    with pytest.raises(errors.UnsupportedDtypeError, match="uint32"):
        ours.psum(jax.random.PRNGKey(0), auto)


def test_order(auto: Any) -> None:
    """Collectives in a compiled loop, between others, whose results nobody has waited for."""

    @jax.jit
    def repeated(array: Any) -> Any:
        copied = jax.lax.fori_loop(0, size, lambda _, each: ours.broadcast(each, auto, LAST) + 1, array)
        return copied, ours.psum(array, auto)

    found = [repeated(jnp.full(number + 1, float(rank + number))) for number in range(10)]
    for number, (copied, summed) in enumerate(found):
        np.testing.assert_array_equal(copied, np.full(number + 1, LAST + number + size))
        np.testing.assert_array_equal(summed, np.full(number + 1, sum(range(size)) + size * number))


LAYOUTS: dict[str, Callable[[Any], Any]] = {  # of the last three axes
    "transposed": lambda array: array.swapaxes(-3, -1),
    "permuted": lambda array: array.swapaxes(-3, -2).swapaxes(-2, -1),
    "sliced": lambda array: array[..., ::2, 1:3],
    "reversed": lambda array: array[..., ::-1, :, ::-1],
    "column": lambda array: array[..., 1],
    "empty": lambda array: array[..., 1:1, :],
}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(("name", "kind"), [("psum", "float32"), ("all_gather", "float32"), ("broadcast", "bool")])
def test_layouts(auto: Any, name: str, kind: str) -> None:
    """Arrays that are not in the order of their memory, from NumPy and from JAX, also those that JAX may overwrite."""
    call, rows, wanted = CALLS[name]
    mine, table = (make(*given, rows, (2, 3, 4), kind) for make, given in ((array_of, [rank]), (everyone, [])))
    held = jnp.asarray(mine)

    def views(array: Any) -> dict[str, Any]:
        return {layout: view(array) for layout, view in LAYOUTS.items()}

    forms = {
        "NumPy": call(views(mine), auto),
        "JAX": call(views(held), auto),
        "compiled": jax.jit(lambda array: call(views(array), auto))(held),
        "donated": jax.jit(partial(call, backend=auto), donate_argnums=0)(views(jnp.array(mine))),
    }
    for layout, view in LAYOUTS.items():
        for form, found in forms.items():
            assert found[layout].dtype == kind
            expected = wanted(np.stack([view(each) for each in table]), rank)
            np.testing.assert_array_equal(np.asarray(found[layout]), expected, err_msg=f"{layout}, {form}")
    np.testing.assert_array_equal(np.asarray(held), mine)


def test_large_arrays_whose_memory_is_reused(auto: Any) -> None:
    """The kind of JAX's issue 40830: sums of 4 MiB, again and again, of memory that the next step takes."""
    index = np.arange(1 << 20) % 997
    step = jax.jit(lambda array: (ours.psum(array, auto), array * 0 - 1), donate_argnums=0)
    for number in range(5):
        summed, _ = step(jnp.asarray(index * (rank + 1) + number, "float32"))
        several = [ours.psum(jnp.asarray(index + rank + more, "float32"), auto) for more in range(2)]
        np.testing.assert_array_equal(summed, index * sum(range(size + 1)) + number * size)
        for more, each in enumerate(several):
            np.testing.assert_array_equal(each, index * size + sum(range(size)) + more * size)


def test_memory(auto: Any) -> None:
    """In compiled code the results take the memory of the arguments, unless other code still reads it."""
    call = partial(ours.pmean, backend=auto)
    mine = jnp.full(100_000, float(rank))
    memory = jax.jit(call, donate_argnums=0).lower(mine).compile().memory_analysis()
    if KNOWS_BUFFERS:  # JAX 0.6.2 and later
        assert memory.temp_size_in_bytes < 1000
    before, mean, after = jax.jit(lambda array: (array, call(array), array + 0))(mine)
    for each in (mine, before, after):
        np.testing.assert_array_equal(each, rank)
    np.testing.assert_array_equal(mean, (size - 1) / 2)


def test_surroundings(auto: Any) -> None:
    """Transformations of JAX around a call: no compilation, recomputed layers, several devices."""
    call = partial(ours.pmean, backend=auto)
    with jax.disable_jit():
        assert float(call(jnp.float32(rank))) == float(call(float(rank))) == (size - 1) / 2

    def layer(array: Any) -> Any:
        return jnp.sin(call(jnp.sin(array)))

    mine = jnp.arange(3.0) + rank
    wanted = jax.grad(lambda array: layer(array).sum())(mine)
    found = jax.jit(jax.grad(lambda array: jax.checkpoint(layer)(array).sum()))(mine)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    devices = np.array(jax.devices())
    assert devices.size == 2
    everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("here",)), jax.sharding.PartitionSpec("here"))
    for changed in (call, jax.jit(lambda array: call(array * 2))):
        text = raised(errors.UnavailableError, lambda changed=changed: changed(jax.device_put(jnp.ones(4), everywhere)))
        assert "one device of each rank" in text
    assert float(call(jax.device_put(jnp.float32(rank), devices[1]))) == (size - 1) / 2


class Layer(NamedTuple):
    """As Equinox's layers and Flax's TrainState: besides arrays it holds a function, which differs in each process."""

    weights: Any
    activation: Callable[[Any], Any]


jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.weights,), layer.activation), lambda kept, parts: Layer(*parts, kept)
)


def test_nodes(auto: Any) -> None:
    layer = Layer({"w": jnp.full(3, float(rank))}, lambda array: array)
    for found in (ours.pmean(layer, auto), jax.jit(partial(ours.pmean, backend=auto))(layer)):
        assert found.activation is layer.activation
        np.testing.assert_array_equal(found.weights["w"], (size - 1) / 2)
    other = Layer({"w" if rank else "v": jnp.ones(3)}, jnp.tanh)
    text = raised(errors.DisagreementError, lambda: ours.pmean(other, auto))
    assert "['v'] of float32[3]" in text, text


def test_errors(flat: allreduce.Topology) -> None:
    """The same named error on every rank, eagerly and compiled; later calls work."""
    reduce = allreduce.create("auto", flat)
    shape = (2, 3) if rank == 0 else (3, 2)
    for differing in (
        lambda: ours.psum_scatter(jnp.ones((size, 6) if rank else (size, 2, 3)), reduce),
        lambda: ours.broadcast(jnp.ones(2), reduce, root=min(rank, 1)),
        lambda: (ours.pmax if rank else ours.pmin)(jnp.ones(2), reduce),
        lambda: ours.all_gather([jnp.ones(2)] * 100 + [jnp.ones(shape)], reduce),
    ):
        assert "rank 0: " in raised(errors.DisagreementError, differing)
    call = partial(ours.pmean, backend=reduce)
    for _ in range(2):
        text = raised(errors.DisagreementError, lambda: call(jnp.ones(shape)))
        assert "rank 0: a tree pmean * of float32[2, 3]" in text, text
        assert float(call(jnp.float32(rank))) == (size - 1) / 2
    text = raised(jax.errors.JaxRuntimeError, lambda: jax.block_until_ready(jax.jit(call)(jnp.ones(shape[0] + 7))))
    assert "DisagreementError" in text
    with_names = ours.named_errors(reduce)

    def compiled() -> None:
        with with_names:
            jax.block_until_ready(jax.jit(call)(jnp.ones(shape[0] + 9)))

    assert "float32[11]" in raised(errors.DisagreementError, compiled)
    raised(errors.DisagreementError, lambda: call({"a" if rank else "b": jnp.ones(3)}))
    assert "mean" in raised(errors.UnsupportedOpError, lambda: call(jnp.ones(3, "int32")))
    raised(errors.UnsupportedDtypeError, lambda: ours.psum(jnp.ones(3, "complex64"), reduce))
    raised(errors.OptionError, lambda: ours.pmean(jnp.ones(3), "ring"))
    assert "root" in raised(errors.OptionError, lambda: ours.broadcast(jnp.ones(3), reduce, root=size))
    assert "axis has the length" in raised(errors.OptionError, lambda: ours.psum_scatter(jnp.float32(1), reduce))
    slope = jax.grad(lambda array: ours.pmax(array, reduce).sum())
    assert "stop_gradient" in raised(errors.UnsupportedOpError, lambda: slope(jnp.ones(3)))
    assert float(jax.jit(call)(jnp.float32(rank))) == (size - 1) / 2
    reduce.close()
    raised(errors.ClosedError, lambda: call(jnp.ones(3)))
