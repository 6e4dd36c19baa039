"""The built-in network: gradients against finite differences, optimizers against their formulas, model files."""

import itertools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from tests.frameworks.replica_checks import check_slices
from tests.matrix.alone import RATES, Alone
from tests.matrix.case import Case
from trainers.errors import ArgumentError, ModelFileError
from trainers.files import checkpoint
from trainers.files.checkpoint import Progress, Saved
from trainers.files.model_file import replacing
from trainers.replica import elements_of, sliced_entries
from trainers.replicas.flat import FlatOptimizer
from trainers.replicas.numpy import optimizers as numpy_optimizers
from trainers.replicas.numpy.network import NumpyNetwork

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(9, 4)).astype(np.float32)
CLASSES = RANDOM.integers(0, 3, 9)
TARGETS = RANDOM.normal(size=(9, 3)).astype(np.float32)


def reference_loss(parameters: np.ndarray, activation: str, loss: str, sizes: list[int]) -> float:
    """Return the mean loss over X, in float64 and without any code of the network."""
    a, start = X.astype(np.float64), 0
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        weights = parameters[start : start + inputs * outputs].reshape(inputs, outputs)
        start += inputs * outputs
        a = a @ weights + parameters[start : start + outputs]
        start += outputs
        if layer < len(sizes) - 2:
            a = np.maximum(a, 0) if activation == "relu" else np.tanh(a)
    if loss == "mean_squared_error":
        return float(((a - TARGETS) ** 2).mean())
    return float((np.log(np.exp(a).sum(axis=1)) - a[np.arange(9), CLASSES]).mean())


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mean_squared_error"])
@pytest.mark.parametrize("hidden", [[], [5], [6, 5]])
def test_gradients_are_finite_differences(activation: str, loss: str, hidden: list[int]) -> None:
    sizes = [4, *hidden, 3]
    network = NumpyNetwork(sizes, activation=activation, loss=loss, seed=1)
    network.parameters += 0.1  # biases too
    y = TARGETS if loss == "mean_squared_error" else CLASSES
    buffer = np.full(network.gradient_length, 7, np.float32)
    network.bind(None, buffer)
    for _ in range(2):  # a second call must not add to the first
        values = network.gradients(X, y, 0.5)
    parameters, step = network.parameters.astype(np.float64), 1e-6
    for index in range(network.gradient_length):
        both = []
        for sign in (1, -1):
            moved = parameters.copy()
            moved[index] += sign * step
            both.append(reference_loss(moved, activation, loss, sizes))
        assert buffer[index] == pytest.approx(0.5 * (both[0] - both[1]) / (2 * step), rel=1e-3, abs=1e-5)
    assert values[0] == pytest.approx(reference_loss(parameters, activation, loss, sizes), rel=1e-5)
    np.testing.assert_allclose(values * 9, network.evaluate(X, y), rtol=1e-6)


@pytest.mark.parametrize("optimizer", numpy_optimizers.OPTIMIZERS)
def test_slices_end_as_the_whole(optimizer: str) -> None:
    whole, first, second = (NumpyNetwork([4, 6, 3], optimizer=optimizer) for _ in range(3))
    check_slices(whole, first, second, X, CLASSES)


def test_a_slice_has_its_own_part_of_the_optimizers_state_only() -> None:
    network = NumpyNetwork([4, 6, 3])
    network.bind(*np.zeros((2, network.gradient_length), np.float32))
    network.gradients(X, CLASSES, 1.0)
    network.update(slice(5, 12))
    sizes = {name: array.size for name, array in network.optimizer.state.items()}
    assert sizes == {"first_moment": 7, "second_moment": 7}
    moment = network.state()["optimizer.first_moment"]
    assert np.array_equal(np.flatnonzero(moment), 5 + np.flatnonzero(network.optimizer.state["first_moment"]))
    assert moment.any()


