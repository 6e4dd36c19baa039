"""A job of 3 ranks: rank 1 is stopped and goes on, rank 2 is killed; rank 0 waits for neither."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from allreduce import Topology
from allreduce.elastic.exchange import Exchange
from trainers.apps.serving.answering import NUMBER, answer_requests

SIZE = 300_000  # elements: more than MPI sends at once


class Done(BaseException):
    """Ends answer_requests alone."""


def main() -> None:
    topology = Topology()
    exchange = Exchange(topology)
    if topology.rank == 0:
        serve(exchange)
    else:
        own = np.array([os.getpid()])

        def handle(header: dict, arrays: list[np.ndarray]) -> tuple[dict, list[np.ndarray]]:
            if "done" in header:
                raise Done
            return header, [own, *arrays]

        with contextlib.suppress(Done):
            answer_requests(exchange, handle)
    exchange.close()
    print(f"rank {topology.rank} ends", flush=True)


def serve(exchange: Exchange) -> None:
    large, pids = np.arange(SIZE), {}

    def deal(rank: int, number: int) -> None:
        exchange.send(rank, {NUMBER: number}, [large])

    def answered(*numbers: int) -> bool:
        """Whether the next answers are those to work of these numbers."""
        found: list[int] = []

        def done() -> bool:
            for message in exchange.poll():
                found.append(message.header[NUMBER])
                pids[message.source] = int(message.arrays[0][0])
                assert np.array_equal(message.arrays[1], large)
            return len(found) >= len(numbers)

        return exchange.wait(done, 30) and sorted(found) == sorted(numbers)

    deal(1, 1)
    deal(2, 2)
    assert answered(1, 2)
    stop(pids[1])
    os.kill(pids[2], signal.SIGKILL)
    deal(1, 3)
    deal(2, 4)
    assert exchange.wait(lambda: exchange.poll() == [] and exchange.lost == {2}, 30)
    os.kill(pids[1], signal.SIGCONT)
    assert answered(3)
    exchange.send(1, {"done": True}, [])


def stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main())
