"""What all trainers share: fit, evaluate, predict, save, load, and the agreement of the ranks about them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn, TextIO, TypeVar

import numpy as np

from allreduce.arrays import dtypes
from allreduce.backend import AllReduce
from allreduce.errors import CopyError
from allreduce.keywords import known_only
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import combine, together
from trainers import stopwatch
from trainers.backends import UPDATES, compression_twice
from trainers.data import Batch, Batches, Collate
from trainers.errors import ArgumentError
from trainers.fit.checkpointing import make_saver
from trainers.fit.evaluation import evaluated, predicted
from trainers.fit.loop import Fit
from trainers.fit.prefetch import AHEAD, wanted
from trainers.group import NO_TARGETS, Ranks, gather_rows
from trainers.recovery.calls import Call, FitCall, Loss, Survival, refusal
from trainers.recovery.terminating import stops_at_sigterm
from trainers.replica import Hold, Replica, Rows
from trainers.state import backup
from trainers.state.checkpoints import Checkpoint
from trainers.watching.history import History
from trainers.watching.meter import Meter

TrainerT = TypeVar("TrainerT", bound="Trainer")
ResultT = TypeVar("ResultT")
UNTRACED = nullcontext()


class Trainer(Ranks, ABC):
    """Trains a replica together with the trainers of the other ranks of a topology.

    Every method is collective: all ranks call it with the same arguments. x and y are the whole data on
    every rank, arrays whose first axis is the sample; `fit` and `evaluate` take data sets too. Arguments that
    make no sense, and ranks that disagree about them, raise the same ArgumentError or DisagreementError on all.
    """

    steps_together = True  # whether ranks take every step together, so that checkpoints may be written between two
    mirrors = "step"  # after what all ranks have the same parameters: each "step", or each "epoch"
    divides_state = True  # whether ranks may have parts of the model's state that others lack, until this is closed
    tells_errors = True  # whether `_step` sees on all ranks, before it updates, that one of them has failed

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} can't be copied or pickled: its communicators belong to this process. "
            'Keep the model: `save("model.npz")` writes a file that loads on any number of ranks; '
            'fit(checkpoint=Checkpoint("run")) writes one from which the training goes on'
        )

    def __init__(self, replica: Replica, topology: Topology) -> None:
        self.replica = replica
        self.closed = self.cut_short = False  # cut_short: steps not taken together have ended before the epoch's last
        self.stop_training = False  # set by a callback, on any rank
        self.measured: Any = None  # what the last step returned
        self.trace: Trace | None = None  # while a callback records what is done
        self.steps = 0  # that were taken together
        self.losses: list[Loss] = []  # the ranks that were lost so far, the same on all ranks
        self._survival: Survival | None = None  # where a rank may be lost without the others
        self._communication = stopwatch.make(replica.device)
        self._connect(topology)
        replica.hold = Hold(self)

    @abstractmethod
    def _compute(self, batch: Batch | None) -> None:
        """Compute this rank's part of a step: the gradients of `batch`, or zeros. Local; may raise anything."""

    @abstractmethod
    def _step(self, flags: tuple[float, ...]) -> Any:
        """Train on one global batch, of which each rank has computed its part.

        The last flag says that a rank has failed: where a trainer `tells_errors` it updates nothing then.
        Returns the means over the global batch of the replica's metrics, and behind them the sums of the ranks'
        flags: the same bits on all ranks, of at least 32 bits a number, on the replica's device. Runs
        `_communication` while it waits for other ranks.
        """

    def _begin_fit(self) -> None:
        """A fit begins, of which nothing is done. Local."""

    def _run_epoch(self, fit: Fit, number: int) -> None:
        """Do this rank's part of the steps of epoch `number`. Errors that `fit.guarded` keeps are raised after it."""
        fit.together(number)

    def _end_epoch(self) -> dict[str, Any]:
        """All ranks have done the steps of an epoch, without an error; what they have to say of it. Collective."""
        return {}

    def _meter(self, batches: Batches) -> Any:
        """What measures the epochs of a fit, as a Meter does."""
        return Meter(self.replica.metrics, batches.sizes(), self.measured.dtype, self.replica.device)

    def _apart(self) -> dict[str, str]:
        """What of the replica's state is no copy of what other ranks have, by name, and why. Local."""
        return {}

    @property
    def _fresh_gradients(self) -> Any:
        """The gradients that this rank has computed in this step, 1-D, while they are not averaged; None for none."""
        return None

    @property
    def _fresh_rows(self) -> Sequence[Rows]:
        """For each of the replica's `tables` the sparse gradient of this rank and step, not averaged yet."""
        return ()

    @property
    def _sent(self) -> np.dtype:
        """The dtype in which gradients reach the other ranks. Local."""
        return dtypes.parse(self.replica.gradient_dtype)

    @property
    def _fresh_measured(self) -> Any:
        """This rank's part of the metrics of this step, and what is behind them, while they are not added up."""
        return self.measured

    def _choices(self) -> dict[str, str]:
        """What was chosen for this job, by name. Collective."""
        return {}

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

        def begin() -> Fit:
            rows = self._admit("fit", x, y, settings, collate)
            validate = None
            if validation_data is not None:
                validate = partial(self._evaluate, *self._admit_validation(validation_data, collate))
            self._mirror(whole=True)
            ahead = AHEAD if fetches_ahead else 0
            batches = Batches(*rows, batch_size, self.part, self.parts, seed, shuffle, ahead)
            saver = together(self._comm, partial(make_saver, self, batches, checkpoint, resume, validate is not None))
            return Fit(
                self,
                batches,
                epochs,
                validate=validate,
                callbacks=callbacks,
                fetches_ahead=fetches_ahead,
                progress=progress,
                stream=stream,
                saver=saver,
            )

        return self._call(FitCall(self, begin))

    def evaluate(self, x: Any, y: np.ndarray | None = None, collate: Collate | None = None) -> dict[str, float]:
        """The replica's metrics ("loss", "accuracy", ...), means over these rows; the ranks share the work.

        x, y, collate: all rows on every rank, arrays or a data set, as for `fit`.
        """
        return self._call(Call("evaluate", lambda: self._evaluate(*self._admit("evaluate", x, y, collate=collate))))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The replica's output for every row, in order, on every rank; the ranks share the work.

        For a NumpyNetwork: (rows, outputs) float32, probabilities with a cross-entropy loss.
        """
        return self._call(Call("predict", lambda: self._predict(x)))

    def save(self, path: str) -> None:
        """Write the model, with the optimizer's state, to exactly `path`, by rank 0. Raises ModelFileError.

        Collective, as all methods: every rank calls it, without an `if rank == 0`, and rank 0 alone writes.

        The file (.npz, no pickle) does not depend on the number of ranks; NumpyNetwork.load reads it without MPI.
        """
        self._call(Call("save", lambda: self._save(path)))

    def load(self, path: str) -> None:
        """Take on the model in `path`, which rank 0 reads and hands to all ranks. Raises ModelFileError."""
        self._call(Call("load", lambda: self._load(path)))

    def record(self, trace: Trace | None) -> None:
        """Record what this rank does in `trace` from now on, or, with None, no more. Local, on all ranks or on none."""
        self.trace = self._communication.trace = trace

    def span(self, kind: str) -> AbstractContextManager[None]:
        """What is done inside is "data", "compute", "update", ... in the trace, if there is one. Local."""
        return UNTRACED if self.trace is None else self.trace.span(kind)

    def parameters_sha256(self) -> list[str]:
        """The SHA-256 of every rank's parameters, by rank, the same on all ranks; mirrored replicas have equal ones."""
        return self._call(Call("parameters_sha256", self._parameters_sha256))

    def note_step(self) -> None:
        """A step was taken. Local."""
        self.steps += 1

    @property
    def goes_on(self) -> bool:
        """Whether the training goes on with the other ranks when one is lost."""
        return self._survival is not None and self._survival.goes_on

    @property
    def goes_back(self) -> bool:
        """Whether it does so from a checkpoint, since a lost rank has a part of the state that others lack."""
        return False

    def close(self) -> None:
        """Free what the trainer made; the replica stays usable. A lost rank meanwhile, or closing twice, is well."""
        if self.closed:
            return
        try:
            self._agree("close")
            self.closed = True
            self.topology.release(self._comm, self)
            self._close()
            if self._has_replica:
                self.replica.hold = Hold()
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.abandon()

    def abandon(self) -> None:
        """Let go of everything without the other ranks, who may be lost. Local; the replica stays usable."""
        self.closed = True

    def _close(self) -> None:
        """Free what a kind of trainer holds besides `_comm`."""

    def __enter__(self: TrainerT) -> TrainerT:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None or self._in_step(error):  # or else others may not come to a collective close
            self.close()

    def _call(self, call: Call[ResultT]) -> ResultT:
        """Make a call, which survives lost ranks where that is asked for. Collective."""
        try:
            self._check_open()
            return call.run() if self._survival is None else self._survival.run(call)
        finally:
            call.close()

    def surviving(self, action: Callable[[], ResultT]) -> ResultT:
        """What `action()` returns, a collective call of the user's own on this trainer's `topology`. Collective.

        Where the training goes on without lost ranks, this is made again by those that are left.
        """

        def run() -> ResultT:
            self._enter("surviving")  # a rank that came to another call is told now, not after a time-out
            return action()

        return self._call(Call("a call of the user's", run))

    def _predict(self, x: np.ndarray) -> np.ndarray:
        x, _ = self._admit("predict", x, NO_TARGETS)
        outputs = together(self._comm, lambda: predicted(self.replica, x, self.size, self.rank))
        gather_rows(self._comm, outputs)
        return outputs

    def _save(self, path: str) -> None:
        self._enter("save")
        self._complete()
        self._on_one(lambda: self.replica.save(path))

    def _load(self, path: str) -> None:
        self._enter("load")
        self._on_one(lambda: self.replica.restore(path))
        self._mirror(whole=False)

    def _evaluate(self, x: Any, y: np.ndarray | None) -> dict[str, float]:
        with np.errstate(all="ignore"):  # a model that has diverged has a loss that says so
            sums = together(self._comm, lambda: evaluated(self.replica, x, y, self.size, self.rank))
        combine(self._comm, sums, "add up an evaluation")
        return dict(zip(self.replica.metrics, (sums / len(x)).tolist(), strict=True))


