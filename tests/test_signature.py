"""Words by which other ranks know a call: one for each call, and told in words again."""

import itertools

import numpy as np

from allreduce.arrays import signature as signatures
from allreduce.arrays.ops import OPS
from allreduce.arrays.signature import ALLOCATED, FOREIGN, NUMBER, Signature


def test_a_word_is_read_as_what_it_was_made_of() -> None:
    choices = itertools.product((1, 70_000, 2**40 - 1), ("float32", "uint8", "int64"), OPS, (FOREIGN, ALLOCATED), "CF")
    made = [Signature(length, np.dtype(dtype), *rest, "all_reduce") for length, dtype, *rest in choices]
    words = [signatures.word(each, OPS[each.op]) for each in made]
    assert [signatures.unpacked(word | NUMBER) for word in words] == [str(each) for each in made]
    assert min(words) > 0
    assert max(words) < 2**63


def test_calls_that_move_arrays_have_words_too() -> None:
    made = [Signature(length, np.dtype("int32"), "sum", FOREIGN, "C", "broadcast") for length in (1, 2, 70_000)]
    words = {signatures.move_word(each, root) for each in made for root in range(3)}
    assert len(words) == 9
    for word in words:
        assert 0 < word < 2**63
        assert signatures.unpacked(word | 3).startswith("broadcast, perhaps of another length")


def test_ranks_that_are_in_no_such_call() -> None:
    assert signatures.unpacked(0) == "no call"
    assert signatures.unpacked(signatures.AGREEING | 7) == "allocate(), close(), or a call that it has not made before"
