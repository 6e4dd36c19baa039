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
from trainers.errors import CheckpointError, DataError, explained
from trainers.files import values

END = object()
# A state is taken after every batch; less often if that would take more than one part in PAUSE of the time.
PAUSE = 20
# the methods by which a loader, or the iterator of a pass over it, gives its state and takes it
ACCESSORS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
PLACE = "cursor"  # the name of a place among the arrays of a checkpoint
Generators = tuple[Any, ...]  # of generator_states


class Place(NamedTuple):
    """A place before a batch of a loader.

    number: of the pass over the loader that has begun, or that begins next. ended: the pass before that one has ended,
        and this one has not begun.
    state: the loader's state at an earlier place of the pass, encoded (trainers.files.values); None for its beginning.
    skip: the batches between that place and this one. before_pass: whether the state is of the end of the pass before.
    begun: the random states when the pass began, because a loader may draw its order or a seed from them; else None.
    before: those before the batch was read; None if they are not known. now: those when the checkpoint was written;
        None if the batch had not been read by then.
    """

    number: int
    ended: bool = False
    state: np.ndarray | None = None
    skip: int = 0
    before_pass: bool = False
    begun: Generators | None = None
    before: Generators | None = None
    now: Generators | None = None

    def pack(self) -> dict[str, np.ndarray]:
        return {PLACE: values.encode(list(self))}

    @classmethod
    def unpack(cls, arrays: dict[str, np.ndarray]) -> "Place":
        """Return the place in the arrays of `pack`. Raises ValueError, KeyError or TypeError if they are damaged."""
        place = cls(*values.decode(arrays[PLACE]))
        number, skip = place.number, place.skip
        if not (type(number) is type(skip) is int and number >= 0 and skip >= 0 and type(place.ended) is bool):
            raise ValueError(f"batch {skip!r} of pass {number!r}")
        return place


