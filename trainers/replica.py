"""The Replica interface (seam 2): the methods that a framework provides to a trainer. No MPI."""

import copy
import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, final

import numpy as np

from trainers.arrays.average import AVERAGE, Average, Spans, flat_arrays, read, set_flat
from trainers.arrays.mean_of_rows import check_mean_of_rows
from trainers.data import Data, Tree, leaves, named, row_count
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, ModelFileError, explained
from trainers.files import model_file

Slices = slice | tuple[slice, ...]
"""A part of the parameters: a slice; or several slices in order, of a replica with `whole_tensors`."""

ALL = slice(None)  # all parameters


class Hold:
    """Records the strategy that uses a replica. holder: the strategy, or None. A copied or unpickled replica has no
    holder."""

    def __init__(self, holder: Any = None) -> None:
        self.holder = holder

    def __reduce__(self) -> tuple[type["Hold"], tuple[()]]:
        return Hold, ()


class Replica(ABC):
    """One rank's copy of a model, with its loss and its optimizer.

    Every replica sets:
    metrics: the names of the values that `gradients` and `evaluate` return; "loss" comes first.
    gradient_length, gradient_dtype: of the buffers that `bind` takes.
    shapes: of the parameters by name, in their order, to compare models; may be empty.
    elementwise: names in `others` of arrays with one number for each parameter, in the order of the parameters.
        After updates of one slice, only that slice of these arrays is up to date; the trainer gathers the rest.
    updated: names in `others` of the entries that an update changes: the elementwise arrays, and step counts.

    The trainer sets:
    memory: the flat parameters: the array that `bind` got; None if they are in the framework's own arrays.
    still: for each of the `optional` parameters, whether `update` leaves it and its optimizer state as they are.
    ready: during `gradients`, if the replica is `early`: ready(number) tells, at most once, that the gradients of
        parameter `number` (in the order of `shapes`, which must have all) are in the buffer, and do not change. Those
        of the others are there when `gradients` returns.
    undoable: if batches may be repeated, left out or computed in micro-batches: the replica keeps the data of `undo`.
    divided: if the rows of a batch are computed in parts, by several ranks or as micro-batches.
    compared: whether it has compared the losses of `loss_name`.
    average: the moving average of the parameters, if there is one; see trainers.arrays.average.
    cuts: where ranks' slices begin; an update whose bits depend on the ends of an array is split there.
    hold: the trainer that uses the replica.

    Of the loss:
    takes_weights: whether rows may have weights. If not, the methods get no argument `weights`, and may lack it.
    loss_name: the name of the loss, if it may be no mean over the rows: the trainer then compares the losses of some
        rows and of their halves. "": it is a mean, or it `counts`.
    counts: whether the loss may ignore rows, or weigh them by their targets; see `counted`.

    Of the model, to save, load and use it:
    config: the arguments from which this replica can be rebuilt, as JSON types, for `save`.
    essentials: names in `config` whose values a saved model must share to be restored here.
    features: the numbers in a row of x, if it must have just as many; otherwise None.
    columns: the facts learned of the table with the rows (`datasets.load(...).columns`), saved for `Trainer.predict`.
    probabilities: whether `predict` returns the probabilities of classes.
    scores: the meaning of the outputs of `predict`: "probabilities" or "logits" of classes; "" if it is unknown.

    Of the framework; most replicas leave these as they are here:
    device: "cpu" or "cuda", where the gradients are.
    statistics: the number of averaged values that follow the gradients of the trained parameters.
    optimizer_state: the state of the optimizer, if it is not in `others`: a trainers.replicas.flat.FlatOptimizer.
    optional: the number of parameters, if a batch may leave some of them without a gradient; else 0.
    unused: for each of the `optional` parameters, whether the last `gradients` left it without a gradient.
    early: whether `gradients` calls `ready` while it still computes, so that ranks may sum gradients meanwhile.
    keeps_memory: whether `bind` gets None for the parameters where no other rank updates them, because they are faster
        in the framework's own memory. The replica then has `arrays` and `put`.
    whole_tensors: the slices of the tensors, if a rank can update only whole ones; () if it can update any, or none.
    allocates: whether a step allocates and frees memory; the trainer then tells malloc to keep freed memory.
    checks_batches: whether `check` is so cheap that it is called for each batch, where no data could be checked before.
    notices: texts that the trainer logs once, on rank 0, when it is made.
    unseeded: why the random numbers of `gradients` can't be seeded. "": Python, NumPy and PyTorch draw them.

    A replica whose parameters are not always in the memory of `bind` has these methods:
    arrays(): the parameters as 1-D arrays on the device, in order; views where possible, one where they are in memory
        of `bind`.
    put(spans, values): sets the parameters in these slices to a 1-D array of their values, one slice after the other.

    A replica may have these methods, which are None here:
    slice_error(): why `update` can't update any slice of the parameters, as text; "" if it can.
    undo(): undoes what the last `gradients` has changed but the gradients. Does nothing after `update` or `refresh`.
    edit(change): calls `change()`, which changes the model in place, and takes the change into the bound memory, if the
        parameters are no views of it.
    state_error(state): why this state is of another model, as text; "" if it may be loaded.
    counted(y): the weight that the loss counts in rows with these targets, if the loss `counts`. The loss of a batch is
        the sum of the rows' weighted losses, divided by the weight of the whole batch, of all ranks: `gradients` and
        `evaluate` divide by the number of rows, and the caller divides the sums by the mean weight of a row. Rows that
        are all ignored have the weight 0, the loss 0, and gradients of zeros.
    stage(rows): copies a later batch to the device, for `gradients` and `check`; in the thread that fetches batches.
    versions(): how often each bound parameter was edited in place, by name.
    to_onnx(x): the computation of `predict` as an onnx.ModelProto, in float32, for a CPU. Its inputs and outputs are
        the arrays of x, at least two rows, and those of `predict`, in order, with a free first axis. Raises
        ExportError.
    drawn_rows(count): random rows like the training's, the same at every call, to compare an export.

    x and y are NumPy arrays whose first axis is the sample; the replica defines the other axes. A model of several
    inputs or outputs gets tuples or dicts of arrays (the user's). Do not change them.

    weights: (rows,) float64, >= 0, or None. The loss of row i then counts weights[i] times: the mean loss over rows is
    the sum of their weighted losses, divided by their number. Metrics other than the loss are not weighted.
    """

    metrics: tuple[str, ...] = ("loss",)
    gradient_length: int
    gradient_dtype: str = "float32"
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # no replica may add to that of all classes
    elementwise: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    memory: Any = None
    still: np.ndarray = np.zeros(0, bool)
    ready: Callable[[int], None] | None = None
    undoable: bool = False
    divided: bool = False
    compared: bool = False
    average: Average | None = None
    cuts: Sequence[int] = ()
    hold = Hold()
    takes_weights: bool = False
    loss_name: str = ""
    counts: bool = False
    config: Mapping[str, Any] = MappingProxyType({})
    essentials: tuple[str, ...] = ()
    features: int | None = None
    columns: Columns | None = None
    probabilities: bool = False
    scores: str = ""
    device: str = "cpu"
    statistics: int = 0
    optimizer_state: Any = None
    optional: int = 0
    unused: np.ndarray = np.zeros(0, bool)
    early: bool = False
    keeps_memory: bool = False
    whole_tensors: tuple[slice, ...] = ()
    allocates: bool = True
    checks_batches: bool = False
    notices: tuple[str, ...] = ()
    unseeded: str = ""
    arrays, put = flat_arrays, set_flat
    slice_error: Callable[[], str] | None = None
    undo: Callable[[], None] | None = None
    edit: Callable[[Callable[[], object]], None] | None = None
    state_error: Callable[[Mapping[str, np.ndarray]], str] | None = None
    counted: Callable[[Any], float] | None = None
    stage: Callable[[Data], Data] | None = None
    versions: Callable[[], Mapping[str, int]] | None = None
    to_onnx: Callable[[Any], Any] | None = None
    drawn_rows: Callable[[int], Any] | None = None

    @abstractmethod
    def bind(self, parameters: Any, gradients: Any) -> None:
        """Copy the parameters into `parameters`, train them there, and write all later gradients to `gradients`.

        Both are 1-D, on `device`, of `gradient_length` and `gradient_dtype`: element i of one belongs to element i of
        the other. A framework whose arrays can be views makes them views of both; others copy, see `refresh`. Replicas
        of other ranks may use the same memory: all are equal when they call this, and each updates only its own slice.
        parameters: None (only with `keeps_memory`): train them in memory of the replica's own; it keeps none that was
            bound before.
        """

    @abstractmethod
    def gradients(self, x: Tree, y: Tree, share: float, weights: np.ndarray | None = None) -> Any:
        """Overwrite the bound buffer with `share` times the gradient of the mean loss over these rows.

        share: these rows as a fraction of the global batch. The SUM of the buffers of all ranks is then
            the gradient of the mean over the global batch, however unevenly the rows are divided. Apply it where that
            is cheap: at the derivative of the loss.

        x may have no rows; then the buffer and the returned values are zero.
        Returns one number for each of `metrics`, means over these rows, as an array on `device` or a
        sequence; it is valid until the next call.
        """

    @abstractmethod
    def update(self, part: Slices = ALL) -> None:
        """Update the parameters in a part of the bound memory with the gradients there. Equal input must give equal
        bits.

        part: ALL; or the slice that this rank updates (start and stop are integers; may be empty; the same in every
            step); several slices only with `whole_tensors`.
        """

    @final
    def use_average(self, part: Slices | None = None) -> None:
        """Put the average in the place of the parameters, or of those in a slice, until `use_parameters`.

        After `network = NumpyNetwork.load(path)` and `network.use_average()` the network predicts with the average.
        A trainer of this network ends it. Raises ArgumentError if there is none.
        """
        if self.average is None:
            raise ArgumentError(
                f"this {type(self).__name__} has no moving average of its parameters; EMA(0.999) keeps one"
            )
        self.average.use(spans_in(self, part))

    @final
    def use_parameters(self) -> None:
        """Undo `use_average`, if it was called."""
        if self.average is not None:
            self.average.stop_using()

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of every group of parameters; [] if the optimizer has none.

        Assign a list of the same length to change the next updates. Assign the same on all ranks; otherwise the
        replicas diverge.
        """
        return []

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        raise ArgumentError(f"{type(self).__name__} has no learning rate that can be set")

    def refresh(self) -> None:  # noqa: B027, nothing to do where parameters are views
        """Reload the bound parameters into the model, after other replicas have updated their slices."""

    @abstractmethod
    def evaluate(self, x: Tree, y: Tree, weights: np.ndarray | None = None) -> Any:
        """Return the SUM over these rows (at least one) for each of `metrics`. Sums, not means, keep counts exact.

        Does not change the gradients.
        """

    @abstractmethod
    def predict(self, x: Tree) -> Tree:
        """Return one row of output for each row of `x`, in new memory on the host; a tuple or a dict if the model has
        several outputs. No rows give an array of shape (0, ...)."""

    @final
    @property
    def parameter_count(self) -> int:
        """The number of trained parameters. Gradients after them are statistics, which are averaged too."""
        return self.gradient_length - self.statistics

    # The state

    def others(self) -> dict[str, np.ndarray]:
        """Return the state besides the parameters, as host arrays: that of the optimizer, statistics.

        It is equal on all ranks and is saved. Always the same names and shapes; no arrays of Python objects. The arrays
        may be views that training changes, and may be read-only.
        """
        return {}

    def load_others(self, state: Mapping[str, np.ndarray]) -> None:  # noqa: B027, nothing to do without others
        """Load a result of `others`, after the parameters have been loaded."""

    @final
    def state(self) -> dict[str, np.ndarray]:
        """Return all state that is equal on all ranks and is saved, as host arrays: "parameters", the 1-D array of all
        trained parameters, `others`, and the moving average, if there is one."""
        return snapshot_of(self, {})

    @final
    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a result of `state` of an equal model. Raises ModelFileError if it is of another model.

        A state without an average begins it with its parameters, if a fit keeps one.
        """
        if self.state_error and (text := self.state_error(state)):
            raise ModelFileError(text)
        here: dict[str, tuple[int, ...]] = {"parameters": (self.parameter_count,)}
        here |= {name: array.shape for name, array in self.others().items()}
        if self.optimizer_state is not None:
            here |= self.optimizer_state.shapes()
        if AVERAGE in state:
            here[AVERAGE] = here["parameters"]
        there = {name: array.shape for name, array in state.items()}
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                shapes = f"{there.get(name, 'missing')}, and in this model {here.get(name, 'missing')}"
                raise ModelFileError(f"the saved model is another one: {name} is {shapes}")
        decay = None if self.average is None else self.average.decay
        self.average = None
        if self.optimizer_state is not None:
            self.optimizer_state.load(state)
        self.put((slice(0, self.parameter_count),), np.array(state["parameters"]))
        self.load_others({name: state[name] for name in self.others()})
        if AVERAGE in state or decay is not None:
            self.average = Average(self, state.get(AVERAGE), decay)

    def local_state(self) -> dict[str, np.ndarray]:
        """Return the state that differs between ranks, as host arrays: random state, buffers that are not averaged.

        Together with `state` it determines how training continues, so a checkpoint needs one for each rank.
        """
        return {}

    def load_local_state(self, state: dict[str, np.ndarray]) -> None:
        """Load a result of `local_state`. Raises ModelFileError if it is of another model."""
        if state:
            raise ModelFileError(f"{type(self).__name__} has no local state, got {sorted(state)}")

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:  # noqa: B027, it may take all
        """Raise ArgumentError if the model does not accept such data; y is None for a prediction. Batches of a stream
        are checked only with `checks_batches`."""

    @final
    def save(self, path: str) -> None:
        """Write the model to `path` (.npz, no pickle). Writes a temporary file and renames it."""
        model_file.write(path, type(self).__name__, saved_config(self), self.state())

    @final
    def restore(self, path: str) -> None:
        """Load the state and the columns from `path`, which `save` wrote. Raises ModelFileError."""
        load_saved(self, path, *model_file.read(path, type(self).__name__))


