"""Exports of PyTorch's, JAX's and Keras' models: the file answers as the replica does, errors name the operator."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import lacking
from tests.training.test_export import answers, properties
from trainers import MirroredTrainer
from trainers.datasets.columns import Columns, Number
from trainers.errors import ArgumentError, ExportError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(9, 64)).astype(np.float32)


@pytest.fixture(autouse=True)
def onnx_is_there() -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript", "torch"))):
        lacking('onnx, onnxruntime, onnxscript or PyTorch is not installed: pip install ".[export,torch]"')


def softmax(logits: np.ndarray) -> np.ndarray:
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return found / found.sum(axis=1, keepdims=True)


def of_torch(module: Any, loss: Any = None, **options: Any) -> Any:
    import torch
    from torch import nn

    from trainers.replicas.pytorch import TorchReplica

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return TorchReplica(module, loss or nn.CrossEntropyLoss(), optimizer, **options)


def test_a_convolution_of_pytorch_in_evaluation_mode(tmp_path: Path) -> None:
    from torch import nn

    path = tmp_path / "a.onnx"
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)]
    module = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers)
    with MirroredTrainer(of_torch(module, precision="bfloat16")) as trainer:
        with pytest.raises(ValueError, match="give x"):
            trainer.export(str(path))
        trainer.fit(IMAGES, np.arange(9) % 3, epochs=2, batch_size=5, progress=False)
        about = trainer.export(str(path), classes=["a", "b", "c"])
        expected = softmax(trainer.predict(IMAGES))
    assert (about.kind, about.rows, about.classifies) == ("TorchReplica", 9, True)
    assert properties(path) == about
    for rows in (9, 1):
        found = answers(path, {"x": IMAGES[:rows]})
        np.testing.assert_allclose(found["probabilities"], expected[:rows], atol=0.04)  # without bfloat16
        assert set(found["label"]) <= {"a", "b", "c"}
    assert b".py" not in path.read_bytes()  # no lines of a program, with paths of this machine


def test_several_inputs_and_outputs_of_pytorch_in_float64(tmp_path: Path) -> None:
    import torch
    from torch import nn

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors, self.weights = nn.Embedding(7, 4), nn.Linear(3, 4)

        def forward(self, words: Any, numbers: Any) -> Any:
            return {"sum": self.vectors(words).sum(1) + self.weights(numbers), "first": words[:, 0]}

    x = {"words": RANDOM.integers(0, 7, (5, 2)), "numbers": RANDOM.normal(size=(5, 3))}
    replica = of_torch(Two().double(), lambda output, y: output["sum"].mean())
    with MirroredTrainer(replica) as trainer:
        trainer.export(str(tmp_path / "a.onnx"), x)
        expected = trainer.predict(x)
    found = answers(tmp_path / "a.onnx", {"words": x["words"], "numbers": x["numbers"].astype(np.float32)})
    assert {*found} == {"sum", "first"}
    np.testing.assert_allclose(found["sum"], expected["sum"], atol=1e-5)
    np.testing.assert_array_equal(found["first"], expected["first"])
    assert torch.float64 == replica.module.weights.weight.dtype


LOSSES = {  # of a module of 3 inputs: its outputs, whether a sigmoid follows, the loss
    "one output": (1, False, "BCEWithLogitsLoss"),
    "sigmoids": (2, True, "BCELoss"),
    "logits": (2, False, "BCEWithLogitsLoss"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_outputs_that_are_no_classes_get_no_softmax(name: str, tmp_path: Path) -> None:
    """The file answers as `predict` does, and nothing makes probabilities of outputs that are none; as many outputs as
    a table has classes are not logits of them."""
    from torch import nn

    width, sigmoid, loss = LOSSES[name]
    module = nn.Sequential(nn.Linear(3, width), *[nn.Sigmoid()][:sigmoid])
    x, path = RANDOM.normal(size=(7, 3)).astype(np.float32), tmp_path / "a.onnx"
    replica = of_torch(module, getattr(nn, loss)())
    with MirroredTrainer(replica) as trainer:
        names = ["yes", "no"][:width]
        for options in ({}, {"logits": True}) if width == 1 else ({},):
            with pytest.raises(ArgumentError, match="two outputs" if width == 1 else "logits=True"):
                trainer.export(str(path), x, classes=names, **options)
        assert not path.exists()
        about = trainer.export(str(path), x)
        expected = trainer.predict(x)
        assert not about.classifies
        np.testing.assert_allclose(answers(path, {"x": x})["output"], expected, atol=1e-6)
        if name == "logits":  # the user says so
            assert trainer.export(str(path), x, classes=names, logits=True).classes == ("yes", "no")
            np.testing.assert_allclose(answers(path, {"x": x})["probabilities"], softmax(expected), atol=1e-6)
        if name == "sigmoids":
            replica.columns = Columns([Number(each, 0.0, 1.0, False) for each in "abc"], "label", ["no", "yes"])
            assert not trainer.export(str(path), x).classifies
            feeds = {each: x[:, at].astype(np.float64) for at, each in enumerate("abc")}
            np.testing.assert_allclose(answers(path, feeds)["output"], expected, atol=1e-6)


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return torch.linalg.eigvals(torch.diag_embed(self.inner(x))).real

    path = tmp_path / "a.onnx"
    path.write_text("older")
    x = RANDOM.normal(size=(5, 3)).astype(np.float32)
    with MirroredTrainer(of_torch(Odd())) as trainer, pytest.raises(ExportError, match=r"eig"):
        trainer.export(str(path), x)
    assert path.read_text() == "older"


def test_keras_with_pytorch(tmp_path: Path) -> None:
    if not find_spec("keras"):
        lacking('Keras is not installed: pip install ".[keras]" in the checkout')
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    if keras.backend.backend() != "torch":
        pytest.skip("another test has imported Keras with another backend")
    from trainers.replicas.keras import KerasReplica

    layers = keras.layers
    made = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()]
    model = keras.Sequential([*made, layers.Dropout(0.5), layers.Flatten(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = IMAGES.reshape(-1, 8, 8, 1)
    with MirroredTrainer(KerasReplica(model, loss, "adam")) as trainer:
        trainer.export(str(tmp_path / "a.onnx"), x)
        expected = trainer.predict(x)
    found = answers(tmp_path / "a.onnx", {"x": x})
    np.testing.assert_allclose(found["probabilities"], softmax(expected), atol=1e-5)


def test_several_inputs_and_outputs_of_jax(tmp_path: Path) -> None:
    if not all(map(find_spec, ("jax", "optax"))):
        lacking('JAX or optax is not installed: pip install ".[jax]" in the checkout')
    import optax

    from trainers.replicas.jax import JaxReplica

    params = {"w": RANDOM.normal(size=(3, 4)).astype(np.float32)}
    a, b = RANDOM.normal(size=(2, 6, 3)).astype(np.float32)
    function = lambda params, x: (x[0] @ params["w"], x[1] * 2)  # noqa: E731
    replica = JaxReplica(function, lambda output, y: 0.0, params, optax.sgd(0.1))
    with MirroredTrainer(replica) as trainer:
        if not find_spec("jax2onnx"):
            with pytest.raises(ExportError, match=r"needs jax2onnx.*\.\[export,export-jax\]"):
                trainer.export(str(tmp_path / "a.onnx"), (a, b))
            return
        trainer.export(str(tmp_path / "a.onnx"), (a, b))
    found = answers(tmp_path / "a.onnx", {"x_0": a, "x_1": b})
    np.testing.assert_allclose(found["output_0"], a @ params["w"], atol=1e-5)
