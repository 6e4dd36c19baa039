"""Fetches the next batches in a thread while a batch is computed."""

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from trainers.data import leaves

ItemT = TypeVar("ItemT")
END: Any = object()  # follows the last item
AHEAD = 2  # batches: one that waits, and one that is being fetched
END_SECONDS = 10.0  # to wait for the thread at the end; a thread that takes longer keeps running


def batches_ahead(x: Any, y: Any, wanted: bool | None, exact: bool) -> int:
    """Return how many batches of arrays, or of a data set (y is None), a thread fetches in advance.

    wanted: the user's choice; None: if the rows are not in memory. exact: whether the random generators of this process
    are seeded for each micro-batch.
    """
    if exact and y is None:
        return 0
    if wanted is None:
        wanted = y is None or any(isinstance(each, np.memmap) for each in leaves((x, y)))
    return AHEAD if wanted else 0


def ahead(items: Iterator[ItemT]) -> Generator[ItemT]:
    """Yield the items, fetched in advance by a thread, at most AHEAD of them. `items` must not use MPI.

    An exception of `items` is raised here, where its item would have come. Closing this iterator ends the thread.
    """
    ready: queue.Queue[tuple[ItemT, BaseException | None]] = queue.Queue(AHEAD - 1)
    stopped = threading.Event()

    def fetch() -> None:
        try:
            for item in items:
                ready.put((item, None))
                if stopped.is_set():
                    return
            ready.put((END, None))
        except BaseException as error:  # raised where the item is consumed
            ready.put((END, error))

    thread = threading.Thread(target=fetch, name="fetches batches", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is END:
                return
            yield item
    finally:
        stopped.set()
        with suppress(queue.Empty):  # make room, so that the thread is not blocked in `put`
            while True:
                ready.get_nowait()
        thread.join(END_SECONDS)