def test_a_slice_is_read_without_a_copy_of_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a load, when the optimizer still has the state of all parameters."""
    network, part = trained(), slice(2, 9)
    state = network.state()
    network.load_state(state)
    monkeypatch.setattr(FlatOptimizer, "pack", None)
    for name in sliced_entries(network):
        np.testing.assert_array_equal(elements_of(network, name, part), state[name][part])


def test_nothing_is_allocated_in_a_second_step() -> None:
    network = NumpyNetwork([4, 6, 3])
    network.gradients(X, CLASSES, 1.0)
    before = [a.ctypes.data for a in (network._inputs, *network._outputs, *network._deltas)]
    network.gradients(X[:5], CLASSES[:5], 1.0)
    network.gradients(X, CLASSES, 1.0)
    assert [a.ctypes.data for a in (network._inputs, *network._outputs, *network._deltas)] == before


def test_predictions_are_probabilities() -> None:
    network = NumpyNetwork([4, 6, 3])
    outputs = network.predict(X * 1000)  # exponents that overflow without care
    np.testing.assert_allclose(outputs.sum(axis=1), 1, rtol=1e-5)
    assert np.isfinite(outputs).all()
    accuracy = (network.predict(X).argmax(axis=1) == CLASSES).mean()
    assert network.evaluate(X, CLASSES)[1] / 9 == accuracy


def test_input_scaling_takes_any_shape_and_dtype() -> None:
    scaled, plain = NumpyNetwork([6, 3]), NumpyNetwork([6, 3])
    scaled.scale_input(np.arange(6), 0.5)
    images = RANDOM.integers(0, 255, (5, 3, 2)).astype(np.uint8)
    by_hand = ((images.reshape(5, 6) - np.arange(6)) * 0.5).astype(np.float32)
    np.testing.assert_allclose(scaled.predict(images), plain.predict(by_hand), rtol=1e-5)


@pytest.mark.parametrize("name", numpy_optimizers.OPTIMIZERS)
@pytest.mark.parametrize("length", [1, 100, numpy_optimizers.BLOCK, 2 * numpy_optimizers.BLOCK + 3])
def test_optimizers_follow_their_formulas(name: str, length: int) -> None:
    """Compared with the formulas in float64, over several blocks."""
    random = np.random.default_rng(length)
    parameters = random.normal(size=length).astype(np.float32)
    steps = [random.normal(size=length).astype(np.float32) for _ in range(5)]
    formula = Alone(Case(update=name))
    formula.arrays, formula.first, formula.second = ([parameters.astype(np.float64) * keep] for keep in (1, 0, 0))
    optimizer = numpy_optimizers.OPTIMIZERS[name](RATES[name])
    buffer = np.empty(length, np.float32)
    optimizer.bind(np, parameters, buffer)
    for gradient in steps:
        buffer[:] = gradient
        optimizer.step()
        formula.update([gradient.astype(np.float64)], 1.0)
        assert np.array_equal(buffer, gradient)
    np.testing.assert_allclose(parameters, formula.arrays[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("init", "variance"), [("he", 2 / 400), ("glorot", 2 / 700)])
def test_initialisation(init: str, variance: float) -> None:
    network = NumpyNetwork([400, 300], init=init)
    weights, bias = network._layers[0]
    assert weights.var() == pytest.approx(variance, rel=0.02)
    assert abs(weights.mean()) < 1e-3
    assert not bias.any()
    assert not np.array_equal(network.parameters, NumpyNetwork([400, 300], init=init, seed=1).parameters)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sizes": [4]}, "describes no network"),
        ({"sizes": [4, 0, 3]}, "describes no network"),
        ({"activation": "gelu"}, "activation='gelu' is unknown; use one of relu, tanh"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"optimizer": "lion"}, "sgd, momentum, adam"),
        ({"init": "zeros"}, "he, glorot"),
        ({"device": "tpu"}, 'use "cpu" or "cuda"'),
        ({"lr": 0.0}, r"lr must be a number > 0 and < .*, got 0\.0"),
        ({"lr": float("nan")}, "lr must be a number > 0 and < inf, got nan"),
        ({"optimizer": numpy_optimizers.Adam(), "lr": 0.1}, "belongs to an optimizer"),
    ],
)
def test_bad_networks(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        NumpyNetwork(**{"sizes": [4, 3], **options})


def test_bad_data_and_buffers() -> None:
    network = NumpyNetwork([4, 3])
    with pytest.raises(ArgumentError, match="float32, of 15 elements, not float64 of shape"):
        network.bind(None, np.zeros(15))
    with pytest.raises(ArgumentError, match="4 features a row"):
        network.check(np.zeros((2, 5)), None)
    with pytest.raises(ArgumentError, match="one-hot"):
        network.check(X, np.eye(9, dtype=np.int64))
    regression = NumpyNetwork([4, 1], loss="mean_squared_error")
    regression.check(X, np.zeros(9))
    with pytest.raises(ArgumentError, match=r"shape \(9, 1\)"):
        regression.check(X, TARGETS)
    with pytest.raises(ArgumentError, match="4 numbers"):
        network.scale_input(np.zeros(3), 1.0)


def trained() -> NumpyNetwork:
    network = NumpyNetwork([4, 6, 3], activation="tanh", lr=0.02)
    network.scale_input(np.arange(4), 2.0)
    for _ in range(3):
        network.gradients(X, CLASSES, 1.0)
        network.update()
    return network


def test_models_load_without_mpi_and_without_pickle(tmp_path: Path) -> None:
    """Also those of checkpoints."""
    network, path, saved = trained(), str(tmp_path / "model.npz"), str(tmp_path / "checkpoint-00000005.npz")
    network.save(path)
    checkpoint.write(saved, Saved("NumpyNetwork", network.config, network.state(), Progress(total=5, ranks=1), [{}]))
    job = launch.child(
        "import sys; sys.modules['mpi4py'] = None\n"
        "import numpy as np\n"
        "from trainers import NumpyNetwork\n"
        "from trainers.files import checkpoint\n"
        f"for path in {path!r}, checkpoint.newest({str(tmp_path)!r})[0]:\n"
        f"    print(NumpyNetwork.load(path).predict(np.array({X.tolist()}, 'float32')).tolist())\n"
        "assert not any(name.split('.')[0] == 'allreduce' for name in sys.modules)\n"
    )
    assert job.returncode == 0, job.stderr
    for line in job.stdout.splitlines():
        assert np.array_equal(np.array(json.loads(line), np.float32), network.predict(X))
    assert len(job.stdout.splitlines()) == 2
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            assert b"'descr': '|O'" not in archive.read(name)[:200]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.npz"
    path.write_text("precious")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ModelFileError, match="No space left on device"):
        trained().save(str(path))
    assert path.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_bad_model_files(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    network = trained()
    with pytest.raises(ModelFileError, match=r"model\.npz can't be read: No such file"):
        NumpyNetwork.load(str(path))
    network.save(str(path))
    others: list[tuple[dict[str, Any], str]] = [
        ({"sizes": [4, 5, 3]}, "sizes 4-6-3, and this one has 4-5-3"),
        ({"optimizer": "sgd"}, "the saved model is another one: optimizer"),
        ({"activation": "relu"}, "holds a model with activation='tanh'"),
        ({"loss": "mean_squared_error"}, "holds a model with loss='softmax_cross_entropy'"),
    ]
    for options, text in others:
        other = NumpyNetwork(**{"sizes": [4, 6, 3], "activation": "tanh", **options})
        before = other.parameters.copy()
        with pytest.raises(ModelFileError, match=text):
            other.restore(str(path))
        assert np.array_equal(other.parameters, before)
    NumpyNetwork([4, 6, 3], activation="tanh").restore(str(path))


def test_an_optimizer_of_the_user(tmp_path: Path) -> None:
    class Sign(numpy_optimizers.SGD):
        pass

    path = str(tmp_path / "model.npz")
    NumpyNetwork([4, 3], optimizer=Sign(0.1), seed=8).save(path)
    again = NumpyNetwork([4, 3], optimizer=Sign(0.1))
    again.restore(path)
    assert np.array_equal(again.parameters, NumpyNetwork([4, 3], seed=8).parameters)
    with pytest.raises(ModelFileError, match="Sign"):
        NumpyNetwork.load(path)


def test_links_are_followed_and_pipes_are_written_to(tmp_path: Path) -> None:
    network, target, link, pipe = trained(), tmp_path / "model", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target.name)
    network.save(str(link))
    assert link.is_symlink()
    assert NumpyNetwork.load(str(target)).sizes == [4, 6, 3]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that opening it for writing does not wait
    with replacing(str(pipe)) as file:
        file.write(b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert {each.name for each in tmp_path.iterdir()} == {"model", "link", "pipe"}  # no ending is added


@pytest.mark.parametrize("foreign", [object(), NumpyNetwork, numpy_optimizers.Adam])
def test_an_optimizer_of_another_framework(foreign: Any) -> None:
    with pytest.raises(ArgumentError, match="optimizer: give sgd, momentum, adam, or an optimizer of"):
        NumpyNetwork([4, 3], optimizer=foreign)
