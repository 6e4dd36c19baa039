"""The arguments of a ParameterServerTrainer: which ranks are servers, and how these treat gradients."""

from typing import Any, NamedTuple

from allreduce import NAMES
from allreduce.topology import Topology
from trainers.arguments import integer, is_integer, name_error
from trainers.errors import ArgumentError
from trainers.replica import Replica

# the values that these arguments of a ParameterServerTrainer may have
CHOICES = {"updates": ("sync", "async"), "stale": ("keep", "drop", "scale")}


def server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], str]:
    """Return (server ranks in ascending order, ""), or ((), the error as text) if `servers` is invalid."""
    if is_integer(servers):
        if text := integer(1).error("servers", servers):
            return (), text
        chosen = tuple(range(max(0, ranks - int(servers)), ranks))
        missing = servers > ranks
    else:
        try:
            chosen = tuple(sorted(int(rank) for rank in servers))
        except (TypeError, ValueError):
            return (), f"servers={servers!r} is neither a number nor ranks; give 1, or (3, 4)"
        if not chosen or len(set(chosen)) < len(chosen):
            return (), f"servers={servers!r}: give at least one rank, and each of them once"
        missing = not set(chosen) <= set(range(ranks))
    if missing:
        return (), f"servers={servers!r}, and there are {ranks} ranks, 0 to {ranks - 1}"
    if len(chosen) == ranks:
        return (), f"servers={servers!r} leaves no worker (ranks: {ranks}): start more ranks, or use fewer servers"
    return chosen, ""


class Options(NamedTuple):
    """The arguments of a ParameterServerTrainer; see there. Messages show them.

    stale="scale": W. Zhang et al.: Staleness-aware async-SGD for distributed deep learning, 2015.
    """

    servers: Any
    updates: str
    stale: str = "keep"
    max_staleness: int | None = None
    warm_up: int = 0
    ranks_per_worker: int = 1
    allreduce: str = "auto"

    @property
    def serve(self) -> bool:
        """Whether the owners of parameters compute no gradients."""
        return True

    @property
    def bound(self) -> int | None:
        """The largest staleness, enforced by letting workers wait; None for no bound."""
        return None if self.stale == "drop" else self.max_staleness

    def factor(self, staleness: int) -> float:
        """Return the factor on the learning rate for a gradient of this staleness; 0.0 drops the gradient."""
        if self.stale == "drop":
            assert self.max_staleness is not None
            return float(staleness <= self.max_staleness)
        return 1.0 / (staleness + 1) if self.stale == "scale" else 1.0

    def owners(self, ranks: int) -> tuple[int, ...]:
        """Return the owners of `ranks` ranks, in order. Local."""
        return server_ranks(self.servers, ranks)[0]

    def error(self, replica: Replica, ranks: Topology) -> ArgumentError | None:
        """Return the error if the arguments are invalid with this replica on these ranks, or None. Local."""
        servers, text = server_ranks(self.servers, ranks.size)
        text = text or self._gradients_error() or self._workers_error(ranks.size - len(servers))
        if not text and self.stale == "scale" and not getattr(replica, "learning_rates", True):
            text = f'{type(replica).__name__} has no learning rate that can be set, so leave out stale="scale"'
        return ArgumentError(text) if text else None

    def _gradients_error(self) -> str:
        """Return the error in the treatment of gradients as text; "" if there is none."""
        texts = [name_error(name, getattr(self, name), names) for name, names in CHOICES.items()]
        texts.append(integer(0).or_none().error("max_staleness", self.max_staleness))
        texts.append(integer(0).error("warm_up", self.warm_up))
        if text := next(filter(None, texts), ""):
            return text
        if self.stale == "drop" and self.max_staleness is None:
            return 'stale="drop" needs max_staleness: gradients of a larger staleness are dropped'
        given = [name for name, default in self._field_defaults.items() if getattr(self, name) != default]
        if self.updates == "async" or not given:
            return ""
        why = 'updates="sync", where no gradient is stale, and all workers divide each batch'
        return f"{given[0]} has no use with {why}; leave it out"

    def _workers_error(self, ranks: int) -> str:
        """Return the error in the arguments of workers as text; "" if there is none. ranks: the number that compute."""
        most, backend = self.ranks_per_worker, self.allreduce
        if text := integer(1).error("ranks_per_worker", most):
            return text
        if most > ranks:
            count = f"{ranks} rank{'s are' if ranks != 1 else ' is'} left for workers"
            return f"ranks_per_worker={most}, and {count}: start more ranks, or give at most {ranks}"
        if most == 1 and backend != "auto":
            return (
                f"allreduce={backend!r} has no use with ranks_per_worker=1, where no worker sums gradients; leave it "
                "out"
            )
        if backend not in NAMES:
            return f"allreduce={backend!r} is unknown; use the name of a backend: {', '.join(NAMES)}"
        return ""
