"""Who hands what on to whom, so that one rank reaches all others in log2 n steps. Pure; no messages here."""


def binomial(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """The rank that this one gets the root's data from, and those that it hands it to, farthest first."""
    place = (rank - root) % size  # the root is at place 0
    lowest = place & -place if place else size
    reach = [1 << k for k in reversed(range(size.bit_length())) if 1 << k < lowest]
    children = [(place + step + root) % size for step in reach if place + step < size]
    parent = (place - lowest + root) % size if place else None
    return parent, children


def subtree(rank: int, size: int) -> range:
    """This rank, and all to which it hands on what comes from rank 0."""
    return range(rank, min(rank + (rank & -rank), size)) if rank else range(size)
