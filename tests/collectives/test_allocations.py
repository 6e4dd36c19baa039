"""The registered arrays of a compressing backend: slices, parts, error feedback, call counts, and their state."""

import numpy as np
import pytest

from allreduce import Part
from allreduce.errors import OptionError
from allreduce.memory.allocations import Allocations


def registry_of(*arrays: np.ndarray) -> Allocations:
    registry = Allocations()
    for array in arrays:
        registry.describe(array)
    return registry


def test_slices_are_found_by_their_address() -> None:
    first, second = np.zeros(100, "float32"), np.zeros(50, "float64")
    registry = registry_of(first, second)
    found = registry.find(first[10:30])
    assert found is not None
    assert (found.start, found.length, found.entry.length) == (10, 20, 100)
    assert registry.find(first[100:]) is not None  # no elements, at the end
    assert registry.find(second) is not None
    assert registry.find(np.zeros(5, "float32")) is None
    assert registry.find(first.view("float64")) is None
    assert registry.find(first.view("uint8")[1:41].view("uint8")) is None


def test_the_place_of_shared_memory_is_that_of_the_array_as_it_is_now() -> None:
    registry, memory = Allocations(), np.zeros(100, "float32")
    number = registry.add(memory[:50], ranks=2).number
    array, later = memory[10:20], memory[20:30]
    assert [registry.place(each) for each in (array, later, array)] == [(number, 40), (number, 80), (number, 40)]
    registry.describe(array, [Part("w", 0, (2, 5))])
    described = registry.place(array)
    assert described is not None
    assert described[0] != number  # of other parameters now
    assert registry.place(memory[10:20]) == described
    del array
    for start in range(200):  # objects at the addresses of freed ones
        assert registry.place(memory[start % 40 : 50]) == (described[0], 4 * (start % 40))


def test_parts_of_a_slice() -> None:
    array = np.zeros(30, "float32")
    registry = registry_of(array)
    registry.describe(array, [Part("w", 0, (4, 5)), Part("b", 20, (4,)), Part("none", 24, (0,)), Part("s", 24, ())])

    def parts(start: int, stop: int) -> list[Part]:
        found = registry.find(array[start:stop])
        assert found is not None
        return found.parts

    assert parts(0, 30) == [Part("w", 0, (4, 5)), Part("b", 20, (4,)), Part("none", 24, (0,)), Part("s", 24, ())]
    assert parts(20, 24) == [Part("b", 0, (4,))]
    assert parts(18, 22) == [Part("w", 0, (2,)), Part("b", 2, (2,))]  # cut: no matrix any more
    registry.describe(array[:20], [Part("other", 0, (20,))])
    assert parts(0, 24) == [Part("other", 0, (20,)), Part("b", 20, (4,))]


@pytest.mark.parametrize("part", [Part("w", 8, (3,)), Part("w", 0, (5, 3))])
def test_parts_that_do_not_fit(part: Part) -> None:
    array = np.zeros(10, "float32")
    with pytest.raises(OptionError, match="'w' is elements"):
        registry_of(array).describe(array, [part])
    with pytest.raises(OptionError, match="overlaps"):
        registry_of(array).describe(array, [Part("v", 0, (5,)), Part("w", 4, (2,))])
