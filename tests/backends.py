"""The names of backends, grouped by the class attributes that describe them."""

from allreduce.algorithm import TwoPhase
from allreduce.algorithms import BACKENDS, class_of, two_phase

ON_CPU = tuple(name for name in BACKENDS if not class_of(name).needs_gpu)
SHARDED = ("auto", *(name for name in two_phase() if name in ON_CPU))  # with update="sharded"
IN_TWO = tuple(name for name in SHARDED if class_of(name).reduce is TwoPhase.reduce)  # a reduction is both phases
