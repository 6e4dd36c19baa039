"""What copies, falls back or oversubscribes says so once, on rank 0, through the logger "allreduce"."""

import logging

log = logging.getLogger("allreduce")
_said: set[str] = set()


def once(rank: int, text: str) -> None:
    """Say `text` the first time, if this is rank 0."""
    if rank == 0 and text not in _said:
        _said.add(text)
        log.warning("allreduce: %s", text)


def shown(value: object, most: int = 60) -> str:
    """What was found in a file, as far as it fits a line, and without characters that a terminal would act upon."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deep, or a number too long, for Python to write
        text = type(value).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."
