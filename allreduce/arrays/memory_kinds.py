"""The kinds of memory that an array can be in; the ranks compare them in each call."""

UNREGISTERED, ALLOCATED, GPU = 0, 1, 2  # all ranks of a call must pass memory of the same kind
