"""The training of a case in ONE process, written with NumPy or PyTorch alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.matrix.case import CLASSES, FEATURES, IGNORED, OPTIMIZER, Case

HIDDEN = 5
RATES = {"sgd": 0.1, "momentum": 0.05, "adam": 0.01}
Arrays = list[np.ndarray]


@dataclass
class Result:
    """parameters: flat, after the training. average: their moving average, or None. losses, norms: the means of each
    epoch; None where they are not compared. travelled: how far the parameters went."""

    parameters: np.ndarray
    average: np.ndarray | None
    losses: list[float]
    norms: list[float]
    travelled: float


class Alone:
    """Two dense layers by hand, and their optimizer; also for JAX, whose last layer has no bias, and for Keras."""

    def __init__(self, case: Case) -> None:
        self.name, self.rate, self.count = case.update, RATES[case.update], 0
        self.keras = case.framework == "keras"
        shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)][: 3 if case.framework == "jax" else 4]
        self.arrays: Arrays = [np.zeros(shape, np.float32) for shape in shapes]
        self.first, self.second = ([np.zeros(each.shape) for each in self.arrays] for _ in range(2))

    def gradients(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, Arrays]:
        """Return the loss, the sum of the weighted rows divided by their number, and the gradients."""
        first, bias, last, *last_bias = self.arrays
        hidden = np.tanh(x @ first + bias)
        scores = hidden @ last + (last_bias[0] if last_bias else 0)
        scores = scores - scores.max(1, keepdims=True)
        odds = np.exp(scores)
        odds /= odds.sum(1, keepdims=True)
        loss = -(weights * np.log(odds[np.arange(len(y)), y])).mean()
        odds[np.arange(len(y)), y] -= 1
        odds *= weights[:, None] / len(y)
        inner = (odds @ last.T) * (1 - hidden**2)
        return float(loss), [x.T @ inner, inner.sum(0), hidden.T @ odds, odds.sum(0)][: len(self.arrays)]

    def update(self, gradients: Arrays, fraction: float) -> None:
        """Update the parameters, with a fraction of the learning rate."""
        rate = self.rate * fraction
        self.count += 1
        for array, gradient, first, second in zip(self.arrays, gradients, self.first, self.second, strict=True):
            if self.name == "sgd":
                array -= (rate * gradient).astype(array.dtype)
            elif self.name == "momentum":
                of_gradient, of_sum = (rate, 1) if self.keras else (1, rate)  # Keras keeps the rate of each step
                first[...] = 0.9 * first + of_gradient * gradient
                array -= (of_sum * first).astype(array.dtype)
            else:
                first[...] = 0.9 * first + 0.1 * gradient
                second[...] = 0.999 * second + 0.001 * gradient**2
                mean, square = first / (1 - 0.9**self.count), second / (1 - 0.999**self.count)
                array -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(array.dtype)

    def parameters(self) -> Arrays:
        """Return copies of the parameters."""
        return [each.copy() for each in self.arrays]

    def load(self, parameters: Arrays) -> None:
        self.arrays = [each.copy() for each in parameters]

    def flat(self) -> np.ndarray:
        return np.concatenate([each.reshape(-1) for each in self.parameters()])

    def load_flat(self, flat: np.ndarray) -> None:
        arrays, at = [], 0
        for each in self.parameters():
            arrays.append(flat[at : at + each.size].reshape(each.shape).astype(each.dtype))
            at += each.size
        self.load(arrays)


class TorchAlone(Alone):
    """A module, its loss and its optimizers of PyTorch."""

    def __init__(self, case: Case) -> None:
        import torch

        self.torch, self.case = torch, case
        self.module, self.optimizers = torch_model(case)
        self.trained = [each for each in self.module.parameters() if each.requires_grad]

    def gradients(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, Arrays]:
        self.module.zero_grad()
        output, target = self.module(self.torch.from_numpy(x)), self.torch.from_numpy(y)
        if not self.case.loss:
            rows = self.torch.nn.functional.cross_entropy(output, target, reduction="none")
            loss = (rows * self.torch.from_numpy(weights.astype(x.dtype))).mean()
        elif (y == IGNORED).all():
            loss = (output * 0).sum()
        else:
            loss = torch_loss(self.case)(output, target)
        loss.backward()
        return loss.item(), [each.grad.numpy().copy() for each in self.trained]

    def update(self, gradients: Arrays, fraction: float) -> None:
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = self.torch.from_numpy(gradient.astype(parameter.detach().numpy().dtype))
        for optimizer in self.optimizers:
            before = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= fraction
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    def parameters(self) -> Arrays:
        return [each.detach().numpy().copy() for each in self.trained]

    def load(self, parameters: Arrays) -> None:
        with self.torch.no_grad():
            for parameter, array in zip(self.trained, parameters, strict=True):
                parameter.copy_(self.torch.from_numpy(array))


def torch_model(case: Case) -> tuple[Any, list[Any]]:
    """Return a module, and an optimizer on its parameters, or one for each layer."""
    import torch

    class Scale(torch.nn.Module):
        """A parameter without dimensions."""

        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Any) -> Any:
            return x * self.factor

    torch.manual_seed(case.seed)
    first, last = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)
    layers = [first, torch.nn.Tanh(), *[Scale()] * (case.layers == "scalar"), last]
    module = torch.nn.Sequential(*layers).to(getattr(torch, case.dtype))
    if case.layers == "frozen":
        first.requires_grad_(False)
    if case.way == "two":
        return module, [torch_optimizer(case, layer.parameters()) for layer in (first, last)]
    slower = {"params": first.parameters(), "lr": RATES.get(case.update, 0.01) / 2, "weight_decay": 0.1}
    groups = [slower, {"params": last.parameters()}] if case.layers == "groups" else module.parameters()
    return module, [torch_optimizer(case, groups)]


def torch_loss(case: Case) -> Any:
    """Return the loss of a trainer."""
    import torch

    if not case.loss:
        plain = torch.nn.functional.cross_entropy
        return (torch.nn.CrossEntropyLoss(), plain, lambda output, target: plain(output, target))[case.seed % 3]
    if case.loss == "ignored":
        return torch.nn.CrossEntropyLoss(ignore_index=IGNORED)
    weights = torch.tensor([0.2, 1.0, 5.0], dtype=getattr(torch, case.dtype))
    return torch.nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)


def torch_optimizer(case: Case, parameters: Any) -> Any:
    import torch

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "sgd": ("SGD", {}),
        "momentum": ("SGD", {"momentum": 0.9}),
        "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
        "amsgrad": ("Adam", {"amsgrad": True}),
        "rmsprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
        **{name.lower(): (name, {}) for name in ("Adam", "AdamW", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD")},
        "adadelta": ("Adadelta", {}),
    }
    name, options = kinds[case.update]
    return getattr(torch.optim, name)(parameters, lr=RATES.get(case.update, 0.01), **options)


def jax_model(case: Case) -> tuple[Any, Any, Any, Any]:
    """Return parameters, the function, the loss, and the optimizer."""
    import jax.numpy as jnp
    import optax

    numbers = np.random.default_rng(case.seed)
    params = {
        "a": numbers.normal(size=(FEATURES, HIDDEN)).astype("float32"),
        "b": np.zeros(HIDDEN, "float32"),
        "c": numbers.normal(size=(HIDDEN, CLASSES)).astype("float32"),
    }
    kind = optax.adam if case.update == "adam" else optax.sgd
    more = {"momentum": 0.9} if case.update == "momentum" else {}
    optimizer = optax.inject_hyperparams(kind)(learning_rate=RATES[case.update], **more)

    def loss(output: Any, y: Any, weights: Any = 1.0) -> Any:
        return (weights * optax.softmax_cross_entropy_with_integer_labels(output, y)).mean()

    return params, lambda params, x: jnp.tanh(x @ params["a"] + params["b"]) @ params["c"], loss, optimizer


def keras_model(case: Case, inputs: str = "") -> tuple[Any, Any, Any]:
    """Return a model, the loss, and the optimizer. inputs: as of a case."""
    import keras

    keras.utils.set_random_seed(case.seed)
    first, rest = keras.Input((1,), name="first"), keras.Input((FEATURES - 1,), name="rest")
    given: Any = {"dict": {"first": first, "rest": rest}, "tuple": (first, rest)}.get(inputs)
    features = keras.layers.concatenate([first, rest]) if inputs else keras.Input((FEATURES,))
    hidden = keras.layers.Dense(HIDDEN, activation="tanh")(features)
    model = keras.Model(given if inputs else features, keras.layers.Dense(CLASSES)(hidden), name="net")
    rate = RATES[case.update]
    if case.update == "adam":
        optimizer = keras.optimizers.Adam(rate, epsilon=1e-10)  # added to other numbers than in the formula
    else:
        optimizer = keras.optimizers.SGD(rate, momentum=0.9 * (case.update == "momentum"))
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer


def clipped(gradients: Arrays, most: float | None, parts: int = 1) -> tuple[float, Arrays]:
    """Return the norm of gradients, and those of at most that norm, as torch.nn.utils.clip_grad_norm_ makes them.

    parts: each part of the gradients has a norm of its own.
    """
    if parts > 1:
        half = len(gradients) // 2
        (one, first), (other, second) = (clipped(each, most) for each in (gradients[:half], gradients[half:]))
        return max(one, other), first + second
    norm = float(np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in gradients)))
    if most is None or norm <= most:
        return norm, gradients
    return norm, [np.asarray(each * (most / (norm + 1e-6))) for each in gradients]


def train(case: Case, start: np.ndarray) -> Result:
    """Train from these parameters."""
    models = beginners(case, start, case.workers(0))
    most, decay = case.argument("ClipNorm"), case.argument("EMA")
    average = start.astype("float64") if decay is not None else None
    losses, norms, total, taken = [], [], 0, np.zeros(len(models))
    for batches in case.batches(classes=True):
        measured, lengths = [], []
        for batch in batches:
            left = case.left(len(batch[0]), total)
            x, y, weights = (each[left] for each in batch)
            if len(models) != case.workers(total):
                models, taken = beginners(case, models[0].flat(), case.workers(total)), np.zeros(case.workers(total))
            step = []
            for number, model in enumerate(models):
                own = case.share(len(x), len(models), number)
                rows = len(x[own])
                if not rows and case.owner in OPTIMIZER:  # the user's loop steps without rows, and momentum goes on
                    model.update([np.zeros_like(each) for each in model.parameters()], case.fraction(total))
                if not rows:
                    continue
                loss, gradients = model.gradients(x[own], y[own], weights[own])
                norm, gradients = clipped(gradients, most, 2 if case.way == "two" else 1)
                if not np.isfinite(norm):  # SkipNotFinite
                    continue
                model.update(gradients, case.fraction(total))
                taken[number] += rows if case.owner in OPTIMIZER else 1
                step.append((loss * rows, rows))
                lengths.append(norm)
            total += 1
            if step:
                measured += step  # without the rows that a rank has discarded
            if step and average is not None and decay is not None:
                average = decay * average + (1 - decay) * models[0].flat()
            if case.meets(total) and taken.any():
                mean = sum(each.flat() * weight for each, weight in zip(models, taken, strict=True)) / taken.sum()
                for model in models:
                    model.load_flat(mean)
                taken[:] = 0
        losses.append(sum(loss for loss, _ in measured) / sum(rows for _, rows in measured) if measured else np.nan)
        norms.append(sum(lengths) / len(lengths) if lengths else np.nan)
    end = models[0].flat()
    return Result(end, average, losses, norms, float(np.linalg.norm(end - start)))


def loss_of(case: Case, parameters: np.ndarray) -> float:
    """Return the loss of all rows of a model with these parameters."""
    (model,) = beginners(case, parameters, 1)
    return float(model.gradients(*case.data, case.weights)[0])


def beginners(case: Case, start: np.ndarray, count: int) -> list[Alone]:
    """Return models with these parameters and new optimizers."""
    models = [(TorchAlone if case.framework == "torch" else Alone)(case) for _ in range(count)]
    for model in models:
        model.load_flat(start)
    return models
