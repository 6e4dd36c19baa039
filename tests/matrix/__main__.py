"""Crosses features of the trainers in random fits, and compares each with one process that uses the framework alone.

    python -m tests.matrix [--cases 2000] [--seed 1] [--only NUMBER]
    python -m tests.matrix --refused      # writes docs/trouble/combinations.md; some minutes

A case crosses owners of the parameters, averages, transforms, loaders, replicas, backends, compressions, ranks, nodes,
and a stop with a resume on other ranks. It is "right" (the parameters, their average and the history are those of one
process, and the ranks have the same bits), "refused" (with a named error), or "wrong". A failure prints the command
that repeats it.
"""

import argparse
import signal
import sys
from collections import Counter

from tqdm import tqdm

from tests.matrix import refused
from tests.matrix.case import FIXED, case_of
from tests.matrix.jobs import outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of a case")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    parser.add_argument("--refused", action="store_true", help="write the page of refused combinations")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no job outlives this
    if given.refused:
        refused.PAGE.write_text(refused.page(tqdm(outcomes(0, FIXED), total=len(FIXED), unit="case")))
        return 0
    numbers = range(given.cases) if given.only is None else [given.only]
    counts: Counter[str] = Counter()
    for done, outcome in enumerate(outcomes(given.seed, numbers), 1):
        counts[outcome.outcome] += 1
        if given.verbose or given.only is not None or outcome.outcome == "wrong":
            print(f"{outcome.outcome}: {case_of(given.seed, outcome.number)}\n{outcome.why}")
            print(f"repeat it: python -m tests.matrix --seed {given.seed} --only {outcome.number}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(numbers)} cases: {dict(counts)}", flush=True)
    print(dict(counts))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
