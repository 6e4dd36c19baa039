"""Any PyTorch module as a replica, so that trainers can train it. No MPI here."""

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from trainers.errors import ArgumentError
from trainers.replica import unfit

try:
    import torch
except ImportError as error:
    raise ImportError(
        f'TorchReplica needs PyTorch, which can\'t be imported ({error}): pip install ".[torch]" in the checkout'
    ) from error

from torch import Tensor, nn

from trainers.replicas.flat import FlatReplica
from trainers.replicas.pytorch import devices, parts
from trainers.replicas.pytorch.optimizer import TorchOptimizer
from trainers.replicas.pytorch.state import Buffers, TorchState
from trainers.replicas.pytorch.tensors import DTYPES, as_tensor, from_array, views

changes_of = attrgetter("_version")  # how often a tensor was changed in place; PyTorch has no public name of it
Metric = Callable[[Tensor, Tensor], Tensor]


class TorchReplica(FlatReplica):
    """A module, its loss and its optimizer.

    module: a torch.nn.Module whose trained parameters have one dtype, on the CPU or on one GPU.
    loss: loss(module(x), y), the MEAN over the rows.
    optimizer: a torch.optim.Optimizer on the module's parameters, whose state has the shapes of the
        parameters (SGD, Adam, AdamW, ...; not LBFGS, not Adafactor).
    metrics: by name, metric(module(x), y), means over the rows, shown beside the loss. With
        nn.CrossEntropyLoss there is an "accuracy" without asking.

    x arrives in the dtype of the parameters (integers too, unless the module has an nn.Embedding: int64
    then); y as int64 when it holds integers, in the dtype of the parameters otherwise.

    The running means and variances of batch norm are averaged over the ranks, by rows, with the gradients;
    other buffers are each rank's own in training, and rank 0's when the trainer mirrors or saves.
    Parameters that a batch does not use have a gradient of zeros, not None. With update="sharded" parameters are
    contiguous (channels_last is given up). Raises ArgumentError.
    """

    _optimizer: TorchOptimizer

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.module, self.loss, self.optimizer = module, loss, optimizer
        self._trained = parts.trained_of(module, optimizer)
        if getattr(loss, "reduction", "mean") != "mean":
            raise ArgumentError(f'the loss has reduction={loss.reduction!r}; rows are weighted here, so use "mean"')  # type: ignore[attr-defined]
        self._metrics = ({"accuracy": parts.accuracy} if isinstance(loss, nn.CrossEntropyLoss) else {}) | dict(
            metrics or {}
        )
        self.metrics = ("loss", *self._metrics)
        self._dtype, self._place = self._trained[0].dtype, devices.device_of(self._trained)
        self.device = self._place.kind
        self.gradient_dtype = DTYPES[self._dtype]
        self._statistics = parts.statistics_of(module, self._dtype)
        self._embeds = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in module.modules())
        self._optimizer = TorchOptimizer(optimizer, self._trained)
        self._state = TorchState(module, optimizer, self._optimizer, self._trained, self._statistics)
        self._length = self._optimizer.layout.length
        self.gradient_length = self._length + sum(each.numel() for each in self._statistics)
        self._before = Buffers(module)
        self._versions: dict[Tensor, int] = {}
        self._parameters: Tensor | None = None  # what bind_parameters was given, and the parameters' places there
        self._places: list[Tensor] = []
        self._take(torch.zeros(self.gradient_length, dtype=self._dtype, device=self._place.device))

    # What a trainer calls

    def bind(self, buffer: Any) -> None:
        super().bind(buffer)
        self._take(parts.same_place(as_tensor(buffer, self._dtype), self._place))

    def _take(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._lay_out()

    @torch.no_grad()
    def _move(self, buffer: Any) -> None:
        self._parameters = flat = parts.same_place(as_tensor(buffer, self._dtype), self._place)
        pieces = flat[: self._length].split([each.numel() for each in self._trained])
        self._places = [piece.view(each.shape) for each, piece in zip(self._trained, pieces, strict=True)]
        with self._place.between():  # memory that is given back may be CuPy's again at once
            for parameter, place in zip(self._trained, self._places, strict=True):
                place.copy_(parameter)
                parameter.data = place
            self._leave_statistics()
        self._lay_out()

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        with self._place.between():
            return self._gradients(x, y, share)

    def _gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        if len(x) == 0:
            self._buffer.zero_()
            self._attach()
            return self._place.numbers([torch.zeros(())] * len(self.metrics))
        for parameter in self._trained:
            parameter.grad = None  # so that autograd hands its gradient over, instead of adding to old ones
        if self.undoable:
            self._before.save()
        self.module.train()
        output, target = self.module(self._input(x)), self._target(y)
        loss = self.loss(output, target)
        (loss * share).backward()
        with torch.no_grad():
            for parameter, view in zip(self._trained, self._views, strict=False):
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            for statistic, view in zip(self._statistics, self._views[len(self._trained) :], strict=True):
                torch.mul(statistic, share, out=view)
            self._attach()
            return self._place.numbers(self._values(loss, output, target))

    def _attach(self) -> None:
        for parameter, view in zip(self._trained, self._views, strict=False):
            parameter.grad = view

    def undo(self) -> None:
        self._before.restore()

    @torch.no_grad()
    def update(self, part: slice | None = None) -> None:
        self._before.forget()
        with self._place.between():
            if part is None:
                self._take_statistics(self._buffer)
                self._optimizer.step(None)
                return
            if self._parameters is None:
                raise ArgumentError("bind_parameters comes before an update of a slice")
            parts.check_places(self.module, self._trained, self._places)
            statistics = self._statistics_in(part)
            self._parameters[statistics] = self._buffer[statistics]
            self._optimizer.step(self._own(part))

    def refresh(self) -> None:
        self._before.forget()
        if self._parameters is not None:
            self._place.take_back()
            self._take_statistics(self._parameters)

    def edited(self) -> str:
        named = self.module.named_parameters()
        names = (name for name, each in named if changes_of(each) != self._versions.get(each))
        return next(names, "") if self._versions else ""

    def accept_edits(self) -> None:
        self._versions = {each: changes_of(each) for each in self.module.parameters()}

    @torch.no_grad()
    def evaluate(self, x: np.ndarray, y: np.ndarray) -> list[float]:
        self.module.eval()
        output, target = self.module(self._input(x)), self._target(y)
        return [len(x) * float(mean) for mean in self._values(self.loss(output, target), output, target)]

    @torch.no_grad()
    def predict(self, x: np.ndarray) -> np.ndarray:
        """The module's output, in evaluation mode; bfloat16 as float32."""
        self.module.eval()
        output = self.module(self._input(x))
        return (output.float() if output.dtype == torch.bfloat16 else output).cpu().numpy()

    def snapshot(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        return self._state.pack(memory, without)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        trained = {id(each) for each in self._trained}
        return {name: tuple(each.shape) for name, each in self.module.named_parameters() if id(each) in trained}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self._state.load(state)
        self._leave_statistics()
        self.accept_edits()

    def local_state(self) -> dict[str, np.ndarray]:
        """PyTorch's random state, and the buffers that are not averaged (those are rank 0's in `state`)."""
        return self._state.pack_own(self._place)

    def load_local_state(self, state: dict[str, np.ndarray]) -> None:
        self._state.load_own(state, self._place)

    def config(self) -> dict[str, Any]:
        return {"module": type(self.module).__name__, "optimizer": type(self.optimizer).__name__}

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                output = self.module(self._input(x[:1]))
                if y is not None:
                    target = self._target(y[:1])
                    list(map(float, self._values(self.loss(output, target), output, target)))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise unfit(type(self.module).__name__, x, y, error) from error
        finally:
            self.module.train(training)

    # Inside

    def _lay_out(self) -> None:
        """Cut the gradients' memory as the parameters lie in theirs."""
        self._optimizer.bind(self._parameters, self._buffer)
        self._views = views(self._buffer, [*self._trained, *self._statistics])
        for parameter in self._trained:
            parameter.grad = None  # a view of what was bound before

    def _take_statistics(self, flat: Tensor) -> None:
        """Running means and variances, which have come behind the gradients or the parameters."""
        pieces = flat[self._length :].split([each.numel() for each in self._statistics])
        for statistic, piece in zip(self._statistics, pieces, strict=True):
            statistic.copy_(piece)

    def _leave_statistics(self) -> None:
        """Leave them behind the bound parameters, where they are taken from before any update too."""
        if self._parameters is not None and self._statistics:
            torch.cat(self._statistics, out=self._parameters[self._length :])

    def _values(self, loss: Tensor, output: Tensor, target: Tensor) -> list[Tensor]:
        return [loss, *(metric(output, target) for metric in self._metrics.values())]

    def _input(self, x: np.ndarray) -> Tensor:
        tensor = from_array(x).to(self._place.device)
        return tensor.long() if self._embeds and not tensor.is_floating_point() else tensor.to(self._dtype)

    def _target(self, y: np.ndarray) -> Tensor:
        tensor = from_array(y).to(self._place.device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor.long()