def consecutive(shapes: Iterable[Sequence[int]]) -> list[slice]:
    """Return the slices of arrays of these shapes in flat memory, one after the other."""
    ends = itertools.accumulate(map(math.prod, shapes), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def parameter_slices(replica: Replica) -> list[slice]:
    """Return the slice of each parameter in the flat ones, in the order of `shapes`."""
    return consecutive(replica.shapes.values())


def slices_of(part: Slices) -> tuple[slice, ...]:
    """Return the slices of a part, in order."""
    return part if isinstance(part, tuple) else (part,)


def clipped(part: Slices, start: int, stop: int) -> Slices:
    """Return the elements of a part that are in [start, stop)."""
    ends = [[min(max(end, start), stop) for end in (each.start, each.stop)] for each in slices_of(part)]
    return as_part([slice(*pair) for pair in ends if pair[0] < pair[1]] or [slice(*ends[0])])


def as_part(slices: Sequence[slice]) -> Slices:
    """Return slices, which are in order, as a part."""
    return slices[0] if len(slices) == 1 else tuple(slices)


def taken(flat: np.ndarray, part: Slices) -> np.ndarray:
    """Return the elements of a part of a 1-D array, one slice after the other; a view if the part is one slice."""
    return np.concatenate([flat[each] for each in part]) if isinstance(part, tuple) else flat[part]


def single(part: Slices) -> slice:
    """Return the slice of a part that is one slice."""
    assert not isinstance(part, tuple), "only a replica with whole_tensors updates several slices"
    return part


def attach(replica: Replica, parameters: Any, gradients: Any) -> None:
    """Call `bind`, after checks. Raises ArgumentError if the memory, or a replica of the user's, does not fit."""
    check_buffers(replica, parameters, gradients)
    if isinstance(parameters, np.ndarray) and not type(replica).__module__.startswith("trainers."):
        _check_bound(replica, parameters, gradients)
    replica.bind(parameters, gradients)
    replica.memory = replica.memory if parameters is None else parameters  # for None `bind` has set it


def check_buffers(replica: Replica, parameters: Any, gradients: Any) -> None:
    """Raise ArgumentError if a buffer has another shape or dtype than the gradients."""
    for what, buffer in (("parameter", parameters), ("gradient", gradients)):
        if buffer is not None and (
            buffer.shape != (replica.gradient_length,) or str(buffer.dtype) != replica.gradient_dtype
        ):
            raise ArgumentError(
                f"the {what} buffer must be 1-D, {replica.gradient_dtype}, of {replica.gradient_length} elements, not "
                f"{buffer.dtype} of shape {buffer.shape}"
            )


def snapshot_of(
    replica: Replica, memory: dict[str, np.ndarray], without: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """Return a copy of the state of a replica without the entries named in `without`.

    memory: name -> array. Its arrays are overwritten where shape and dtype match, and replaced otherwise; they are the
        copy.
    """
    held, shape = {}, (replica.parameter_count,)
    if "parameters" not in without:
        dtype = np.dtype("float32" if replica.gradient_dtype == "bfloat16" else replica.gradient_dtype)
        held["parameters"] = reserved(memory, "parameters", shape, dtype)
        read(replica, held["parameters"])
    held |= copied({name: array for name, array in replica.others().items() if name not in without}, memory)
    if replica.average is not None and AVERAGE not in without:
        held[AVERAGE] = replica.average.whole(reserved(memory, AVERAGE, shape, replica.average.array.dtype))
    return held if replica.optimizer_state is None else held | replica.optimizer_state.pack(memory, without)


def sliced_entries(replica: Replica) -> tuple[str, ...]:
    """Return the names in the state of the arrays, besides "parameters", with one number for each parameter."""
    return tuple(replica.elementwise) + (AVERAGE,) * (replica.average is not None)


def changing_entries(replica: Replica) -> tuple[str, ...]:
    """Return the names in the state of the entries, besides "parameters", that a step changes."""
    return tuple(replica.updated) + (AVERAGE,) * (replica.average is not None)


def elements_of(replica: Replica, name: str, part: Slices) -> np.ndarray:
    """Return the elements `part` of the state entry `name`, one of `sliced_entries`, one slice after the other."""
    part, state = clipped(part, 0, replica.parameter_count), replica.optimizer_state
    if replica.average is not None and name == AVERAGE:
        return replica.average.elements(slices_of(part))
    if state is None or name not in state.elementwise:
        return taken(replica.others()[name], part)
    return state.elements(name, part)


def spans_in(replica: Replica, part: Slices | None) -> Spans | None:
    """Return the slices of the trained parameters in a part; None for all of them."""
    return None if part is None else slices_of(clipped(part, 0, replica.parameter_count))


def copy_of(replica: Replica) -> Replica:
    """Return a copy that can compute gradients while the replica is updated. Bind the copy to other memory before use.

    Raises ArgumentError if the model can't be copied: a replica may have a method `__deepcopy__`.
    """
    modules = {id(module): module for module in sys.modules.values()}  # an array module, say
    with explained(ArgumentError, f"this {type(replica).__name__} can't be copied", passes=(ArgumentError,)):
        return copy.deepcopy(replica, modules)


COLUMNS = "columns"  # their name in the config of a model file


def saved_config(replica: Replica) -> dict[str, Any]:
    """Return the config of a replica and its columns, as they are in a model file."""
    config = dict(replica.config)
    return config if replica.columns is None else {**config, COLUMNS: replica.columns.as_dict()}


def load_saved(replica: Replica, path: str, saved: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Load the state and the columns from a `saved_config` and a `state` that were read from `path`, whose name is for
    errors. Raises ModelFileError."""
    columns = columns_of(path, saved)
    check_config(replica, path, saved)
    replica.load_state(state)
    replica.columns = columns


def check_config(replica: Replica, path: str, saved: dict[str, Any]) -> None:
    """Raise ModelFileError if the config `saved` in `path` differs from the replica's in one of its `essentials`."""
    here = replica.config
    for name in replica.essentials:
        if saved.get(name) != here[name]:
            raise ModelFileError(
                f"{path} holds a model with {name}={saved.get(name)!r}, and this one has {name}={here[name]!r}"
            )


def columns_of(path: str, config: dict[str, Any]) -> Columns | None:
    """Take the columns out of a config that was read from `path`. Raises ModelFileError."""
    given = config.pop(COLUMNS, None)
    try:
        return None if given is None else Columns.from_dict(given)
    except ValueError as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error


def saved_columns(path: str) -> Columns | None:
    """Return the columns in a model file, None if it has none. Raises ModelFileError."""
    return columns_of(path, model_file.read_header(path)[1])


def check_divisible(replica: Replica, whole: bool) -> None:
    """Raise ArgumentError if a rank can't update a slice of this replica alone. whole: the slices that ranks update
    begin and end between `whole_tensors`, if there are any."""
    if not (whole and replica.whole_tensors) and replica.slice_error and (reason := replica.slice_error()):
        raise ArgumentError(reason)


def _check_bound(replica: Replica, parameters: np.ndarray, gradients: np.ndarray) -> None:
    """Raise ArgumentError if a replica of the user's does not train its parameters in the memory of `bind`, or does not
    declare state with one number for each parameter. Binds it to other memory."""
    kind, count = type(replica).__name__, replica.parameter_count
    undeclared = [
        name
        for name, array in replica.others().items()
        if name not in replica.elementwise and array.shape == (count,) and count > 1
    ]
    if undeclared:
        raise ArgumentError(
            f"the state {undeclared[0]!r} of this {kind} has one number for each parameter, and is not in its "
            "`elementwise`: a rank would have only that of its own slice; declare it, or give it another shape"
        )
    first, second = np.full_like(parameters, np.nan), np.zeros_like(parameters)
    replica.bind(first, gradients)
    written = np.array(first[:count])
    first[:count] = written + first.dtype.type(1)
    replica.refresh()
    replica.bind(second, gradients)
    if not np.array_equal(first[:count], second[:count], equal_nan=True):
        raise ArgumentError(
            f"this {kind} does not train its parameters in the memory of bind, which other ranks update: copy them "
            "into `parameters` there and make them views of it, or refresh() must reload them"
        )
    second[:count] = written
    replica.refresh()


def reserved(memory: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory[name]; if its shape or dtype differ, replace it by a new array first."""
    array = memory.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        array = memory[name] = np.empty(shape, dtype)
    return array


def copied(arrays: Mapping[str, np.ndarray], memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return copies of arrays, in `memory`; see `reserved`."""
    for name, array in arrays.items():
        np.copyto(reserved(memory, name, array.shape, array.dtype), array)
    return {name: memory[name] for name in arrays}


def gradients_of(replica: Replica, data: Data, share: float, ready: Callable[[int], None] | None = None) -> Any:
    """Call `replica.gradients` with rows, and their weights if they have any. ready: see Replica.ready."""
    x, y, *weights = data
    if ready is None:
        return replica.gradients(x, y, share, *weights)
    replica.ready = ready
    try:
        return replica.gradients(x, y, share, *weights)
    finally:
        replica.ready = None


def undo_batch(replica: Replica) -> None:
    """Undo the last `gradients` of a replica; see Replica.undo."""
    if replica.undo:
        replica.undo()


def weight_of(replica: Replica, y: Tree) -> float:
    """Return the weight that a replica's loss counts in rows with these targets."""
    return replica.counted(y) if replica.counts and replica.counted else float(row_count(y))


def check_rows(replica: Replica, data: Data, batch: bool = False) -> None:
    """Raise ArgumentError if the replica does not accept these rows. batch: they are one batch of many."""
    if len(data) > 2 and not replica.takes_weights:
        kind = type(replica).__name__
        raise ArgumentError(
            f"this {kind} can't weigh rows: leave out sample_weight and class_weight, or use another one"
        )
    if replica.checks_batches or not batch:
        replica.check(*data)
    if replica.loss_name and replica.divided and len(data) == 2 and not (batch and replica.compared):
        compare_losses(replica, *data)


def compare_losses(replica: Replica, x: Tree, y: Tree | None) -> None:
    """Raise ArgumentError if the loss of these rows is no mean over them. Compares nothing if there are fewer than two
    rows, or if they lie in memory of a GPU."""
    if y is None or row_count(x) < 2 or not isinstance(leaves(y)[0], np.ndarray):
        return
    replica.compared = True
    rough = replica.gradient_dtype not in ("float32", "float64") or replica.config.get("precision") == "bfloat16"
    with feeding(f"this {type(replica).__name__}", x, y):
        check_mean_of_rows(replica.loss_name, x, y, lambda x, y: float(replica.evaluate(x, y)[0]) / row_count(x), rough)


def feeding(what: str, x: Tree, y: Tree | None) -> AbstractContextManager[None]:
    """Context manager: an exception of a framework in its block is raised as an ArgumentError about these rows. what:
    the model, for the message."""
    arrays = named((x,) if y is None else (x, y))
    given = ", ".join(f"{name} {array.dtype} of shape {array.shape}" for name, array in arrays)
    return explained(ArgumentError, f"{what} can't be fed with {given}", passes=(ArgumentError,))
