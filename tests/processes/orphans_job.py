"""A rank starts children by multiprocessing, writes their process numbers to a file, and is killed.

python -m tests.processes.orphans_job METHOD FILE [none]    (none: the forkserver imports nothing before it forks)
"""

import multiprocessing
import os
import signal
import sys
import time

import allreduce


def work(started: "multiprocessing.Queue[int]") -> None:
    assert allreduce.NAMES
    started.put(os.getpid())
    time.sleep(600)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    if len(sys.argv) > 3:
        context.set_forkserver_preload([])  # then the children import the library, not the server
    queue = context.Queue()
    for _ in range(2):
        context.Process(target=work, args=(queue,), daemon=True).start()
    numbers = [queue.get() for _ in range(2)]
    with open(sys.argv[2], "w") as file:
        file.write(" ".join(map(str, numbers)))
    os.kill(os.getpid(), signal.SIGKILL)
