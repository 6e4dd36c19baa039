"""The batches of a loader of the user's: any iterable of batches (x, y), the same on all ranks, or each rank's own."""

import logging
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from trainers.data import (
    Batch,
    BatchSource,
    Collate,
    Data,
    Fingerprint,
    as_data,
    cut,
    kinds_of,
    leaves,
    micro_batches_of,
    row_count,
    rows_error,
    seed_of,
    sliced,
    structure_of,
    without_rows,
)
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit import prefetch

log = logging.getLogger("trainers")

DIVIDED, WHOLE = "divided", "whole"
NO_STRUCTURE = {"tuple": [["float32", []], ["float32", []]]}  # before any batch was read
KEPT = 3  # batches: the previous one, because a step is taken again after a failure; the current and the next one
END = object()


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
    ) -> None:
        self.name = type(loader).__name__
        self._loader, self._divided, self._collate = loader, rows == DIVIDED, collate
        self.limit, self.ahead = None if limit is None else int(limit), 0
        self._ahead, self._micro_batch, self._seed = ahead, micro_batch, seed
        self._once = isinstance(loader, Iterator)
        self._reader: Any = None  # the pass over the loader that has begun
        self._passes = 0  # passes over the loader that have begun
        self._taken = 0  # batches taken since the loader's first pass began, or with no limit since the last one
        self._epoch, self._read = 0, 0  # the epoch, and the number of its batches that were read
        self._kept: dict[int, Data | None] = {}  # the last batches, by their step
        self._starts = {0: 0}  # for each epoch, the steps before it
        self._sizes: list[int] = []  # rows of the epoch's global batches, as far as the ranks know them
        self._weigh = weigh
        self._structure: Any = None  # of all batches: see data.structure_of
        self._part, self._parts = part, parts

    def __str__(self) -> str:
        return f"{self.name}, rows={DIVIDED if self._divided else WHOLE}"

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

    def fingerprint(self) -> Fingerprint:
        return {}

    def set_part(self, part: int | None, parts: int) -> None:
        if self._divided and part == 0 and parts < self._parts:
            log.warning('trainers: rows="divided": the rows of the failed ranks are not trained on any more')
        self._part, self._parts = part, parts

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

    def describe(self) -> list[Any] | None:
        """Read the first batch. Returns the structure of its rows, and for rows="whole" checksums, as JSON types; None
        if there is none. Local. Raises DataError."""
        data = None if self._idle else self._at(0)
        if data is None:
            return None
        sums = [] if self._divided else [zlib.crc32(np.ascontiguousarray(each).tobytes()) for each in leaves(data)]
        return [structure_of(data), *sums]

    def first(self) -> Data | None:
        """Return the first batch, if there is one. Local, after `describe`."""
        return self._kept.get(0)

    def adopt(self, described: Sequence[list[Any] | None]) -> None:
        """Take `describe` of every rank. Raises the same ArgumentError or DataError on all ranks. Local."""
        given = [each for each in described if each is not None]
        if not given:
            raise self.empty(0)
        if any(each != given[0] for each in given):
            texts = ["no batch" if each is None else _shown(*each) for each in described]
            rows = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            what = "batches of other rows" if self._divided else 'other batches, and rows="whole" takes the same'
            raise ArgumentError("\n".join([f"fit: the loaders of the ranks give {what}:", *rows]))
        self._structure = given[0][0]

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
            self._epoch, self._read, self._sizes = epoch, 0, []
            self._kept.clear()
            if self.limit is None and not self._once:
                self._stop()
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

    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        """As BatchSource.share. If the ranks do not know the rows of the global batch, its `rows` and its `share` are
        the rows of this rank."""
        whole = None if self._idle else self._at(step)
        data = self._part_of(whole, part, parts)
        own = row_count(data)
        if step >= len(self._sizes):
            return Batch.of(data, own, float(own))
        total = self._sizes[step]
        if not (self._divided or self._idle) and total != (0 if whole is None else row_count(whole)):
            given = "none" if whole is None else str(row_count(whole))
            raise DataError(
                f'rows="whole": batch {step + 1} of epoch {epoch + 1} has {total} rows on all ranks together, and '
                f'{given} in the loader of this rank: all loaders must give the same batches; use rows="divided" for '
                "loaders that give each rank its own"
            )
        size = self._micro_batch
        if size is None:
            return Batch.of(data, total, own / total)
        seeds = tuple(seed_of(self._seed, epoch, step, number) for number in self._numbers(total, part))
        return Batch.of(data, total, own / total, seeds, cut(data, own, size))

    def _part_of(self, data: Data | None, part: int | None, parts: int | None = None) -> Data:
        if data is None or part is None:
            return without_rows(self._structure or NO_STRUCTURE)
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
        while self._read <= step:
            self._kept[self._read] = self._next()
            self._kept.pop(self._read - KEPT, None)
            self._read += 1
        return self._kept[step]

    def _next(self) -> Data | None:
        if self.limit is not None and self._read >= self.limit:
            return None
        return self._take(f"batch {self._read + 1} of epoch {self._epoch + 1}")

    def _take(self, where: str) -> Data | None:
        """Return the loader's next batch with rows, None if the loader has ended. where: names it. Raises DataError."""
        try:
            data = self._next_of_pass()
            if data is None and self.limit is not None and not self._once:
                self._reader = None
                data = self._next_of_pass()
        except Exception as error:
            reason = error if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(f"the {self.name} can't give {where}: {reason}") from error
        if data is None:
            return None
        structure = structure_of(data)
        if self._structure not in (None, structure):
            raise DataError(f"the {self.name} gave {_shown(structure)} as {where}, and first {_shown(self._structure)}")
        self._structure = structure
        self._taken += 1
        return data

    def _next_of_pass(self) -> Data | None:
        """Return the next batch with rows of this pass over the loader, None if there is none. Begins a pass if there
        is none."""
        if self._reader is None:
            self._restart(self._epoch if self.limit is None else self._passes)
        while (item := next(self._reader, END)) is not END:
            data = self._converted(item)
            if row_count(data):
                return data
        return None

    def _restart(self, number: int) -> None:
        """Begin pass `number` over the loader."""
        self._stop()
        parts = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for each in (self._loader, *parts, getattr(parts[1], "sampler", None)):
            if callable(change := getattr(each, "set_epoch", None)):
                change(number)
        items = iter(self._loader)
        self._reader = prefetch.ahead(items) if self._ahead else items
        self._passes = number + 1
        if self.limit is None:
            self._taken = 0

    def _converted(self, item: Any) -> Data:
        if self._collate is not None:
            item = self._collate(item)
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise DataError(f"a batch is a {type(item).__name__}, not a pair (x, y); pass collate= to make pairs")
        data = as_data(item, lists=True)
        if wrong := rows_error(data):
            raise DataError(wrong)
        return data if self._weigh is None else self._weigh(data)

    # Positions

    def position(self) -> dict[str, Any]:
        return {"sizes": list(self._sizes)}

    def depends_on_ranks(self, step: int, total: int) -> bool:
        return self._divided and (step if self.limit is None else total) > 0

    def resume(self, epoch: int, step: int, total: int, position: Any) -> None:
        sizes: Any = position.get("sizes") if isinstance(position, dict) else None
        if not isinstance(sizes, list) or not all(type(rows) is int and rows >= 0 for rows in sizes):
            sizes = []
        if not 0 <= step <= total or len(sizes) < step:
            raise CheckpointError("the checkpoint does not tell the rows of the batches: it is damaged, or of arrays")
        if (self._epoch, epoch, step) != (0, 0, 0) or self._read > 1:  # the first batch has been read
            self._kept.clear()
            self._read = -1  # `begin` goes to the right batch
        self._epoch, self._starts = epoch, {epoch: total - step}
        self._sizes = sizes[: step + 1] if step else []  # at an epoch's beginning they are those of the epoch before

    def _go_to(self, epoch: int, step: int) -> None:
        """Read the loader again up to batch `step` of an epoch. Raises DataError."""
        self._kept.clear()
        self._epoch, self._read = epoch, step
        target = step if self.limit is None else self._starts[epoch] + step
        if self._idle:
            return
        if self._once and self._taken > target:
            raise DataError(f"the {self.name} is an iterator and can't be read again from its beginning; give a loader")
        if not self._once:
            self._restart(epoch if self.limit is None else 0)
            self._taken = 0
        while self._taken < target:
            if self._take(f"batch {self._taken + 1} of {target} that it has given before") is None:
                break

    def _stop(self) -> None:
        """End the pass over the loader, with the thread that reads it. An iterator of the user's stays open."""
        reader, self._reader = self._reader, None
        if isinstance(reader, Generator) and (self._ahead or not self._once):
            reader.close()

    def close(self) -> None:
        self._stop()


def _shown(structure: Any, *sums: int) -> str:
    return kinds_of(without_rows(structure)) + "".join(f" #{each:08x}" for each in sums)
