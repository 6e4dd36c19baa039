"""Trainers with JaxReplica, and the collectives of allreduce.jax."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from tests.frameworks.test_jax import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before JAX is imported
jax = pytest.importorskip("jax", reason="JAX is not installed in this environment")
optax = pytest.importorskip("optax", reason="optax is not installed in this environment")

import jax.numpy as jnp  # noqa: E402

import allreduce  # noqa: E402
import allreduce.jax as ours  # noqa: E402
from allreduce import errors  # noqa: E402
from allreduce.jax.primitive import KNOWS_BUFFERS  # noqa: E402
from tests.frameworks.replica_checks import as_dict, as_tuple, check_edits, check_inputs, check_weights  # noqa: E402
from trainers import EMA, Accumulate, ClipNorm, Loader, MirroredTrainer, ParameterServerTrainer  # noqa: E402
from trainers.errors import ArgumentError  # noqa: E402
from trainers.replica import copy_of  # noqa: E402
from trainers.replicas.jax import JaxReplica  # noqa: E402

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(50, 6)), RANDOM.integers(0, 4, 50)


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"][0] + params["b"]) @ params["w"][1]


def loss(output: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()


def accuracy(output: Any, y: Any) -> Any:
    return (output.argmax(1) == y).mean()


def replica(seed: int = 0, optimizer: Any = None, **options: Any) -> JaxReplica:
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape).astype("float32") for shape in ((6, 7), (7, 4))]
    params = {"w": weights, "b": np.zeros(7, "float32")}
    return JaxReplica(apply, loss, params, optimizer or optax.adam(0.02), {"accuracy": accuracy}, **options)


@pytest.fixture(scope="module")
def reduce(topology_of: Callable[[None], allreduce.Topology]) -> Iterator[Any]:
    with allreduce.create("auto", topology_of(None)) as made:
        yield made


STEP = [ClipNorm(1.0), EMA(0.9)]  # options that the ranks share with one rank alone


def alone(topology: allreduce.Topology, optimizer: Any = None) -> tuple[np.ndarray, Any]:
    """Return the result of one rank alone."""
    with topology.split(rank) as self, MirroredTrainer(replica(0, optimizer), "native", self) as trainer:
        history = trainer.fit(X, Y, epochs=1, batch_size=16, progress=False, transforms=STEP)
        return trainer.replica.state()["parameters"].copy(), history


def learned(trainer: Any) -> tuple[np.ndarray, Any]:
    history = trainer.fit(X, Y, epochs=1, batch_size=16, progress=False, transforms=[Accumulate(2), *STEP])
    scores = trainer.evaluate(X, Y)
    assert scores == MPI.COMM_WORLD.bcast(scores)
    return trainer.replica.state()["parameters"].copy(), history


def test_asynchronous_servers(flat: allreduce.Topology) -> None:
    """The matrix has the other strategies."""
    with ParameterServerTrainer(replica(rank), flat, servers=1) as trainer:
        epochs = trainer.fit(X, Y, epochs=3, batch_size=16, progress=False)
        assert epochs[-1].loss < epochs[0].loss
        assert trainer.evaluate(X, Y)["loss"] < 2


def test_the_user_edits_parameters(flat: allreduce.Topology) -> None:
    def halve(replica: JaxReplica) -> None:
        replica.params = jax.tree.map(lambda leaf: leaf / 2, replica.params)

    check_edits(replica, halve, flat, (X, Y), ["sharded", "local"])
    made = replica()
    with pytest.raises(ArgumentError, match="a tree like the one of this JaxReplica"):
        made.params = {**made.params, "b": np.zeros(6, "float32")}


def test_several_inputs_and_weights(flat: allreduce.Topology) -> None:
    random = np.random.default_rng(1)
    params = [random.normal(size=shape).astype("float32") for shape in ((2, 3), (4, 3))]

    def added(params: Any, x: Any) -> Any:
        first, rest = (x["first"], x["rest"]) if isinstance(x, dict) else x
        return first @ params[0] + jnp.tanh(rest @ params[1])

    def made() -> JaxReplica:
        return JaxReplica(added, loss, params, optax.adam(0.02))

    check_weights(made(), as_tuple if rank else as_dict)
    check_inputs(made, as_dict, flat, ["servers"])
    wrong = JaxReplica(added, lambda output, y: len(y) * loss(output, y), params, optax.adam(0.02))
    with MirroredTrainer(wrong, "auto", flat) as trainer, pytest.raises(ArgumentError, match="mean over the rows"):
        trainer.fit((X[:, :2], X[:, 2:]), Y % 3, sample_weight=np.ones(50), progress=False)


def test_bfloat16(flat: allreduce.Topology, folder: Path) -> None:
    """Equal bits on all ranks; as float32 to bfloat16's rounding; a saved model loads with either precision."""
    wanted, history = alone(flat)
    with MirroredTrainer(replica(rank, precision="bfloat16"), "shared", flat, update="sharded") as trainer:
        found, losses = learned(trainer)
        assert len(set(trainer.parameters_sha256())) == 1
        outputs = trainer.predict(X, ema=False)
        trainer.save(str(folder))
        copied = copy_of(trainer.replica)
    np.testing.assert_allclose(found, wanted, atol=0.05)
    np.testing.assert_allclose([each.loss for each in losses], [each.loss for each in history], rtol=0.02)
    assert found.dtype == outputs.dtype == np.float32
    assert (found != wanted).any()
    np.testing.assert_array_equal(copied.predict(X), outputs)
    with MirroredTrainer(replica(rank), "auto", flat) as trainer:
        trainer.load(str(folder))
        np.testing.assert_allclose(trainer.predict(X, ema=False), outputs, atol=0.05)
        assert (trainer.predict(X, ema=False) != outputs).any()
    assert "losses are scaled" in raised(ArgumentError, lambda: replica(precision="float16"))


