"""The table of algorithms by name. A new algorithm is one file of this folder and one line here."""

import importlib

from allreduce import notices
from allreduce.algorithm import Algorithm
from allreduce.errors import OptionError, UnknownBackendError

BACKENDS: dict[str, str | type[Algorithm]] = {
    "ring": "allreduce.algorithms.ring:Ring",
    "halving_doubling": "allreduce.algorithms.halving_doubling:HalvingDoubling",
    "reduce_to_one": "allreduce.algorithms.reduce_to_one:ReduceToOne",
    "hierarchical_copy": "allreduce.algorithms.hierarchical_copy:HierarchicalCopy",
    "shared": "allreduce.algorithms.shared:Shared",
    "native": "allreduce.algorithms.native:Native",
    "nccl": "allreduce.algorithms.nccl:Nccl",
    "auto": "allreduce.algorithms.auto:Auto",
}
OTHERS: dict[str, str | type[Algorithm]] = {  # created by name only, and not in NAMES: they do not sum
    "adasum": "allreduce.algorithms.adasum:Adasum",
}


def register(name: str, algorithm: type[Algorithm]) -> None:
    """Register an algorithm of your own. `create`, `available` and trainers then know its name. Local; on all ranks.

    algorithm: a class that derives from allreduce.Algorithm. Keyword arguments of its constructor become options of
    `create`. Raises OptionError for another class, or for the name of another algorithm.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        given = algorithm.__qualname__ if isinstance(algorithm, type) else repr(algorithm)
        raise OptionError(
            f"register({name!r}): {given} is no algorithm. Derive it from allreduce.Algorithm, and write "
            "`def reduce(self, buffer, op)`, which reduces a 1-D array in place; its constructor takes a context"
        )
    known = {**BACKENDS, **OTHERS}.get(name)
    if known not in (None, algorithm):
        raise OptionError(f"register({name!r}): there is an algorithm of this name; use another name")
    BACKENDS[name] = algorithm


def class_of(name: str | type[Algorithm]) -> type[Algorithm]:
    """Return the class of an algorithm, whose attributes say what it can do. Local. Raises UnknownBackendError."""
    if isinstance(name, type) and issubclass(name, Algorithm):
        return name
    backends = {**BACKENDS, **OTHERS}
    if not isinstance(name, str) or name not in backends:
        hint = notices.near(str(name), backends) or "."
        raise UnknownBackendError(f"no backend is called {name!r}{hint} The backends are: {', '.join(BACKENDS)}")
    found = backends[name]
    return load(found) if isinstance(found, str) else found


def load(place: str) -> type[Algorithm]:
    """Return the class at "module:name". Local."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def two_phase() -> tuple[str, ...]:
    """The names of the backends with the two phases reduce_scatter and all_gather. Local."""
    return tuple(name for name in BACKENDS if class_of(name).two_phase)


def with_cost() -> tuple[str, ...]:
    """The names of the backends that have a formula of their time, of their own class. Local."""
    return tuple(name for name in BACKENDS if "cost" in vars(class_of(name)))
