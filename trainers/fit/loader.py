"""The batches of a loader of the user's: any iterable of batches (x, y), the same on all ranks, or each rank's own."""

import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np

from allreduce.transport.tables import table
from trainers.data import (
    Batch,
    BatchSource,
    Collate,
    Data,
    checksum,
    cut,
    generator_states,
    load_generator_states,
    micro_batches_of,
    row_count,
    seed_of,
    sliced,
    structure_of,
    without_rows,
)
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.files import values
from trainers.fit.reader import Mark, Reader, shown

log = logging.getLogger("trainers")

DIVIDED, WHOLE = "divided", "whole"
NO_STRUCTURE = {"tuple": [["float32", []], ["float32", []]]}  # before any batch was read
KEPT = 3  # batches: the previous one, because a step is taken again after a failure; the current and the next one
PLACE, STATE, GENERATORS = "place", "state", "generators"  # the names of a rank's own arrays in a checkpoint


class Place(NamedTuple):
    """The place of a step in this rank's loader. before: `generator_states` before its batch was read; None if they are
    not known. now: those when the checkpoint was written; None if the batch had not been read by then."""

    mark: Mark
    before: tuple[Any, ...] | None = None
    now: tuple[Any, ...] | None = None


class LoaderBatches(BatchSource):
    """The batches of a loader.

    Batch s of an epoch has the rows of the batches s of all ranks. A rank whose loader has ended brings empty batches,
    until all loaders have ended; that ends the epoch. No rank knows the others' rows before they come, so each step
    carries the number of rows of the rank's next batch.

    loader: iterated once in each epoch; before that its `set_epoch`, or its sampler's, gets the number of the pass.
        None for a rank that brings no rows.
    rows: "divided": each rank's loader has other rows. "whole": all loaders give the same batches, and each rank takes
        its part of them.
    collate: makes (x, y), or (x, y, weights), of an item of the loader; None if its items are such. Batches without
        rows are skipped.
    limit: the steps of an epoch. The loader is then read on in the next epoch, and from its beginning when it ends.
    ahead: how many batches a thread may fetch in advance. micro_batch, seed, weigh: as for Batches.
    saves: whether checkpoints will be written.
    """

    streams = True

    def __init__(
        self,
        loader: Any,
        rows: str,
        collate: Collate | None,
        limit: int | None,
        part: int | None,
        parts: int,
        ahead: int,
        micro_batch: int | None = None,
        seed: int = 0,
        weigh: Callable[[Data], Data] | None = None,
        saves: bool = False,
    ) -> None:
        self._loader, self._divided = loader, rows == DIVIDED
        self._reader = Reader(loader, collate, ahead > 0, saves, weigh)
        self.limit, self.ahead = None if limit is None else int(limit), 0
        self._micro_batch, self._seed, self._weigh = micro_batch, seed, weigh
        self._taken = 0  # batches taken since the loader's first pass began, or with no limit since the last one
        self._epoch, self._read = 0, 0  # the epoch, and the number of its batches that were read
        self._kept: dict[int, Data | None] = {}  # the last batches, by their step
        self._starts = {0: 0}  # for each epoch, the steps before it
        self._own_rows: list[
            int
        ] = []  # rows of the epoch's batches of this rank, as far as they were read; 0 at the end
        self._fingerprints: dict[int, int] = {}  # of the epoch's batches that were read, if all ranks read the same
        self._sizes: list[int] = []  # rows of the epoch's global batches, as far as the ranks know them
        self._part, self._parts = part, parts
        self._saves, self._keeps_generators = saves, saves and not ahead  # a thread draws at any time
        self._places: dict[int, Place] = {}  # of the kept batches, by their step, if `saves`
        self._saved: dict[tuple[int, int], Place] = {}  # of the last checkpoints, by epoch and step
        self._loaded: Place | None = None  # of the checkpoint that was loaded
        self._target: Place | None = None  # the place to which `begin` goes

    def __str__(self) -> str:
        return "x of a loader"

    # What all ranks know

    @property
    def steps(self) -> int:  # type: ignore[override]
        return len(self._sizes)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return sum(self._sizes)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self._sizes[-1]

    @property
    def planned(self) -> int | None:
        return self.limit

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": DIVIDED if self._divided else WHOLE, "steps_per_epoch": self.limit}
        found["class_weight"] = None if self._weigh is None else str(self._weigh)
        micro = {} if self._micro_batch is None else {"micro_batch": int(self._micro_batch), "seed": int(self._seed)}
        return found | micro

    def set_part(self, part: int | None, parts: int) -> None:
        self._part, self._parts = part, parts

    def lose_ranks(self) -> None:
        if self._divided:
            log.warning('trainers: rows="divided": the rows of the failed ranks are not trained on any more')

    def sizes(self) -> np.ndarray:
        return np.array(self._sizes, np.int64)

    def total(self, epoch: int, step: int) -> int:
        if epoch == self._epoch + 1:
            return self._starts[self._epoch] + len(self._sizes) + step
        return self._starts.get(epoch, 0) + step

    def learn(self, step: int, rows: int) -> None:
        del self._sizes[step:]
        self._sizes += [0] * (step - len(self._sizes)) + [rows] * (rows > 0)

    # The first batches of all ranks

    def first(self) -> Data | None:
        return None if self._idle else self._at(0)

    def meet(self, values: Callable[[Any, str], list[Any]]) -> None:
        data = self.first()
        own = None if data is None else [structure_of(data), *([] if self._divided else [checksum(data)])]
        described = values(own, "fit: the first batches of the ranks")
        given = [each for each in described if each is not None]
        if not given:
            raise self.empty(0)
        if any(each != given[0] for each in given):
            texts = ["no batch" if each is None else shown(*each) for each in described]
            what = "batches of other rows" if self._divided else 'other batches, and rows="whole" takes the same'
            raise ArgumentError(f"fit: the loaders of the ranks give {what}:\n{table(texts)}")
        self._reader.structure = given[0][0]

    def empty(self, epoch: int) -> DataError:
        """Return the error if no rank has a batch in an epoch."""
        return DataError(
            f"no rank's loader gives a batch in epoch {epoch + 1}: it has no rows, or is an iterator that has ended. "
            "Give a loader that can be iterated in every epoch, or an endless one and steps_per_epoch"
        )

    # Reading

    @property
    def _idle(self) -> bool:
        """Whether this rank needs no rows."""
        return self._loader is None or self._part is None

    def begin(self, epoch: int, step: int) -> int:
        if epoch == self._epoch + 1:
            self._starts[epoch] = self._starts[self._epoch] + len(self._sizes)
            nowhere = self._read < 0  # this rank has joined after the last batch of the epoch before
            self._epoch, self._read, self._sizes = epoch, 0, []
            self._kept.clear()
            self._places.clear()
            self._fingerprints.clear()
            if self.limit is None and not self._reader.once:
                self._reader.stop()
                self._taken = 0
            if nowhere:
                self._go_to(epoch, step)
        elif epoch != self._epoch or (step not in self._kept and step != self._read):
            self._go_to(epoch, step)
        self.peek(step)
        return self.coming

    def peek(self, step: int) -> None:
        self.coming = 0
        if not self._idle:
            self.coming = row_count(self._part_of(self._at(step), self._part))

    def epoch(self, number: int, first: int = 0) -> Generator[Batch]:
        while True:
            yield self.share(number, first, self._part)
            first += 1

    @property
    def divided(self) -> bool:
        return self._divided

    def part_of(self, step: int, part: int | None) -> Batch | None:
        whole = None if self._idle else self._at(step)
        if whole is None:
            return None
        data, rows = self._part_of(whole, part), row_count(whole)
        return Batch.of(data, rows, row_count(data) / rows)

    def finish(self, steps: int) -> None:
        while not (self._divided or self._idle) and self._read <= steps:
            self._at(self._read)

    @property
    def own_rows(self) -> list[int]:
        return [rows for rows in self._own_rows if rows]

    @property
    def fingerprints(self) -> dict[int, int] | None:
        return None if self._divided or self._idle else self._fingerprints

    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        """As BatchSource.share. If the ranks do not know the rows of the global batch, its `rows` and its `share` are
        the rows of this rank."""
        whole = None if self._idle else self._at(step)
        data = self._part_of(whole, part, parts)
        own = row_count(data)
        if step >= len(self._sizes):
            return Batch.of(data, own, float(own))
        total = self._sizes[step]
        size = self._micro_batch
        if size is None:
            return Batch.of(data, total, own / total)
        seeds = tuple(seed_of(self._seed, epoch, step, number) for number in self._numbers(total, part))
        return Batch.of(data, total, own / total, seeds, cut(data, own, size))

    def _part_of(self, data: Data | None, part: int | None, parts: int | None = None) -> Data:
        if data is None or part is None:
            return without_rows(self._reader.structure or NO_STRUCTURE)
        if self._divided:
            return data
        rows, parts = row_count(data), parts or self._parts
        mine = slice(*(rows * each // parts for each in (part, part + 1)))
        if self._micro_batch is not None:
            numbers = self._numbers(rows, part)
            mine = slice(numbers.start * self._micro_batch, numbers.stop * self._micro_batch)
        return sliced(data, mine)

    def _numbers(self, rows: int, part: int | None) -> range:
        """Return the micro-batches of a batch of `rows` rows that a part gets."""
        assert self._micro_batch is not None
        return range(0) if part is None else micro_batches_of(-(-rows // self._micro_batch), part, self._parts)

    def _at(self, step: int) -> Data | None:
        """Return batch `step` of the epoch, None if the loader has ended before it. Raises DataError."""
        if step < self._read and step not in self._kept:  # after a failure
            self._go_to(self._epoch, step)
        while self._read <= step:
            if self._saves:
                self._places[self._read] = self._place()
            data = self._kept[self._read] = self._next()
            self._own_rows[self._read :] = [0 if data is None else row_count(data)]
            if not self._divided:
                self._fingerprints[self._read] = 0 if data is None else checksum(data)
            self._kept.pop(self._read - KEPT, None)
            self._places.pop(self._read - KEPT, None)
            self._read += 1
        return self._kept[step]

    def _place(self) -> Place:
        return Place(self._reader.mark(), generator_states() if self._keeps_generators else None)

    def _next(self) -> Data | None:
        if self.limit is not None and self._read >= self.limit:
            return None
        return self._take(f"batch {self._read + 1} of epoch {self._epoch + 1}")

    def _take(self, where: str) -> Data | None:
        data = self._reader.read(where, again=self.limit is not None)
        self._taken += data is not None
        return data

    # Positions

    def position(self) -> dict[str, Any]:
        return {"sizes": list(self._sizes)}

    def depends_on_ranks(self, step: int, total: int) -> bool:
        return self._divided and (step if self.limit is None else total) > 0

    @property
    def alike(self) -> bool:
        return not self._divided

    def own_state(self, epoch: int, step: int) -> dict[str, np.ndarray]:
        if self._idle:
            return {}
        place = self._target or (self._places.get(step) if epoch == self._epoch else None)
        if place is None:
            if epoch == self._epoch and step != self._read:
                return {}  # this rank has read on, in a round of local SGD that a failure has ended
            place = self._place()  # its batch has not been read
        elif self._keeps_generators:
            place = place._replace(now=generator_states())
        self._saved[epoch, step] = place
        while len(self._saved) > KEPT:
            del self._saved[next(iter(self._saved))]
        return _as_arrays(place)

    def load_own_state(self, state: dict[str, np.ndarray]) -> None:
        self._loaded = None if not state or self._idle else _place_of(state)

    def resume(self, epoch: int, step: int, total: int, position: Any) -> None:
        sizes: Any = position.get("sizes") if isinstance(position, dict) else None
        if not isinstance(sizes, list) or not all(type(rows) is int and rows >= 0 for rows in sizes):
            sizes = []
        if not 0 <= step <= total or len(sizes) < step:
            raise CheckpointError("the checkpoint does not tell the rows of the batches: it is damaged, or of arrays")
        target = self._target = self._saved.get((epoch, step), self._loaded)
        self._loaded, self.how_resumed = None, ""
        if target is not None and target.mark.state is not None:
            self.how_resumed = "the loaders continue from their states"
        elif target.mark.skip if target is not None else not self._idle and (step or (total and self.limit)):
            self.how_resumed = "the loaders are read again up to there"
        if self._target is not None or (self._epoch, epoch, step) != (0, 0, 0) or self._read > 1:
            self._kept.clear()
            self._places.clear()
            self._read = -1  # `begin` goes to the right batch
        self._epoch, self._starts = epoch, {epoch: total - step}
        self._fingerprints.clear()
        self._sizes = sizes[: step + 1] if step else []  # at an epoch's beginning they are those of the epoch before

    def _go_to(self, epoch: int, step: int) -> None:
        """Go to batch `step` of an epoch: to its place in the checkpoint, or by reading the loader again. Raises
        DataError or CheckpointError."""
        self._kept.clear()
        self._places.clear()
        self._epoch, self._read = epoch, step
        target, self._target = self._target, None
        if self._idle:
            return
        if target is not None:
            self._go_to_place(target, step)
            return
        reader, count = self._reader, step if self.limit is None else self._starts[epoch] + step
        if reader.once and self._taken > count:
            raise reader.error_of_once()
        try:
            if not reader.once:
                reader.restart(epoch if self.limit is None else 0)
                self._taken = 0
        except Exception as error:
            raise DataError(f"the {reader.name} can't be read again: {type(error).__name__}: {error}") from error
        while self._taken < count:
            if self._take(f"batch {self._taken + 1} of {count} that it has given before") is None:
                break

    def _go_to_place(self, place: Place, step: int) -> None:
        """Go to a place, and read batch `step` from there, with the random numbers with which it was read before."""
        reader, mark, begins = self._reader, place.mark, step == 0 and self.limit is None
        goes_on = mark.begun is not None or (mark.ended and not begins)  # else a pass begins here, and may draw numbers
        try:
            reader.go_to(mark if goes_on else mark._replace(begun=place.before), begins)
            if goes_on and place.before is not None:
                load_generator_states(place.before)
        except (CheckpointError, DataError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"the {reader.name} can't read on where the checkpoint was written: {reason}") from error
        self._taken = (0 if self.limit is None else self._starts[self._epoch]) + step
        self._at(step)
        if place.now is not None:
            load_generator_states(place.now)

    def close(self) -> None:
        self._reader.stop()


def _as_arrays(place: Place) -> dict[str, np.ndarray]:
    """Return a place as arrays for a checkpoint; equal states of the generators only once."""
    mark, found = place.mark, {} if place.mark.state is None else {STATE: place.mark.state}
    drawn = [None if each is None else values.encode(each) for each in (mark.begun, place.before, place.now)]
    different = list({each.tobytes(): each for each in drawn if each is not None}.values())
    numbers = [None if each is None else _index(different, each) for each in drawn]
    found |= {f"{GENERATORS}{number}": each for number, each in enumerate(different)}
    return found | {PLACE: values.encode([mark.number, mark.ended, mark.skip, numbers])}


def _index(arrays: list[np.ndarray], wanted: np.ndarray) -> int:
    return next(number for number, each in enumerate(arrays) if np.array_equal(each, wanted))


def _place_of(arrays: dict[str, np.ndarray]) -> Place:
    """Return the place in the arrays of `_as_arrays`. Raises ValueError, KeyError or TypeError if they are damaged."""
    number, ended, skip, numbers = values.decode(arrays[PLACE])
    begun, before, now = (
        None if each is None else values.decode(arrays[f"{GENERATORS}{int(each)}"]) for each in numbers
    )
    if not (type(number) is type(skip) is int and number >= 0 and skip >= 0 and type(ended) is bool):
        raise ValueError(f"batch {skip!r} of pass {number!r}")
    return Place(Mark(number, ended, arrays.get(STATE), skip, begun), before, now)