def test_an_optimizer_of_whole_arrays(flat: allreduce.Topology) -> None:
    """An optimizer that needs all gradients trains replicated, and raises an error if ranks divide the update."""
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02))
    wanted, _ = alone(flat, clipped)
    with MirroredTrainer(replica(rank, clipped), "auto", flat) as trainer:
        np.testing.assert_allclose(learned(trainer)[0], wanted, rtol=2e-4, atol=2e-5)
    assert "slices" in raised(
        ArgumentError, lambda: MirroredTrainer(replica(rank, clipped), "shared", flat, update="sharded")
    )


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    """Every rank raises `kind`."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} on rank {rank}")


def tree(number: float) -> dict[str, Any]:
    """Return a tree of two floating dtypes and integers, with different values on each rank."""
    return {
        "w": jnp.arange(6.0).reshape(2, 3) * (number + 1),
        "half": [jnp.full(4, number, "bfloat16"), jnp.float32(number)],
        "count": jnp.full((2,), int(number), "int32"),
    }


def test_values(reduce: Any) -> None:
    """Eagerly and compiled, against NumPy over all ranks' trees."""
    everyone = [tree(number) for number in range(size)]
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *everyone)
    combined = {"psum": np.sum, "pmax": np.max, "pmin": np.min}
    wanted: dict[str, Any] = {
        name: jax.tree.map(lambda leaf, combine=combine: combine(leaf, axis=0).astype(leaf.dtype), stacked)
        for name, combine in combined.items()
    }
    wanted |= {"all_gather": stacked, "broadcast": jax.tree.map(lambda leaf: leaf[0], stacked)}

    def every(mine: Any) -> dict[str, Any]:
        return {name: getattr(ours, name)(mine, backend=reduce) for name in wanted}

    for found in (every(tree(rank)), jax.jit(every)(tree(rank))):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert here.dtype == there.dtype
            np.testing.assert_allclose(np.asarray(here, "float32"), np.asarray(there, "float32"), rtol=1e-2)
    assert ours.pmean({}, reduce) == {}
    assert float(ours.pmean(float(rank), reduce)) == (size - 1) / 2


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda array: array.T,
    "permuted": lambda array: array.transpose(1, 2, 0),
    "sliced": lambda array: array[:, ::2, 1:3],
    "reversed": lambda array: array[::-1, :, ::-1],
    "column": lambda array: array[..., 1],
    "empty": lambda array: array[:, 1:1],
}


