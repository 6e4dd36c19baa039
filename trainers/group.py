"""What a trainer does with the other ranks besides training: agree, and hand each other a state."""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.arrays.dtypes import BFLOAT16
from allreduce.errors import ClosedError, CommunicationError, DisagreementError, RankLeftError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.chunked import LARGEST, broadcast
from allreduce.transport.control import agree, everywhere, known, root_value, together
from allreduce.transport.wait import waiting
from trainers.data import Collate, Samples
from trainers.errors import ArgumentError, TrainerError
from trainers.replica import Replica
from trainers.state.pieces import Arrays

if TYPE_CHECKING:
    from trainers.trainer import Trainer


class Ranks:
    """The part of a trainer that knows who the ranks are. `_connect` is called again when a rank was lost."""

    replica: Replica
    topology: Topology
    rank: int
    size: int
    part: int | None  # which part of every batch this rank takes; None for none
    parts: int
    closed: bool
    being_made = False  # whether its constructor may have to be called again, since a rank was lost
    _comm: MPI.Intracomm
    _owns_backend = _owns_topology = False

    def _connect(self, topology: Topology) -> None:
        """Make what depends on the ranks. Collective; what was made on other ranks is dropped before."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self.part, self.parts = topology.rank, topology.size
        self._comm = topology.private(self)  # type: ignore[arg-type]

    def _unmake(self) -> None:
        """The constructor was interrupted by a loss, and is called again: let go of what others share. Local."""

    def _renumber(self, arguments: dict[str, Any], former: tuple[int, ...]) -> None:
        """Change the constructor's arguments that name ranks, for others. former: those that these had. Local."""

    def _reconnect(self, topology: Topology) -> None:
        """Make anew what depends on the ranks, after `_let_go_of_ranks`. Collective."""
        self._connect(topology)

    def _let_go_of_ranks(self) -> None:
        """Drop what was made on ranks of which some are lost, and keep what this rank has of the state. Local.

        May be called again when another rank is lost before `_restore` has ended.
        """
        self.topology.let_go(self)  # type: ignore[arg-type]
        self.replica.undo()  # a batch of a step that was not taken

    def _restore(self) -> bool:
        """All ranks take on the newest state and its `steps`; false when nobody has it whole. Collective."""
        raise NotImplementedError

    def _share_again(self) -> None:
        """All ranks have the same state: divide what they divide. Collective."""

    def _go_on(self) -> None:
        """All ranks have everything that they need to go on. Local."""

    # A state that ranks hold together

    def _whole(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A state of the replica with what other ranks have of it. Collective."""
        return state

    def _complete(self) -> None:
        """Have rank 0's replica hold its whole state. Collective."""

    def _snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A copy of the whole state on rank 0, in `memory` as of Replica.snapshot; of nothing elsewhere. Collective."""
        self._complete()
        return together(self._comm, lambda: self.replica.snapshot(memory) if self.rank == 0 else {})

    def _check_edits(self) -> None:
        """Raise, on this rank, when the replica was edited in a way that several ranks may have done."""

    def _settle(self) -> None:
        """The ranks have written the same parameters: go on when all have done so. Collective."""

    # Agreement

    def _admit(
        self, call: str, x: Any, y: Any, settings: dict[str, Any] | None = None, collate: Collate | None = None
    ) -> tuple[Any, Any]:
        """Arrays x and y, or Samples and None, when all ranks bring the same and it makes sense; or all raise."""
        self._check_open()
        data, row, error = look_at(self.replica, call, (x, y), settings or {}, collate)
        try:
            self._begin(row, error)
        except DisagreementError as differ:
            tell_who_divides(differ, row, settings or {})
            raise
        return data

    def _admit_validation(self, given: Any, collate: Collate | None) -> tuple[Any, Any]:
        pair = isinstance(given, tuple | list)
        x, y = given if pair and len(given) == 2 else (given, None)
        return self._admit("validation_data of fit", x, y, collate=None if pair else collate)

    def _enter(self, call: str) -> None:
        """Begin a method without data; a rank that came to another one is told instead of waited for."""
        self._check_open()
        self._begin(call)

    def _begin(self, row: str, error: Exception | None = None) -> None:
        """As `_agree`, at the begin of a method, to which some ranks may never come."""
        try:
            self._agree(row, error)
        except RankLeftError as left:
            tell_collective(left, row)
            raise

    def _agree(self, row: str, error: Exception | None = None) -> None:
        """Raise on all ranks an error of any, or that they differ. row: this rank's side in words. Collective."""
        try:
            agree(self._comm, [zlib.crc32(row.encode())], row, error)
        except DisagreementError as differ:
            tell_collective(differ, row)
            raise

    def _on_one(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; its error, whatever it is, is raised on all ranks."""
        together(self._comm, lambda: action() if self.rank == 0 else None)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed; make another to go on")
        if not self._has_replica:
            newer = type(self.replica.hold.trainer).__name__
            raise ClosedError(
                f"this {type(self).__name__} trains no more, since a {newer} was made on its replica; use that one"
            )

    @property
    def _has_replica(self) -> bool:
        """Whether no trainer was made on the replica since this one. Local."""
        return self.replica.hold.trainer is self

    def _in_step(self, error: BaseException) -> bool:
        """Whether all ranks leave a block by this error, so that they can go on together. Local."""
        return isinstance(error, Exception) and everywhere(error, self._comm) and ulfm.lost(error) is None

    def _parameters_sha256(self) -> list[str]:
        self._enter("parameters_sha256")
        parameters = np.ascontiguousarray(together(self._comm, self.replica.state)["parameters"])
        mine = np.frombuffer(hashlib.sha256(parameters.view(np.uint8).data).digest(), np.uint8)
        everyone = np.empty((self.size, mine.size), np.uint8)
        with waiting(self._comm, "parameters_sha256"):
            self._comm.Allgather(mine, everyone)
        return [each.tobytes().hex() for each in everyone]

    def _mirror(self, whole: bool = True) -> None:
        """Give all replicas the state of rank 0's, as `mirroring.mirror` does."""
        mirror(self, whole)  # type: ignore[arg-type]


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


def tell_collective(error: DisagreementError | RankLeftError, row: str) -> None:
    """Add to an error that calls are collective, where a rank has made another call, or none.

    row: this rank's side of the call in words.
    """
    text = str(error)
    if isinstance(error, RankLeftError):
        error.args = (f"{text}; {_name(row)} is collective: every rank calls it, without an `if rank == 0`",)
        return
    names = list(dict.fromkeys(_name(row) for row in re.findall(r"^  rank \d+: (.*)", text, re.MULTILINE)))
    if len(names) > 1:
        told = f"{' and '.join(names)} are collective: every rank calls them, in one order, without an `if rank == 0`"
        error.args = (f"{text}\n{told}",)


def _name(row: str) -> str:
    """The name of a call in words: "evaluate" of "evaluate: x float32[100, 64]"."""
    return re.split("[:,(]", row, maxsplit=1)[0].strip()


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


def mirror(trainer: "Trainer", whole: bool = True, root: int = 0) -> None:
    """Give all replicas the state of `root`'s. Collective; DisagreementError when they are different models.

    whole: collect first what of that state other ranks have; false when the root has just loaded all of it.
    """
    replica, comm = trainer.replica, trainer._comm
    if whole:
        together(comm, trainer._check_edits)
    config, held = together(comm, lambda: (json.dumps(replica.config(), sort_keys=True), replica.state()))
    state = {
        name: np.asarray(array, order="C") for name, array in sorted((trainer._whole(held) if whole else held).items())
    }
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in state.items())
    trainer._agree(f"model: {shapes}; {config}")
    state = sent(comm, state, root, f"take on the state of rank {root}")
    together(comm, lambda: replica.load_state(state) if comm.rank != root else None)
    trainer._settle()


# What `dtype.str` says of arrays of numbers, behind the order of bytes, and of texts, not of objects.
DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "V1", "V2"}
TEXTS = re.compile(r"[<>|=][SU]\d{1,7}")
MOST_AXES = 32
NAMED = {"bfloat16": BFLOAT16}  # by `dtype.name`: what `dtype.str` says of these is true of any two bytes


