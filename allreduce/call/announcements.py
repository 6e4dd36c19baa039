"""Finds the calls of a queue that all ranks have announced, by messages along a binomial tree. It uses no MPI.

- The root of the tree is rank 0. A rank tells its parent of a call when its whole subtree has announced it. Equal
  requests are told once, with the ranks that make them.
- Rank 0 decides that the call runs, or refuses it if the requests differ, before any data moves. Each rank forwards the
  decision. So a rank sends one announcement and at most log2 n decisions of a call.
- A rank that has joined makes no calls until all ranks have joined, so no call waits for it.
- A rank whose calls have all ended forwards nothing. Nothing can wait there: a decision needs an announcement or a join
  of every rank.

(The ideas are Horovod's: A. Sergeev, M. Del Balso, 2018.)
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from allreduce.arrays.chunks import binomial

JOIN = "join"
PerRank = list[Any]  # each rank's `own`; None for a rank that has joined
Span = list[int]  # [first rank, last rank + 1]


class Request(NamedTuple):
    """A rank's request to run a call. All fields are JSON-serializable.

    same: metadata that must be equal on all ranks. own: metadata of this rank; every rank receives all ranks'.
    joinable: a join proxy can make the call. description: the call in words; by default `same`.
    """

    same: Any
    own: Any = None
    joinable: bool = False
    description: str = ""

    @property
    def words(self) -> str:
        """The call in words."""
        return self.description or str(self.same)


class Announcement(NamedTuple):
    """The announcement of a call by all ranks of a subtree that have not joined.

    requests: (request as JSON without `own`, ranks). owns: (rank, own), where `own` is not None. Of JOIN: all ranks of
    the subtree have joined, and the one in `owns` was the last.
    """

    name: str
    requests: list[tuple[str, list[Span]]]
    owns: list[tuple[int, Any]]


class Decision(NamedTuple):
    """Rank 0's decision to run or refuse a call.

    same: the Request's, for join proxies; None if no rank has joined. per_rank: every rank's `own`, or None if no rank
    passed one. refusal: None if the call runs; each rank's call in words if they differ; otherwise the reason.
    """

    name: str
    same: Any
    per_rank: PerRank | None
    refusal: list[str] | str | None


class Announcements:
    """The announcements of one queue's calls at one rank of the tree. Messages are lists for JSON."""

    def __init__(self, rank: int, size: int) -> None:
        self.parent, self.children = binomial(rank, 0, size)
        self._rank, self._size = rank, size
        self._needed = {rank, *self.children}
        self._heard: dict[str, dict[int, Announcement]] = {}  # by name and sender; neither passed on nor decided
        self._joined: list[int] = []  # this rank and the children whose subtrees have joined
        self._decided: list[Decision] = []  # rank 0: decisions not yet sent

    def announce(self, name: str, request: Request) -> list[Announcement]:
        """Add this rank's request for a call. Return the announcements for the parent."""
        text = json.dumps(request._replace(own=None), sort_keys=True)
        owns = [] if request.own is None else [(self._rank, request.own)]
        return self.hear(self._rank, Announcement(name, [(text, [[self._rank, self._rank + 1]])], owns))

    def hear(self, sender: int, announcement: Sequence[Any]) -> list[Announcement]:
        """Add the announcement of this rank or of a child. Return the announcements for the parent."""
        heard = Announcement(*announcement)
        if heard.name != JOIN:
            self._heard.setdefault(heard.name, {})[sender] = heard
            return self._complete([heard.name])
        self._joined.append(sender)
        found = self._complete(list(self._heard))  # first: the parent does not wait for a subtree that has joined
        if len(self._joined) < len(self._needed):
            return found
        if self.parent is not None:
            return [*found, heard]
        self._decided.append(Decision(JOIN, None, [heard.owns[0][1]], None))
        return []

    def decisions(self) -> list[Decision]:
        """Return the new decisions of rank 0."""
        decided, self._decided = self._decided, []
        return self.learn(decided)

    def learn(self, decided: Iterable[Sequence[Any]]) -> list[Decision]:
        """Take note of decisions that the parent has sent, and return them."""
        found = [Decision(*each) for each in decided]
        if any(decision.name == JOIN for decision in found):
            self._joined.clear()
        return found

    def _complete(self, names: Iterable[str]) -> list[Announcement]:
        """Pass on the calls that no rank of the subtree is missing in; rank 0 decides them."""
        complete = [name for name in names if self._needed <= {*self._heard[name], *self._joined}]
        merged = [_merge(name, self._heard.pop(name).values()) for name in complete]
        if self.parent is not None:
            return merged
        self._decided += map(self._decide, merged)
        return []

    def _decide(self, announced: Announcement) -> Decision:
        requests = [(Request(*json.loads(text)), spans) for text, spans in announced.requests]
        _, first = min((spans[0][0], request) for request, spans in requests)
        present = sum(stop - start for _, spans in requests for start, stop in spans)
        refusal: list[str] | str | None = None
        if len({json.dumps(request.same, sort_keys=True) for request, _ in requests}) > 1:
            words = {rank: request.words for request, spans in requests for span in spans for rank in range(*span)}
            refusal = [words.get(rank, "has joined") for rank in range(self._size)]
        elif present < self._size and not first.joinable:
            joined = {*range(self._size)}.difference(*(range(*span) for _, spans in requests for span in spans))
            refusal = f"{first.words}: ranks {sorted(joined)} have joined, and no join proxy can make this call"
        owns = dict(announced.owns)
        return Decision(
            announced.name,
            first.same if present < self._size else None,
            [owns.get(rank) for rank in range(self._size)] if owns else None,
            refusal,
        )


def _merge(name: str, announcements: Iterable[Announcement]) -> Announcement:
    """Merge the announcements of one call: equal requests become one."""
    found: dict[str, list[Span]] = {}
    owns: list[tuple[int, Any]] = []
    for each in announcements:
        owns += each.owns
        for text, spans in each.requests:
            found.setdefault(text, []).extend(spans)
    return Announcement(name, [(text, _joined(spans)) for text, spans in found.items()], owns)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order; spans that touch become one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1][1] = stop
        else:
            found.append([start, stop])
    return found
