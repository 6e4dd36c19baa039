"""One rank of a training in which ranks kill themselves, and ranks that wait take their places.

    mpirun --with-ft ulfm -n 6 python joining.py

Three ranks work and three wait: two of them are needed, and the last one is let go. Each rank prints what came of it.
"""

import json

from training import Deaths, trained

from allreduce import Topology, spares

WORKING = 3


def main() -> None:
    pool = Topology()
    moments = {1: ("batch_begin", 1, 2), 0: ("epoch_end", 3, 0)}
    deaths = Deaths(moments.get(pool.rank))
    ranks = spares.man(pool, pool.size - WORKING)
    if ranks is None:
        print("not needed", flush=True)
        return
    print(json.dumps(trained(ranks, {}, deaths)), flush=True)


if __name__ == "__main__":
    main()