def views(array: Any) -> dict[str, Any]:
    return {name: view(array) for name, view in LAYOUTS.items()}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    ("name", "kind", "combine"),
    [
        ("psum", "float32", lambda arrays: sum(arrays[1:], arrays[0])),
        ("all_gather", "float32", np.stack),
        ("broadcast", "bool", lambda arrays: arrays[0]),
    ],
    ids=["psum", "all_gather", "broadcast"],
)
def test_layouts(reduce: Any, name: str, kind: str, combine: Callable[[list[Any]], Any]) -> None:
    """Arrays that are not in the order of their memory, from NumPy and from JAX, also those that JAX may overwrite."""
    everyone = [((np.arange(24).reshape(2, 3, 4) * (number + 2) + number) % 5).astype(kind) for number in range(size)]
    call = partial(getattr(ours, name), backend=reduce)
    mine = jnp.asarray(everyone[rank])
    forms = {
        "NumPy": call(views(everyone[rank])),
        "JAX": call(views(mine)),
        "compiled": jax.jit(lambda array: call(views(array)))(mine),
        "donated": jax.jit(call, donate_argnums=0)(views(jnp.array(everyone[rank]))),
    }
    for layout, view in LAYOUTS.items():
        wanted = combine([view(array) for array in everyone])
        for form, found in forms.items():
            assert found[layout].dtype == kind
            np.testing.assert_array_equal(np.asarray(found[layout]), wanted, err_msg=f"{layout}, {form}")
    np.testing.assert_array_equal(np.asarray(mine), everyone[rank])


def test_large_arrays_whose_memory_is_reused(reduce: Any) -> None:
    """The kind of JAX's issue 40830: sums of 4 MiB, again and again, of memory that the next step takes."""
    index = np.arange(1 << 20) % 997
    step = jax.jit(lambda array: (ours.psum(array, reduce), array * 0 - 1), donate_argnums=0)
    for number in range(5):
        summed, _ = step(jnp.asarray(index * (rank + 1) + number, "float32"))
        several = [ours.psum(jnp.asarray(index + rank + more, "float32"), reduce) for more in range(2)]
        np.testing.assert_array_equal(summed, index * sum(range(size + 1)) + number * size)
        for more, each in enumerate(several):
            np.testing.assert_array_equal(each, index * size + sum(range(size)) + more * size)


def test_moves(reduce: Any) -> None:
    """Collectives that compute nothing accept every dtype: random keys are uint32, or have their own dtype."""
    kinds = ("uint16", "uint32", "int16", "complex64", "bool", "float8_e4m3fn", "float32")
    mine, wanted = ({kind: (np.arange(4) * (of % 2)).astype(kind) for kind in kinds} for of in (rank, size - 1))
    found = jax.jit(partial(ours.broadcast, backend=reduce, root=size - 1))(mine)
    for kind in kinds:
        assert found[kind].dtype == kind
        np.testing.assert_array_equal(found[kind], wanted[kind])
    assert {each.shape for each in ours.all_gather(mine, reduce).values()} == {(size, 4)}
    for key in (jax.random.PRNGKey(rank), jax.random.key(rank)):
        first = ours.broadcast({"key": key}, reduce)["key"]
        assert first.dtype == key.dtype
        of_rank_0 = jax.random.PRNGKey(0) if key.dtype == "uint32" else jax.random.key(0)
        np.testing.assert_array_equal(jax.random.normal(first, 3), jax.random.normal(of_rank_0, 3))
        assert ours.all_gather(key, reduce).shape == (size, *key.shape)
    assert "uint32" in raised(errors.UnsupportedDtypeError, lambda: ours.psum(jax.random.PRNGKey(0), reduce))


