"""The base of all trainers: fit, evaluate, predict, save, load, edit, and the check that all ranks call them alike."""

import functools
import hashlib
import itertools
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TextIO, TypeVar

import numpy as np

from allreduce.backend import AllReduce
from allreduce.errors import ClosedError, CopyError
from allreduce.topology import Topology
from allreduce.tracing.recorder import Recorder, record
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import combine, root_value, together
from allreduce.transport.wait import waiting
from trainers.arguments import FLAG, require
from trainers.data import BatchSource, Tree, leaves, mapped, row_count
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError
from trainers.fit import source
from trainers.fit.checkpointing import Checkpoint, make_saver
from trainers.fit.evaluation import evaluate_on_ranks, means_of, predict_chunk
from trainers.fit.loop import Fit
from trainers.fit.source import BATCH_SIZE, Given, Rows
from trainers.fit.weights import ClassWeights
from trainers.group import GroupOwner, RankGroup, gather_rows
from trainers.options.loader import Loader
from trainers.recovery.recovery import Call, Failure, FitCall, Recovery
from trainers.recovery.terminating import stops_at_sigterm
from trainers.replica import Hold, changing_entries, snapshot_of
from trainers.state.adopt import complete, mirror
from trainers.strategies.interface import Strategy
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.transforms.chosen import chosen
from trainers.strategies.transforms.transform import Transform
from trainers.watching.history import History
from trainers.watching.progress import Progress

log = logging.getLogger("trainers")

KEPT_ROWS, KEPT_BYTES = 32, 1 << 24  # at most, of the rows of a fit, for an export
StrategyT = TypeVar("StrategyT", bound=Strategy)
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def recoverable(method: Callable[Concatenate[Any, P], ResultT]) -> Callable[Concatenate[Any, P], ResultT]:
    """Decorates a method that is one collective call: with on_failure="continue" the remaining ranks repeat the call
    after a failure."""

    @functools.wraps(method)
    def call(self: "Trainer[Any]", *args: P.args, **options: P.kwargs) -> ResultT:
        return self._call(Call(method.__name__, lambda: method(self, *args, **options)))

    return call


