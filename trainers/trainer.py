"""The base of all trainers: fit, evaluate, predict, save, load, edit, and the check that all ranks call them alike."""

import functools
import hashlib
import itertools
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TextIO, TypeVar

import numpy as np

from allreduce.errors import ClosedError, CopyError, DisagreementError
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, on_all_ranks, root_value, together
from allreduce.transport.wait import waiting
from trainers.arguments import flag_error, integer_error, require
from trainers.data import (
    Batches,
    BatchSource,
    Collate,
    Data,
    Samples,
    Tree,
    as_arrays,
    as_data,
    leaves,
    mapped,
    named,
    row_count,
    rows_error,
    sliced,
)
from trainers.datasets.columns import Columns
from trainers.datasets.shards import ShardRows
from trainers.errors import ArgumentError, TrainerError, known_only
from trainers.fit import prefetch as fetching
from trainers.fit.checkpointing import Checkpoint, make_saver
from trainers.fit.evaluation import (
    EXACT_ROWS,
    Evaluated,
    Evaluation,
    evaluate_loader,
    means_of,
    predict_chunk,
    rows_of_loaders,
)
from trainers.fit.loader import DIVIDED, WHOLE, LoaderBatches
from trainers.fit.loop import Fit
from trainers.fit.reader import Reader
from trainers.fit.shards import OwnRows, ShardBatches, shards_error, uneven_text
from trainers.fit.weights import ClassWeights
from trainers.group import GroupOwner, RankGroup, gather_rows
from trainers.recovery.recovery import Call, EditCall, Failure, FitCall, Recovery
from trainers.recovery.terminating import stops_at_sigterm
from trainers.replica import Hold, Replica, check_rows
from trainers.state.adopt import mirror
from trainers.strategies.interface import Strategy
from trainers.strategies.rule import StepOptions
from trainers.watching.history import History
from trainers.watching.progress import Progress

log = logging.getLogger("trainers")

