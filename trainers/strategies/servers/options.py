"""The arguments of a ParameterServerTrainer: which ranks are servers, and how these treat gradients."""

from typing import Any, NamedTuple

from allreduce import NAMES
from allreduce.topology import Topology
from trainers.arguments import integer_error, is_integer, name_error
from trainers.errors import ArgumentError
from trainers.replica import Replica

# the values that these arguments of a ParameterServerTrainer may have
CHOICES = {"updates": ("sync", "async"), "stale": ("keep", "drop", "scale")}


def server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], ArgumentError | None]:
    """Return (server ranks in ascending order, None), or ((), error) if `servers` is invalid."""
    if is_integer(servers):
        if text := integer_error("servers", servers, 1):
            return (), ArgumentError(text)
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
            f"servers={servers!r} leaves no worker (ranks: {ranks}): start more ranks, or use fewer servers"
        )
    return chosen, None


def worker_error(ranks_per_worker: Any, backend: Any, ranks: int) -> ArgumentError | None:
    """Return the error if these arguments are invalid with `ranks` ranks that compute, or None."""
    if text := integer_error("ranks_per_worker", ranks_per_worker, 1):
        return ArgumentError(text)
    if ranks_per_worker > ranks:
        count = f"{ranks} rank{'s are' if ranks != 1 else ' is'} left for workers"
        return ArgumentError(
            f"ranks_per_worker={ranks_per_worker}, and {count}: start more ranks, or give at most {ranks}"
        )
    if ranks_per_worker == 1 and backend != "auto":
        return ArgumentError(
            f"allreduce={backend!r} has no use with ranks_per_worker=1, where no worker sums gradients; leave it out"
        )
    if backend not in NAMES:
        return ArgumentError(f"allreduce={backend!r} is unknown; use the name of a backend: {', '.join(NAMES)}")
    return None


def options_error(updates: Any, stale: Any, most: Any, warm_up: Any) -> ArgumentError | None:
    """Return the error if these options of a parameter server are invalid, or None."""
    for name, value in (("updates", updates), ("stale", stale)):
        if text := name_error(name, value, CHOICES[name]):
            return ArgumentError(text)
    limits = integer_error("max_staleness", most, 0, optional=True) or integer_error("warm_up", warm_up, 0)
    if limits:
        return ArgumentError(limits)
    if stale == "drop" and most is None:
        return ArgumentError('stale="drop" needs max_staleness: gradients of a larger staleness are dropped')
    return None


def useless_error(given: "Options") -> ArgumentError | None:
    """Return the error if an argument other than `servers` is given to synchronous servers, or None."""
    names = [name for name, default in Options._field_defaults.items() if getattr(given, name) != default]
    if given.updates == "async" or not names:
        return None
    why = 'updates="sync", where no gradient is stale, and all workers divide each batch'
    return ArgumentError(f"{names[0]} has no use with {why}; leave it out")


class Options(NamedTuple):
    """The arguments of a ParameterServerTrainer; see there, and trainers.strategies.few_owners.Placement."""

    servers: Any
    updates: str
    stale: str = "keep"
    max_staleness: int | None = None
    warm_up: int = 0
    ranks_per_worker: int = 1
    allreduce: str = "auto"

    @property
    def serve(self) -> bool:
        return True

    def owners(self, ranks: int) -> tuple[int, ...]:
        return server_ranks(self.servers, ranks)[0]

    def error(self, replica: Replica, ranks: Topology) -> ArgumentError | None:
        servers, error = server_ranks(self.servers, ranks.size)
        error = error or options_error(*self[1:5]) or useless_error(self)
        error = error or worker_error(self.ranks_per_worker, self.allreduce, ranks.size - len(servers))
        if error is None and self.stale == "scale" and not getattr(replica, "learning_rates", True):
            text = 'has no learning rate that can be set, so leave out stale="scale"'
            error = ArgumentError(f"{type(replica).__name__} {text}")
        return error

    def renumbered(self, previous: tuple[int, ...]) -> "Options":
        given = self.servers
        if isinstance(given, int):  # keep a worker as long as two ranks remain
            servers: Any = min(given, max(1, len(previous) - 1))
        else:  # the remaining servers, or the last rank if none remains
            servers = [rank for rank, old in enumerate(previous) if old in given] or 1
        count = servers if isinstance(servers, int) else len(servers)
        most = max(1, len(previous) - count)
        return self._replace(servers=servers, ranks_per_worker=min(self.ranks_per_worker, most))
