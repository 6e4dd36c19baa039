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
from trainers.apps.serving.answering import Dealer, answer_requests

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
    dealer, large = Dealer(exchange), np.arange(SIZE)

    def answers(count: int) -> dict[int, bool]:
        found: dict[int, bool] = {}

        def done() -> bool:
            for answer in dealer.answers():
                found[answer.rank] = answer.header is not None
                if answer.arrays:
                    pids[answer.rank] = int(answer.arrays[0][0])
                    assert np.array_equal(answer.arrays[1], large)
            return len(found) >= count

        assert exchange.wait(done, 30), found
        return found

    pids: dict[int, int] = {}
    for rank in (1, 2):
        dealer.deal(rank, {}, [large])
    assert answers(2) == {1: True, 2: True}
    stop(pids[1])
    os.kill(pids[2], signal.SIGKILL)
    late = dealer.deal(1, {}, [large])
    dealer.deal(2, {}, [large])
    assert answers(1) == {2: False}
    assert exchange.lost == {2}
    dealer.forget(late)
    assert dealer.busy(1) == 1
    os.kill(pids[1], signal.SIGCONT)
    assert exchange.wait(lambda: dealer.answers() == [] and dealer.late == 1, 30)
    dealer.forget(dealer.deal(1, {"done": True}))


def stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main())