class Arguments(NamedTuple):
    """The arguments of a MirroredTrainer; see there."""

    allreduce: str | AllReduce
    topology: Topology | None
    update: str
    compress: str | None
    copies: int
    on_failure: str | None

    def described(self, replica: Replica) -> str:
        """What must be alike on the ranks."""
        name = self.allreduce.name if isinstance(self.allreduce, AllReduce) else self.allreduce
        options = ", ".join(f"{field}={getattr(self, field)!r}" for field in self._fields[2:])
        return f"MirroredTrainer({type(replica).__name__}, {name!r}, {options})"

    def refused(self, ranks: Topology, replica: Replica, remakes: bool) -> Exception | None:
        """What makes no sense on this rank. Local.

        ranks: that train. remakes: whether the trainer makes its backend itself, whatever was given.
        """
        given, update = self.allreduce, self.update
        if error := replica_refusal(replica):
            return error
        if update not in UPDATES:
            return ArgumentError(f"update={update!r} is unknown; use one of {', '.join(UPDATES)}")
        if isinstance(given, AllReduce) and self.topology not in (None, given.topology):
            return ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
        if update != "sharded" and self.copies == 2:
            return ArgumentError(f'copies=2: with update="{update}" all ranks have everything; leave it out')
        return (
            compression_twice(given, self.compress)
            or backup.refusal(self.copies, ranks.size, self.on_failure == "continue")
            or refusal(self.on_failure, ranks, replica, None if remakes else given)
        )


def replica_refusal(replica: Replica) -> ArgumentError | None:
    """Why no trainer can be made on this replica now. Local."""
    if not isinstance(replica, Replica):
        found = replica if isinstance(replica, type) else type(replica)
        return ArgumentError(
            "a trainer takes a replica, such as NumpyNetwork(sizes), TorchReplica(module, loss, optimizer), "
            "JaxReplica(apply, loss, params, optimizer) or one of your own (trainers.replica.Replica), not "
            f"{found.__module__}.{found.__qualname__}"
        )
    trainer = replica.hold.trainer
    if trainer is None or trainer.closed or trainer.being_made or not trainer.divides_state:
        return None
    kind, holder = type(replica).__name__, type(trainer).__name__
    return ArgumentError(
        f"this {kind} has a {holder} already, in whose memory it is, and with it other ranks may have parts of its "
        f"state: close() that first, on all ranks (`with {holder}(...) as trainer:` does), or make another {kind}"
    )
