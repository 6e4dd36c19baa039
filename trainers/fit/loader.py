"""The batches of a loader of the user's: any iterable of batches (x, y), the same on all ranks, or each rank's own."""

import logging
from collections.abc import Callable
from typing import Any

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
    part_slice,
    row_count,
    sliced,
    structure_of,
    without_rows,
)
from trainers.errors import ArgumentError, CheckpointError, DataError, explained
from trainers.fit.reader import Place, Reader, shown
from trainers.options.loader import DIVIDED, WHOLE

log = logging.getLogger("trainers")

NO_STRUCTURE = {"tuple": [["float32", []], ["float32", []]]}  # before any batch was read
KEPT = 3  # batches: the previous one, because a step is taken again after a failure; the current and the next one


class LoaderBatches(BatchSource):
    """The batches of a loader.

    Batch s of an epoch has the rows of the batches s of all ranks, until all loaders have ended. No rank knows the
    others' rows before they come, so each step carries the number of rows of the rank's next batch.

    loader: iterated once in each epoch; before that its `set_epoch`, or its sampler's, gets the number of the pass.
        None for a rank that brings no rows. rows, collate, limit: see Loader (rows, collate, steps); batches without
        rows are skipped. micro_batch, seed, weigh: as for Batches. saves: whether checkpoints will be written.
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
        micro_batch: int | None = None,
        seed: int = 0,
        weigh: Callable[[Data], Data] | None = None,
        saves: bool = False,
    ) -> None:
        self._loader, self.divided = loader, rows == DIVIDED
        self._reader = Reader(loader, collate, saves, weigh)
        self.limit = None if limit is None else int(limit)
        self._saves = saves
        self._taken = 0  # batches taken since the loader's first pass began, or with no limit since the last one
        self._epoch, self._start = 0, 0  # the epoch, and the steps before it
        self._read = 0  # the number of the epoch's batches that were read; -1 if `begin` goes to the right batch
        self._kept: dict[int, Data | None] = {}  # the last batches by their step, None after the end
        # if `saves`: their places by epoch and step, and the place of a checkpoint to which `begin` goes
        self._places: dict[tuple[int, int], Place] = {}
        self._sizes: list[int]  # as far as the ranks know them
        super().__init__([], part, parts, seed, micro_batch, weigh)
        self.length = _length_of(loader) if limit is None else limit

    def __str__(self) -> str:
        return "x of a loader"

    # What all ranks know

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self._sizes[-1]

    @property
    def planned(self) -> int | None:
        return self.limit

    @property
    def settings(self) -> dict[str, Any]:
        found = {"rows": DIVIDED if self.divided else WHOLE, "steps": self.limit, **super().settings}
        return found if self._micro_batch is None else found | {"seed": int(self._seed)}

    def lose_ranks(self) -> None:
        if self.divided:
            log.warning('trainers: rows="divided": the rows of the failed ranks are not trained on any more')

    def total(self, epoch: int, step: int) -> int:
        return self._start + step + (len(self._sizes) if epoch > self._epoch else 0)

    def learn(self, step: int, rows: int) -> None:
        del self._sizes[step:]
        self._sizes += [0] * (step - len(self._sizes)) + [rows] * (rows > 0)

    # The first batches of all ranks

    def first(self) -> Data | None:
        return None if self._idle else self._at(0)

    def meet(self, values: Callable[[Any, str], list[Any]]) -> None:
        data = self.first()
        own = None if data is None else [structure_of(data), *([] if self.divided else [checksum(data)])]
        everyone = values([own, self.length], "fit: the first batches of the ranks")
        described, lengths = zip(*everyone, strict=True)
        self.length = None if None in lengths else max(lengths) or None  # 0 is wrong: a rank has a batch
        given = [each for each in described if each is not None]
        if not given:
            raise no_batch_error(0)
        if any(each != given[0] for each in given):
            texts = ["no batch" if each is None else shown(*each) for each in described]
            what = "batches of other rows" if self.divided else 'other batches, and rows="whole" takes the same'
            raise ArgumentError(f"fit: the loaders of the ranks give {what}:\n{table(texts)}")
        self._reader.structure = given[0][0]

    # Reading

    @property
    def _idle(self) -> bool:
        """Whether this rank needs no rows."""
        return self._loader is None or self._part is None

    def begin(self, epoch: int, step: int) -> int:
        if epoch == self._epoch + 1:
            self._start, self._epoch = self.total(epoch, 0), epoch
            self._read = min(self._read, 0)  # a rank that has joined after the epoch before has read nothing
            self._kept.clear()
            self._places.clear()
            self._sizes = []
            self.seen.clear()
            if self.limit is None and not self._reader.once:
                self._reader.stop()
                self._taken = 0
        if epoch != self._epoch or (step not in self._kept and step != self._read):
            self._go_to(epoch, step)
        self.peek(step)
        return self.coming

    def peek(self, step: int) -> None:
        self.coming = 0 if self._idle else row_count(self._part_of(self._at(step), self._part))

    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        data = self._part_of(None if self._idle else self._at(step), part, parts)
        own = row_count(data)
        if step >= len(self._sizes):
            return Batch(data, own, float(own))
        total, seeds = self._sizes[step], self.seeds(epoch, step, self._sizes[step], part, parts)
        return Batch(data, total, own / total, seeds, cut(data, own, self._micro_batch or own) if seeds else ())

    def _part_of(self, data: Data | None, part: int | None, parts: int | None = None) -> Data:
        if data is None or part is None:
            return without_rows(self._reader.structure or NO_STRUCTURE)
        if self.divided:
            return data
        return sliced(data, part_slice(row_count(data), part, parts or self._parts, self._micro_batch))

    def _at(self, step: int) -> Data | None:
        """Return batch `step` of the epoch, None if the loader has ended before it. Raises DataError."""
        if step < self._read and step not in self._kept:  # after a failure
            self._go_to(self._epoch, step)
        while self._read <= step:
            number = self._read
            if self._saves:
                self._places[self._epoch, number] = self._reader.tell()
                self._places.pop((self._epoch, number - KEPT), None)
            within = self.limit is None or number < self.limit
            data = self._take(f"batch {number + 1} of epoch {self._epoch + 1}") if within else None
            sum = 0 if self.divided or data is None else checksum(data)
            self._kept[number], self.seen[number] = data, (0 if data is None else row_count(data), sum)
            self._kept.pop(number - KEPT, None)
            self._read += 1
        return self._kept[step]

    def _take(self, where: str) -> Data | None:
        data = self._reader.read(where, again=self.limit is not None)
        self._taken += data is not None
        return data

    # Places

    def depends_on_ranks(self, step: int, total: int) -> bool:
        return self.divided and (step if self.limit is None else total) > 0

    def tell(self, epoch: int, step: int) -> tuple[Any, dict[str, np.ndarray]]:
        shared, place = {"sizes": list(self._sizes)}, None
        if (epoch, step) in self._places:
            place = self._places[epoch, step]._replace(now=generator_states())
        elif self._read >= 0 and (epoch != self._epoch or step == self._read):  # its batch has not been read
            place = self._reader.tell()
        # else: this rank has joined and has read nothing, or has read on in a round of local SGD that a failure ended
        return shared, {} if place is None or self._idle else place.pack()

    def seek(self, epoch: int, step: int, total: int, shared: Any, own: dict[str, np.ndarray]) -> None:
        sizes: Any = shared.get("sizes") if isinstance(shared, dict) else None
        if not isinstance(sizes, list) or not all(type(rows) is int and rows >= 0 for rows in sizes):
            sizes = []
        if not 0 <= step <= total or len(sizes) < step:
            raise CheckpointError("the checkpoint does not tell the rows of the batches: it is damaged, or of arrays")
        target = None
        if own and not self._idle:
            try:
                target = Place.unpack(own)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    "the checkpoint is damaged, or of a former version: it does not tell the place of this rank in its "
                    f"loader ({error!r}); train again from the beginning, in another folder"
                ) from error
        self.how_resumed = ""
        if target is not None and target.state is not None:
            self.how_resumed = "the loaders continue from their states"
        elif not self._reader.once and (
            target.skip if target is not None else not self._idle and (step or (total and self.limit))
        ):
            self.how_resumed = "the loaders are read again up to there"
        if target is not None or (self._epoch, epoch, step) != (0, 0, 0) or self._read > 1:
            self._kept.clear()
            self._places = {} if target is None else {(epoch, step): target}
            self._read = -1
            self.seen.clear()
        self._epoch, self._start = epoch, total - step
        self._sizes = sizes[: step + 1] if step else []  # at an epoch's beginning they are those of the epoch before

    def _go_to(self, epoch: int, step: int) -> None:
        """Go to batch `step` of an epoch: to its place in the checkpoint, or by reading the loader again. Raises
        DataError or CheckpointError."""
        self._kept.clear()
        self._epoch, self._read = epoch, step
        target = self._places.pop((epoch, step), None)
        if self._idle:
            return
        reader, count = self._reader, step if self.limit is None else self._start + step
        if target is not None:
            reader.seek(target, begins=step == 0 and self.limit is None)
            self._taken = count
            self._at(step)  # with the random numbers with which it was read before
            if target.now is not None:
                load_generator_states(target.now)
            return
        if reader.once and self._taken > count:
            raise reader.error_of_once()
        with explained(DataError, f"the {reader.name} can't be read again"):
            if not reader.once:
                reader.restart(epoch if self.limit is None else 0)
                self._taken = 0
        while self._taken < count:
            if self._take(f"batch {self._taken + 1} of {count} that it has given before") is None:
                break

    def close(self) -> None:
        self._reader.stop()


def no_batch_error(epoch: int) -> DataError:
    return DataError(
        f"no rank's loader gives a batch in epoch {epoch + 1}: it has no rows, or is an iterator that has ended. "
        "Give a loader that can be iterated in every epoch, or an endless one and its steps"
    )


def _length_of(loader: Any) -> int | None:
    try:
        return 0 if loader is None else len(loader)
    except Exception:  # of a loader that leaves out, or forwards, its length
        return None
