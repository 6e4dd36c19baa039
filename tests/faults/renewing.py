"""One rank of a training in which ranks kill themselves, and new ones are started in their places.

    mpirun --with-ft ulfm -n 3 python renewing.py

Two of three ranks die in an epoch, one of them the chief, and one of those that have come later. Those that are left
wait with the epochs until new ranks are ready, so that it does not matter how long those take.
"""

import json
import time
from typing import Any

from training import Deaths, trained

from allreduce import Topology, ending, newcomers

MOMENTS = {0: ("batch_begin", 1, 2), 2: ("batch_end", 1, 3), 4: ("batch_begin", 3, 1)}


class Waiting(Deaths):
    """Waits before an epoch until those that were started are ready to join."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        started, deadline = self.trainer._survival.renewal._newcomers, time.monotonic() + 60
        while started is not None and not all(map(started._ready, started._new)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.moment is None:
            self.moment = MOMENTS.get(ending.here()[0])
        super().on_train_batch_begin(batch, logs)


def main() -> None:
    late, ranks = newcomers.started(), Topology()
    deaths = Waiting(None if late else MOMENTS.get(ranks.rank))
    came = trained(ranks, {}, deaths, on_failure="replace")
    print(json.dumps(came | {"late": late, "number": ending.here()[0]}), flush=True)


if __name__ == "__main__":
    main()
