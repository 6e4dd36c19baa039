"""JaxReplica alone: one process, no MPI."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.replica_checks import check_slices
from trainers.errors import ArgumentError, ModelFileError

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    if os.environ.get("ALLREDUCE_TEST_REQUIRE") == "1":
        raise
    pytest.skip(str(error), allow_module_level=True)

from trainers.replica import check_divisible, copy_of
from trainers.replicas.jax import JaxReplica
from trainers.replicas.jax.layout import TreeLayout, own
from trainers.replicas.jax.optimizer import Optimizer

ROOT = Path(__file__).resolve().parents[2]
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))  # compiled once for all replicas
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 5)).astype("float32"), RANDOM.integers(0, 3, 12)


def params(dtype: str = "float32") -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {"hidden": {"w": jnp.asarray(random.normal(size=(5, 4)), dtype), "b": jnp.zeros(4, dtype)},
            "out": [jnp.asarray(random.normal(size=(4, 3)), dtype)]}  # fmt: skip


def apply(tree: Any, x: Any) -> Any:
    return jnp.tanh(x @ tree["hidden"]["w"] + tree["hidden"]["b"]) @ tree["out"][0]


def loss(output: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()


def accuracy(output: Any, y: Any) -> Any:
    return (output.argmax(1) == y).mean()


def replica(optimizer: Any = None, **options: Any) -> JaxReplica:
    return JaxReplica(apply, loss, params(), optimizer or optax.adam(0.01), **options)


def steps_of_optax(optimizer: Any, steps: int) -> list[np.ndarray]:
    """Return the parameters after some steps of a loop as in optax's documentation."""

    @jax.jit
    def step(tree: Any, state: Any) -> Any:
        slopes = jax.grad(lambda tree: loss(apply(tree, X), Y))(tree)
        changes, state = optimizer.update(slopes, state, tree)
        return optax.apply_updates(tree, changes), state

    tree, state = params(), optimizer.init(params())
    for _ in range(steps):
        tree, state = step(tree, state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


ELEMENTWISE = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw with a schedule": lambda: optax.chain(
        optax.clip(0.1), optax.adamw(optax.cosine_decay_schedule(0.01, 10), weight_decay=0.1)
    ),
    "injected": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
    "every second": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
}
WHOLE = {
    "norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01),
    "masked": lambda: optax.masked(optax.adam(0.01), {"hidden": {"w": True, "b": False}, "out": [True]}),
    "decay of matrices": lambda: optax.adamw(
        0.01, weight_decay=0.5, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    ),
    "random": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
    "finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", ["injected", "every second", *WHOLE])
def test_which_optimizers_work_on_slices(name: str) -> None:
    made = Optimizer((ELEMENTWISE | WHOLE)[name](), TreeLayout(params()), jax.tree.map(own, params()))
    with jax.debug_nans(name in ELEMENTWISE):  # the trial uses NaN, which must not be reported as the user's
        assert (made.slice_error() == "") == (name in ELEMENTWISE)


