"""The next batch is fetched while this one computes."""

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

ItemT = TypeVar("ItemT")
AHEAD = 2  # batches: one that waits, and one that is being fetched
END_SECONDS = 10.0  # a data set that does not come back from a row by then is left to itself


def wanted(x: Any, y: Any) -> bool:
    """Whether rows are not in memory: of a data set, which comes without y, and of memory maps."""
    return y is None or isinstance(x, np.memmap) or isinstance(y, np.memmap)


def ahead(items: Iterator[ItemT]) -> Generator[ItemT]:
    """The same items, which a thread asks for before they are needed: at most AHEAD of them. No MPI there.

    An exception of `items` is raised here, where its item would have come. Closing this iterator ends the thread.
    """
    ready: queue.Queue[tuple[ItemT | None, BaseException | None]] = queue.Queue(AHEAD - 1)
    stopped = threading.Event()

    def fetch() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                ready.put((item, None))
                if stopped.is_set():
                    return
        except BaseException as met:  # the thread has nobody to raise it to
            error = met
        ready.put((None, error))

    thread = threading.Thread(target=fetch, name="fetches batches", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        with suppress(queue.Empty):  # room for what the thread holds
            while True:
                ready.get_nowait()
        thread.join(END_SECONDS)
