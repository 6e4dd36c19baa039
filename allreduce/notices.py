"""What copies, falls back or oversubscribes says so once, on rank 0, through the logger "allreduce"."""

import logging

log = logging.getLogger("allreduce")
_said: set[str] = set()


def once(rank: int, text: str) -> None:
    """Say `text` the first time, if this is rank 0."""
    if rank == 0 and text not in _said:
        _said.add(text)
        log.warning("allreduce: %s", text)
