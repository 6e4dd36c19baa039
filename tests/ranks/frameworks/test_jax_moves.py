"""The collectives of allreduce.jax that give ranks different results: against NumPy over all ranks' arrays."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
from allreduce.jax.collective import words_of_perm  # noqa: E402

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = size - 1
SHIFT = [(each, (each + 1) % size) for each in range(size)]
TO_ZERO = [(LAST, 0)]  # the others get zeros
Wanted = Callable[[np.ndarray, int], Any]  # all ranks' arrays, stacked, and a rank -> the rank's result


def only(wanted: Wanted, root: int) -> Wanted:
    return lambda table, here: wanted(table, here) if here == root else 0 * wanted(table, here)


# name: the call, whether it takes a row for each rank, the result
CALLS: dict[str, tuple[Callable[..., Any], bool, Wanted]] = {
    "psum_scatter": (ours.psum_scatter, True, lambda table, here: table[:, here].sum(0).astype(table.dtype)),
    "all_to_all": (ours.all_to_all, True, lambda table, here: table[:, here]),
    "scatter": (ours.scatter, True, lambda table, here: table[0, here]),
    "scatter of the last": (partial(ours.scatter, root=LAST), True, lambda table, here: table[LAST, here]),
    "gather": (ours.gather, False, only(lambda table, _: table, 0)),
    "gather to the last": (partial(ours.gather, root=LAST), False, only(lambda table, _: table, LAST)),
    "shift": (partial(ours.ppermute, perm=SHIFT), False, lambda table, here: table[here - 1]),
    "any order": (partial(ours.ppermute, perm=SHIFT[rank:] + SHIFT[:rank]), False, lambda table, here: table[here - 1]),
    "to zero": (partial(ours.ppermute, perm=TO_ZERO), False, only(lambda table, _: table[LAST], 0)),
    "nothing": (partial(ours.ppermute, perm=[]), False, lambda table, _: 0 * table[0]),
    "scan": (ours.scan, False, lambda table, here: table[: here + 1].sum(0).astype(table.dtype)),
}
EACH = [name for name in CALLS if name not in ("scatter", "gather", "any order", "nothing")]  # with a root of its own


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


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_other_ops_of_scan(auto: Any, op: str) -> None:
    table, combine = everyone(False), {"max": np.max, "min": np.min, "prod": np.prod}[op]
    found = jax.jit(lambda array: ours.scan(array, auto, op))(table[rank])
    np.testing.assert_array_equal(found, combine(table[: rank + 1], axis=0))
    with pytest.raises(errors.UnsupportedOpError, match=f"scan by {op} .* has no derivative"):
        jax.grad(lambda array: ours.scan(array, auto, op).sum())(table[rank])


def test_scan_of_16_bits_rounds_once(auto: Any) -> None:
    mine = jnp.asarray([256.0 if rank == 0 else 1.0], "bfloat16")  # 256 + 1 is 256 in bfloat16
    assert float(ours.scan(mine, auto)[0]) == float(jnp.bfloat16(256 + rank))


def test_moves_of_every_dtype(auto: Any) -> None:
    kinds = ("uint16", "complex64", "bool", "float8_e4m3fn")
    found = ours.all_to_all({kind: array_of(rank, True, (3,), kind) for kind in kinds}, auto)
    for kind in kinds:
        np.testing.assert_array_equal(found[kind], everyone(True, (3,), kind)[:, rank])
    keys = jax.random.split(jax.random.key(3), size)
    assert ours.scatter(keys, auto) == keys[rank]
    assert ours.ppermute(keys[rank], auto, SHIFT) == keys[rank - 1]


def test_order(auto: Any) -> None:
    """A ring by ppermute in a compiled loop, between other collectives, whose results nobody has waited for."""

    @jax.jit
    def rotated(array: Any) -> Any:
        turned = jax.lax.fori_loop(0, size, lambda _, each: ours.ppermute(each, auto, SHIFT) + 1, array)
        return turned, ours.psum(array, auto)

    found = [rotated(jnp.full(number + 1, float(rank + number))) for number in range(10)]
    for number, (turned, summed) in enumerate(found):
        np.testing.assert_array_equal(turned, np.full(number + 1, rank + number + size))
        np.testing.assert_array_equal(summed, np.full(number + 1, sum(range(size)) + size * number))


def test_layouts(auto: Any) -> None:
    """Arrays that are not in the order of their memory, and memory that JAX may overwrite."""
    views = [lambda array: array.swapaxes(1, 2), lambda array: array[:, ::-1, ::2], lambda array: array[..., 1:1]]
    mine, table = array_of(rank, True, (3, 4)), everyone(True, (3, 4))
    for view in views:
        wanted = np.stack([view(each) for each in table])[:, rank]
        for form in (view(mine), view(jnp.asarray(mine))):
            np.testing.assert_array_equal(ours.all_to_all(form, auto), wanted)
        compiled = jax.jit(lambda array, view=view: ours.all_to_all(view(array), auto))
        np.testing.assert_array_equal(compiled(jnp.asarray(mine)), wanted)
    donated = jax.jit(lambda array: ours.all_to_all(array, auto), donate_argnums=0)
    np.testing.assert_array_equal(donated(jnp.asarray(mine)), table[:, rank])


def test_the_text_of_many_pairs_is_short() -> None:
    few, many = ((0, 1), (1, 0)), tuple((each, each) for each in range(1000))
    assert words_of_perm(few) == str(few)
    other = (*many[:-2], (998, 999), (999, 998))
    assert words_of_perm(many).startswith("1000 pairs, (0, 0), (1, 1), (2, 2), (3, 3) ... #")
    assert words_of_perm(many) != words_of_perm(other)
    assert len(words_of_perm(many)) < 80


def test_errors(auto: Any) -> None:
    """Invalid arguments on every rank, calls that differ on all ranks; later calls work."""
    wrong = {
        "row for each rank": lambda: ours.all_to_all(jnp.ones((size + 1, 2)), auto),
        "first axis has the length": lambda: ours.psum_scatter(jnp.float32(1), auto),
        "twice": lambda: ours.ppermute(jnp.ones(2), auto, [(0, 0), (0, 0)]),
        "pairs": lambda: ours.ppermute(jnp.ones(2), auto, [0, 1]),
        "got None": lambda: ours.ppermute(jnp.ones(2), auto, None),
        "got 5": lambda: ours.ppermute(jnp.ones(2), auto, 5),
        "got .*0, .1, 2": lambda: ours.ppermute(jnp.ones(2), auto, [(0, (1, 2))]),
        "of ranks": lambda: ours.ppermute(jnp.ones(2), auto, [(0, size)]),
        "root": lambda: ours.gather(jnp.ones(2), auto, root=size),
    }
    for text, call in wrong.items():
        with pytest.raises(errors.OptionError, match=text):
            call()
    with pytest.raises(errors.UnsupportedOpError, match="mean"):
        ours.scan(jnp.ones(2), auto, "mean")
    if size > 1:
        differing = [
            lambda: ours.ppermute(jnp.ones(2), auto, [(0, 1)] if rank else [(1, 0)]),
            lambda: ours.gather(jnp.ones(2), auto, root=min(rank, 1)),
            lambda: ours.psum_scatter(jnp.ones((size, 6) if rank else (size, 2, 3)), auto),
            lambda: ours.scan(jnp.ones(2), auto, "max" if rank else "min"),
            lambda: ours.gather([jnp.ones(2)] * 100 + [jnp.ones((2, 3) if rank else (3, 2))], auto),
        ]
        for call in differing:
            with pytest.raises(errors.DisagreementError, match="rank 0: "):
                call()
    assert float(ours.scan(jnp.float32(1), auto)) == rank + 1
