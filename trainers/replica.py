"""Seam 2: what a framework gives a trainer. It knows arrays and no MPI."""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.files import model_file

Rows = tuple[Any, Any]
"""Which rows of a table, integers, and an array with a row of values for each of them."""


class Table(NamedTuple):
    """Parameters that are rows, of which a batch uses a few. shape, dtype: of one row of their gradients."""

    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str = "float32"


class Hold:
    """holder: the strategy of the trainer that has a replica, None for none. A copy of the replica is a free one."""

    def __init__(self, holder: Any = None) -> None:
        self.holder = holder

    def __reduce__(self) -> tuple[type["Hold"], tuple[()]]:
        return Hold, ()


class Replica(ABC):
    """One rank's copy of a model, with its loss and its optimizer.

    device: "cpu" or "cuda", where the gradients are.
    metrics: what `gradients` and `evaluate` measure; the loss comes first.
    gradient_length, gradient_dtype: the buffers that `bind` and `bind_parameters` want.
    elementwise: names in `state` of arrays with one number for each parameter, in the order of "parameters".
        After updates of a slice alone only that slice of them is right here; the trainer collects the rest.
    updated: names in `state` of all that an update changes besides "parameters": those, and what is counted.
    allocates: whether a step makes and frees memory of its own; the trainer then tells malloc to keep it.
    essentials: names in `config` whose values a saved model must share to be restored here.
    tables: what is trained besides the parameters, by sparse gradients; they are no part of "parameters" in `state`.
    undoable: set where a batch may be computed once more, or left out: whether to keep what `undo` needs.
    hold: set by the trainer that has it.

    x and y are NumPy arrays whose first axis is the sample; what the other axes mean is the replica's
    business. They are valid during a call only: the trainer fills the same memory again for the next batch.
    """

    device: str = "cpu"
    metrics: tuple[str, ...] = ("loss",)
    gradient_length: int
    gradient_dtype: str = "float32"
    elementwise: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    allocates: bool = True
    essentials: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    undoable: bool = False
    hold = Hold()

    @abstractmethod
    def bind(self, buffer: Any) -> None:
        """From now on, leave the gradients in `buffer`: 1-D, `gradient_length` elements, on `device`.

        A framework whose gradients can be views makes them views of it; others copy into it.
        """

    def _check_buffer(self, what: str, buffer: Any) -> None:
        """Raise ArgumentError when this can't be bound to such an array."""
        if buffer.shape != (self.gradient_length,) or str(buffer.dtype) != self.gradient_dtype:
            raise ArgumentError(
                f"the {what} buffer must be 1-D, {self.gradient_dtype}, of {self.gradient_length} elements, not "
                f"{buffer.dtype} of shape {buffer.shape}"
            )

    @abstractmethod
    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        """Overwrite the bound buffer with `share` times the gradient of the mean loss over these rows.

        share: these rows as a fraction of the global batch. The SUM of the buffers of all ranks is then
            the gradient of the mean over the global batch, however unevenly the rows are divided. A
            replica scales where that is cheap, at the derivative of the loss, so nothing is scaled later.

        There may be no rows: the buffer becomes zero then, and so do the values.
        Returns one number for each of `metrics`, means over these rows, as an array on `device` or a
        sequence; it is valid until the next call.
        """

    def sparse_gradients(self) -> list[Rows]:
        """Of each of `tables` what `gradients` found, with its `share`: rows in any order, and more than once."""
        return []

    def take_sparse(self, sums: list[Rows]) -> None:  # noqa: B027, nothing to do without tables
        """Of each of `tables` the sums over all ranks, each row once, for the next `update`, which changes them."""

    def undo(self) -> None:  # noqa: B027, nothing to do where `gradients` changes nothing but gradients
        """The last batch is left out: undo what `gradients` has changed besides gradients.

        Does nothing after `update` or `refresh`.
        """

    def bind_parameters(self, buffer: Any) -> None:
        """Move the parameters into `buffer` and train them there: shape and dtype of the gradients', on `device`.

        Element i of it is changed by element i of the gradients. Other replicas may have their parameters in
        the same memory: they are equal when they move in, and each updates a slice of its own. Raises
        ArgumentError, before anything is changed, when this model or its optimizer can't work so.
        """
        raise ArgumentError(
            f'{type(self).__name__} can\'t have its parameters in memory that a trainer gives; use update="replicated"'
        )

    @abstractmethod
    def update(self, part: slice | None = None) -> None:
        """Change the parameters by the gradients in the bound buffer. Equal input must give equal bits.

        part: only this slice of the bound parameters, start and stop given; it may be empty, and is the same in
            every step. All parameters when none is given. Only a replica with `bind_parameters` needs it.
        """

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of every group of parameters; none where an optimizer has no such thing.

        Setting as many changes the next updates; equally on all ranks, or replicas drift apart.
        """
        return []

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        raise ArgumentError(f"{type(self).__name__} has no learning rate that can be set")

    def copy(self) -> "Replica":
        """A copy that computes gradients while this one is updated; it is bound to other memory before it is used.

        Raises ArgumentError when there can be none.
        """
        modules = {id(module): module for module in sys.modules.values()}  # an array module, say
        try:
            return copy.deepcopy(self, modules)
        except Exception as error:  # whatever the model holds
            kind = type(self).__name__
            raise ArgumentError(f"this {kind} can't be copied: {type(error).__name__}: {error}") from error

    def refresh(self) -> None:  # noqa: B027, nothing to do where parameters are views
        """Take on the bound parameters, after other replicas have updated their slices."""

    def edited(self) -> str:
        """A bound parameter that was edited in place since `accept_edits`; "" for none, and where edits don't show."""
        return ""

    def accept_edits(self) -> None:  # noqa: B027, nothing to do where edits can't be seen
        """Accept all edits of parameters until now."""

    @abstractmethod
    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Any:
        """One number for each of `metrics`, SUMS over these rows (at least one): sums of counts stay exact.

        Leaves the gradients alone.
        """

    @abstractmethod
    def predict(self, x: np.ndarray) -> np.ndarray:
        """One row of output for each row of `x`, on the host; no rows give an array of shape (0, ...)."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """All that must be equal on all ranks and is saved, on the host.

        "parameters" is the 1-D array of all trained parameters, in the order of the gradients; other
        names are the replica's own (optimizer state, statistics). No arrays of Python objects. They may be
        live views that training changes, and may be read-only: copy what you keep or change.
        """

    def snapshot(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """A copy of `state`, but for the entries `without`, that training does not change.

        memory: the arrays of an earlier copy by name, which are overwritten where they fit; it is given those of
            this one.
        """
        held = {name: array for name, array in self.state().items() if name not in without}
        for name, array in held.items():
            np.copyto(reserved(memory, name, array.shape, array.dtype), array)
        return {name: memory[name] for name in held}

    def elements(self, name: str, part: slice) -> np.ndarray:
        """Elements of one of `elementwise`: those of a slice of the parameters that this replica updates."""
        return self.state()[name][part]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by their names, in their order, to tell models apart; may be empty."""
        return {}

    @abstractmethod
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take on what `state` returned, here or elsewhere. ModelFileError when it is of another model."""

    def local_state(self) -> dict[str, np.ndarray]:
        """The state of this rank alone, on the host: random state, buffers that are not averaged.

        Together with `state` it determines how training continues, so a checkpoint needs one for each rank.
        """
        return {}

    def load_local_state(self, state: dict[str, np.ndarray]) -> None:
        """Take on what `local_state` returned. ModelFileError when it is of another model."""
        if state:
            raise ModelFileError(f"{type(self).__name__} has no state of a rank's own, and was given {sorted(state)}")

    def config(self) -> dict[str, Any]:
        """What rebuilds this replica, for `save`; only what JSON can hold."""
        return {}

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:  # noqa: B027, a replica may take anything
        """Raise ArgumentError when the model can't be fed with such data; y is None for a prediction."""

    def check_batch(self, x: np.ndarray, y: np.ndarray) -> None:  # noqa: B027
        """The same for one batch of a data set whose rows could not all be checked before; it should be cheap."""

    def save(self, path: str) -> None:
        """Write the model to `path` (.npz, no pickle), aside and then renamed."""
        model_file.write(path, type(self).__name__, self.config(), self.state())

    def restore(self, path: str) -> None:
        """Take on the state in `path`, which `save` wrote. Raises ModelFileError."""
        saved, state = model_file.read(path, type(self).__name__)
        self.check_config(path, saved)
        self.load_state(state)

    def check_config(self, path: str, saved: dict[str, Any]) -> None:
        """Raise ModelFileError when a model with this config, saved in `path`, differs in one of `essentials`."""
        here = self.config()
        for name in self.essentials:
            if saved.get(name) != here[name]:
                raise ModelFileError(
                    f"{path} holds a model with {name}={saved.get(name)!r}, and this one has {name}={here[name]!r}"
                )


def reserved(memory: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The array of this name in `memory`, made anew when it does not fit."""
    array = memory.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        array = memory[name] = np.empty(shape, dtype)
    return array


def unfit(what: str, x: np.ndarray, y: np.ndarray | None, error: Exception) -> ArgumentError:
    """The error of `check` where a framework raises one. what: refuses these rows."""
    given = f"x {x.dtype} of shape {x.shape}" + ("" if y is None else f", y {y.dtype} of shape {y.shape}")
    return ArgumentError(f"{what} can't be fed with {given}: {type(error).__name__}: {error}")
