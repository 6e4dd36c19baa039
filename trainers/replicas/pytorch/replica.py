"""TorchReplica: any PyTorch module as a replica for the trainers. No MPI."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from trainers.arguments import require
from trainers.arrays.average import Spans
from trainers.data import Data, Tree, as_arrays, mapped, row_count, sliced
from trainers.errors import ArgumentError, ModelFileError, needing
from trainers.replica import ALL, Slices, clipped, feeding, slices_of

with needing(
    'TorchReplica needs PyTorch, which can\'t be imported ({}): pip install ".[torch]" in the checkout', ImportError
):
    import torch

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainers.replicas.flat import FlatReplica, lower_precision
from trainers.replicas.pytorch import devices, graphs, row_losses
from trainers.replicas.pytorch.division import foreign_error, hyperparameters
from trainers.replicas.pytorch.optimizer import TorchOptimizer
from trainers.replicas.pytorch.tensors import DTYPES, TORCH, Placed, as_tensor, from_array, host_view, version_of, views

HYPERPARAMETER = "hyperparameter."  # prefix of the hyperparameters' names in the state
Metric = Callable[[Tensor, Tensor], Tensor]


class TorchReplica(FlatReplica):
    """A module, its loss and its optimizer.

    module: a torch.nn.Module whose trained parameters have one dtype, on the CPU or on one GPU.
    loss: loss(module(x), y), the MEAN over the rows. To weigh rows, a loss of torch.nn or torch.nn.functional is called
        with reduction="none", any other one for each row (torch.vmap).
    optimizer: on the module's parameters; its state has their shapes (SGD, AdamW, ...; not LBFGS, not Adafactor).
    metrics: name -> metric(module(x), y), a mean over the rows. nn.CrossEntropyLoss adds "accuracy" by default.
    precision: "bfloat16": the module computes under torch.autocast; parameters, gradients and the optimizer stay
        float32. None: no autocast.
    shard: how MirroredTrainer(update="sharded") divides the update: "elements": equal slices. "tensors": whole,
        consecutive tensors for each rank. "auto": elements for trainers.pytorch.ELEMENTWISE; tensors for TENSORWISE,
        and for other classes if a trial shows that they treat tensors one by one.

    The module is called as module(x); as module(a, b) if x is a tuple (a, b), and as module(image=a, text=b) if x is a
    dict {"image": a, "text": b}. Each array is converted to the dtype of the parameters; integers to int64 if the
    module has an nn.Embedding. y is converted to int64 if it holds integers, else to the dtype of the parameters.

    The running means and variances of batch norm are averaged over the ranks, by rows, with the gradients; other
    buffers are local to each rank in training. Parameters that a batch does not use have a gradient of zeros, not None.
    With update="sharded" parameters are contiguous (channels_last is given up). Raises ArgumentError.
    """

    takes_weights = True
    optimizer_state: TorchOptimizer

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        metrics: Mapping[str, Metric] | None = None,
        *,
        precision: str | None = None,
        shard: str = "auto",
    ) -> None:
        self.module, self.loss, self.optimizer = module, loss, optimizer
        self._named = _trained_of(module, optimizer)
        self._trained = [*self._named.values()]
        if getattr(loss, "reduction", "mean") != "mean":
            raise ArgumentError(f'the loss has reduction={loss.reduction!r}; rows are weighted here, so use "mean"')  # type: ignore[attr-defined]
        self._metrics = ({"accuracy": _accuracy} if isinstance(loss, nn.CrossEntropyLoss) else {}) | dict(metrics or {})
        self.metrics = ("loss", *self._metrics)
        self._dtype, self._device = self._trained[0].dtype, devices.device_of(self._trained)
        self.device = self._device.kind
        # a subclass may change the gradients that it gets from `gradients`: if not, it sets `early` itself
        self.early = self.device == "cpu" and type(self).gradients is TorchReplica.gradients
        self.gradient_dtype = DTYPES[self._dtype]
        self._low = lower_precision(precision, self.gradient_dtype)
        made = {"module": type(module).__name__, "optimizer": type(optimizer).__name__, "flags": _flags(optimizer)}
        self.config = made | {"precision": "bfloat16" if self._low else self.gradient_dtype}
        if module.training and (still := [name for name, each in module.named_modules() if not each.training]):
            self.notices = (f"{len(still)} parts of the module stay in evaluation mode: {still[0]}, for example",)
        running = running_statistics(module)
        self._averaged = {name: each for name, each in running.items() if each.dtype == self._dtype}
        self._statistics = [*self._averaged.values()]
        self._embeds = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in module.modules())
        self.optimizer_state = TorchOptimizer(optimizer, self._trained, shard)
        self._length = self.optimizer_state.layout.length
        self.statistics = sum(each.numel() for each in self._statistics)
        self.gradient_length = self._length + self.statistics
        self._buffers = Buffers(module)
        self.unseeded = NO_MOMENTUM if any(each.momentum is None for each in batch_norms(module)) else ""
        self.scores = "logits" if isinstance(loss, nn.CrossEntropyLoss) else ""
        self.shapes = {name: tuple(each.shape) for name, each in self._named.items()}
        self.counts = row_losses.counts(loss)
        self.optional = len(self._trained)
        self.unused = self.still = np.zeros(self.optional, bool)
        self._parameters: Tensor | None = None  # the memory of `bind`, and the parameters there
        self._placed = Placed([], [])
        self._use(torch.zeros(self.gradient_length, dtype=self._dtype, device=self._device.device))

    # Methods of Replica

    @property
    def loss_name(self) -> str:  # type: ignore[override]
        """As Replica.loss_name, of the attribute `loss`, which the user may change."""
        return "" if self.counts or row_losses.is_mean(self.loss) else row_losses.name_of(self.loss)

    def bind(self, parameters: Any, gradients: Any) -> None:
        flat = None if parameters is None else self._tensor(parameters)
        buffer = self._tensor(gradients)
        super().bind(parameters, gradients)
        if flat is not None:
            self._move_parameters(flat)
        self._use(buffer)

    @torch.no_grad()
    def _leave(self) -> None:
        with self._device.ordered_with_cupy():
            self._placed.leave()
        self._parameters, self._placed = None, Placed([], [])

    def _use(self, buffer: Tensor) -> None:
        """Make views of the gradient buffer with the parameters' shapes and strides."""
        self._buffer = buffer
        self.optimizer_state.bind(self._parameters, buffer, self.cuts)
        self._views = views(buffer, [*self._trained, *self._statistics])
        for parameter in self._trained:
            parameter.grad = None  # it is a view of the buffer that was bound before

    @torch.no_grad()
    def _move_parameters(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`, which has their values."""
        self._parameters = flat
        pieces = flat[: self._length].split([each.numel() for each in self._trained])
        own = [piece.view(each.shape) for each, piece in zip(self._trained, pieces, strict=True)]
        self._placed = Placed(self._trained, own)
        with self._device.ordered_with_cupy():  # CuPy may reuse freed memory at once
            self._placed.enter(copies=False)
            self._store_statistics()

    def gradients(self, x: Tree, y: Tree, share: float, weights: np.ndarray | None = None) -> Any:
        with self._device.ordered_with_cupy():
            return self._gradients(x, y, share, weights)

    def _gradients(self, x: Tree, y: Tree, share: float, weights: np.ndarray | None) -> Any:
        if row_count(x) == 0:
            self._buffer.zero_()
            self._attach()
            self.unused = np.ones(self.optional, bool)
            return self._device.numbers([torch.zeros(())] * len(self.metrics))
        for parameter in self._trained:
            parameter.grad = None  # so that autograd stores its gradient instead of adding to an old one
        ready = self.ready or (lambda number: None)
        if self.undoable:
            self._buffers.save()
        if not self.module.training:
            self.module.train()
        output, target = self._output(x), self._target(y)
        loss = self._mean_loss(output, target, weights)
        hooks = self._tell_early(ready, share) if self.ready else []
        try:
            loss.backward()  # the user's hooks see the gradients of these rows' mean
        finally:
            for hook in hooks:
                hook.remove()
        self._check_untouched()
        with torch.no_grad():
            self.unused = np.array([each.grad is None for each in self._trained])
            for number, (parameter, view) in enumerate(zip(self._trained, self._views, strict=False)):
                if parameter.grad is not view:  # else the hook has been called
                    view.zero_() if parameter.grad is None else torch.mul(parameter.grad.to_dense(), share, out=view)
                    ready(number)
            for statistic, view in zip(self._statistics, self._views[len(self._trained) :], strict=True):
                torch.mul(statistic, share, out=view)
            self._attach()
            return self._device.numbers(self._values(loss, output, target))

    def _tell_early(self, ready: Callable[[int], None], share: float) -> list[Any]:
        """Return hooks of autograd: each moves `share` times a parameter's gradient into the buffer, and tells it."""

        def move(number: int, parameter: Tensor) -> None:
            if parameter.grad is None:  # a hook of the user has taken it
                return
            if parameter.grad is not self._views[number]:  # else it is complete for the second time
                self._check_untouched()
                with torch.no_grad():
                    torch.mul(parameter.grad.to_dense(), share, out=self._views[number])
                parameter.grad = self._views[number]
            ready(number)
            self._version = version_of(self._buffer)

        self._version = version_of(self._buffer)
        return [
            each.register_post_accumulate_grad_hook(partial(move, number))
            for number, each in enumerate(self._trained)
            if each.requires_grad
        ]

    def _check_untouched(self) -> None:
        """Raise ArgumentError if a hook has changed a gradient that may be half summed. Local."""
        if self.ready and version_of(self._buffer) != self._version:
            raise ArgumentError(
                "a hook has changed the gradient of a parameter that was complete, and may be half summed: change it "
                "in a hook of this parameter, or give buckets=Buckets(overlap=False)"
            )

    def _attach(self) -> None:
        for parameter, view in zip(self._trained, self._views, strict=False):
            parameter.grad = view

    def counted(self, y: Tree) -> float:
        held = getattr(y, "counted", None)  # of a result of `stage`
        if held is not None:
            return held
        tensor = y if isinstance(y, Tensor) else from_array(y)
        return row_losses.counted(self.loss, tensor if tensor.is_floating_point() else tensor.long())

    def undo(self) -> None:
        self._buffers.restore()

    @torch.no_grad()
    def update(self, part: Slices = ALL) -> None:
        self._buffers.forget()
        with self._device.ordered_with_cupy():
            if part == ALL:
                self._load_statistics(self._buffer)
                self._store_statistics()
                self.optimizer_state.step(None, self.still)
                return
            if self._parameters is None:
                raise ArgumentError("call bind(parameters, gradients) before update(part)")
            self._check_replaced()
            for each in slices_of(clipped(part, self.parameter_count, sys.maxsize)):
                self._parameters[each] = self._buffer[each]
            self.optimizer_state.step(clipped(part, 0, self.parameter_count), self.still)

    def edit(self, change: Callable[[], object]) -> None:
        change()
        self._check_replaced()
        self._store_statistics()

    def refresh(self) -> None:
        self._buffers.forget()
        if self._parameters is not None:
            self._device.torch_after_cupy()
            self._load_statistics(self._parameters)

    def versions(self) -> Mapping[str, int]:
        return {name: version_of(each) for name, each in self._named.items()}  # frozen ones are no rank's alone

    @torch.no_grad()
    def evaluate(self, x: Tree, y: Tree, weights: np.ndarray | None = None) -> list[float]:
        with self._evaluating():
            output, target = self._output(x), self._target(y)
            means = self._values(self._mean_loss(output, target, weights), output, target)
        return [row_count(x) * float(mean) for mean in means]

    @torch.no_grad()
    def predict(self, x: Tree) -> Tree:
        """Return the module's output, in evaluation mode; bfloat16 as float32."""
        with self._evaluating():
            return as_arrays(_each(lambda output: np.array(host_view(output)), self._output(x)), lists=True)

    def to_onnx(self, x: Tree) -> Any:
        return graphs.converted(self.module, mapped(lambda array: self._input(array).cpu(), x))

    def arrays(self) -> Sequence[Any]:
        with self._device.ordered_with_cupy():
            if self.memory is not None and not self._placed.left():
                return super().arrays()
            return [self._device.array(each.detach().reshape(-1)) for each in self._trained]

    @torch.no_grad()
    def put(self, spans: Spans, values: Any) -> None:
        if self.memory is not None and not self._placed.left():
            self._device.cupy_after_torch()  # CuPy writes to memory that PyTorch uses
            super().put(spans, values)
            self._device.torch_after_cupy()
            return
        with self._device.ordered_with_cupy():
            new = as_tensor(values, TORCH[str(values.dtype)])
            for parameter, own in zip(self._trained, self.optimizer_state.layout.views(new), strict=True):
                parameter.copy_(own)

    def others(self) -> dict[str, np.ndarray]:
        held = {name: host_view(each) for name, each in self._untrained().items()}
        return held | _hyperparameters(self.optimizer)

    @torch.no_grad()
    def load_others(self, state: Mapping[str, np.ndarray]) -> None:
        for name, each in self._untrained().items():
            each.copy_(torch.from_numpy(np.array(state[name])))
        for name in state:
            if name.startswith(HYPERPARAMETER):
                key = name.removeprefix(HYPERPARAMETER)
                for group, value in zip(self.optimizer.param_groups, state[name].tolist(), strict=True):
                    group[key] = tuple(value) if isinstance(value, list) else _number(value, group[key])
        self._store_statistics()

    def local_state(self) -> dict[str, np.ndarray]:
        """Return PyTorch's random state, and the buffers that are not averaged (`state` contains rank 0's)."""
        own = {name: np.array(host_view(each)) for name, each in self._own_buffers().items()}
        return self._device.random_states() | own

    @torch.no_grad()
    def load_local_state(self, state: dict[str, np.ndarray]) -> None:
        here = self._own_buffers()
        shapes = [
            {name: tuple(each.shape) for name, each in held.items() if not name.startswith("random")}
            for held in (state, here)
        ]
        if "random" not in state or shapes[0] != shapes[1]:
            raise ModelFileError(f"the local state is of another model: it has {shapes[0]}, and this one {shapes[1]}")
        self._device.set_random_states(state)
        for name, each in here.items():
            each.copy_(torch.from_numpy(np.array(state[name])))

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        with self._evaluating(), torch.no_grad(), feeding(type(self.module).__name__, x, y):
            rows = slice(1 if weights is None else row_losses.CHECKED)
            self._check_frozen()
            output = self._output(sliced(x, rows))
            if y is not None:
                if self.counts and isinstance(y, np.ndarray) and isinstance(output, Tensor) and output.dim() > 1:
                    row_losses.check_labels(self.loss, y, output.shape[1])
                target = self._target(sliced(y, rows))
                list(map(float, self._values(self._mean_loss(output, target, None), output, target)))
                if weights is not None and (not self.counts or row_losses.class_weights(self.loss) is not None):
                    row_losses.check_mean(self.loss, output, target)

    # Inside

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context manager: evaluation mode. At its end each part goes on in its own mode: frozen batch norms too."""
        modes = [(each, each.training) for each in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for each, mode in modes:
                each.training = mode

    def _check_frozen(self) -> None:
        chosen = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        named = [(name, each) for name, each in self.module.named_parameters() if name not in self._named]
        if names := [name for name, each in named if id(each) in chosen and each.requires_grad]:
            raise ArgumentError(
                f"{names[0]} was frozen (requires_grad_(False)) when this TorchReplica was made, so it has no place "
                "among the gradients: make the replica before you freeze parameters, or another one now"
            )

    def _tensor(self, buffer: Any) -> Tensor:
        """Return a trainer's buffer as a tensor. Raises ArgumentError if it is not on the model's device."""
        tensor = as_tensor(buffer, self._dtype)
        if tensor.device != self._device.device:
            raise ArgumentError(
                f"the model is on {self._device.device} and the memory of its gradients on {tensor.device}; on GPUs "
                "first call torch.cuda.set_device(rank on the node), and move the model there"
            )
        return tensor

    def _untrained(self) -> dict[str, Tensor]:
        """Return all tensors of the module that are not trained."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {f"module.{name}": each for name, each in named if name not in self._named}

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are not averaged."""
        named = self.module.named_buffers()
        return {f"module.{name}": each for name, each in named if name not in self._averaged}

    def _check_replaced(self) -> None:
        """Raise ArgumentError if the module no longer has its parameters in the memory of `bind`."""
        if self._placed.left():
            raise ArgumentError(
                f"a parameter's .data was replaced, so this {type(self.module).__name__} would no longer be "
                "trained: copy into parameters (p.copy_) instead, or create the trainer afterwards"
            )

    def _load_statistics(self, flat: Tensor) -> None:
        """Copy the running means and variances from the end of `flat` (gradients or parameters) into the module."""
        pieces = flat[self._length :].split([each.numel() for each in self._statistics])
        for statistic, piece in zip(self._statistics, pieces, strict=True):
            statistic.copy_(piece)

    def _store_statistics(self) -> None:
        """Copy the running means and variances behind the bound parameters, because `refresh` reads them there."""
        if self._parameters is not None and self._statistics:
            torch.cat(self._statistics, out=self._parameters[self._length :])

    def _values(self, loss: Tensor, output: Tensor, target: Tensor) -> list[Tensor]:
        return [loss, *(metric(output, target) for metric in self._metrics.values())]

    def _mean_loss(self, output: Any, target: Any, weights: np.ndarray | None) -> Tensor:
        """Return the loss of these rows: the mean over the rows of their weighted losses."""
        if self.counts:
            return row_losses.total(self.loss, output, target, weights) / len(target)
        if weights is None:
            return self.loss(output, target)
        losses = row_losses.of_rows(self.loss)(output, target)
        return (
            losses * torch.from_numpy(weights).to(losses.device, torch.promote_types(self._dtype, torch.float32))
        ).mean()

    def _output(self, x: Tree) -> Any:
        """Return the module's output for these rows; with precision="bfloat16" computed by autocast, as float32."""
        inputs = mapped(self._input, x)
        if not self._low:
            return graphs.called(self.module, inputs)
        with torch.autocast(self.device, torch.bfloat16):
            output = graphs.called(self.module, inputs)
        return _each(lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor, output)

    def stage(self, rows: Data) -> Data:
        x, y, *weights = rows
        staged = [mapped(lambda array: self._device.stage(from_array(array)), tree) for tree in (x, y)]
        if self.counts and isinstance(staged[1], Tensor):
            staged[1].counted = self.counted(y)  # type: ignore[attr-defined]
        return *staged, *weights

    def _on_device(self, rows: Any) -> Tensor:
        """Return rows, an array or a result of `stage`, as a tensor on the device. In evaluation an array is copied: it
        may be a view of the user's, and a module may change its input."""
        if not isinstance(rows, Tensor):
            return from_array(rows).to(self._device.device, copy=not self.module.training)
        self._device.use(rows)
        return rows

    def _input(self, x: Any) -> Tensor:
        tensor = self._on_device(x)
        return tensor.long() if self._embeds and not tensor.is_floating_point() else tensor.to(self._dtype)

    def _target(self, y: Tree) -> Any:
        if isinstance(y, tuple | dict):
            return mapped(self._target, y)
        tensor = self._on_device(y)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor.long()


def _trained_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, in the module's order. Raises ArgumentError if they do not fit."""
    if not isinstance(module, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        given = " and ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in (module, optimizer))
        raise ArgumentError(f"a torch.nn.Module and a torch.optim.Optimizer are needed, not {given}")
    require(foreign_error(module, optimizer))
    chosen = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = {name: each for name, each in module.named_parameters() if id(each) in chosen and each.requires_grad}
    kinds = {(each.dtype, each.device) for each in trained.values()}
    if len(kinds) != 1 or (kind := next(iter(kinds)))[1].type not in ("cpu", "cuda") or kind[0] not in DTYPES:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in sorted((str(a), str(b)) for a, b in kinds))
        raise ArgumentError(
            f"the trained parameters must have one dtype of {', '.join(DTYPES.values())} on the CPU or one GPU, and "
            f"are {found or 'none'}; MirroredOptimizer of trainers.pytorch takes mixed dtypes"
        )
    return trained


def _each(function: Callable[[Tensor], Any], output: Any) -> Any:
    """Return a module's output, a tensor or a list, tuple or dict of tensors: `function` of each tensor."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, dict):
        return {name: _each(function, each) for name, each in output.items()}
    return type(output)(_each(function, each) for each in output) if type(output) in (list, tuple) else output


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the fraction of rows whose largest output is the target's; targets are class numbers, or one-hot."""
    wanted = target if target.dim() < output.dim() else target.argmax(1)
    return (output.argmax(1) == wanted).float().mean()


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return the optimizer's numeric hyperparameters, one row per group: schedulers change them, so they are saved."""
    found = {}
    for key in optimizer.defaults:
        values = [group.get(key) for group in optimizer.param_groups]
        if all(map(_is_numeric, values)):
            found[f"{HYPERPARAMETER}{key}"] = np.array(values, np.float64)
    return found


def _flags(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the other hyperparameters as text, one row per group: they must be the same on all ranks."""
    found, kinds = [], bool | str | Tensor | None
    for group in optimizer.param_groups:
        flags = {key: each for key, each in hyperparameters(group).items() if isinstance(each, kinds)}
        found.append({key: repr(each.tolist() if isinstance(each, Tensor) else each) for key, each in flags.items()})
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float, like: Any) -> float | int:
    """Convert to int if `like` is an int and the value is integral: a scheduler may turn lr=1 into 0.5."""
    return int(value) if isinstance(like, int) and value.is_integer() else value


NO_MOMENTUM = (
    "Exact: batch norm with momentum=None averages over the batches that a rank has seen, which depends on the "
    "ranks; give it a momentum, or leave out Exact"
)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms in a module."""
    return [each for each in module.modules() if isinstance(each, _BatchNorm)]


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of the batch norms in a module, by name."""
    running = {id(each) for norm in batch_norms(module) for each in (norm.running_mean, norm.running_var)}
    return {name: each for name, each in module.named_buffers() if id(each) in running}


class Buffers:
    """Copies of the buffers of a module (running statistics of batch norm, for example) from before a batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor] | None = None

    def save(self) -> None:
        """Copy the buffers before a batch."""
        self._before = {name: each.detach().clone() for name, each in self._module.named_buffers()}

    def saved(self) -> dict[str, Tensor]:
        """The copies, by name."""
        return self._before or {}

    def before_forward(self, module: nn.Module, *_: object) -> None:
        """Save the buffers before the first forward in training since the last `forget`. A hook of the module."""
        if module.training and self._before is None:
            self.save()

    def forget(self) -> None:
        """Drop the copies: the model was updated from the batch."""
        self._before = None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers from before the batch, if they are saved."""
        for name, before in self.saved().items():
            self._module.get_buffer(name).copy_(before)
        self.forget()
