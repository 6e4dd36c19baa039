"""The state of a job during a long wait: facts about each rank, their messages, and the table in a report. No MPI here.

Ranks that wait in the same call have the same fact, so the state of a whole job is a few facts with ranges of ranks. A
message has the facts of such ranks once, and a few bytes for each rank: the version of its row.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from allreduce.transport.tables import LINES, listed, ranges

WAITING, LEFT, STALLED, ENDED = range(4)
NOT_COME = "has not arrived: it computes, is stopped, or waits for something else"
SEVERAL = {NOT_COME: "have not arrived: they compute, are stopped, or wait for something else"}
TEXT_BYTES = 300
MOST_TEXTS = 40  # of calls in a message; beyond that, the calls of the fewest ranks have the text OTHERS
OTHERS = "another call"
MESSAGE_BYTES = 1 << 18  # of a message that is sent
FINAL = 1 << 60  # the version of a row that does not change any more, and the highest that is decoded


class Fact(NamedTuple):
    """A fact about a rank.

    WAITING: it waits in the call `text`; number, turn: number and count of the WaitRecord; fingerprint: the call's.
    LEFT: it makes no further calls, for the reason `text`; number: of the WaitRecord whose calls end, 0: all; then
        turn: the exit code of its program; fingerprint: the number of `finished` agreements that it took part in.
    STALLED: it requests all ranks' stacks and last calls; turn: the number of the request.
    ENDED: it ends the job with the exit code `turn`.
    """

    kind: int
    number: int = 0
    turn: int = 0
    fingerprint: int = 0
    text: str = ""


class RankFacts(NamedTuple):
    """All facts about a rank, or about several. The version grows with each change, so the newest row is known."""

    version: int
    facts: tuple[Fact, ...]


def fact(kind: int, number: int, turn: int, fingerprint: int, text: str) -> Fact:
    """Create a Fact, with its text cut to TEXT_BYTES and without control characters."""
    cut = text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore")
    return Fact(kind, number, turn, fingerprint, "".join(filter(str.isprintable, cut)))


def encode(rows: Mapping[int, RankFacts]) -> bytes:
    """Encode the rows of some ranks: for ranks with the same facts an entry of facts, ranges of ranks, and versions.

    One version holds for all ranks of an entry; else each rank has one, in the order of ranks.
    """
    calls = Counter(each for row in rows.values() for each in row.facts if each.kind == WAITING)
    unnamed = {each for each, _ in calls.most_common()[MOST_TEXTS:]}
    alike: dict[tuple[Fact, ...], dict[int, int]] = {}  # the versions of ranks
    for rank, row in sorted(rows.items()):
        facts = tuple(each._replace(text=OTHERS) if each in unnamed else each for each in row.facts)
        alike.setdefault(facts, {})[rank] = row.version
    entries = []
    for facts, versions in alike.items():
        same = len({*versions.values()}) == 1
        entries.append([facts, ranges(versions), [*versions.values()][: 1 if same else None]])
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()


def encode_first(rows: Sequence[tuple[int, RankFacts]]) -> tuple[bytes, int]:
    """Encode the first rows that fit into a message of MESSAGE_BYTES. Returns it, and the number of rows in it."""
    count = len(rows)
    while len(message := encode(dict(rows[:count]))) > MESSAGE_BYTES and count > 1:
        count //= 2
    return message, count


def decode(message: bytes, ranks: int) -> dict[int, RankFacts]:
    """Return the rows in a message by rank, out of `ranks`; none if it does not have this version's format."""
    rows: dict[int, RankFacts] = {}
    try:
        for given, pairs, versions in json.loads(message):
            facts = tuple(fact(int(kind), int(a), int(b), int(c), str(text)) for kind, a, b, c, text in given)
            members = [rank for first, last in pairs for rank in range(max(first, 0), min(last + 1, ranks))]
            for rank, version in zip(members, versions * (len(members) if len(versions) == 1 else 1), strict=True):
                rows[rank] = RankFacts(min(int(version), FINAL), facts)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return {}
    return rows


def table(state: Mapping[Fact, Collection[int]], size: int, rank: int, call: str) -> str:
    """Format a table of where all ranks are, as known to `rank`, which waits in `call`.

    state: the ranks of each fact. At most 20 lines: ranks in the same call share one.
    """
    waits: dict[int, list[str]] = {rank: [call]}
    left: dict[int, str] = {}
    for each, ranks in sorted(state.items()):
        for other in ranks:
            if each.kind == WAITING and other != rank and each.text not in waits.get(other, ()):
                waits.setdefault(other, []).append(each.text)
            elif each.kind == LEFT and each.number == 0:
                left[other] = each.text
    places: dict[str, list[int]] = {}
    for other in range(size):
        if other in left and other != rank:
            where = f"has left: {left[other]}"
        else:
            where = f"waits in {' and in '.join(waits[other])}" if other in waits else NOT_COME
        places.setdefault(where, []).append(other)
    important = sorted(places, key=lambda where: (where.startswith("waits in "), -len(places[where])))[:LINES]
    lines = [_line(ranks, where) for where, ranks in places.items() if where in important]
    others = [other for where in places if where not in important for other in places[where]]
    return "\n".join(lines + ([f"  {listed(others)}: wait in {len(places) - LINES} other calls"] if others else []))


def _line(ranks: list[int], where: str) -> str:
    if len(ranks) > 1:
        where = SEVERAL.get(where) or where.replace("waits in ", "wait in ", 1).replace("has left: ", "have left: ", 1)
    return f"  {listed(ranks)}: {where}"