class Trainer(GroupOwner, Generic[StrategyT]):
    """Trains a replica together with the trainers of the other ranks of a topology.

    Every method is collective: all ranks call it with the same arguments. x and y are the whole data on
    every rank, arrays whose first axis is the sample, or tuples or dicts of arrays for models of several inputs;
    `fit` and `evaluate` take data sets too. Invalid arguments raise the same ArgumentError on all ranks, and arguments
    that differ the same DisagreementError.

    replica: this rank's copy of the model. strategy: how a step is computed and applied. group: the ranks.
    recovery: continues or stops when ranks fail.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} can't be copied or pickled: its communicators belong to this process. "
            'Keep the model: `save("model.npz")` writes a file that loads on any number of ranks; '
            'fit(checkpoint=Checkpoint("run")) writes checkpoints from which a fit can be resumed'
        )

    def __init__(self, strategy: StrategyT, topology: Topology | None, on_failure: str | None) -> None:
        """Check the arguments on all ranks, and set up the strategy on them. Collective.

        topology: the ranks that train; None for all ranks, on a new topology that is closed with the trainer.
        """
        self.strategy, self.replica = strategy, strategy.replica
        self._rows: Tree | None = None  # the first rows of the last fit
        self._fitting = False
        self._recorder: Recorder | None = None  # records the backend's calls in the trace
        self.recovery = Recovery(strategy, on_failure)
        self.group: RankGroup = self.recovery.make(topology, self)

    @property
    def closed(self) -> bool:
        """Whether the trainer was closed."""
        return self.strategy.closed

    @property
    def measured(self) -> Any:
        """1-D array: the metrics of the last step, then the sums of the flags over the ranks
        (strategies.rule.FLAGS)."""
        return self.strategy.measured

    @property
    def steps(self) -> int:
        """The number of steps that the ranks have taken together."""
        return self.strategy.steps

    @property
    def allreduce(self) -> AllReduce:
        """The backend that sums the gradients of all ranks; None if none does."""
        return self.strategy.allreduce

    @property
    def buffer(self) -> Any:
        """The array that is reduced in every step; None after `close`, and where ranks do not step together."""
        return None if self.strategy.core is None else self.strategy.core.buffer

    @property
    def trace(self) -> Trace | None:
        """The trace in which a callback records this fit, or None."""
        return self.strategy.clock.trace

    @property
    def failures(self) -> list[Failure]:
        """The failures so far, in order; the same on all ranks."""
        return self.recovery.failures

    @property
    def goes_on(self) -> bool:
        """Whether the other ranks continue the training when one fails."""
        return self.recovery.goes_on

    @property
    def stop_training(self) -> bool:
        """Set it in a callback on any rank to end the fit on all ranks."""
        return self.strategy.stop_training

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        self.strategy.stop_training = stop

    @stops_at_sigterm
    def fit(
        self,
        x: Any,
        y: Any = None,
        epochs: int = 10,
        batch_size: int = BATCH_SIZE,
        *,
        transforms: Sequence[Transform] = (),
        seed: int = 0,
        shuffle: bool = True,
        sample_weight: Any = None,
        class_weight: Any = None,
        validation_data: Any = None,
        callbacks: Sequence[Any] = (),
        checkpoint: Checkpoint | str | None = None,
        resume: bool = False,
        progress: bool | TextIO = True,
    ) -> History:
        """Train for `epochs` passes over the data; first the model of rank 0 is copied to all ranks. Collective.

        x, y: ALL rows, on every rank: each rank takes its share of every batch. Arrays, or memory maps; a tuple or a
            dict of them, if the model has several inputs (or outputs); or in x a data set with len() and rows by number
            whose rows are pairs (x, y), and no y (see trainers.data.Samples). An error in a data set on one rank is
            raised on all, as DataError.
            x may be a Loader, of any iterable of batches (x, y), or with a collate; then there is no y. Of shards (the
            `train` of `load_shards`), each rank has its own rows.
        sample_weight: (rows,) numbers >= 0, not all zero; or rows of a data set, and batches of a loader, are triples
            (x, y, weights). The loss of row i counts sample_weight[i] times: a batch has the sum of the weighted losses
            of its rows, divided by the number of its rows, as in Keras. The loss in the history is weighted too, other
            metrics are not.
        class_weight: {class number: weight}, a class that is missing has 1.0; or "balanced", for arrays: all classes
            count alike, by rows / (classes * rows of the class), as in scikit-learn. y has class numbers, or one-hot
            rows. A row has the product of its weight and that of its class. Validation data are not weighted by it.
        batch_size: rows in a GLOBAL batch, divided among the ranks. It need not be divisible, and the last one may be
            short: gradients are weighted by samples, so that any number of ranks trains as one rank would.
        transforms: a list of objects, one of a kind, that change the steps: ClipNorm(1.0), say; see
            trainers.strategies.transforms.
        seed, shuffle: epoch e visits the rows in the order of data.order(rows, seed, e, shuffle).
        validation_data: (x, y), (x, y, weights), a data set, or a Loader, evaluated after each epoch.
        callbacks: objects with the events of Keras callbacks (see trainers.watching.callback.Callback). Each rank
            calls its own, so they may be given to some ranks only; an exception in one is raised on all ranks.
        checkpoint: where and how often checkpoints are written: a Checkpoint, or a folder.
        resume: continue from the newest usable checkpoint there, if any; raises CheckpointError if that is of another
            model or of other settings. `epochs` counts from the beginning of the training, and the history contains all
            epochs. With the same number of ranks the result has the same bits as that of an uninterrupted training.
        progress: print a line per epoch on rank 0, and on a terminal a bar. A stream: print them there.

        Returns the history, the same on all ranks. Raises, on all ranks, DivergedError when the loss becomes NaN or
        infinite, and Terminated, which is a SystemExit, when any rank has received SIGTERM.
        """
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        settings["validation_data"] = "none" if validation_data is None else "given"
        settings |= {"checkpoint": checkpoint, "resume": resume}
        weigh = None if class_weight is None else ClassWeights(class_weight)
        settings |= {} if weigh is None else {"class_weight": weigh}
        strategy, group = self.strategy, self.group
        stream: Any = progress if hasattr(progress, "write") else None
        flags = {"shuffle": shuffle, "resume": resume, "progress": True if stream else progress}
        steps = [*transforms] if isinstance(transforms, Iterable) else transforms

        def begin() -> Fit:
            options = self._check_options(steps, flags, settings)
            divides = strategy.micro_batch is not None or any(each.divides for each in options)
            self.replica.divided = strategy.parts > 1 or divides
            batches = source.to_train(strategy, Given.of(x, y, sample_weight), settings)
            try:
                return fit_of(batches, options)
            except BaseException:
                batches.close()
                raise

        def fit_of(batches: BatchSource, options: Sequence[Transform]) -> Fit:
            self._keep_rows(batches)
            validate = None
            if validation_data is not None:
                to_validate = Given.to_validate(validation_data)
                validation = source.to_evaluate(strategy, "validation_data of fit", to_validate)
                average = all(each.validates_average for each in options)
                validate = partial(self._evaluate, validation, average)
            strategy.owners.end_round()
            together(group.comm, partial(strategy.rule.use, options))
            together(group.comm, partial(strategy.rule.begin, trains=epochs > 0))
            mirror(strategy)
            saver = together(group.comm, partial(make_saver, strategy, batches, checkpoint, resume))
            return Fit(
                strategy,
                batches,
                epochs,
                watched=self,
                validate=validate,
                callbacks=callbacks,
                progress=Progress(bool(progress), group.rank, batches.planned, epochs, stream),
                saver=saver,
            )

        if self._fitting:
            raise ArgumentError("fit: a callback has called fit of the trainer that fits: use another trainer")
        self._fitting = True
        try:
            return self._call(FitCall(strategy, begin))
        finally:
            self._fitting = False

    @recoverable
    def evaluate(
        self, x: Any, y: Any = None, *, sample_weight: Any = None, ema: bool | None = None
    ) -> dict[str, float]:
        """Return the replica's metrics ("loss", "accuracy", ...), means over these rows. Collective.

        x, y, sample_weight: all rows on every rank, arrays or a data set, as for `fit`; or in x a Loader. The ranks
            share the work. The loss is the sum of the weighted losses, divided by the number of rows; other metrics are
            not weighted.
        ema: True: with the moving average of the parameters, which EMA keeps; False: with the parameters;
            None: with the average if there is one.
        """
        self._check_ema("evaluate", ema)
        return self._evaluate(source.to_evaluate(self.strategy, "evaluate", Given.of(x, y, sample_weight)), ema)

    def _check_ema(self, call: str, ema: Any) -> None:
        """Raise ArgumentError on all ranks if `ema`, an argument of this call, is invalid on any. Collective."""
        if ema is None and not self.replica.average:
            return
        text = FLAG.or_none().error("ema", ema)
        if ema and not text and not self.replica.average:
            text = "ema=True: there is no average of the parameters; fit(..., transforms=[EMA(0.999)]) keeps one"
        self.group.enter(f"{call}: ema={ema!r}", ArgumentError(text) if text else None)

    @recoverable
    def predict(self, x: Any, out: Any = None, *, ema: bool | None = None) -> Any:
        """Return the replica's output for every row, in order, on every rank. Collective.

        x: an array, or a tuple or a dict of arrays, as for `fit`. The ranks share the work. Models with several outputs
            give a tuple or a dict, a NumpyNetwork (rows, outputs) float32, which are probabilities with a cross-entropy
            loss.
        ema: as for `evaluate`.
        out: write the predictions to this file (.csv or .jsonl) instead, in constant memory, and return its path. A
            line has the number of the row, from 0, and the class with its probability, or all outputs. After an error
            the file is unchanged. x may then be files too: a path, a list, or a pattern such as `part-*.csv`, of .npy,
            .npz (the array x), or tables with the columns of the table on which the model was trained; labels are not
            read.
        """
        self._check_ema("predict", ema)
        if out is not None or _are_files(x):
            return self._predict_into(x, out, ema)
        self._check_open()
        rows, group = source.to_read(self.strategy, "predict", Given(x, source.NO_TARGETS)), self.group
        self.strategy.owners.end_round()
        with self._weights(ema):
            outputs = together(group.comm, lambda: predict_chunk(self.replica, rows, group.size, group.rank))
        for output in leaves(outputs):
            gather_rows(group.comm, output)
        return outputs

    def _predict_into(self, given: Any, out: Any, ema: bool | None) -> str:
        group, replica = self.group, self.replica
        self._check_open()

        def rows(unknown: dict[str, int]) -> Any:
            streams = _app("tables.streams")
            if _are_files(given):
                paths = [os.fspath(each) for each in (given if isinstance(given, list) else [given])]
                return streams.open_stream(paths, replica.columns, replica.features, unknown)
            return streams.Arrays(x)

        if _are_files(given):
            group.enter(f"predict: {given}, out={out}")
        else:
            (x,) = source.to_read(self.strategy, "predict", Given(given, source.NO_TARGETS), {"out": out}).data
        self.strategy.owners.end_round()
        with self._weights(ema):
            path: str = _app("tables.predicting").predict_into(group.comm, replica, rows, out)
        return path

    @recoverable
    def save(self, path: str) -> None:
        """Write the model, with the optimizer's state, to exactly `path`. Collective.

        Every rank calls it, without an `if rank == 0`; rank 0 writes. Raises ModelFileError on all ranks.
        The file (.npz, no pickle) does not depend on the number of ranks; NumpyNetwork.load reads it without MPI.
        """
        self.group.enter("save")
        self.strategy.owners.end_round()
        complete(self.strategy)
        rates = self.replica.learning_rates
        self.strategy.rule.end_step()  # in a callback: a file has the learning rates from before the fit
        try:
            self.group.on_one(lambda: self.replica.save(path))
        finally:
            if rates:
                self.replica.learning_rates = rates

    @recoverable
    def export(
        self,
        path: str,
        x: Any = None,
        *,
        classes: Sequence[str] | None = None,
        logits: bool = False,
        ema: bool | None = None,
    ) -> Any:
        """Write the model as an ONNX file, which runs without this package. Return an Exported, which describes the
        file. Collective.

        The file takes raw rows, any number of them: scaling, the categories of a table, the softmax of a classifier and
        the names of its classes are inside (see trainers.apps.export.metadata). The optimizer is not. Before the file
        replaces an older one, onnxruntime runs it: classes must be those of `predict`, and probabilities and numbers
        within 1e-5. Otherwise, and if the model can't be converted, all ranks raise the same ExportError, and the older
        file stays. Rank 0 writes. Needs the extra "export"; a JaxReplica needs "export-jax".

        x: rows on which the file is checked. None: the first rows of the last fit, or for networks of this package
            without one, random rows.
        classes: the names of the classes, by number. None: those of the table, or none.
        logits: True: the outputs are logits of classes, so a softmax makes probabilities of them. Needed for a replica
            that can't tell; a TorchReplica with CrossEntropyLoss and a KerasReplica with a cross-entropy can.
        ema: as for `evaluate`.
        """
        self._check_ema("export", ema)
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        settings = {"path": name, "classes": classes, "logits": logits}
        rows = self._rows
        if x is None:
            self.group.enter(source.described("export", type(self.replica).__name__, settings))
        else:
            (rows,) = source.to_read(self.strategy, "export", Given(x, source.NO_TARGETS), settings).data
        self.strategy.owners.end_round()
        with self._weights(ema):
            self._check_equal("export")
            average = self.replica.average is not None and ema is not False
            made: list[Any] = []
            write = partial(_app("export.export").write, classes=classes, logits=logits, average=average)
            self.group.on_one(lambda: made.append(write(name, self.replica, rows)))
        texts = root_value(self.group.comm, made[0].as_properties() if made else None, "export: the metadata")
        return _app("export.metadata").Exported.read(name, texts)

    @recoverable
    def load(self, path: str) -> None:
        """Load the model that rank 0 reads from `path` on all ranks; or raise ModelFileError on all. Collective."""
        self.group.enter("load")
        self.group.on_one(lambda: self.replica.restore(path))
        columns = self.replica.columns
        given = root_value(self.group.comm, columns and columns.as_dict(), "load: the columns of a table")
        self.replica.columns = None if given is None else Columns.from_dict(given)
        mirror(self.strategy, whole=False)
        self.strategy.owners.reset()
        if self.strategy.allreduce is not None:
            self.strategy.allreduce.load_state({})

    @recoverable
    def edit(self, change: Callable[[], object]) -> None:
        """Change the model's parameters in place by `change()`, the same on all ranks. Collective.

        `change` is called on every rank, or, if the ranks of a node share one copy of the parameters, on one rank of
        each node, while the others wait. An error in it is raised on all ranks. If a rank fails meanwhile, the
        remaining ranks call it again, on the parameters as they were. Asynchronous servers and spare replicas have no
        edit.
        """
        strategy: Any = self.strategy
        if not isinstance(strategy, Mirrored):
            text = "has no edit(); change the model before you make the trainer, or use load()"
            raise ArgumentError(f"a {type(self).__name__} {text}")
        strategy.edit(change)

    @recoverable
    def parameters_sha256(self) -> list[str]:
        """The SHA-256 of every rank's parameters, by rank, the same on all ranks; mirrored replicas have equal ones."""
        comm = self.group.comm
        self.group.enter("parameters_sha256")
        self.strategy.owners.end_round()
        parameters = np.ascontiguousarray(together(comm, self.replica.state)["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((comm.size, mine.size), np.uint8)
        with waiting(comm, "parameters_sha256"):
            comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def record(self, trace: Trace | None) -> None:
        """Record this rank's work in `trace` from now on; None stops that. Local; call it on all ranks or on none."""
        strategy = self.strategy
        strategy.clock.trace = trace
        if strategy.allreduce is not None:
            strategy.clock.recorded = False  # a recorder does
            observers = strategy.allreduce.observers
            if self._recorder in observers:
                observers.remove(self._recorder)
            self._recorder = None if trace is None else record(strategy.allreduce, trace)

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager that records its block in the trace, if any, as "data", "compute", ... Local."""
        return self.strategy.clock.span(kind)

    def surviving(self, action: Callable[[], ResultT]) -> ResultT:
        """Call `action()`, a collective function of the user's on `topology`, and return its result. Collective.

        With on_failure="continue", the remaining ranks call it again after a failure.
        """

        def run() -> ResultT:
            self.group.enter("surviving")  # a rank that made another call gets its error now, not after a time-out
            return action()

        return self._call(Call("a call of the user's", run))

    def close(self) -> None:
        """Free what the trainer created; the replica stays usable. Collective. Closing twice does nothing; a failed
        rank is not an error."""
        if self.closed:
            return
        strategy, group = self.strategy, self.group
        try:
            group.agree("close")
            strategy.closed = True
            group.release()
            strategy.close()
            if self.replica.hold.holder is strategy:
                self.replica.hold = Hold()
            if self.recovery.owns_topology:
                group.topology.close()
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.abandon()

    def abandon(self) -> None:
        """Free everything without the other ranks, some of which may have failed. Local; the replica stays usable."""
        self.strategy.closed = True
        self.strategy.abandon()

    # Calls

    def _call(self, call: Call[ResultT]) -> ResultT:
        """Make a call, which with on_failure="continue" survives failed ranks. Collective."""
        try:
            self._check_open()
            return self.recovery.run(call)
        finally:
            call.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed; create another one")
        if self.replica.hold.holder is not self.strategy:
            raise ClosedError(
                f"this {type(self).__name__} can't train any more: a {self.replica.hold.holder.name} was created on "
                "its replica; use that one"
            )

    def _evaluate(self, rows: Rows | Loader, ema: bool | None) -> dict[str, float]:
        strategy: Any = self.strategy
        replica, exact = self.replica, strategy.micro_batch is not None
        self.strategy.owners.end_round()
        with self._weights(ema), np.errstate(all="ignore"):  # the loss shows it if the model has diverged
            terms, count, number = evaluate_on_ranks(replica, rows, self.group, exact)
        sums = (
            strategy.core.add_up(terms, count) if exact else combine(self.group.comm, terms.sum(axis=0), "sum metrics")
        )
        return means_of(replica.metrics, replica.counts, sums, number)

    def _weights(self, ema: bool | None) -> AbstractContextManager[None]:
        """Return a context manager: the average is in the place of the parameters, unless `ema` is False or there is
        none."""
        return self._averaged() if self.replica.average and ema is not False else nullcontext()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context manager: all replicas have the moving average of the parameters in their place. Collective."""
        replica, owners = self.replica, self.strategy.owners
        try:
            together(self.group.comm, lambda: replica.use_average(owners.own_part))
            owners.share_parameters()
            yield
        except BaseException as error:
            replica.use_parameters()
            if self.group.all_raise(error):
                owners.share_parameters()
            raise
        replica.use_parameters()
        owners.share_parameters()

    def _keep_rows(self, batches: BatchSource) -> None:
        """Keep copies of the first rows of a fit, on which an export is checked. Local."""
        if (first := batches.first()) is None:
            return
        x = first[0]
        row = max(1, sum(array.nbytes for array in leaves(x)) // max(1, row_count(x)))
        kept = min(KEPT_ROWS, max(1, KEPT_BYTES // row))
        self._rows = mapped(lambda array: np.array(array[:kept]), x)

    def _check_equal(self, call: str) -> None:
        """Raise DisagreementError on all ranks if their parameters differ. Collective."""
        replica = self.replica

        def described() -> str:
            held = np.ascontiguousarray(snapshot_of(replica, {}, without=changing_entries(replica))["parameters"])
            return f"{call}: {type(replica).__name__}, parameters #{zlib.crc32(held.view(np.uint8).data):08x}"

        self.group.agree(together(self.group.comm, described))

    # Arguments of the calls

    def _check_options(self, transforms: Any, flags: Mapping[str, Any], settings: dict[str, Any]) -> list[Transform]:
        """Return the transforms of a fit. Raise the same ArgumentError on all ranks if they, or flags, are invalid on
        any.

        flags: must be True or False. settings: of the fit, to which the transforms are added. Without an error it is
        local: the check of the data that follows compares the settings.
        """
        self._check_open()
        found, error = list[Transform](), None
        try:
            found = chosen(transforms)
            wrong = [each.error(self.replica, self.strategy.average) for each in found]
            wrong += itertools.starmap(FLAG.error, flags.items())
            require(*[f"fit: {each}" for each in wrong if each])
            settings |= {"transforms": found} if found else {}
        except Exception as refused:  # any exception, of a user's transform
            error = refused
        if error is not None:
            self.group.enter(f"fit: {', '.join(f'{name}={value}' for name, value in settings.items())}", error)
        return found


def _app(module: str) -> Any:
    """Return a module of trainers.apps, which is above this one: it is imported when it is asked for."""
    return import_module(f"trainers.apps.{module}")


def _are_files(x: Any) -> bool:
    paths = x if isinstance(x, list) and x else [x]
    return all(isinstance(each, str | os.PathLike) for each in paths)
