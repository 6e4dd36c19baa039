"""What the ranks must pass alike in one call, read off an array or refused by name."""

FOREIGN, ALLOCATED, GPU = 0, 1, 2  # where an array's memory is; ranks must agree about it
