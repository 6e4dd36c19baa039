"""What all trainers share: fit, evaluate, predict, save, load, and the agreement of the ranks about them."""

import hashlib
import json
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk, segments
from allreduce.errors import ClosedError
from allreduce.messages.agreement import agree, known, together
from allreduce.topology import Topology
from trainers.data import Batch, Batches
from trainers.errors import ArgumentError, DivergedError, TrainerError
from trainers.replica import Replica
from trainers.watching import stopwatch
from trainers.watching.history import Epoch, History
from trainers.watching.meter import Meter
from trainers.watching.progress import Progress

TrainerT = TypeVar("TrainerT", bound="Trainer")
FORWARD_ROWS = 1024  # rows that a replica evaluates or predicts at a time
MESSAGE_BYTES = 1 << 30  # an MPI count is a C int in Open MPI 5


class Trainer(ABC):
    """Trains a replica together with the trainers of the other ranks of a topology.

    Every method is collective: all ranks call it with the same arguments. x and y are the whole data on
    every rank, arrays whose first axis is the sample. Arguments that make no sense, and ranks that
    disagree about them, raise the same ArgumentError or DisagreementError on all ranks.
    """

    def __init__(self, replica: Replica, topology: Topology) -> None:
        self.replica = replica
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self.closed = False
        self._comm = topology.private(self)
        self._communication = stopwatch.make(replica.device)

    @abstractmethod
    def _step(self, batch: Batch) -> Any:
        """Train on one global batch, of which this rank has `batch`.

        Returns the means over the global batch of the replica's metrics, the same bits on all ranks, on
        the replica's device. Runs `_communication` while it waits for other ranks.
        """

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        epochs: int = 10,
        batch_size: int = 100,
        *,
        seed: int = 0,
        shuffle: bool = True,
        validation_data: tuple[np.ndarray, np.ndarray] | None = None,
        progress: bool = True,
    ) -> History:
        """Train for `epochs` passes over the data; the model of rank 0 is copied to all ranks first.

        batch_size: rows in a GLOBAL batch, divided among the ranks. It need not be divisible, and the last
            batch of an epoch may be short: gradients are weighted by samples, so that any number of
            ranks trains as one rank would.
        seed, shuffle: epoch e visits the rows in the order of data.order(rows, seed, e, shuffle).
        validation_data: (x, y), evaluated after each epoch.
        progress: print a line per epoch on rank 0, and on a terminal a bar.

        Raises DivergedError on all ranks when the loss becomes NaN or infinite.
        """
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        settings["validation_data"] = "none" if validation_data is None else "given"
        x, y = self._admit("fit", x, y, settings)
        if validation_data is not None:
            validation_data = self._admit("validation_data of fit", *validation_data)
        self._mirror()
        batches = Batches(x, y, batch_size, self.rank, self.size, seed, shuffle)
        meter = Meter(self.replica.metrics, batches.steps, self.replica.gradient_dtype, self.replica.device)
        shown = Progress(progress and self.rank == 0, batches.steps, epochs)
        history = History()
        try:
            for number in range(epochs):
                shown.begin(number + 1)
                with np.errstate(all="ignore"):  # the meter tells it better when the loss diverges
                    history.append(self._train(batches, number, meter, shown, validation_data))
                shown.end(history[-1])
        finally:
            shown.close()
        return history

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """The replica's metrics ("loss", "accuracy", ...), means over these rows; the ranks share the work."""
        return self._evaluate(*self._admit("evaluate", x, y))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The replica's output for every row, in order, on every rank; the ranks share the work.

        For a NumpyNetwork: (rows, outputs) float32, probabilities with a cross-entropy loss.
        """
        x, _ = self._admit("predict", x, None)
        mine = chunk(len(x), self.size, self.rank)
        parts = [self.replica.predict(x[part]) for part in segments(mine, FORWARD_ROWS)]
        like = parts[0] if parts else self.replica.predict(x[:0])
        outputs = np.empty((len(x), *like.shape[1:]), like.dtype)
        if parts:
            np.concatenate(parts, out=outputs[mine])
        self._gather_rows(outputs)
        return outputs

    def save(self, path: str) -> None:
        """Write the model, with the optimizer's state, to exactly `path`, by rank 0. Raises ModelFileError.

        The file (.npz, no pickle) does not depend on the number of ranks; NumpyNetwork.load reads it without MPI.
        """
        self._enter("save")
        self._on_one(lambda: self.replica.save(path))

    def load(self, path: str) -> None:
        """Take on the model in `path`, which rank 0 reads and hands to all ranks. Raises ModelFileError."""
        self._enter("load")
        self._on_one(lambda: self.replica.restore(path))
        self._mirror()

    def parameters_sha256(self) -> list[str]:
        """The SHA-256 of every rank's parameters, by rank, the same on all ranks; mirrored replicas have equal ones."""
        self._enter("parameters_sha256")
        parameters = np.ascontiguousarray(self.replica.state()["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((self.size, mine.size), np.uint8)
        self._comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def close(self) -> None:
        """Free what the trainer made; the replica stays usable. Closing twice does nothing."""
        if not self.closed:
            self.closed = True
            self.topology.release(self._comm, self)
            self._close()

    def _close(self) -> None:  # noqa: B027, a trainer may hold nothing else
        """Free what a kind of trainer holds besides `_comm`."""

    def __enter__(self: TrainerT) -> TrainerT:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    # Training

    def _train(
        self,
        batches: Batches,
        number: int,
        meter: Meter,
        shown: Progress,
        validation_data: tuple[np.ndarray, np.ndarray] | None,
    ) -> Epoch:
        """One epoch, and its evaluation."""
        self._communication.read()  # the rest of an epoch that an error has ended
        begin = time.perf_counter()
        for step, batch in enumerate(batches.epoch(number)):
            try:
                meter.note(step, self._step(batch), number + 1)
            except DivergedError as error:  # by the loss of the global batch, so every rank finds it in the same step
                raise known(error, self._comm) from None
            shown.advance()
        spent = np.array([time.perf_counter() - begin, self._communication.read()])
        self._comm.Allreduce(MPI.IN_PLACE, spent)
        seconds, communication = (spent / self.size).tolist()
        means = meter.means(batches.sizes())
        return Epoch(
            epoch=number + 1,
            loss=means.pop(self.replica.metrics[0]),
            metrics=means,
            seconds=seconds,
            samples_per_second=batches.rows / seconds,
            communication_share=communication / seconds,
            validation=self._evaluate(*validation_data) if validation_data else {},
        )

    def _evaluate(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        names = self.replica.metrics
        sums = np.zeros(len(names))
        with np.errstate(all="ignore"):  # a model that has diverged has a loss that says so
            for part in segments(chunk(len(x), self.size, self.rank), FORWARD_ROWS):
                values = self.replica.evaluate(x[part], y[part])
                sums += [float(value) for value in values]
        self._comm.Allreduce(MPI.IN_PLACE, sums)
        return dict(zip(names, (sums / len(x)).tolist(), strict=True))

    # Agreement

    def _admit(
        self, call: str, x: np.ndarray, y: np.ndarray | None, settings: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, Any]:
        """The data as arrays, when all ranks bring the same and it makes sense; an error on all ranks otherwise."""
        self._check_open()
        error: Exception | None = None
        row = ""
        try:
            x = np.asarray(x)
            y = None if y is None else np.asarray(y)
            row = _describe(call, x, y, settings or {})
            self._check_data(x, y, settings or {})
        except (TrainerError, ValueError, TypeError) as refused:
            error = refused if isinstance(refused, TrainerError) else ArgumentError(f"{call}: {refused}")
        self._agree(row, error)
        return x, y

    def _check_data(self, x: np.ndarray, y: np.ndarray | None, settings: dict[str, Any]) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
            value = settings.get(name, least)
            if not isinstance(value, int | np.integer) or value < least:
                raise ArgumentError(f"{name}={value!r} makes no sense: give an integer of at least {least}")
        if x.ndim == 0 or (y is not None and (y.ndim == 0 or len(x) != len(y))):
            shapes = f"x has shape {x.shape}" + ("" if y is None else f" and y has shape {y.shape}")
            raise ArgumentError(f"{shapes}; they must have one row for each sample, and as many of one as of the other")
        if y is not None and len(x) == 0:
            raise ArgumentError("there are no samples: x and y are empty")
        self.replica.check(x, y)

    def _enter(self, call: str) -> None:
        """Begin a method without data; a rank that came to another one is told instead of waited for."""
        self._check_open()
        self._agree(call)

    def _agree(self, row: str, error: Exception | None = None) -> None:
        agree(self._comm, [zlib.crc32(row.encode())], row, error)

    def _on_one(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; its error, whatever it is, is raised on all ranks."""
        together(self._comm, lambda: action() if self.rank == 0 else None)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed; make another to go on")

    # Communication

    def _mirror(self) -> None:
        """Give all replicas the state of rank 0's. Raises DisagreementError when they are different models."""
        replica = self.replica
        config, held = together(self._comm, lambda: (json.dumps(replica.config(), sort_keys=True), replica.state()))
        state = {name: np.asarray(array, order="C") for name, array in sorted(held.items())}
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in state.items())
        self._agree(f"model: {shapes}; {config}")
        for array in state.values():
            for piece in _pieces(array):
                self._comm.Bcast(piece)
        if self.rank:
            self.replica.load_state(state)

    def _gather_rows(self, rows: np.ndarray) -> None:
        """Complete an array of which every rank has filled its chunk of rows."""
        spans = [chunk(len(rows), self.size, rank) for rank in range(self.size)]
        counts, starts = [span.stop - span.start for span in spans], [span.start for span in spans]
        width = rows.itemsize * int(np.prod(rows.shape[1:]))
        row = MPI.BYTE.Create_contiguous(width).Commit()  # so that counts are rows, which keeps them small
        self._comm.Allgatherv(MPI.IN_PLACE, [rows.reshape(-1).view(np.uint8), counts, starts, row])
        row.Free()


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array's memory as bytes, in pieces that MPI can count."""
    memory = array.reshape(-1).view(np.uint8)
    for span in segments(slice(0, memory.size), MESSAGE_BYTES):
        yield memory[span]


def _describe(call: str, x: np.ndarray, y: np.ndarray | None, settings: dict[str, Any]) -> str:
    """What ranks must have in common: shapes, dtypes, settings, and a checksum of the first and the last row."""
    data = {"x": x} if y is None else {"x": x, "y": y}
    parts = [f"{name} {array.dtype}{list(array.shape)} {_checksum(array)}" for name, array in data.items()]
    return f"{call}: {', '.join(parts + [f'{name}={value}' for name, value in settings.items()])}"


def _checksum(array: np.ndarray) -> str:
    if array.ndim == 0 or len(array) == 0 or array.dtype.hasobject:
        return "empty"
    return f"#{zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes()):08x}"
