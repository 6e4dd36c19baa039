"""What becomes of gradients whose parameters have been updated by others meanwhile, and how many there were."""

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.transport.control import all_values, combine
from trainers.errors import ArgumentError

STALE = ("keep", "drop", "scale")


class Rule(NamedTuple):
    """What a server does with a gradient that is so many updates behind.

    stale: "keep" applies it as it is; "drop" discards it when it is more than `most` behind; "scale" divides the
        learning rate by staleness + 1 (W. Zhang et al.: Staleness-aware async-SGD for distributed deep learning, 2015).
    rate: of the learning rate that every update uses.
    """

    stale: str = "keep"
    most: int | None = None
    rate: float = 1.0

    @property
    def bound(self) -> int | None:
        """The staleness that is kept by waiting."""
        return None if self.stale == "drop" else self.most

    def factor(self, staleness: int) -> float:
        """Of the learning rate; zero for a gradient that is dropped."""
        if self.stale == "drop":
            assert self.most is not None
            return self.rate if staleness <= self.most else 0.0
        return self.rate / (staleness + 1) if self.stale == "scale" else self.rate


class Counts:
    """behind: how many applied gradients were 0, 1, 2, ... updates behind. dropped: how many were not applied.

    cut_short: whether the epoch was ended before its last step.
    """

    def __init__(self) -> None:
        self.behind: list[int] = []
        self.dropped = 0
        self.cut_short = False


HOW_FAR = "hear how far the servers are"
LEFT, NOTHING, DROPPED = -1, -2, -3  # what has become of a part, besides the staleness of gradients that were applied


class EpochLedger:
    """What has become of each part of the epoch under way: parts of batches that are dealt, or steps.

    outcomes: (parts,): what has become of every part in this server's slice; empty on workers.
    dealt: (parts,) bool, those that all servers have had when the epoch began or was gone on with, which nobody needs
        to compute. cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self) -> None:
        self.epoch, self.cut_short = -1, False
        self._begin_anew(0)

    def begin(self, epoch: int, parts: int) -> None:
        """An epoch of so many parts begins here, or is gone on with. Local."""
        if self.epoch != epoch or self.parts != parts:
            self.epoch, self.cut_short = epoch, False
            self._begin_anew(parts)

    def _begin_anew(self, parts: int) -> None:
        self.outcomes = np.full(parts, LEFT, np.int32)
        self.dealt = np.zeros(parts, bool)

    @property
    def parts(self) -> int:
        return self.outcomes.size

    def has(self, number: int) -> bool:
        """Whether this server had a part."""
        return bool(self.outcomes[number] != LEFT)

    def note(self, number: int, outcome: int) -> None:
        """This server had a part; what became of it the first time counts."""
        if not self.has(number):
            self.outcomes[number] = outcome

    def counts(self) -> Counts:
        """What is told of the epoch."""
        counts = Counts()
        counts.behind = np.bincount(self.outcomes[self.outcomes >= 0]).tolist()
        counts.dropped = int((self.outcomes == DROPPED).sum())
        counts.cut_short = self.cut_short
        return counts

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """Parts that any server lacks are to be dealt again. Collective. serves: whether this rank is a server."""
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, parts if serves else 0)
        done = self.outcomes != LEFT if serves else np.ones(parts, bool)
        self.dealt = combine(comm, done, HOW_FAR, MPI.LAND)


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
    """What is wrong with these options of a parameter server, if anything."""
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
