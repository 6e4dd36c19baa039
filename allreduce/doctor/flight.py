"""Compares the last calls in the dumps of a job's ranks (health/dump.py): which rank differs first."""

import glob
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from allreduce.errors import OptionError
from allreduce.health.dump import DUMP, PATTERN, RecordedCall
from allreduce.notices import shown
from allreduce.transport.tables import listed

NO_CALL = "has not made this call"


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
        for entry in content["calls"]:
            user, count, call, begin, end = entry
            end = None if end is None else float(end)
            calls.setdefault(str(user), {})[int(count)] = RecordedCall(
                str(user), int(count), str(call), float(begin), end
            )
        rank, size = int(content["rank"]), int(content["size"])
        began, written = float(content["began"]), float(content["time"])
        why, full = str(content["why"]), bool(content["full"])
        return Record(rank, size, str(content["host"]), why, full, calls, began, written)
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
            calls = {rank: call for rank in members if (call := _call(records[rank], user, count)) != "dropped"}
            made = [call for call in calls.values() if isinstance(call, RecordedCall)]
            # a call that some ranks have completed may be under way on others
            late = len(made) < len(calls) and any(call.end is None for call in made)
            if len({call.call for call in made}) > 1 or late:
                alike = {rank: call if isinstance(call, RecordedCall) else None for rank, call in calls.items()}
                found.append(Difference(min(call.begin for call in made), user, count, alike))
                break
    return min(found, default=None, key=lambda difference: difference.begin)


def _call(record: Record, user: str, count: int) -> RecordedCall | str | None:
    """Return a rank's call, None if it has not made it, or "dropped" if its record may have held it."""
    calls = record.calls.get(user, {})
    if count in calls:
        return calls[count]
    return "dropped" if record.full and count < min(calls, default=count + 1) else None


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
    lines += [f"  {listed(ranks)}: {why}" for why, ranks in _grouped(records).items()]
    missing = [rank for rank in range(size) if rank not in records]
    if missing:
        lines.append(
            f"  {listed(missing)}: no dump of this job: killed, without the folder, or stuck in code that holds the GIL"
        )
    difference = first_difference(records)
    if difference is None:
        lines.append("no rank differs: each call that is recorded on several ranks is the same on them")
        return "\n".join([*lines, *_last_lines(records)]) + "\n", 2 if missing else 0
    ranks = _members(difference.user)
    of = f" of {listed(ranks)}" if ranks else ""
    odd = difference.odd_ranks()
    lines.append(
        f"{listed(odd)} differ{'s' * (len(odd) == 1)} first: in call number {difference.number} of a backend, queue or "
        f"communicator{of}"
    )
    by_text: dict[str, list[int]] = {}
    for rank, call in sorted(difference.calls.items()):
        by_text.setdefault(NO_CALL if call is None else call.call, []).append(rank)
    for text, some in by_text.items():
        lines.append(f"  {listed(some)}: {text}")
        lines += [f"    rank {rank}: {_times(call)}" for rank in some[:8] if (call := difference.calls[rank])]
    lines += _last_lines(records, [rank for rank, call in difference.calls.items() if call is None])
    return "\n".join(lines) + "\n", 2


def _last_lines(records: Mapping[int, Record], ranks: Sequence[int] | None = None) -> list[str]:
    """Return a line about the last call of each rank."""
    lines = []
    for rank in (sorted(records) if ranks is None else ranks)[:8]:
        every = [call for calls in records[rank].calls.values() for call in calls.values()]
        if every:
            last = max(every, key=lambda call: call.begin)
            lines.append(f"  rank {rank}: its last call: {last.call}; {_times(last)}")
    return lines


def _grouped(records: Mapping[int, Record]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        found.setdefault(record.why, []).append(rank)
    return found


def _times(call: RecordedCall) -> str:
    ended = "did not end" if call.end is None else f"ended after {(call.end - call.begin) * 1e3:.3f} ms"
    return f"began {time.strftime('%H:%M:%S', time.gmtime(call.begin))}.{int(call.begin % 1 * 1e6):06d} UTC, {ended}"
