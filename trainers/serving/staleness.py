"""What becomes of gradients whose parameters have been updated by others meanwhile, and how many there were."""

from typing import NamedTuple

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
