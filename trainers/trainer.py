"""The face of all trainers: fit, evaluate, predict, save, load, edit, and the agreement of the ranks about them."""

import functools
import hashlib
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TextIO, TypeVar

import numpy as np

from allreduce.errors import ClosedError, CopyError, DisagreementError
from allreduce.keywords import known_only
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import combine, together
from allreduce.transport.wait import waiting
from trainers.data import Batches, Collate, Samples
from trainers.errors import ArgumentError, TrainerError
from trainers.fit.checkpointing import make_saver
from trainers.fit.evaluation import evaluated, predicted
from trainers.fit.loop import Fit
from trainers.fit.prefetch import AHEAD, wanted
from trainers.group import RankGroup, gather_rows
from trainers.recovery.recovery import Call, EditCall, Failure, FitCall, Recovery
from trainers.recovery.terminating import stops_at_sigterm
from trainers.replica import Hold, Replica
from trainers.state.adopt import mirror
from trainers.state.checkpoints import Checkpoint
from trainers.strategies.interface import Strategy
from trainers.watching.history import History

TrainerT = TypeVar("TrainerT", bound="Trainer[Any]")
StrategyT = TypeVar("StrategyT", bound=Strategy)
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def recoverable(method: Callable[Concatenate[Any, P], ResultT]) -> Callable[Concatenate[Any, P], ResultT]:
    """A method of a trainer that is one collective call, which survives failed ranks where that is asked for."""

    @functools.wraps(method)
    def call(self: "Trainer[Any]", *args: P.args, **options: P.kwargs) -> ResultT:
        return self._call(Call(method.__name__, lambda: method(self, *args, **options)))

    return call