BATCH_SIZE = 100  # rows of a global batch, by default
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
    def trace(self) -> Trace | None:
        """The trace in which a callback records this fit, or None."""
        return self.strategy.trace

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

    @known_only
    @stops_at_sigterm
    def fit(
        self,
        x: Any,
        y: Any = None,
        epochs: int = 10,
        batch_size: int = BATCH_SIZE,
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
        rows: str | None = None,
        steps_per_epoch: int | None = None,
        validation_rows: str | None = None,
        validation_steps: int | None = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        ema: float | None = None,
        validate_ema: bool = True,
        schedule: str | Callable[[int], float] | None = None,
        warmup_steps: int = 0,
    ) -> History:
        """Train for `epochs` passes over the data; first the model of rank 0 is copied to all ranks. Collective.

        x, y: ALL rows, on every rank: each rank takes its share of every batch. Arrays, or memory maps; a tuple or a
            dict of them, if the model has several inputs (or outputs); or in x a data set with len() and rows by number
            whose rows are pairs (x, y), and no y (see trainers.data.Samples). An error in a data set on one rank is
            raised on all, as DataError.
            With `rows`, x is a loader: any iterable of batches (x, y), and there is no y. Of shards (the `train` of
            `load_shards`), each rank has its own rows.
        rows: which rows a loader brings. "divided": each rank its own; global batch s has the rows of batch s of every
            rank, and a rank whose loader ends first brings no rows until all have ended. "whole": the same batches on
            all ranks; each rank takes its share. The training is that of one rank with all rows. The batches are the
            loader's, so batch_size and shuffle stay away. `set_epoch` of the loader, its sampler or its data set is
            called before each pass. A rank that computes nothing (a server) brings no loader: x=None.
        steps_per_epoch: the steps of an epoch of a loader that is endless, or is read on from one epoch to the next and
            from its beginning when it ends. None: an epoch is one pass.
        sample_weight: (rows,) numbers >= 0, not all zero; or rows of a data set, and batches of a loader, are triples
            (x, y, weights). The loss of row i counts sample_weight[i] times: a batch has the sum of the weighted losses
            of its rows, divided by the number of its rows, as in Keras. The loss in the history is weighted too, other
            metrics are not.
        class_weight: {class number: weight}, a class that is missing has 1.0; or "balanced", for arrays: all classes
            count alike, by rows / (classes * rows of the class), as in scikit-learn. y has class numbers, or one-hot
            rows. A row has the product of its weight and that of its class. Validation data are not weighted by it.
        batch_size: rows in a GLOBAL batch, divided among the ranks. It need not be divisible, and the last one may be
            short: gradients are weighted by samples, so that any number of ranks trains as one rank would.
        seed, shuffle: epoch e visits the rows in the order of data.order(rows, seed, e, shuffle).
        validation_data: (x, y), (x, y, weights), a data set, or a loader, evaluated after each epoch.
        validation_rows, validation_steps: the `rows` and the `steps` of a loader in validation_data: see `evaluate`.
        callbacks: objects with the events of Keras callbacks (see trainers.watching.callback.Callback). Each rank
            calls its own, so they may be given to some ranks only; an exception in one is raised on all ranks.
        collate: makes (x, y) or (x, y, weights), of arrays, from a list of a data set's rows, by default they are
            stacked; or from a batch of a loader, by default a pair or a triple.
        checkpoint: where and how often checkpoints are written: a Checkpoint, or a folder.
        resume: continue from the newest usable checkpoint there, if any; raises CheckpointError if that is of another
            model or of other settings. `epochs` counts from the beginning of the training, and the history contains all
            epochs. With the same number of ranks the result has the same bits as that of an uninterrupted training.
        prefetch: whether a thread fetches the next batches during a step; None: for data sets and memory maps only (a
            loader usually has workers of its own). Other processes read rows if x is a loader that has them, such as
            DataLoader(num_workers=4).
        accumulate: k: each rank computes its share of a batch in k micro-batches, one after the other, and adds up
            their gradients before it sends them. Memory for activations is that of a micro-batch; the training is the
            same. batch_size remains the GLOBAL batch of an update: Lightning's accumulate_grad_batches=k makes the
            batch k times as large instead.
        clip_norm: the largest norm of the averaged gradients of all parameters, as PyTorch's `clip_grad_norm_` takes
            it; larger ones are scaled down to it, on all ranks by the same factor. The history has the mean norm before
            the clipping, "grad_norm". Asynchronous servers and sync_every average no gradients: there each worker clips
            those of its own rows.
        ema: the decay, such as 0.999, of an exponential moving average of the parameters, which is updated after each
            step: average = decay * average + (1 - decay) * parameters. It begins with the parameters at the beginning
            of the fit, or continues that of an earlier fit; a fit without `ema` drops it. It is saved with the model,
            and `evaluate` and `predict` use it. Running statistics of batch norm are those of the model.
        validate_ema: whether the validation uses the average, if `ema` is given; else the parameters.
        schedule: the learning rates of each step: "constant", "linear" or "cosine" (to 0 at the end of the training),
            "inverse_sqrt"; or a function of the step (0, 1, ...) that returns a fraction of the rates from before the
            fit. None: they stay. After the fit they are as before it. `epochs` decides when "linear" and "cosine" end,
            so give the same to a resumed fit.
        warmup_steps: the rates rise linearly in this number of steps, before the schedule.
        progress: print a line per epoch on rank 0, and on a terminal a bar.
        stream: where `progress` prints; None: to stdout.

        Returns the history, the same on all ranks. Raises, on all ranks, DivergedError when the loss becomes NaN or
        infinite, and Terminated, which is a SystemExit, when any rank has received SIGTERM.
        """
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        validates = validation_data is not None or validation_rows is not None
        settings["validation_data"] = "given" if validates else "none"
        settings |= {"checkpoint": checkpoint, "resume": resume}
        weigh = None if class_weight is None else ClassWeights(class_weight)
        settings |= {} if weigh is None else {"class_weight": weigh}
        strategy, group = self.strategy, self.group
        options = StepOptions(accumulate, clip_norm, ema, schedule, warmup_steps)
        settings |= options.as_settings() | ({} if validate_ema is True else {"validate_ema": validate_ema})
        flags = {"shuffle": shuffle, "resume": resume, "progress": progress, "validate_ema": validate_ema}
        flags |= {} if prefetch is None else {"prefetch": prefetch}

        def begin() -> Fit:
            self._check_options(options, flags, settings)
            self.replica.divided = strategy.parts > 1 or accumulate > 1 or strategy.micro_batch is not None
            if isinstance(x, ShardRows):
                others = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight, "collate": collate}
                others |= {"rows": rows, "steps_per_epoch": steps_per_epoch}
                return fit_of(self._check_shards(x, settings, others))
            if rows is None and steps_per_epoch is None:
                x_all, y_all, *weights = self._check_call("fit", (x, y, sample_weight), settings, collate)
                self._keep_rows(x_all.first[0] if isinstance(x_all, Samples) else x_all)
                ahead = fetching.batches_ahead(x, y, prefetch, strategy.micro_batch is not None)
                own = strategy.part, strategy.parts, seed, shuffle, ahead, strategy.micro_batch
                return fit_of(Batches(x_all, y_all, batch_size, *own, weights[0] if weights else None, weigh))
            given, ahead = (x, y, sample_weight), fetching.AHEAD if prefetch else 0
            loader = self._check_loader(given, rows, steps_per_epoch, settings, collate, ahead)
            try:
                return fit_of(loader)
            except BaseException:
                loader.close()
                raise

        def fit_of(batches: BatchSource) -> Fit:
            validate = None
            if isinstance(validation_data, ShardRows):
                own = OwnRows(validation_data, group.rank, group.size)
                validate = partial(self._evaluate_loader, Reader(own, None), True, None, validate_ema)
            elif validation_rows is not None or validation_steps is not None:
                given = self._check_evaluation(validation_data, validation_rows, validation_steps, collate)
                validate = partial(self._evaluate_loader, *given, validate_ema)
            elif validation_data is not None:
                validate = partial(self._evaluate, self._check_validation(validation_data, collate), validate_ema)
            strategy.end_round()
            strategy.rule.use(options)
            strategy.rule.keep_average(trains=epochs > 0)
            mirror(strategy)
            saver = together(
                group.comm, partial(make_saver, strategy, batches, checkpoint, resume, validate is not None)
            )
            return Fit(
                strategy,
                batches,
                epochs,
                watched=self,
                validate=validate,
                callbacks=callbacks,
                progress=Progress(progress, group.rank, batches.planned, epochs, stream),
                saver=saver,
            )

        return self._call(FitCall(strategy, begin))

    @recoverable
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        collate: Collate | None = None,
        *,
        sample_weight: Any = None,
        ema: bool | None = None,
        rows: str | None = None,
        steps: int | None = None,
    ) -> dict[str, float]:
        """Return the replica's metrics ("loss", "accuracy", ...), means over these rows. Collective.

        x, y, collate, sample_weight: all rows on every rank, arrays or a data set, as for `fit`. The ranks
            share the work. The loss is the sum of the weighted losses, divided by the number of rows; other metrics are
            not weighted. With `rows`, x is a loader.
        rows: which rows a loader brings: "divided", each rank its own, or "whole", the same batches on all ranks. A
            server may bring none (x=None).
        steps: the number of batches that each rank reads of its loader. None: all batches of a pass.
        ema: True: with the moving average of the parameters, which fit(ema=0.999) keeps; False: with the parameters;
            None: with the average if there is one.
        """
        self._check_ema("evaluate", ema)
        if isinstance(x, ShardRows):
            x, rows = OwnRows(x, self.group.rank, self.group.size), rows or DIVIDED
        if rows is not None or steps is not None:
            alone = y is None and sample_weight is None
            return self._evaluate_loader(*self._check_evaluation(x, rows, steps, collate, alone), ema)
        return self._evaluate(Evaluation(self._check_call("evaluate", (x, y, sample_weight), {}, collate)), ema)

    def _check_ema(self, call: str, ema: Any) -> None:
        if ema is not None or self.replica.averages:
            self.group.enter(f"{call}: ema={ema!r}", self._ema_error(ema))

    @recoverable
    def predict(
        self, x: Any, out: Any = None, *, progress: bool = True, stream: TextIO | None = None, ema: bool | None = None
    ) -> Any:
        """Return the replica's output for every row, in order, on every rank. Collective.

        If the model has several outputs, they are a tuple or a dict of arrays.

        x: an array, or a tuple or a dict of arrays, as for `fit`. The ranks share the work. For a NumpyNetwork: (rows,
            outputs) float32, probabilities with a cross-entropy loss.
        ema: as for `evaluate`.

        With `out`, write the predictions to files instead, in constant memory, and return the paths of the files:
        x: arrays, memory maps too; or files: a path, a list of paths, or a pattern such as `part-*.csv`. Of .npy and
            .npz files (the array x) any number of rows is read; tables (.csv, .tsv) have the columns of the table on
            which the model was trained, or, without a table, only numbers. A label may be there, and is not read.
        out: a file that ends in .csv or .jsonl (JSON lines), with the rows in order; or a folder, new or empty, where
            each rank writes its own rows: "folder", or `folder/part-*.jsonl` with the rank for the star.
            A line has the number of the row, from 0, the class in words and its probability; or all outputs, if the
            model has no classes. After an error no file is changed.
        progress: show on rank 0 how many rows are done: on a terminal a bar, elsewhere a line every 10 seconds.
        stream: where the lines go; None for stdout.
        """
        self._check_ema("predict", ema)
        if out is not None or _are_files(x):
            return self._predict_into(x, out, progress, stream, ema)
        (x,) = self._check_call("predict", (x, NO_TARGETS, None))
        group = self.group
        self.strategy.end_round()
        with self._weights(ema):
            outputs = together(group.comm, lambda: predict_chunk(self.replica, x, group.size, group.rank))
        for output in leaves(outputs):
            gather_rows(group.comm, output)
        return outputs

    def _predict_into(self, given: Any, out: Any, progress: bool, output: TextIO | None, ema: bool | None) -> list[str]:
        group, replica = self.group, self.replica
        self._check_open()

        def rows(unknown: dict[str, int]) -> Any:
            streams = _app("tables.streams")
            if _are_files(given):
                paths = [os.fspath(each) for each in (given if isinstance(given, list) else [given])]
                return streams.open_stream(paths, replica.columns, replica.features, unknown)
            return streams.Arrays(x, row_count(x), sliced)

        if _are_files(given):
            group.enter(f"predict: {given}, out={out}")
        else:
            (x,) = self._check_call("predict", (given, NO_TARGETS, None), {"out": out})
        self.strategy.end_round()
        with self._weights(ema):
            paths: list[str] = _app("tables.predicting").predict_into(group, replica, rows, out, progress, output)
        return paths

    @recoverable
    def save(self, path: str) -> None:
        """Write the model, with the optimizer's state, to exactly `path`. Collective.

        Every rank calls it, without an `if rank == 0`; rank 0 writes. Raises ModelFileError on all ranks.
        The file (.npz, no pickle) does not depend on the number of ranks; NumpyNetwork.load reads it without MPI.
        """
        self.group.enter("save")
        self.strategy.end_round()
        self.strategy.complete()
        self.group.on_one(lambda: self.replica.save(path))

    @recoverable
    def export(
        self,
        path: str,
        x: Any = None,
        y: Any = None,
        *,
        int8: bool = False,
        validation_data: tuple[Any, Any] | None = None,
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

        x: rows on which the file is checked, and the training rows that int8 needs. None: the first rows of the last
            fit, or for networks of this package without one, random rows.
        y: the targets of x, with int8. validation_data: (x, y) on which the accuracy is measured, before and after the
            conversion to int8; None for x and y.
        int8: convert the matrices to 8-bit integers, by the ranges of activations on 512 of the rows x.
        classes: the names of the classes, by number. None: those of the table, or none.
        logits: True: the outputs are logits of classes, so a softmax makes probabilities of them. Needed for a replica
            that can't tell; a TorchReplica with CrossEntropyLoss and a KerasReplica with a cross-entropy can.
        ema: as for `evaluate`.
        """
        self._check_ema("export", ema)
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        settings = {"path": name, "int8": int8, "classes": classes, "logits": logits}
        rows, scored = self._rows, None
        if x is None:
            self._check_open()
            wrong = int8 or y is not None or validation_data is not None
            error = ArgumentError("export: int8, y and validation_data need training rows: give x") if wrong else None
            self.group.enter(_described("export", [type(self.replica).__name__], settings), error)
        else:
            rows, *y = self._check_call("export", (x, NO_TARGETS if y is None else y, None), settings)
            scored = (rows, *y) if y else None
        if validation_data is not None:
            if not isinstance(validation_data, tuple | list) or len(validation_data) != 2:
                self.group.enter("export", ArgumentError("export: validation_data must be a pair (x, y) of arrays"))
            scored = self._check_call("validation_data of export", (*validation_data, None))
        self.strategy.end_round()
        with self._weights(ema):
            self._check_equal("export")
            average = self.replica.averages and ema is not False
            made: list[Any] = []
            write = partial(
                _app("export.export").write, classes=classes, logits=logits, scored=scored, int8=int8, average=average
            )
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
        self.strategy.reset()

    def edit(self, change: Callable[[], object]) -> None:
        """Change the model's parameters in place by `change()`, the same on all ranks. Collective.

        `change` is called on every rank, or, if the ranks of a node share one copy of the parameters, on one rank of
        each node, while the others wait. An error in it is raised on all ranks. If a rank fails meanwhile, the
        remaining ranks call it again, on the parameters as they were. Trainers with servers have no edit.
        """
        self._call(EditCall(self.strategy, change))

    @recoverable
    def parameters_sha256(self) -> list[str]:
        """The SHA-256 of every rank's parameters, by rank, the same on all ranks; mirrored replicas have equal ones."""
        comm = self.group.comm
        self.group.enter("parameters_sha256")
        self.strategy.end_round()
        parameters = np.ascontiguousarray(together(comm, self.replica.state)["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((comm.size, mine.size), np.uint8)
        with waiting(comm, "parameters_sha256"):
            comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def record(self, trace: Trace | None) -> None:
        """Record this rank's work in `trace` from now on; None stops that. Local; call it on all ranks or on none."""
        self.strategy.record(trace)

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager that records its block in the trace, if any, as "data", "compute", ... Local."""
        return self.strategy.span(kind)

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
            if strategy.holds_replica:
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
        if not self.strategy.holds_replica:
            raise ClosedError(
                f"this {type(self).__name__} can't train any more: a {self.replica.hold.holder.name} was created on "
                "its replica; use that one"
            )

    def _evaluate(self, evaluation: Evaluation, ema: bool | None) -> dict[str, float]:
        group, replica, exact = self.group, self.replica, self.strategy.micro_batch is not None
        rows = len(evaluation)
        self.strategy.end_round()
        with self._weights(ema), np.errstate(all="ignore"):  # the loss shows it if the model has diverged
            segments = together(group.comm, lambda: evaluation.evaluate_chunk(replica, group.size, group.rank, exact))
        sums = self.strategy.add_up(segments, -(-rows // EXACT_ROWS))
        return means_of(replica.metrics, replica.counts, sums, rows)

    def _evaluate_loader(
        self, reader: Reader | None, divided: bool, steps: int | None, ema: bool | None = None
    ) -> dict[str, float]:
        """Evaluate a loader. reader: of this rank's loader, None if it has none. Collective."""
        group, replica, exact = self.group, self.replica, self.strategy.micro_batch is not None
        self.strategy.end_round()
        have = all_values(group.comm, reader is not None, "learn which ranks have a loader")
        ranks, rank = (1, 0) if divided else (sum(have), sum(have[: group.rank]))
        none = Evaluated(np.empty((0, len(replica.metrics) + 1)), 0, 0)

        def evaluate() -> Evaluated:
            return none if reader is None else evaluate_loader(replica, reader, steps, ranks, rank, exact)

        with self._weights(ema), np.errstate(all="ignore"):
            found = together(group.comm, evaluate)
        own = None if reader is None else [found.batches, found.rows, found.sum]
        read = all_values(group.comm, [own, len(found.terms)], "learn the rows of an evaluation")
        rows = together(group.comm, lambda: rows_of_loaders([each for each, _ in read], divided))
        sums = self.strategy.add_up(found.terms, sum(terms for _, terms in read))
        return means_of(replica.metrics, replica.counts, sums, rows)

    def _weights(self, ema: bool | None) -> AbstractContextManager[None]:
        """Return a context manager: the average is in the place of the parameters, unless `ema` is False or there is
        none."""
        averages = self.replica.averages
        return self.strategy.averaged() if averages and ema is not False else nullcontext()

    def _ema_error(self, ema: Any) -> ArgumentError | None:
        """Return the error if `ema`, an argument of `evaluate` or `predict`, is invalid, or None. Local."""
        if text := flag_error("ema", ema, optional=True):
            return ArgumentError(text)
        if ema and not self.replica.averages:
            return ArgumentError("ema=True: there is no average of the parameters; fit(..., ema=0.999) keeps one")
        return None

    def _keep_rows(self, x: Tree) -> None:
        """Keep copies of the first rows of a fit, on which an export is checked. Local."""
        row = max(1, sum(array.nbytes for array in leaves(x)) // max(1, row_count(x)))
        kept = min(KEPT_ROWS, max(1, KEPT_BYTES // row))
        self._rows = mapped(lambda array: np.array(array[:kept]), x)

    def _check_equal(self, call: str) -> None:
        """Raise DisagreementError on all ranks if their parameters differ. Collective."""
        replica = self.replica

        def described() -> str:
            held = np.ascontiguousarray(replica.snapshot({}, without=replica.updated)["parameters"])
            return f"{call}: {type(replica).__name__}, parameters #{zlib.crc32(held.view(np.uint8).data):08x}"

        self.group.agree(together(self.group.comm, described))

    # Arguments of the calls

    def _check_options(self, options: StepOptions, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Raise the same ArgumentError on all ranks if options of a fit are invalid on any.

        flags: must be True or False. settings: of the fit. Without an error it is local: the check of the data that
        follows compares the settings.
        """
        self._check_open()
        replica, strategy = self.replica, self.strategy
        reason = options.error(replica) or strategy.options_error(options)
        reason = reason or next(filter(None, itertools.starmap(flag_error, flags.items())), "")
        error = ArgumentError(f"fit: {reason}") if reason else None
        if error is not None:
            self.group.enter(f"fit: {', '.join(f'{name}={value}' for name, value in settings.items())}", error)

    def _check_evaluation(
        self, loader: Any, rows: Any, steps: Any, collate: Collate | None, alone: bool = True
    ) -> tuple[Reader | None, bool, int | None]:
        """Check the arguments of an evaluation of a loader on all ranks; returns those of `_evaluate_loader`.
        Collective. alone: whether there are no y and weights."""
        self._check_open()
        error = evaluation_error(self.strategy, loader, rows, steps, alone)
        self.group.enter(_described("evaluate", ["x of a loader"], {"rows": rows, "steps": steps}), error)
        reader = None if loader is None else Reader(loader, collate)
        return reader, rows == DIVIDED, None if steps is None else int(steps)

    def _check_call(
        self,
        call: str,
        given: tuple[Any, Any, Any],
        settings: dict[str, Any] | None = None,
        collate: Collate | None = None,
    ) -> Data:
        """Check the arguments of a call on all ranks; returns arrays, or (Samples, None). Raises the same error on all
        ranks if they are invalid or differ. Collective. given: x, y, sample_weight, as for `check_call`."""
        self._check_open()
        data, row, error = check_call(self.replica, call, given, settings or {}, collate)
        try:
            self.group.enter(row, error)
        except DisagreementError as differ:
            explain_division(differ, row, settings or {})
            raise
        return data

    def _check_shards(self, x: ShardRows, settings: dict[str, Any], others: Mapping[str, Any]) -> ShardBatches:
        """Check a fit with shards on all ranks; returns their batches. Raises the same error on all ranks. Collective.
        others: see shards_error."""
        strategy, group = self.strategy, self.group
        error: Exception | None = shards_error(strategy.micro_batch is not None, others)
        try:
            _check_settings(settings)
        except ArgumentError as refused:
            error = refused
        group.enter(_described("fit", [str(x)], settings), error)
        text = uneven_text(x, strategy.parts)
        if text and group.rank == 0:
            log.warning("trainers: %s", text)
        own = strategy.part, strategy.parts, settings["seed"], settings["shuffle"]
        batches = ShardBatches(x, settings["batch_size"], *own)

        def check_first() -> None:
            batch = batches.share(0, 0, strategy.part)
            if len(batch.x):
                check_rows(self.replica, (batch.x, batch.y))
                self._keep_rows(batch.x)

        together(group.comm, check_first)
        return batches

    def _check_loader(
        self, given: tuple[Any, Any, Any], rows: Any, steps: Any, settings: dict[str, Any], collate: Collate | None,
        ahead: int,
    ) -> LoaderBatches:  # fmt: skip
        """Check a fit with a loader on all ranks; returns its batches, and reads the first. Raises the same error on
        all ranks. Collective. given: the loader, y, sample_weight."""
        self._check_open()
        strategy, group, settings = self.strategy, self.group, settings | {"rows": rows, "steps_per_epoch": steps}
        batches, described = None, None
        error: Exception | None = loader_error(strategy, given, settings)
        if error is None:
            loader = None if strategy.part is None else given[0]
            saves = settings["checkpoint"] is not None
            options = rows, collate, steps, strategy.part, strategy.parts, ahead, strategy.micro_batch
            batches = LoaderBatches(loader, *options, settings["seed"], settings.get("class_weight"), saves)
            try:
                described = batches.describe()
                if (first := batches.first()) is not None:
                    check_rows(self.replica, first)
                    self._keep_rows(first[0])
            except TrainerError as refused:
                error = refused
            except Exception as refused:  # of a model; the other ranks must not wait for this one
                error = ArgumentError(f"fit: {type(refused).__name__}: {refused}")
        try:
            group.enter(_described("fit", ["x of a loader"], settings), error)
            assert batches is not None
            everyone = group.values(described, "fit: the first batches of the ranks")
            try:
                batches.adopt(everyone)
            except TrainerError as refused:
                raise on_all_ranks(refused, group.comm) from None
        except BaseException:
            if batches is not None:
                batches.close()
            raise
        return batches

    def _check_validation(self, given: Any, collate: Collate | None) -> Evaluation:
        triple = isinstance(given, tuple) and len(given) == 3 and not all(map(_is_row, given))
        pair = triple or isinstance(given, tuple | list)
        x, y, weights = given if triple else (*given, None) if pair and len(given) == 2 else (given, None, None)
        own = None if pair else collate
        return Evaluation(self._check_call("validation_data of fit", (x, y, weights), {}, own))


def _app(module: str) -> Any:
    """Return a module of trainers.apps, which is above this one: it is imported when it is asked for."""
    return import_module(f"trainers.apps.{module}")


def _are_files(x: Any) -> bool:
    """Whether x are paths of files."""
    paths = x if isinstance(x, list) and x else [x]
    return all(isinstance(each, str | os.PathLike) for each in paths)


def _is_row(given: Any) -> bool:
    """Whether this may be a row of a data set: a pair or a triple."""
    return isinstance(given, tuple | list) and len(given) in (2, 3)


NO_TARGETS = object()  # passed as y for a prediction, which has no targets

CheckedCall = tuple[Data, str, Exception | None]


def check_call(
    replica: Replica,
    call: str,
    given: tuple[Any, Any, Any],
    settings: dict[str, Any],
    collate: Collate | None = None,
) -> CheckedCall:
    """Convert and check the data of a call. Returns (arrays, or (Samples, None)), the call as text, and the error or
    None. Local.

    given: arrays x and y, x and NO_TARGETS, or a data set and None; then the weights of rows, or None. settings: the
        other arguments, by name.
    """
    data: Data = given[:2]
    row: str = call
    error: Exception | None = None
    weigh: ClassWeights | None = settings.get("class_weight")
    try:
        if weigh is not None:
            weigh.check(arrays=given[1] is not None)
        if given[1] is None or collate is not None:
            samples = _samples(*given, collate)
            data, checked = (samples, None), samples.first
            row = _described(call, [str(samples)], settings)
            checked = checked if weigh is None else weigh(checked)
        else:
            data = _arrays(*given)
            row = _described(call, _sides(data), settings)
            _check_rows(data)
            data = checked = data if weigh is None else weigh.of_all(data)
        _check_settings(settings)
        check_rows(replica, checked if len(checked) > 1 else (*checked, None))
    except (TrainerError, ValueError, TypeError) as refused:
        error = refused if isinstance(refused, TrainerError) else ArgumentError(f"{call}: {refused}")
    except Exception as refused:  # of a data set or a model; the other ranks must not wait for this one
        error = ArgumentError(f"{call}: {type(refused).__name__}: {refused}")
    return data, row, error


def _arrays(x: Any, y: Any, weights: Any) -> Data:
    """Return the arrays of a call. Raises ArgumentError."""
    if y is NO_TARGETS:
        return (as_arrays(x),)
    if isinstance(x, list) and len(x) != len(y) and all(getattr(each, "ndim", 0) > 0 for each in x):
        raise ArgumentError(
            f"x is a list of {len(x)} arrays, and a list is one array of rows: for a model of several inputs give a "
            "tuple, x=(a, b), or a dict"
        )
    return as_data((x, y) if weights is None else (x, y, weights))


def explain_division(error: DisagreementError, row: str, settings: dict[str, Any]) -> None:
    """If the ranks differ only in their rows, append to the error that the trainer divides the rows itself. Changes
    `error`.

    row: the call as text, from `check_call`.
    """
    text = str(error)
    call, end = f": {row.partition(': ')[0]}: ", _described("", [""], settings)[2:]
    if all(call in line and line.endswith(end) for line in text.splitlines()[1:]):
        error.args = (
            f"{text}\nA trainer takes all rows, the same on every rank, and divides each batch among the ranks itself",
        )


def loader_error(strategy: Strategy, given: tuple[Any, Any, Any], settings: dict[str, Any]) -> ArgumentError | None:
    """Return the error if these arguments of a fit with a loader are invalid, or None. Local.

    given: the loader, y, sample_weight. settings: of the fit.
    """
    loader, y, weights = given
    rows, steps = settings["rows"], settings["steps_per_epoch"]
    if rows not in (DIVIDED, WHOLE):
        only = "" if rows is not None else "; steps_per_epoch is for loaders only"
        return ArgumentError(f'fit: rows={rows!r}: with a loader use rows="{DIVIDED}" or rows="{WHOLE}"{only}')
    if y is not None:
        return ArgumentError(
            f'fit: rows="{rows}" is for a loader, whose batches are pairs (x, y): leave out rows, or y'
        )
    if weights is not None:
        return ArgumentError("fit: sample_weight is for arrays: a loader gives weights in its batches, (x, y, weights)")
    if reason := strategy.loader_error(rows == DIVIDED):
        return ArgumentError(f"fit: {reason}")
    idle = strategy.part is None
    if idle and rows == DIVIDED and loader is not None:
        return ArgumentError(
            f'fit: rows="{DIVIDED}": this rank is a server, which computes nothing, so its rows would be lost: give it '
            "x=None, and divide the rows among the workers"
        )
    if not idle and not hasattr(loader, "__iter__"):
        return ArgumentError(f"fit: a {type(loader).__name__} is no loader: it can't be iterated")
    if error := _steps_error("fit: steps_per_epoch", steps):
        return error
    if settings["batch_size"] != BATCH_SIZE or settings["shuffle"] is not True:
        return ArgumentError("fit: batch_size and shuffle are the loader's: leave them out")
    return _settings_error(settings)


def _settings_error(settings: dict[str, Any]) -> ArgumentError | None:
    try:
        _check_settings(settings)
        if (weigh := settings.get("class_weight")) is not None:
            weigh.check(arrays=False)
    except ArgumentError as error:
        return error
    return None


def evaluation_error(strategy: Strategy, loader: Any, rows: Any, steps: Any, alone: bool) -> ArgumentError | None:
    """Return the error if these arguments of an evaluation of a loader are invalid, or None. Local."""
    if rows not in (DIVIDED, WHOLE):
        return ArgumentError(f'evaluate: rows={rows!r}: with a loader use rows="{DIVIDED}" or rows="{WHOLE}"')
    if not alone:
        return ArgumentError(
            "evaluate: a loader reads pairs (x, y) or triples itself: leave out rows, or y and sample_weight"
        )
    if not hasattr(loader, "__iter__") and not (loader is None and strategy.part is None):
        return ArgumentError(f"evaluate: a {type(loader).__name__} is no loader: it can't be iterated")
    return _steps_error("evaluate: steps", steps)


def _steps_error(name: str, steps: Any) -> ArgumentError | None:
    text = integer_error(name, steps, 1, optional=True)
    return ArgumentError(text) if text else None


def _samples(x: Any, y: Any, weights: Any, collate: Collate | None) -> Samples:
    if y is not None:
        raise ArgumentError("collate is for data sets, whose rows are pairs: leave out collate, or y")
    if weights is not None:
        raise ArgumentError("sample_weight is for arrays: a data set gives weights in its rows, (x, y, weight)")
    return x if isinstance(x, Samples) else Samples(x, collate)


def _described(call: str, data: list[str], settings: dict[str, Any]) -> str:
    return f"{call}: {', '.join(data + [f'{name}={value}' for name, value in settings.items()])}"


def _sides(data: Data) -> list[str]:
    """Return arrays as text: dtype, shape, and a checksum of the first and the last row."""
    return [f"{name} {array.dtype}{list(array.shape)} {_checksum(array)}" for name, array in named(data)]


def _checksum(array: np.ndarray) -> str:
    if array.ndim == 0 or len(array) == 0 or array.dtype.hasobject:
        return "empty"
    return f"#{zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes()):08x}"


def _check_settings(settings: dict[str, Any]) -> None:
    for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
        require(integer_error(name, settings.get(name, least), least))


def _check_rows(data: Data) -> None:
    if wrong := rows_error(data):
        raise ArgumentError(wrong)
    if len(data) > 1 and not row_count(data):
        raise ArgumentError("there are no samples: x and y are empty")
    if len(data) > 2 and not data[2].any():
        raise ArgumentError("sample_weight is 0 for all rows, so there would be nothing to train on")
