"""Kills ranks of real jobs, again and again: do the other ranks continue, how fast, and is the result right?

    python -m tests.faults --runs 1000 --seed 1       a table: injected, survived, hung, wrong, seconds, work lost
    python -m tests.faults --only 1000017             repeats one run, by its number in the output
    python -m tests.faults --hours 1 --mtbf 30        one training under random kills: does its memory grow?
    python -m tests.faults --scenarios                one run of every kind of fault, also damaged checkpoints, a full
                                                           /dev/shm, and wrong sums, which must be detected

Starts jobs of its own, under Open MPI's mpirun --with-ft ulfm: start it without mpirun. What a run is, what the results
mean, and what --hours prints: docs/contribute/faults.md. A minute of a soak: --hours 0.02 --mtbf 5.

The seconds are those from the kill until the last remaining rank has finished a step, or a call, without the failed
rank. The files and the output of a bad run are kept in --keep. The exit code is 1 if there was a bad run.
"""

import mpi4py

mpi4py.rc.initialize = False  # the jobs have MPI; this process needs none

import argparse  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402

from tests.faults import drawing, jobs, judging, plans, soak  # noqa: E402
from tests.faults.judging import ENDED, HUNG, OUTCOMES, WRONG, Injected, Judged  # noqa: E402
from tests.faults.plans import Plan  # noqa: E402
from trainers.cli.parser import Parser  # noqa: E402

SEED_RUNS = 1_000_000  # numbers from one seed to the next


def main() -> int:
    options = _parser().parse_args()
    if options.hours:
        return soak.main(options)
    numbers = [options.seed * SEED_RUNS + place for place in range(options.runs)]
    if options.only is not None:
        numbers = [options.only]
    names = options.programs.split(",")
    drawn = [drawing.draw(number, names, options.most_ranks, options.faults) for number in numbers]
    if options.scenarios:
        drawn = list(plans.SCENARIOS.values())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no job outlives this
    begin = time.monotonic()
    runs: list[Judged] = []
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            for run in pool.map(lambda plan: _run(plan, options), drawn):
                runs.append(run)
                _tell(run, len(runs), len(drawn), options)
    except KeyboardInterrupt:
        print("interrupted: what was done until then", flush=True)
    seconds = time.monotonic() - begin
    print(table(runs))
    bad = [run for run in runs if run.outcome not in judging.GOOD]
    print(f"{len(runs)} runs in {seconds:.0f} s, {len(bad)} of them bad")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tests.faults", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=100, metavar="N", help="how many jobs (default: 100)")
    add("--seed", type=int, default=1, metavar="S", help="another one gives other runs (default: 1)")
    add("--only", type=int, metavar="NUMBER", help="one run, by its number")
    add("--scenarios", action="store_true", help="one run of every kind of fault instead")
    add("--programs", default=",".join(plans.PROGRAMS), metavar="NAME,...", help="(default: %(default)s)")
    add(
        "--faults",
        choices=drawing.WAYS,
        default=drawing.WAYS[0],
        help="several: two or three losses 10 ms to 1 s apart; host: all ranks of one of two simulated hosts at once, "
        "which needs root (see scripts/cluster_sim.sh --help) (default: %(default)s)",
    )
    add("--most-ranks", type=int, default=5, metavar="N", help="(default: 5)")
    add("--jobs", type=int, default=1, metavar="N", help="jobs at once, which spoils the seconds (default: 1)")
    add(
        "--limit",
        type=float,
        default=120,
        metavar="S",
        help="without progress, after which a job is said to hang (default: 120)",
    )
    add("--hours", type=float, metavar="H", help="one long training under random kills instead, for H hours")
    add("--mtbf", type=float, default=30, metavar="S", help="of --hours: seconds between two kills (default: 30)")
    add("--keep", default="faults", metavar="DIR", help="where what is bad is kept (default: ./faults)")
    return parser


def _run(plan: Plan, options: argparse.Namespace) -> Judged:
    with tempfile.TemporaryDirectory(prefix="faults", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ended = jobs.run(plan, folder, options.limit)
        judged = judging.judge(plan, ended, folder)
        if judged.outcome not in judging.GOOD or options.only is not None:
            kept = Path(options.keep) / str(plan.number)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
    return judged


def _tell(run: Judged, done: int, runs: int, options: argparse.Namespace) -> None:
    seconds = [f"{fault.seconds * 1e3:.0f} ms" if fault.seconds is not None else "-" for fault in run.faults]
    why = f": {run.why}; see {options.keep}/{run.plan.number}" if run.why else ""
    print(f"{done}/{runs} {run.outcome}{why} [{', '.join(seconds)}] {run.plan}", flush=True)


HEAD = f"{'times':>6}" + "".join(f"{name:>10}" for name in OUTCOMES) + f"{'median s':>10}{'max s':>8}{'redone':>8}"


def table(runs: Sequence[Judged]) -> str:
    """A line for every kind of fault, one for every program, one for all, and why runs have ended."""
    pairs = [(run, fault) for run in runs for fault in run.faults]
    lines = _group("injected", pairs, lambda _, fault: fault.name)
    lines += ["", *_group("program", pairs, lambda run, _: run.plan.program), "", _line("all", pairs)]
    bad = Counter((run.outcome, run.why) for run in runs if run.outcome in (HUNG, WRONG, ENDED))
    lines += [f"{times} x {outcome}: {why}" for (outcome, why), times in bad.most_common()]
    return "\n".join(lines)


def _group(title: str, pairs: Sequence[tuple[Judged, Injected]], key: Callable[[Judged, Injected], str]) -> list[str]:
    names = sorted({key(*pair) for pair in pairs})
    return [f"{title:32}{HEAD}", *(_line(name, [pair for pair in pairs if key(*pair) == name]) for name in names)]


def _line(name: str, pairs: Sequence[tuple[Judged, Injected]]) -> str:
    """redone: the most steps that a run has done again, besides the one that a loss has broken off."""
    counts = "".join(f"{sum(fault.outcome == outcome for _, fault in pairs):>10}" for outcome in OUTCOMES)
    seconds = [fault.seconds for _, fault in pairs if fault.seconds is not None]
    times = f"{statistics.median(seconds):>10.3f}{max(seconds):>8.3f}" if seconds else f"{'':>18}"
    redone = max((run.redone for run, _ in pairs), default=0)
    return f"{name:32}{len(pairs):>6}{counts}{times}{redone:>8}"


if __name__ == "__main__":
    sys.exit(main())