class Trainer(Generic[StrategyT]):
    """Trains a replica together with the trainers of the other ranks of a topology.

    Every method is collective: all ranks call it with the same arguments. x and y are the whole data on
    every rank, arrays whose first axis is the sample; `fit` and `evaluate` take data sets too. Arguments that
    make no sense, and ranks that disagree about them, raise the same ArgumentError or DisagreementError on all.

    replica: this rank's copy of the model. strategy: how a step is computed and applied. group: the ranks.
    recovery: what happens when some of them fail.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} can't be copied or pickled: its communicators belong to this process. "
            'Keep the model: `save("model.npz")` writes a file that loads on any number of ranks; '
            'fit(checkpoint=Checkpoint("run")) writes one from which the training goes on'
        )

    def __init__(self, strategy: StrategyT, topology: Topology | None, on_failure: str | None) -> None:
        """Agree on the arguments, and make the strategy on the ranks. Collective.

        topology: of the ranks that train; None for all ranks. It is closed with the trainer then.
        """
        self.strategy, self.replica = strategy, strategy.replica
        self.recovery = Recovery(strategy, on_failure)
        self.group: RankGroup = self.recovery.make(topology, self)

    @property
    def topology(self) -> Topology:
        """Of the ranks that train; a new one after a failure."""
        return self.group.topology

    @property
    def rank(self) -> int:
        """This rank among those that train; -1 while it joins a fit."""
        return self.group.rank

    @property
    def size(self) -> int:
        """How many ranks train."""
        return self.group.size

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.strategy.closed

    @property
    def measured(self) -> Any:
        """What the last step has measured, and behind it the FLAGS."""
        return self.strategy.measured

    @property
    def steps(self) -> int:
        """How many steps the ranks have taken together."""
        return self.strategy.steps

    @property
    def trace(self) -> Trace | None:
        """Where a callback has what is done recorded, if one has."""
        return self.strategy.trace

    @property
    def losses(self) -> list[Failure]:
        """The ranks that have failed so far, the same on all ranks."""
        return self.recovery.failures

    @property
    def goes_on(self) -> bool:
        """Whether the training goes on with the other ranks when one fails."""
        return self.recovery.goes_on

    @property
    def stop_training(self) -> bool:
        """Set by a callback on any rank: the fit ends on all of them."""
        return self.strategy.stop_training

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        self.strategy.stop_training = stop

    @known_only
    @stops_at_sigterm
    def fit(
        self,
        x: Any,
        y: np.ndarray | None = None,
        epochs: int = 10,
        batch_size: int = 100,
        *,
        seed: int = 0,
        shuffle: bool = True,
        validation_data: Any = None,
        callbacks: Sequence[Any] = (),
        collate: Collate | None = None,
        checkpoint: Checkpoint | str | None = None,
        resume: bool = False,
        prefetch: bool | None = None,
        progress: bool = True,
        stream: TextIO | None = None,
    ) -> History:
        """Train for `epochs` passes over the data; the model of rank 0 is copied to all ranks first.

        x, y: ALL rows, on every rank: each rank takes its share of every batch. Arrays, or memory maps; or in x
            a data set with len() and rows by number whose rows are pairs (x, y), and no y (see
            trainers.data.Samples). What a data set raises on one rank is raised on all, as DataError.
        batch_size: rows in a GLOBAL batch, divided among the ranks. It need not be divisible, and the last one may be
            short: gradients are weighted by samples, so that any number of ranks trains as one rank would.
        seed, shuffle: epoch e visits the rows in the order of data.order(rows, seed, e, shuffle).
        validation_data: (x, y) or a data set, evaluated after each epoch.
        callbacks: what watches the training, with Keras' events (trainers.watching.callback.Callback). Each rank
            calls its own, so they may be given to some ranks only; an exception in one is raised on all ranks.
        collate: makes (x, y), arrays, of a list of a data set's rows; by default they are stacked.
        checkpoint: where and how often the training is written down: a Checkpoint, or a folder. resume: go on from
            the newest good one there, if any (CheckpointError when it is of another model or other settings); `epochs`
            counts from the beginning, and the history has all. On as many ranks the bits are as if it never stopped.
        prefetch: whether a thread fetches the next batch meanwhile; by default of data sets and memory maps.
        progress: print a line per epoch on rank 0, and on a terminal a bar. stream: where, if not to stdout.

        Returns the history, the same on all ranks. Raises, on all ranks, DivergedError when the loss becomes NaN or
        infinite, and Terminated, which is a SystemExit, when SIGTERM has come to any rank.
        """
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        settings["validation_data"] = "none" if validation_data is None else "given"
        settings |= {"checkpoint": checkpoint, "resume": resume}
        fetches_ahead = wanted(x, y) if prefetch is None else prefetch
        strategy, group = self.strategy, self.group

        def begin() -> Fit:
            rows = self._admit("fit", x, y, settings, collate)
            validate = None
            if validation_data is not None:
                validate = partial(self._evaluate, *self._admit_validation(validation_data, collate))
            mirror(strategy)
            ahead = AHEAD if fetches_ahead else 0
            batches = Batches(*rows, batch_size, strategy.part, strategy.parts, seed, shuffle, ahead)
            saver = together(
                group.comm, partial(make_saver, strategy, batches, checkpoint, resume, validate is not None)
            )
            return Fit(
                strategy,
                batches,
                epochs,
                watched=self,
                goes_on=self.goes_on,
                validate=validate,
                callbacks=callbacks,
                fetches_ahead=fetches_ahead,
                progress=progress,
                stream=stream,
                saver=saver,
            )

        return self._call(FitCall(strategy, begin))

    @recoverable
    def evaluate(self, x: Any, y: np.ndarray | None = None, collate: Collate | None = None) -> dict[str, float]:
        """The replica's metrics ("loss", "accuracy", ...), means over these rows; the ranks share the work.

        x, y, collate: all rows on every rank, arrays or a data set, as for `fit`.
        """
        return self._evaluate(*self._admit("evaluate", x, y, collate=collate))

    @recoverable
    def predict(self, x: np.ndarray) -> np.ndarray:
        """The replica's output for every row, in order, on every rank; the ranks share the work.

        For a NumpyNetwork: (rows, outputs) float32, probabilities with a cross-entropy loss.
        """
        x, _ = self._admit("predict", x, NO_TARGETS)
        group = self.group
        outputs = together(group.comm, lambda: predicted(self.replica, x, group.size, group.rank))
        gather_rows(group.comm, outputs)
        return outputs

    @recoverable
    def save(self, path: str) -> None:
        """Write the model, with the optimizer's state, to exactly `path`, by rank 0. Raises ModelFileError.

        Collective, as all methods: every rank calls it, without an `if rank == 0`, and rank 0 alone writes.

        The file (.npz, no pickle) does not depend on the number of ranks; NumpyNetwork.load reads it without MPI.
        """
        self.group.enter("save")
        self.strategy.complete()
        self.group.on_one(lambda: self.replica.save(path))

    @recoverable
    def load(self, path: str) -> None:
        """Take on the model in `path`, which rank 0 reads and hands to all ranks. Raises ModelFileError."""
        self.group.enter("load")
        self.group.on_one(lambda: self.replica.restore(path))
        mirror(self.strategy, whole=False)

    def edit(self, change: Callable[[], object]) -> None:
        """Change the model's parameters in place by `change()`, the same on all ranks. Collective.

        It is called on every rank, or, where the ranks of a node have one copy of the parameters, on one rank of
        each node, while the others wait. An error of it is raised on all ranks. When a rank fails meanwhile, those
        that are left do it anew, on the parameters as they were. Trainers with servers have no edit.
        """
        self._call(EditCall(self.strategy, change))

    @recoverable
    def parameters_sha256(self) -> list[str]:
        """The SHA-256 of every rank's parameters, by rank, the same on all ranks; mirrored replicas have equal ones."""
        comm = self.group.comm
        self.group.enter("parameters_sha256")
        parameters = np.ascontiguousarray(together(comm, self.replica.state)["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((comm.size, mine.size), np.uint8)
        with waiting(comm, "parameters_sha256"):
            comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def record(self, trace: Trace | None) -> None:
        """Record what this rank does in `trace` from now on, or, with None, no more. Local, on all ranks or on none."""
        self.strategy.record(trace)

    def span(self, kind: str) -> AbstractContextManager[None]:
        """What is done inside is "data", "compute", "update", ... in the trace, if there is one. Local."""
        return self.strategy.span(kind)

    def surviving(self, action: Callable[[], ResultT]) -> ResultT:
        """What `action()` returns, a collective call of the user's own on this trainer's `topology`. Collective.

        Where the training goes on without failed ranks, this is made again by those that are left.
        """

        def run() -> ResultT:
            self.group.enter("surviving")  # a rank that came to another call is told now, not after a time-out
            return action()

        return self._call(Call("a call of the user's", run))

    def close(self) -> None:
        """Free what the trainer made; the replica stays usable. A failed rank meanwhile, or closing twice, is well."""
        if self.closed:
            return
        strategy, group = self.strategy, self.group
        try:
            group.agree("close")
            strategy.closed = True
            group.release()
            strategy.close()
            if strategy.holds_replica:
                self.replica.hold = Hold()
            if self.recovery.owns_topology:
                group.topology.close()
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.abandon()

    def abandon(self) -> None:
        """Let go of everything without the other ranks, of which some may have failed. Local; the replica lives on."""
        self.strategy.closed = True
        self.strategy.abandon()

    def __enter__(self: TrainerT) -> TrainerT:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None or self.group.in_step(error):  # or else others may not come to a collective close
            self.close()

    # Calls

    def _call(self, call: Call[ResultT]) -> ResultT:
        """Make a call, which survives failed ranks where that is asked for. Collective."""
        try:
            self._check_open()
            return self.recovery.run(call)
        finally:
            call.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed; make another to go on")
        if not self.strategy.holds_replica:
            raise ClosedError(
                f"this {type(self).__name__} trains no more, since a {self.replica.hold.holder.name} was made on its "
                "replica; use that one"
            )

    def _evaluate(self, x: Any, y: np.ndarray | None) -> dict[str, float]:
        group, replica = self.group, self.replica
        with np.errstate(all="ignore"):  # a model that has diverged has a loss that says so
            sums = together(group.comm, lambda: evaluated(replica, x, y, group.size, group.rank))
        combine(group.comm, sums, "add up an evaluation")
        return dict(zip(replica.metrics, (sums / len(x)).tolist(), strict=True))

    # Their arguments

    def _admit(
        self, call: str, x: Any, y: Any, settings: dict[str, Any] | None = None, collate: Collate | None = None
    ) -> tuple[Any, Any]:
        """Arrays x and y, or Samples and None, when all ranks bring the same and it makes sense; or all raise."""
        self._check_open()
        data, row, error = look_at(self.replica, call, (x, y), settings or {}, collate)
        try:
            self.group.enter(row, error)
        except DisagreementError as differ:
            tell_who_divides(differ, row, settings or {})
            raise
        return data

    def _admit_validation(self, given: Any, collate: Collate | None) -> tuple[Any, Any]:
        pair = isinstance(given, tuple | list)
        x, y = given if pair and len(given) == 2 else (given, None)
        return self._admit("validation_data of fit", x, y, collate=None if pair else collate)


NO_TARGETS = object()  # in the place of y: x is rows without y, for a prediction

Looked = tuple[tuple[Any, Any], str, Exception | None]


def look_at(
    replica: Replica, call: str, data: tuple[Any, Any], settings: dict[str, Any], collate: Collate | None = None
) -> Looked:
    """The data as arrays x and y, or as Samples and None; this rank's side of the call in words; what is wrong.

    data: arrays x and y, x and NO_TARGETS, or a data set and None. settings: the other arguments, by name.
    """
    x, y = data
    row: str = call
    error: Exception | None = None
    checked: tuple[Any, Any]
    try:
        if y is None or collate is not None:
            x, y = _samples(x, y, collate), None
            row = _described(call, [str(x)], settings)
            checked = x.first
        else:
            x, y = np.asarray(x), None if y is NO_TARGETS else np.asarray(y)
            row = _described(call, _sides(x, y), settings)
            _check_rows(x, y)
            checked = x, y
        _check_settings(settings)
        replica.check(*checked)
    except (TrainerError, ValueError, TypeError) as refused:
        error = refused if isinstance(refused, TrainerError) else ArgumentError(f"{call}: {refused}")
    except Exception as refused:  # whatever a data set or a model raises, the other ranks must not wait for this one
        error = ArgumentError(f"{call}: {type(refused).__name__}: {refused}")
    return (x, y), row, error


def tell_who_divides(error: DisagreementError, row: str, settings: dict[str, Any]) -> None:
    """Add to the table of an error, where ranks differ in their rows alone, what was most likely meant otherwise.

    row: this rank's side of the call, from `look_at`.
    """
    text = str(error)
    call, end = f": {row.partition(': ')[0]}: ", _described("", [""], settings)[2:]
    if all(call in side and side.endswith(end) for side in text.splitlines()[1:]):
        error.args = (
            f"{text}\nA trainer takes all rows, the same on every rank, and divides each batch among the ranks itself",
        )


def _samples(x: Any, y: Any, collate: Collate | None) -> Samples:
    if y is not None:
        raise ArgumentError("collate is for data sets, whose rows are pairs: leave out collate, or y")
    return x if isinstance(x, Samples) else Samples(x, collate)


def _described(call: str, data: list[str], settings: dict[str, Any]) -> str:
    return f"{call}: {', '.join(data + [f'{name}={value}' for name, value in settings.items()])}"


def _sides(x: np.ndarray, y: np.ndarray | None) -> list[str]:
    """Arrays in words: shapes, dtypes, and a checksum of the first and the last row."""
    data = {"x": x} if y is None else {"x": x, "y": y}
    return [f"{name} {array.dtype}{list(array.shape)} {_checksum(array)}" for name, array in data.items()]


def _checksum(array: np.ndarray) -> str:
    if array.ndim == 0 or len(array) == 0 or array.dtype.hasobject:
        return "empty"
    return f"#{zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes()):08x}"


def _check_settings(settings: dict[str, Any]) -> None:
    for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
        value = settings.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ArgumentError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_rows(x: np.ndarray, y: np.ndarray | None) -> None:
    if x.ndim == 0 or (y is not None and (y.ndim == 0 or len(x) != len(y))):
        shapes = f"x has shape {x.shape}" + ("" if y is None else f" and y has shape {y.shape}")
        raise ArgumentError(f"{shapes}; they must have one row for each sample, and as many of one as of the other")
    if y is not None and len(x) == 0:
        raise ArgumentError("there are no samples: x and y are empty")