def test_derivatives(reduce: Any) -> None:
    """The gradient of a mean is a mean; the gradients of the others follow from the sum of all ranks' losses."""
    mine = jnp.arange(3.0) + rank
    ranks = range(size)
    mean = np.arange(3.0) + (size - 1) / 2
    calls = {
        "pmean": (ours.pmean, lambda array: array**2, 2 * mean),
        "psum": (ours.psum, lambda array: array**2, 2 * size * size * mean),
        "all_gather": (ours.all_gather, lambda array: array**2, 2 * size * np.asarray(mine)),
        "broadcast": (ours.broadcast, lambda array: array * (rank + 1), np.full(3, (rank == 0) * sum(ranks, size))),
    }
    for name, (call, then, wanted) in calls.items():

        def value(array: Any, call: Any = call, then: Any = then) -> Any:
            return then(call(array, reduce)).sum()

        np.testing.assert_allclose(jax.jit(jax.grad(value))(mine), wanted, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(jax.grad(lambda array: (ours.pmean(array, reduce) ** 2).sum())(mine), 2 * mean)
    slopes = jax.jit(jax.grad(lambda array: (array * rank).sum()))(mine)  # as data-parallel code has it
    np.testing.assert_allclose(jax.jit(partial(ours.pmean, backend=reduce))(slopes), np.full(3, (size - 1) / 2))
    assert "stop_gradient" in raised(
        errors.UnsupportedOpError, lambda: jax.grad(lambda a: ours.pmax(a, reduce).sum())(mine)
    )
    _, tangent = jax.jvp(lambda array: ours.psum(array, reduce), (mine,), (jnp.ones(3) * rank,))
    np.testing.assert_allclose(tangent, sum(ranks))
    stacked = jax.vmap(lambda array: ours.all_gather(array, reduce), in_axes=1, out_axes=1)(jnp.ones((3, 5)) * rank)
    assert stacked.shape == (size, 5, 3)
    np.testing.assert_array_equal(stacked[:, 0, 0], ranks)
    looped = jax.jit(lambda array: jax.lax.fori_loop(0, 5, lambda _, each: ours.pmean(each, reduce) + 1, array))(mine)
    np.testing.assert_allclose(looped, mean + 5, rtol=1e-6)


def test_memory(reduce: Any) -> None:
    """In compiled code the results take the memory of the arguments, unless other code still reads it."""
    call = partial(ours.pmean, backend=reduce)
    mine = jnp.full(100_000, float(rank))
    memory = jax.jit(call, donate_argnums=0).lower(mine).compile().memory_analysis()
    if KNOWS_BUFFERS:  # JAX 0.6.2 and later
        assert memory.temp_size_in_bytes < 1000
    before, mean, after = jax.jit(lambda array: (array, call(array), array + 0))(mine)
    for each in (mine, before, after):
        np.testing.assert_array_equal(each, rank)
    np.testing.assert_array_equal(mean, (size - 1) / 2)


def test_surroundings(reduce: Any) -> None:
    """Transformations of JAX around a call: no compilation, recomputed layers, several devices."""
    call = partial(ours.pmean, backend=reduce)
    with jax.disable_jit():
        assert float(call(jnp.float32(rank))) == (size - 1) / 2

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


def test_nodes(reduce: Any) -> None:
    layer = Layer({"w": jnp.full(3, float(rank))}, lambda array: array)
    for found in (ours.pmean(layer, reduce), jax.jit(partial(ours.pmean, backend=reduce))(layer)):
        assert found.activation is layer.activation
        np.testing.assert_array_equal(found.weights["w"], (size - 1) / 2)
    other = Layer({"w" if rank else "v": jnp.ones(3)}, jnp.tanh)
    text = raised(errors.DisagreementError, lambda: ours.pmean(other, reduce))
    assert "['v'] of float32[3]" in text, text


def test_order(reduce: Any) -> None:
    """Many calls under way, compiled or not, whose results nobody has waited for: the same order on all ranks."""

    @jax.jit
    def two(array: Any) -> tuple[Any, Any]:
        return ours.psum(array, reduce), ours.pmax(array * 2, reduce)

    found = []
    for number in range(10):
        found.append(two(jnp.full(1000 + 100 * (number % 3), float(rank))))
        found.append((ours.psum(jnp.float32(number), reduce), jnp.float32(2 * (size - 1))))
    for number, (summed, largest) in enumerate(found):
        assert float(largest.max()) == 2 * (size - 1)
        assert float(summed.max()) == (sum(range(size)) if number % 2 == 0 else size * (number // 2))


def test_errors(flat: allreduce.Topology) -> None:
    """The same named error on every rank, eagerly and compiled; later calls work."""
    reduce = allreduce.create("auto", flat)
    shape = (2, 3) if rank == 0 else (3, 2)
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
    raised(errors.OptionError, lambda: ours.broadcast(jnp.ones(3), reduce, root=size))
    assert float(jax.jit(call)(jnp.float32(rank))) == (size - 1) / 2
    reduce.close()
    raised(errors.ClosedError, lambda: call(jnp.ones(3)))


def test_a_loss_that_is_no_mean_over_rows_is_refused(topology_of: Callable[[None], allreduce.Topology]) -> None:
    def ignoring(output: Any, y: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(output, y)
        return (losses * (y > 0)).sum() / (y > 0).sum()

    made = JaxReplica(apply, ignoring, replica().params, optax.adam(0.02))
    with MirroredTrainer(made, "ring", topology_of(None)) as trainer:
        with pytest.raises(ArgumentError, match="the loss ignoring is no mean over the rows"):
            trainer.fit(X, Y, 1, 20, transforms=[Accumulate(2)], progress=False)
        with pytest.raises(ArgumentError, match="the loss ignoring is no mean over the rows"):
            trainer.fit(Loader([(X[:20], Y[:20])], rows="whole"), epochs=1, transforms=[Accumulate(2)], progress=False)
