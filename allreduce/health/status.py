"""The state of a job during a long wait: facts, each with the ranks that it holds for. No MPI here.

Ranks that wait in the same call have the same fact, so the state of a whole job is a few facts with ranges of ranks,
however many ranks it has.
"""

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from allreduce.transport.tables import LINES, listed, ranges

WAITING, LEFT, STALLED, ENDED, SILENT = range(5)
NOT_COME = "has not arrived: it computes, is stopped, or waits for something else"
SEVERAL = {NOT_COME: "have not arrived: they compute, are stopped, or wait for something else"}
TEXT_BYTES = 300
MOST_FACTS = 40  # in a message; beyond that, the calls with the fewest ranks are merged into OTHERS
OTHERS = "other calls"
MOST_BYTES = 1 << 20  # of a message that is decoded; states are smaller
ROW_BYTES, HEAD_BYTES = 4096, 24
FAR_ROWS = 8  # for facts of other nodes
OWN_BYTES, FAR_BYTES = ROW_BYTES - HEAD_BYTES, FAR_ROWS * ROW_BYTES - HEAD_BYTES  # of content, at most


class Fact(NamedTuple):
    """A fact about ranks.

    WAITING: they wait in the call `text`; number, turn: number and count of the WaitRecord; fingerprint: the call's.
    LEFT: they make no further calls, for the reason `text`; number: of the WaitRecord whose calls end, 0: all; turn:
        the exit code of their program; fingerprint: the number of `finished` agreements that they took part in.
    STALLED: they request all ranks' stacks and last calls; turn: the number of the request.
    ENDED: they end the job with the exit code `turn`. SILENT: no message arrives from them, for the reason `text`.
    """

    kind: int
    number: int = 0
    turn: int = 0
    fingerprint: int = 0
    text: str = ""


State = Mapping[Fact, Collection[int]]  # ranks, as numbers of the topology


def fact(kind: int, number: int, turn: int, fingerprint: int, text: str) -> Fact:
    """Create a Fact, with its text cut to TEXT_BYTES and without control characters."""
    cut = text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore")
    return Fact(kind, number, turn, fingerprint, "".join(filter(str.isprintable, cut)))


def merged(states: Iterable[State]) -> dict[Fact, set[int]]:
    """Merge several states."""
    found: dict[Fact, set[int]] = {}
    for state in states:
        for each, ranks in state.items():
            found.setdefault(each, set()).update(ranks)
    return found


def limited(state: State) -> State:
    """Return a state with at most MOST_FACTS facts; the calls with the fewest ranks are merged into OTHERS."""
    if len(state) <= MOST_FACTS:
        return state
    order = sorted(state, key=lambda each: (each.kind == WAITING, -len(state[each]), min(state[each])))
    kept: dict[Fact, Collection[int]] = {each: state[each] for each in order[:MOST_FACTS]}
    rest = [state[each] for each in order[MOST_FACTS:] if each.kind == WAITING]
    if rest:
        kept[Fact(WAITING, text=OTHERS)] = {
            *kept.get(Fact(WAITING, text=OTHERS), ()),
            *(r for each in rest for r in each),
        }
    return kept


def fitting(state: State, nbytes: int) -> bytes:
    """Encode a state as a message of at most `nbytes`, if necessary without its last facts."""
    facts = list(state)
    while len(message := encode({each: state[each] for each in facts})) > nbytes:
        facts.pop()
    return message


def encode(state: State) -> bytes:
    """Encode a state as a message."""
    facts = [[*each, ranges(ranks)] for each, ranks in sorted(state.items())]
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()


def decode(message: bytes, ranks: int) -> dict[Fact, set[int]]:
    """Decode the state of `ranks` ranks from a message; empty if the message does not have this version's format."""
    try:
        facts = json.loads(message) if len(message) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        return {}
    found: dict[Fact, set[int]] = {}
    for each in facts if isinstance(facts, list) else []:
        match each:
            case [int(kind), int(number), int(turn), int(fingerprint), str(text), list(pairs)] if kind in range(
                SILENT + 1
            ):
                members = {rank for pair in pairs for rank in _members(pair, ranks)}
                if members:
                    found.setdefault(fact(kind, number, turn, fingerprint, text), set()).update(members)
    return found


def _members(pair: Any, ranks: int) -> range:
    match pair:
        case [int(first), int(last)] if 0 <= first <= last < ranks:
            return range(first, last + 1)
    return range(0)


