"""The kinds of memory that an array can be in; the ranks compare them in each call."""

FOREIGN, ALLOCATED, GPU = 0, 1, 2  # where an array's memory is; ranks must agree about it
