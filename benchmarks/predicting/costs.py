"""The predicted time of an all-reduce: the cost of an algorithm (Algorithm.cost), for given ranks and constants."""

from dataclasses import replace
from functools import cache

from allreduce.algorithms import class_of, with_cost
from allreduce.transport.cost import Layout, Machine

backends = cache(with_cost)  # the names of the backends whose cost is known


def predict(backend: str, k: Machine, at: Layout, s: float, allocated: bool = True) -> float:
    """Return the seconds that a backend needs to all-reduce s bytes. Raises ValueError if it can't work on `at`."""
    if backend not in backends():
        raise ValueError(f"the cost of {backend!r} is not known; use one of {', '.join(backends())}")
    if class_of(backend).one_node and at.nodes > 1:
        raise ValueError(f"{backend} works within one node only")
    if at.ranks == 1 or s <= 0:
        return 0.0
    return class_of(backend).cost(s, replace(at, allocated=allocated), k)


def usable(at: Layout) -> list[str]:
    """Return the names of the backends that work on these ranks."""
    return [name for name in backends() if at.nodes == 1 or not class_of(name).one_node]
