"""Fingerprints of calls: different calls have different ones, and all ranks compute the same one for the same call."""

import itertools

import numpy as np

from allreduce.arrays.memory_kinds import ALLOCATED, UNREGISTERED
from allreduce.arrays.ops import OPS
from allreduce.call.call import AGREEING, SEQUENCE_MASK, Call, fingerprint


def test_every_call_has_a_fingerprint_of_its_own() -> None:
    lengths, kinds, dtypes = (1, 70_000, 2**40 - 1), ("all_reduce", "broadcast"), ("float32", "uint8", "complex64")
    choices = itertools.product(kinds, lengths, map(np.dtype, dtypes), OPS, (UNREGISTERED, ALLOCATED), "CF")
    shapes = ((6,), (2, 3), (3, 2)), (None, 0, 1)
    made = [Call(*each, *more) for each in choices for more in itertools.product(*shapes)]
    found = {fingerprint(each) for each in made}
    assert len(found) == len(made)
    assert min(found) > AGREEING
    assert max(found) < 2**63
    assert not any(each & SEQUENCE_MASK for each in found)
