"""Compares the last calls in the dumps of a job's ranks (health/dump.py): which rank differs first."""

import glob
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from allreduce.errors import OptionError
from allreduce.health.dump import DUMP, PATTERN, RecordedCall
from allreduce.notices import shown
from allreduce.transport.tables import listed

NO_CALL = "has not made this call"
MOST_RANKS = 8  # that have lines of their own


class Record(NamedTuple):
    """The last dump of one rank. calls: user -> count -> call. full: earlier calls were dropped.

    began, time: when the rank's program began, and when it wrote the dump; seconds since 1970.
    """

    rank: int
    size: int
    host: str
    why: str
    full: bool
    calls: dict[str, dict[int, RecordedCall]]
    began: float
    time: float

    def may_have_made(self, user: str, count: int) -> bool:
        """Whether the record may have held a call that it does not have: it was dropped."""
        return self.full and count < min(self.calls.get(user, {}), default=count + 1)


class Difference(NamedTuple):
    """The first call that is not the same on all ranks. calls: by rank, None for a rank that has not made it."""

    begin: float
    user: str
    number: int
    calls: dict[int, RecordedCall | None]

    def odd_ranks(self) -> list[int]:
        """Return the ranks that have made another call than most ranks that have made one, or none."""
        texts = {rank: call.call for rank, call in self.calls.items() if call is not None}
        usual, _ = Counter(texts.values()).most_common(1)[0]
        return [rank for rank in self.calls if texts.get(rank) != usual]


def read(folder: str) -> dict[int, Record]:
    """Read the files in a folder: rank -> its last dump. Raises OptionError if there is none, or one can't be read.

    A dump that was written before another rank's program began is of an earlier job, and is left out.
    """
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), PATTERN.format("*"))))
    if not paths:
        raise OptionError(
            f"no dumps ({PATTERN.format('*')}) are in {folder}: run the job with {DUMP}={folder}; "
            "ranks write them when a wait times out or the job is aborted"
        )
    records = [_record(path) for path in paths]
    newest = max(record.began for record in records)
    return {record.rank: record for record in records if record.time >= newest}


def _record(path: str) -> Record:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = json.loads([line for line in file if line.startswith("{") and line.endswith("}\n")][-1])
        calls: dict[str, dict[int, RecordedCall]] = {}
        for user, count, text, begin, end in content["calls"]:
            call = RecordedCall(str(user), int(count), str(text), float(begin), None if end is None else float(end))
            calls.setdefault(call.user, {})[call.number] = call
        kinds = {"rank": int, "size": int, "host": str, "why": str, "full": bool, "began": float, "time": float}
        fields: dict[str, Any] = {name: kind(content[name]) for name, kind in kinds.items()}
        return Record(calls=calls, **fields)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise OptionError(
            f"{path} has no last calls: {type(error).__name__}: {shown(str(error), 200)}; remove it, or take the "
            "files of one job"
        ) from error


def first_difference(records: Mapping[int, Record]) -> Difference | None:
    """Return the earliest call that not all of its ranks have made alike, or None. Pure."""
    found = []
    for user in {user for record in records.values() for user in record.calls}:
        members = [rank for rank in _members(user) if rank in records] or sorted(records)
        for count in sorted({count for rank in members for count in records[rank].calls.get(user, ())}):
            calls = {
                rank: records[rank].calls.get(user, {}).get(count)
                for rank in members
                if not records[rank].may_have_made(user, count)
            }
            made = [call for call in calls.values() if call is not None]
            # a call that some ranks have completed may be under way on others
            late = len(made) < len(calls) and any(call.end is None for call in made)
            if len({call.call for call in made}) > 1 or late:
                found.append(Difference(min(call.begin for call in made), user, count, calls))
                break
    return min(found, default=None, key=lambda difference: difference.begin)


def _members(user: str) -> list[int]:
    """Return the world ranks in a user's name, such as "0-2,5#1/7"."""
    found: list[int] = []
    try:
        for part in user.partition("#")[0].split(","):
            first, _, last = part.strip().partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:  # a wait outside any topology
        return []
    return found


def report(records: Mapping[int, Record]) -> tuple[str, int]:
    """Return the text of the report, and the exit code: 0 if no rank differs, else 2. Pure."""
    size = max(record.size for record in records.values())
    lines = [f"flight records of {len(records)} of {size} ranks"]
    whys = _by_text({rank: record.why for rank, record in records.items()})
    lines += [f"  {listed(ranks)}: {why}" for why, ranks in whys.items()]
    missing = [rank for rank in range(size) if rank not in records]
    if missing:
        lines.append(
            f"  {listed(missing)}: no dump of this job: killed, without the folder, or stuck in code that holds the GIL"
        )
    difference = first_difference(records)
    if difference is None:
        lines.append("no rank differs: each call that is recorded on several ranks is the same on them")
        return "\n".join([*lines, *_last_lines(records, sorted(records))]) + "\n", 2 if missing else 0
    ranks = _members(difference.user)
    of = f" of {listed(ranks)}" if ranks else ""
    odd = difference.odd_ranks()
    lines.append(
        f"{listed(odd)} differ{'s' * (len(odd) == 1)} first: in call number {difference.number} of a backend, queue or "
        f"communicator{of}"
    )
    texts = {rank: NO_CALL if call is None else call.call for rank, call in difference.calls.items()}
    for text, some in _by_text(texts).items():
        lines.append(f"  {listed(some)}: {text}")
        calls = {rank: difference.calls[rank] for rank in some[:MOST_RANKS]}
        lines += [f"    rank {rank}: {_times(call)}" for rank, call in calls.items() if call]
    lines += _last_lines(records, [rank for rank, call in difference.calls.items() if call is None])
    return "\n".join(lines) + "\n", 2


def _last_lines(records: Mapping[int, Record], ranks: Iterable[int]) -> list[str]:
    """Return a line about the last call of each rank."""
    lines = []
    for rank in list(ranks)[:MOST_RANKS]:
        every = [call for calls in records[rank].calls.values() for call in calls.values()]
        if every:
            last = max(every, key=lambda call: call.begin)
            lines.append(f"  rank {rank}: its last call: {last.call}; {_times(last)}")
    return lines


def _by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each text."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return found


def _times(call: RecordedCall) -> str:
    ended = "did not end" if call.end is None else f"ended after {(call.end - call.begin) * 1e3:.3f} ms"
    return f"began {time.strftime('%H:%M:%S', time.gmtime(call.begin))}.{int(call.begin % 1 * 1e6):06d} UTC, {ended}"
