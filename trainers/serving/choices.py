"""Whether the choices of a parameter server make sense. No MPI."""

from typing import Any

import numpy as np

from trainers.errors import ArgumentError
from trainers.serving.staleness import STALE

UPDATES = ("async", "sync")
RATES = ("keep", "divide")


def server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], ArgumentError | None]:
    """The ranks that are servers, or what is wrong with them."""
    if isinstance(servers, int | np.integer) and not isinstance(servers, bool):
        if servers < 1:
            return (), ArgumentError(f"servers must be an integer >= 1, got {servers!r}")
        chosen = tuple(range(max(0, ranks - int(servers)), ranks))
        missing = servers > ranks
    else:
        try:
            chosen = tuple(sorted(int(rank) for rank in servers))
        except (TypeError, ValueError):
            return (), ArgumentError(f"servers={servers!r} is neither a number nor ranks; give 1, or (3, 4)")
        if not chosen or len(set(chosen)) < len(chosen):
            return (), ArgumentError(f"servers={servers!r}: give at least one rank, and each of them once")
        missing = not set(chosen) <= set(range(ranks))
    if missing:
        return (), ArgumentError(f"servers={servers!r}, and there are {ranks} ranks, 0 to {ranks - 1}")
    if len(chosen) == ranks:
        return (), ArgumentError(
            f"servers={servers!r} leaves no worker (ranks: {ranks}): start more ranks, or fewer servers"
        )
    return chosen, None


def bad_options(updates: Any, stale: Any, most: Any, warm_up: Any, rate: Any) -> ArgumentError | None:
    for name, value, known in (("updates", updates, UPDATES), ("stale", stale, STALE), ("learning_rate", rate, RATES)):
        if value not in known:
            return ArgumentError(f"{name}={value!r} is unknown; use one of {', '.join(known)}")
    for name, value in (("max_staleness", 0 if most is None else most), ("warm_up", warm_up)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            return ArgumentError(f"{name} must be an integer >= 0, got {value!r}")
    if stale == "drop" and most is None:
        return ArgumentError('stale="drop" needs max_staleness: how many updates behind is too many')
    given = [stale != "keep" and "stale", most is not None and "max_staleness", warm_up and "warm_up",
             rate != "keep" and "learning_rate"]  # fmt: skip
    useless = [name for name in given if name]
    if updates == "sync" and useless:
        return ArgumentError(f'{useless[0]} has no use with updates="sync", where no gradient is stale; leave it out')
    return None
