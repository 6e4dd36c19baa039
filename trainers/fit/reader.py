"""Reads a loader of the user: passes over it, its batches as Data, and the place where a later run goes on."""

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from trainers.data import (
    Collate,
    Data,
    as_data,
    generator_states,
    keeping_generators,
    kinds_of,
    load_generator_states,
    row_count,
    rows_error,
    structure_of,
    without_rows,
)
from trainers.errors import CheckpointError, DataError
from trainers.files import values
from trainers.fit import prefetch

END = object()
# A state is taken after every batch; less often if that would take more than one part in PAUSE of the time.
PAUSE = 20
# the methods by which a loader, or the iterator of a pass over it, gives its state and takes it
ACCESSORS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class Mark(NamedTuple):
    """A place before a batch of a loader.

    number: of the pass over the loader. ended: the pass before that one has ended, and this one has not begun.
    state: the loader's state at an earlier place of the pass, encoded (trainers.files.values); None for its beginning.
    skip: the batches between that place and this one.
    begun: `generator_states` when the pass began, because a loader may draw its order or a seed from them; else None.
    """

    number: int
    ended: bool
    state: np.ndarray | None
    skip: int
    begun: tuple[Any, ...] | None


class Reader:
    """Reads a loader. All methods are local.

    loader: an iterable of batches. collate: makes (x, y), or (x, y, weights), of a batch; None if it is such.
    ahead: whether a thread reads in advance. saves: whether `mark` will be called, which needs the loader's states.
    weigh: as for Batches.
    passes: passes over the loader that have begun. ended: whether the last one has ended.
    structure: of all batches: see data.structure_of; None before the first one.
    once: whether the loader is an iterator, which can't be read again.
    """

    def __init__(
        self,
        loader: Any,
        collate: Collate | None,
        ahead: bool = False,
        saves: bool = False,
        weigh: Callable[[Data], Data] | None = None,
    ) -> None:
        self.name = type(loader).__name__
        self.once = isinstance(loader, Iterator)
        self.passes, self.ended = 0, False
        self.structure: Any = None
        self._loader, self._collate, self._ahead, self._saves, self._weigh = loader, collate, ahead, saves, weigh
        self._stateful = _accessors(loader) is not None
        self._batches: Any = None  # of the pass that has begun: generator of (batch, the loader's state after it)
        self._state: np.ndarray | None = None  # the newest state
        self._skip = 0  # the batches since that state
        self._pending: np.ndarray | None = None  # an earlier run's state, which the next pass takes on
        self._begun: tuple[Any, ...] | None = None
        self._took = self._at = 0.0  # the seconds that the newest state took, and the time when it was taken

    def read(self, where: str, again: bool) -> Data | None:
        """Return the next batch with rows; None if the pass has ended. where: names the batch, for an error.

        Begins a pass if none has begun; at the end of one another one if `again`. Raises DataError, or CheckpointError
        if the loader's state can't be saved.
        """
        try:
            data = self._next()
            if data is None and again and not self.once:
                self.restart(self.passes)
                data = self._next()
        except CheckpointError:
            raise
        except Exception as error:
            reason = error if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(f"the {self.name} can't give {where}: {reason}") from error
        if data is None:
            return None
        structure = structure_of(data)
        if self.structure not in (None, structure):
            raise DataError(f"the {self.name} gave {shown(structure)} as {where}, and first {shown(self.structure)}")
        self.structure = structure
        return data

    def _next(self) -> Data | None:
        if self._batches is None and not self.ended:
            self.restart(self.passes)
        while not self.ended:
            item, state = next(self._batches, (END, None))
            self._skip += 1
            if state is not None:
                self._state, self._skip = state, 0
            if item is END:
                self._batches, self.ended = None, True
                self._state = self._state if self._stateful else None
                break
            data = self._converted(item)
            if row_count(data):
                return data
        return None

    def _converted(self, item: Any) -> Data:
        if self._collate is not None:
            item = self._collate(item)
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise DataError(f"a batch is a {type(item).__name__}, not a pair (x, y); pass collate= to make pairs")
        data = as_data(item, lists=True)
        if wrong := rows_error(data):
            raise DataError(wrong)
        return data if self._weigh is None else self._weigh(data)

    # Passes over the loader

    def restart(self, number: int) -> None:
        """Begin pass `number` from the loader's beginning. Raises an exception of any type."""
        self.stop()
        self._set_epoch(number)
        pending, self._pending = self._pending, None
        self._begin_after(number, pending)

    def stop(self) -> None:
        """End the pass over the loader, with the thread that reads it. An iterator of the user's stays open."""
        batches, self._batches = self._batches, None
        if not (self.ended and self._stateful):  # else the next pass begins at its state at the end of this one
            self._state = None
        self.ended = False
        if batches is not None:
            batches.close()

    def rewind(self) -> None:
        """Begin the loader's first pass with the next `read`."""
        self.stop()
        self.passes = 0

    def _set_epoch(self, number: int) -> None:
        parts = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for each in (self._loader, *parts, getattr(parts[1], "sampler", None)):
            if callable(change := getattr(each, "set_epoch", None)):
                change(number)

    def _begin(self, number: int, state: np.ndarray | None) -> None:
        """Begin pass `number`, at `state` if it is not None."""
        self._begun = generator_states() if self._saves else None
        if state is not None and self._stateful:
            self._load(self._loader, state)
        items = iter(self._loader)
        if state is not None and not self._stateful:
            self._load(items, state)
        self.passes, self._skip = number + 1, 0
        batches = self._with_states(items)
        self._batches = prefetch.ahead(batches) if self._ahead else batches

    def _with_states(self, items: Iterator[Any]) -> Generator[tuple[Any, np.ndarray | None]]:
        """Yield each batch, then END, with the loader's state after it, or None if that is not taken."""
        source = self._loader if self._stateful else items
        try:
            item: Any = None
            while item is not END:
                item = next(items, END)
                yield item, self._state_after(source, item is END)
        finally:
            if not self.once and isinstance(items, Generator):
                items.close()

    # States

    def _state_after(self, source: Any, at_end: bool) -> np.ndarray | None:
        accessors = _accessors(source)
        if not self._saves or accessors is None:
            return None
        begin = time.perf_counter()
        if at_end and not self._stateful:
            return None  # the next pass has another iterator
        if begin < self._at + PAUSE * self._took and not at_end:
            return None
        try:
            state = values.encode(accessors[0]())
        except TypeError as error:
            raise CheckpointError(
                f"the state of the {self.name} can't be in a checkpoint: {error}; let it have numbers, text, bytes, "
                "arrays and tensors only, or train without checkpoint="
            ) from error
        self._at = time.perf_counter()
        self._took = self._at - begin
        return state

    def _load(self, source: Any, state: np.ndarray) -> None:
        accessors = _accessors(source)
        if accessors is None:
            raise CheckpointError(
                f"the checkpoint has the state of a loader, and a {self.name} takes none: give the loader with which "
                "the checkpoint was written"
            )
        self._state = state
        try:
            accessors[1](values.decode(state))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the {self.name} can't take its state of the checkpoint: {reason}") from error

    def mark(self) -> Mark:
        """Return the place before the next batch."""
        if self._batches is None:
            return Mark(self.passes, self.ended, self._state, 0, None)
        return Mark(self.passes - 1, False, self._state, self._skip, self._begun)

    def go_to(self, mark: Mark, begins: bool) -> None:
        """Go to a place, of this run or an earlier one. begins: whether a pass that has not begun there begins. Raises
        an exception of any type, CheckpointError among them."""
        if mark.begun is not None:
            load_generator_states(mark.begun)
        if self.once and mark.state is None:
            self._go_on(mark)
            return
        self.ended = False
        self.stop()
        self._pending = None
        if mark.ended and not begins:
            self.ended, self.passes = True, mark.number
            self._state = self._pending = mark.state
            return
        self._set_epoch(mark.number)
        if mark.ended:
            self._begin_after(mark.number, mark.state)
        else:
            self._begin(mark.number, mark.state)
            self._pass_over(mark.skip)

    def _begin_after(self, number: int, state: np.ndarray | None) -> None:
        """Begin pass `number`. state: of an earlier run's loader at the end of the pass before it, or None."""
        drawn = None if state is None else self._draws_of_a_pass()
        self._begin(number, state)
        if drawn is not None:
            load_generator_states(drawn)

    def _draws_of_a_pass(self) -> tuple[Any, ...] | None:
        """Return `generator_states` after a pass has begun without a state, from which a loader may draw more numbers;
        leaves the generators as they are."""
        if not self._saves or self._ahead:
            return None
        with keeping_generators():
            iter(self._loader)
            return generator_states()

    def _go_on(self, mark: Mark) -> None:
        """Read an iterator up to a place."""
        if mark.ended:
            self.stop()
            self.ended = True
            return
        if self._batches is None:
            self.restart(mark.number)
        if self._state is not None or self._skip > mark.skip:
            raise self.error_of_once()
        self._pass_over(mark.skip - self._skip)

    def _pass_over(self, count: int) -> None:
        for number in range(count):
            item, state = next(self._batches, (END, None))
            if item is END:
                raise CheckpointError(
                    f"the {self.name} has ended after {number} batches of {count} that it has given before the "
                    "checkpoint: it is not the same loader"
                )
            self._skip += 1
            if state is not None:
                self._state, self._skip = state, 0

    def error_of_once(self) -> DataError:
        """Return the error if an iterator had to be read again."""
        return DataError(f"the {self.name} is an iterator and can't be read again from its beginning; give a loader")


def _accessors(source: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the methods that give and take the state of a loader or an iterator, None if it has none."""
    for names in ACCESSORS:
        get, take = (getattr(source, name, None) for name in names)
        if callable(get) and callable(take):
            return get, take
    return None


def shown(structure: Any, *sums: int) -> str:
    """Return the structure of batches, and checksums, as text."""
    return kinds_of(without_rows(structure)) + "".join(f" #{each:08x}" for each in sums)