class Reader:
    """Reads a loader. All methods are local.

    loader: an iterable of batches. collate: makes (x, y), or (x, y, weights), of a batch; None if it is such.
    saves: whether `tell` will be called, which needs the loader's states.
    weigh: as for Batches.
    structure: of all batches: see data.structure_of; None before the first one.
    once: whether the loader is an iterator, which can't be read again.
    """

    def __init__(
        self, loader: Any, collate: Collate | None, saves: bool = False, weigh: Callable[[Data], Data] | None = None
    ) -> None:
        self.name = type(loader).__name__
        self.once = isinstance(loader, Iterator)
        self.structure: Any = None
        self._loader, self._collate, self._saves, self._weigh = loader, collate, saves, weigh
        self._stateful = _accessors(loader) is not None
        self._items: Any = None  # of the pass that has begun: an iterator
        self._place = Place(0)  # before the next batch, with the newest state
        self._loads = False  # whether the loader has yet to take the state at which the next pass begins
        self._took = self._since = 0.0  # the seconds that the newest state took, and the time when it was taken

    def read(self, where: str, again: bool) -> Data | None:
        """Return the next batch with rows; None if the pass has ended. where: names the batch, for an error.

        Begins a pass if none has begun; at the end of one another one if `again`. Raises DataError, or CheckpointError
        if the loader's state can't be saved.
        """
        try:
            data = self._next()
            if data is None and again and not self.once:
                self.restart(self._place.number)
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
        if self._items is None and not self._place.ended:
            self.restart(self._place.number)
        while not self._place.ended:
            item = self._item()
            if item is END:
                self._close()
                self._place = Place(self._place.number + 1, True, self._place.state if self._stateful else None)
                break
            data = self._converted(item)
            if row_count(data):
                return data
        return None

    def _item(self) -> Any:
        """Return the next item of the pass, or END."""
        item = next(self._items, END)
        state = self._new_state(item is END)
        if state is None:
            self._place = self._place._replace(skip=self._place.skip + 1)
        else:
            self._place = self._place._replace(state=state, skip=0, before_pass=False)
        return item

    def _converted(self, item: Any) -> Data:
        if self._collate is not None:
            item = self._collate(item)
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise DataError(f"a batch is a {type(item).__name__}, not a pair (x, y); give a Loader(x, collate=...)")
        data = as_data(item, lists=True)
        if wrong := rows_error(data):
            raise DataError(wrong)
        return data if self._weigh is None else self._weigh(data)

    # Passes over the loader

    def restart(self, number: int) -> None:
        """Begin pass `number` from the loader's beginning. Raises an exception of any type."""
        self.stop()
        self._begin(number, self._place.state if number == self._place.number else None, before_pass=True)

    def stop(self) -> None:
        """End the pass over the loader. An iterator of the user's stays open."""
        # a pass that has not begun begins at the state at the end of the one before
        self._place = Place(self._place.number + 1) if self._items is not None else self._place._replace(ended=False)
        self._close()

    def _close(self) -> None:
        items, self._items = self._items, None
        if not self.once and isinstance(items, Generator):
            items.close()

    def _begin(self, number: int, state: np.ndarray | None, before_pass: bool) -> None:
        """Begin pass `number`, at `state` if it is not None. before_pass: whether it is of the end of the one before. A
        loader that has not read that pass may draw more random numbers here: the generators go on as if it had."""
        parts = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for each in (self._loader, *parts, getattr(parts[1], "sampler", None)):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(number)
        loaded, self._loads = state if self._loads else None, False
        drawn = None
        if loaded is not None and before_pass and self._saves:
            with keeping_generators():
                iter(self._loader)
                drawn = generator_states()
        begun = generator_states() if self._saves else None
        if loaded is not None and self._stateful:
            self._load(self._loader, loaded)
        items = iter(self._loader)
        if loaded is not None and not self._stateful:
            self._load(items, loaded)
        self._place, self._items = Place(number, False, state, 0, before_pass, begun), items
        if drawn is not None:
            load_generator_states(drawn)

    # States

    def _new_state(self, at_end: bool) -> np.ndarray | None:
        """Return the loader's state; None if it has none, or the newest one is so new that this would take too long."""
        accessors = _accessors(self._loader if self._stateful else self._items)
        if not self._saves or accessors is None or (at_end and not self._stateful):  # the next pass has a new iterator
            return None
        begin = time.perf_counter()
        if begin < self._since + PAUSE * self._took and not at_end:
            return None
        try:
            state = values.encode(accessors[0]())
        except TypeError as error:
            raise CheckpointError(
                f"the state of the {self.name} can't be in a checkpoint: {error}; or train without checkpoint="
            ) from error
        self._since = time.perf_counter()
        self._took = self._since - begin
        return state

    def _load(self, source: Any, state: np.ndarray) -> None:
        accessors = _accessors(source)
        if accessors is None:
            raise CheckpointError(
                f"the checkpoint has the state of a loader, and a {self.name} takes none: give the loader with which "
                "the checkpoint was written"
            )
        with explained(CheckpointError, f"the {self.name} can't take its state of the checkpoint"):
            accessors[1](values.decode(state))

    def tell(self) -> Place:
        """Return the place before the next batch."""
        return self._place._replace(before=generator_states() if self._saves else None)

    def seek(self, place: Place, begins: bool) -> None:
        """Go to a place, of this run or an earlier one. begins: whether a pass that has not begun there begins. Raises
        CheckpointError or DataError."""
        goes_on = place.begun is not None or (place.ended and not begins)  # else a pass begins here, and draws numbers
        begun = place.begun if goes_on else place.before
        wrong = f"the {self.name} can't read on where the checkpoint was written"
        with explained(DataError, wrong, passes=(CheckpointError, DataError)):
            if begun is not None:
                load_generator_states(begun)
            if self.once and place.state is None and (place.number or place.skip):
                raise self.error_of_once()
            self.stop()
            self._loads = place.state is not None
            if place.ended and not begins:
                self._place = Place(place.number, True, place.state)
            else:
                self._begin(place.number, place.state, before_pass=place.ended or place.before_pass)
                self._pass_over(place.skip)
            if goes_on and place.before is not None:
                load_generator_states(place.before)

    def _pass_over(self, count: int) -> None:
        for number in range(count):
            if self._item() is END:
                raise CheckpointError(
                    f"the {self.name} has ended after {number} batches of {count} that it has given before the "
                    "checkpoint: it is not the same loader"
                )

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
