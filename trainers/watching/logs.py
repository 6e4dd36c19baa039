"""Logs: each rank logs to a file of its own."""

import contextlib
import logging
import os
import socket
import sys
import time

from allreduce.health import abort, dump
from allreduce.transport import processes
from trainers.errors import ArgumentError, as_error

LINE = "%(asctime)s {where} %(levelname)s %(name)s: %(message)s"
LOGGERS = ("allreduce", "trainers")
_handlers: dict[str, logging.Handler] = {}  # by path


def log_to(folder: str | os.PathLike[str], level: int = logging.INFO) -> str:
    """Write the log of this rank to a file in `folder`, which is created; returns its path, such as "logs/rank-3.log".

    Local: call it on every rank, before the training. The file gets the records of Python's logging on this rank, from
    `level` on: the notices of allreduce and trainers, a line for each epoch, and those of your program. It also gets
    the error with which this rank ends the job. A line has the time in UTC, the rank of MPI.COMM_WORLD, the node and
    the process. An existing file is continued, so a restarted job keeps its logs. Stderr stays the same.

    Unless ALLREDUCE_DUMP is set, the rank also writes its stacks and last calls there when a wait is reported or times
    out, or the job is aborted. A second call for the same folder does nothing. Raises ArgumentError if the file can't
    be written.
    """
    rank, size = processes.here()
    path = os.path.join(os.path.abspath(folder), f"rank-{rank}.log")
    if path in _handlers:
        return path
    with as_error(ArgumentError, f"the log of rank {rank} can't be written to {path}"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # no link is followed: other users may write to the folder
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    handler = logging.StreamHandler(os.fdopen(opened, "a", 1, encoding="utf-8", errors="replace"))
    where = f"rank {rank} of {size} on {socket.gethostname()} process {os.getpid()}".replace("%", "%%")
    handler.setFormatter(logging.Formatter(LINE.format(where=where)))
    handler.formatter.converter = time.gmtime  # type: ignore[union-attr]
    handler.setLevel(level)
    root = logging.getLogger()
    if not root.handlers:  # Python's handler of last resort, which a handler of the root's own replaces
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(logging.WARNING)
        root.addHandler(shown)
    root.addHandler(handler)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(min(level, logger.getEffectiveLevel()))
    _handlers[path] = handler
    os.environ.setdefault(dump.DUMP, os.path.dirname(path))
    abort.on_ending(lambda _, text: _write(handler, text))
    return path


def write_error(error: BaseException) -> None:
    """Write an error that all ranks have, and that ends their programs, to this rank's logs, if any. Local."""
    for handler in _handlers.values():
        _write(handler, f"{type(error).__name__}: {error}")


def _write(handler: logging.Handler, text: str) -> None:
    record = logging.LogRecord("trainers", logging.ERROR, "", 0, text.rstrip("\n"), None, None)
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file: the job ends all the same
        handler.handle(record)
