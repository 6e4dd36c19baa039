"""Words by which other ranks know a call: another one for each call, the same on all ranks."""

import itertools

import numpy as np

from allreduce.arrays.memory_kinds import ALLOCATED, FOREIGN
from allreduce.arrays.ops import OPS
from allreduce.engine import call as signatures
from allreduce.engine.call import NUMBER, Signature


def test_every_signature_has_a_word_of_its_own() -> None:
    lengths, kinds, calls = (1, 70_000, 2**40 - 1), ("float32", "uint8", "complex64"), ("all_reduce", "broadcast")
    choices = itertools.product(lengths, map(np.dtype, kinds), OPS, (FOREIGN, ALLOCATED), "CF", calls)
    shapes = ((6,), (2, 3), (3, 2)), (None, 0, 1)
    made = [Signature(*each, *more) for each in choices for more in itertools.product(*shapes)]
    words = {signatures.word(each) for each in made}
    assert len(words) == len(made)
    assert min(words) > signatures.AGREEING
    assert max(words) < 2**63
    assert not any(word & NUMBER for word in words)
