"""Notices of copies, fallbacks and oversubscription, logged once on rank 0 by "allreduce"; texts for messages."""

import difflib
import logging
from collections.abc import Iterable, Sequence

log = logging.getLogger("allreduce")
_said: set[str] = set()


def once(rank: int, text: str) -> None:
    """Log `text` the first time, if this is rank 0. Local."""
    if rank == 0 and text not in _said:
        _said.add(text)
        log.warning("allreduce: %s", text)


def shown(value: object, most: int = 60) -> str:
    """Format an untrusted value: at most `most` characters, without control characters."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deeply nested, or a number too long, for Python to format
        text = type(value).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def near(unknown: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name: "; did you mean 'update'?", or "" if no name is near. Local."""
    found = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def nbytes(number: float) -> str:
    """ "8 B", "64 KiB", "1.5 GiB" """
    return scaled(number, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def scaled(number: float, units: Sequence[str], base: int) -> str:
    """Format a number with the largest unit that it reaches."""
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.0f} {units[power]}" if number >= 100 else f"{number:.3g} {units[power]}"