def table(state: State, size: int, rank: int, call: str) -> str:
    """Format a table of where all ranks are, as known to `rank`, which waits in `call`.

    At most 20 lines: ranks in the same call share one.
    """
    waits: dict[int, list[str]] = {rank: [call]}
    left, silent = {}, {}
    for each, ranks in sorted(state.items()):
        for other in ranks:
            if each.kind == WAITING and other != rank and each.text not in waits.get(other, ()):
                waits.setdefault(other, []).append(each.text)
            elif each.kind == LEFT and each.number == 0:
                left[other] = each.text
            elif each.kind == SILENT:
                silent[other] = each.text
    places: dict[str, list[int]] = {}
    for other in range(size):
        if other in left and other != rank:
            where = f"has left: {left[other]}"
        elif other in waits:
            where = f"waits in {' and in '.join(waits[other])}"
        else:
            where = silent.get(other, NOT_COME)
        places.setdefault(where, []).append(other)
    important = sorted(places, key=lambda where: (where.startswith("waits in "), -len(places[where])))[:LINES]
    lines = [_line(ranks, where) for where, ranks in places.items() if where in important]
    others = [other for where in places if where not in important for other in places[where]]
    return "\n".join(lines + ([f"  {listed(others)}: wait in {len(places) - LINES} other calls"] if others else []))


def _line(ranks: list[int], where: str) -> str:
    if len(ranks) > 1:
        where = SEVERAL.get(where) or where.replace("waits in ", "wait in ", 1).replace("has left: ", "have left: ", 1)
    return f"  {listed(ranks)}: {where}"


class StatusRows:
    """The status of a node's ranks, in memory that they share: each rank writes its own row and reads all rows.

    The leader writes another, longer row: the facts of other nodes. The rank that has written a row may compute, be
    stopped, or have ended when others read it. A row has a length and a checksum before its content, so a reader
    recognizes a row that is being written. A row also counts its rank's checks: a leader whose count does not grow is
    not forwarding other nodes' facts.

    memory: of shape (ranks + FAR_ROWS, ROW_BYTES), dtype uint8, zero at first. own: the index of this rank.
    """

    def __init__(self, memory: np.ndarray, own: int) -> None:
        self.own, self.far = own, len(memory) - FAR_ROWS  # indices of rows
        self._use(memory)
        self._seen = np.zeros_like(self._heads)

    def _use(self, memory: np.ndarray) -> None:
        self._bytes = memory.reshape(-1)
        heads = memory[: self.far + 1, :HEAD_BYTES].view(np.int64)
        self._heads, self._checks = heads[:, :2], heads[:, 2]  # (length, checksum) of each row; its count of checks

    def release(self) -> None:
        """Release the shared memory, and use a copy instead. Local, from any thread, at any time."""
        self._use(self._bytes.reshape(-1, ROW_BYTES).copy())

    def write(self, content: bytes, far: bool = False) -> None:
        """Write this rank's row, of at most OWN_BYTES. far: the row of other nodes instead, of at most FAR_BYTES."""
        index = self.far if far else self.own
        head = len(content), zlib.crc32(content)
        if tuple(self._heads[index].tolist()) != head:
            self._bytes[self._place(index, len(content))] = np.frombuffer(content, np.uint8)
            self._heads[index] = head

    def count_check(self) -> None:
        """Count a check of this rank."""
        self._checks[self.own] += 1

    def checks(self, index: int) -> int:
        """Return how many checks the rank with this index has made."""
        return int(self._checks[index])

    def changed(self) -> list[tuple[int, bytes]]:
        """Return (index, content) of each row that has changed since the last call."""
        heads = self._heads.copy()
        news = []
        for index in np.flatnonzero((heads != self._seen).any(axis=1)).tolist():
            length, checksum = heads[index].tolist()
            if 0 <= length <= (FAR_BYTES if index == self.far else OWN_BYTES):
                content = self._bytes[self._place(index, length)].tobytes()
                if zlib.crc32(content) == checksum:  # else the row is being written, and is read the next time
                    self._seen[index] = heads[index]
                    news.append((index, content))
        return news

    def _place(self, index: int, length: int) -> slice:
        begin = index * ROW_BYTES + HEAD_BYTES
        return slice(begin, begin + length)