def gather_rows(comm: MPI.Intracomm, rows: np.ndarray) -> None:
    """Complete an array of which every rank has filled its chunk of rows, in place. Collective."""
    spans = [chunk(len(rows), comm.size, rank) for rank in range(comm.size)]
    counts, starts = [span.stop - span.start for span in spans], [span.start for span in spans]
    width = rows.itemsize * int(np.prod(rows.shape[1:]))
    row = MPI.BYTE.Create_contiguous(width).Commit()  # so that counts are rows, which keeps them small
    with waiting(comm, "gather the rows of a result"):
        comm.Allgatherv(MPI.IN_PLACE, [rows.reshape(-1).view(np.uint8), counts, starts, row])
    row.Free()


def sent(comm: MPI.Intracomm, state: dict[str, np.ndarray], root: int, what: str) -> dict[str, np.ndarray]:
    """The root's contiguous arrays, on all ranks; what the others bring is not looked at. Collective.

    CommunicationError on all ranks when these are told to be what no state has.
    """
    shapes = root_value(comm, [[name, _told(array.dtype), array.shape] for name, array in state.items()], what, root)
    if not described(shapes):
        raise known(CommunicationError(f"{what}: rank {root} has told of arrays that no state has"), comm)
    if comm.rank != root:
        state = {name: np.empty(shape, NAMED.get(dtype, dtype)) for name, dtype, shape in shapes}
    broadcast(comm, state.values(), root, what)
    return state


def _contiguous(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _told(dtype: np.dtype) -> str:
    return dtype.name if dtype.name in NAMED else dtype.str


def described(shapes: Any, most: int = LARGEST) -> bool:
    """Whether this, a JSON value, is [name, dtype, shape] of arrays of numbers or texts, of `most` bytes in all."""
    nbytes = 0
    for entry in shapes if isinstance(shapes, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 3 or not all(isinstance(word, str) for word in entry[:2]):
            return False
        shape = entry[2]
        dtype = NAMED.get(entry[1], entry[1])
        if entry[1] not in NAMED and entry[1][1:] not in DTYPES and not TEXTS.fullmatch(entry[1]):
            return False
        if not isinstance(shape, list) or len(shape) > MOST_AXES:
            return False
        if not all(type(length) is int and 0 <= length <= most for length in shape):
            return False
        nbytes += math.prod(max(1, length) for length in shape) * np.dtype(dtype).itemsize  # NumPy counts so too
    return nbytes <= most
