"""Memory of arrays: the table of allocations."""