@pytest.mark.parametrize("name", ["every second", "norm", "masked"])
def test_steps_are_those_of_optax(name: str) -> None:
    made = (ELEMENTWISE | WHOLE)[name]
    ours = replica(made())
    for _ in range(4):
        ours.gradients(X, Y, 1.0)
        ours.update()
    for here, there in zip(jax.tree.leaves(ours.params), steps_of_optax(made(), 4), strict=True):
        np.testing.assert_allclose(here, there, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw with a schedule"])
def test_slices(name: str) -> None:
    """Two replicas in one memory, each of which updates its own slice, end with the parameters and the state of one
    replica."""
    whole, first, second = (replica(ELEMENTWISE[name]()) for _ in range(3))
    for _ in range(2):  # begun in one piece
        for each in (whole, first, second):
            each.gradients(X, Y, 1.0)
            each.update()
    check_slices(whole, first, second, X, Y)


def test_gradients_are_weighted_and_in_place() -> None:
    ours = replica(metrics={"accuracy": accuracy})
    buffer = np.full(ours.gradient_length, np.nan, "float32")
    ours.bind(None, buffer)
    values = ours.gradients(X, Y, 0.25)
    tree = jax.grad(lambda tree: loss(apply(tree, X), Y))(params())
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    np.testing.assert_allclose(buffer, 0.25 * flat, rtol=1e-5, atol=1e-7)
    assert ours.metrics == ("loss", "accuracy")
    np.testing.assert_allclose(values, [loss(apply(params(), X), Y), accuracy(apply(params(), X), Y)], rtol=1e-5)
    np.testing.assert_allclose(ours.evaluate(X, Y), 12 * values, rtol=1e-5)
    assert ours.gradients(X[:0], Y[:0], 0.0) == [0.0, 0.0]
    assert not buffer.any()
    assert ours.predict(X[:0]).shape == (0, 3)
    assert list(ours.shapes.values()) == [(4,), (5, 4), (4, 3)]


def test_what_was_given_and_handed_out_is_not_touched() -> None:
    """Updates donate the memory of old parameters, so the user's arrays must not be in it."""
    given = params()
    ours = JaxReplica(apply, loss, given, optax.adam(0.1))
    before, handed = given["out"][0] + 0, ours.params
    copied = copy_of(ours)
    for _ in range(2):
        ours.gradients(X, Y, 1.0)
        ours.update()
    for each in (given, handed, copied.params):
        np.testing.assert_array_equal(each["out"][0], before)
    assert abs(ours.params["out"][0] - before).max() > 0.01


def test_an_update_reads_the_gradients_before_it_returns() -> None:
    """The trainer writes the next gradients into the same memory."""
    ours = JaxReplica(apply, loss, params(), optax.trace(0.5))  # its state after a step is the gradient
    for value in (1.0, 2.0):
        ours._buffer[:] = value
        ours.update()
        held = ours.state()
        ours._buffer[:] = 99.0
        for name, array in ours.state().items():
            np.testing.assert_array_equal(array, held[name])


def test_files_of_bfloat16(tmp_path: Path) -> None:
    ours, other = (JaxReplica(apply, loss, params("bfloat16"), optax.adam(0.01)) for _ in range(2))
    assert (ours.gradient_dtype, str(ours._buffer.dtype)) == ("bfloat16", "bfloat16")
    for _ in range(2):
        ours.gradients(X, Y, 1.0)
        ours.update()
    path = str(tmp_path / "model.npz")
    ours.save(path)
    other.restore(path)
    for each in (ours, other):
        each.gradients(X, Y, 1.0)
        each.update()
    for name, array in ours.state().items():
        np.testing.assert_array_equal(array, other.state()[name])
    assert jax.tree.map(lambda leaf: str(leaf.dtype), other.params)["out"] == ["bfloat16"]


def test_what_numpy_made() -> None:
    """JAX converts NumPy's float64 to float32, so gradients are not sent with 64 bits."""
    made = jax.tree.map(lambda leaf: np.asarray(leaf, "float64"), params())
    made["out"] = params()["out"]
    ours = JaxReplica(apply, loss, made, optax.sgd(0.1))
    assert (ours.gradient_dtype, str(ours.params["hidden"]["w"].dtype)) == ("float32", "float32")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert JaxReplica(apply, loss, jax.tree.map(np.float64, params()), optax.sgd(0.1)).gradient_dtype == "float64"


def test_states_of_other_models() -> None:
    ours = replica()
    for other in (replica(optax.sgd(0.1)), JaxReplica(lambda p, x: x @ p, loss, jnp.ones((5, 3)), optax.adam(0.1))):
        with pytest.raises(ModelFileError, match="the saved model is another one"):
            ours.load_state(other.state())


def test_learning_rates() -> None:
    assert replica().learning_rates == []
    ours = replica(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    assert ours.learning_rates == [0.5]
    ours.learning_rates = [0.0]
    before = ours.state()["parameters"]
    ours.gradients(X, Y, 1.0)
    ours.update()
    np.testing.assert_array_equal(before, ours.state()["parameters"])
    with pytest.raises(ArgumentError, match="inject_hyperparams"):
        replica().learning_rates = [0.1]


class Adam:
    """An optimizer as in torch.optim, without `init` and `update`."""


def of(tree: Any, loss: Any = loss, optimizer: Any = None) -> JaxReplica:
    return JaxReplica(apply, loss, tree, optimizer or optax.adam(0.1))


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("holds no array", lambda: of({})),
    ("holds int32", lambda: of({"w": jnp.ones(3, "int32")})),
    ("holds bfloat16, float32", lambda: of({"w": jnp.ones(3), "v": jnp.ones(3, "bfloat16")})),
    ("holds str", lambda: of({"w": "text"})),
    (r'can\'t update slices .* update="replicated"', lambda: check_divisible(replica(WHOLE["norm"]()), whole=True)),
    ("takes an optax optimizer", lambda: replica("adam")),
    ("takes an optax optimizer", lambda: replica(Adam())),
    ("takes an optax optimizer", lambda: replica(optax.adam)),
    ("only gradients and parameters of this model", lambda: replica(optax.lbfgs())),
    (r"can't be fed with x float32 of shape \(12, 4\)", lambda: replica().check(X[:, :4], Y)),
    ("scalar", lambda: of(params(), optax.softmax_cross_entropy_with_integer_labels).check(X, Y)),
    ("no mean over the rows", lambda: of(params(), lambda out, y: loss(out, y) * len(y)).check(X, Y, np.ones(len(X)))),
    ("buffer must be 1-D, float32, of 36 elements", lambda: replica().bind(None, np.zeros(3, "float32"))),
    ("buffer must be 1-D, float32, of 36 elements", lambda: replica().bind(None, np.zeros(36))),
]


def test_what_does_not_fit_is_refused() -> None:
    replica().check(X, Y)
    for words, call in REFUSED:
        with pytest.raises(ArgumentError, match=words):
            call()


def test_without_optax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_extras.py has the others."""
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "trainers.replicas.jax.replica")
    with pytest.raises(ImportError, match=r'pip install "\.\[jax\]" in the checkout'):
        importlib.import_module("trainers.replicas.jax.replica")
