"""Runs random programs with one injected disagreement each, and counts their outcomes.

    python -m tests.faults.random_programs --programs 1000 --seed 1  a table of outcomes, by kind of injection and check
    python -m tests.faults.random_programs --only 4711               one program: its calls, and what its job printed

Every rank of a program ends in one of these ways:

    right    it finished, with the numbers that NumPy gets in float64: nothing was injected, or it had no effect
    named    all ranks have the same named error, or the job ended and printed one (also an injected exception)
    refused  named errors, although nothing was injected
    raw      an error of Python or MPI, or the job ended without a message of this library
    wrong    it continued with wrong numbers and without an error
    hang     it did not end within --limit, although ALLREDUCE_TIMEOUT_SECONDS is --timeout

Programs that finish, or end in an error that all ranks have, follow each other in one job. Any other program ends its
job, and a new job runs the rest. The exit code is 1 if a program ended in one of the last four ways. On a busy machine,
time-outs also end programs that are only slow: use a longer --timeout there.
"""

import argparse
import collections
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import launch
from tests.faults.notes import read
from tests.faults.random_programs import making

OUTCOMES = ("right", "named", "refused", "raw", "wrong", "hang")
BAD = ("refused", "raw", "wrong", "hang")
JOB_PROGRAMS = 40  # at most so many follow each other in a job: MPICH has 2,048 communicators
RANK = "tests.faults.random_programs.rank"
NAMED = {
    "InjectedError",
    *re.findall(r"^class (\w+)", (launch.ROOT / "allreduce" / "errors.py").read_text(), re.MULTILINE),
}
OURS = re.compile(r"^rank \d+ of \d+: ", re.MULTILINE)  # how what ends a job begins


class Result(NamedTuple):
    seed: int
    outcome: str
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.only is not None:
        return _show(options)
    seeds = range(options.seed * 1_000_000, options.seed * 1_000_000 + options.programs)
    begin = time.monotonic()
    results = run(seeds, options)
    print(table(results, options))
    bad = [result for result in results if result.outcome in BAD]
    for result in bad:
        program = make(result.seed, options)
        print(f"{result.outcome}: --only {result.seed} ({program.kind}, check {program.check}): {result.text}")
    print(f"{len(results)} programs in {time.monotonic() - begin:.0f} s under {options.mpi}, {len(bad)} of them bad")
    return 1 if bad else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--programs", type=int, default=100, metavar="N", help="how many (default: 100)")
    add("--seed", type=int, default=1, metavar="N", help="which ones: another number gives other programs (default: 1)")
    add("--only", type=int, metavar="SEED", help="one program, by the number that the list of bad ones gives it")
    add("--mpi", choices=launch.MPIS, default="openmpi", help="(default: openmpi)")
    add("--kinds", default=",".join(making.KINDS), metavar="KIND,...", help="(default: %(default)s)")
    add("--checks", default=",".join(making.CHECKS), metavar="CHECK,...", help="(default: %(default)s)")
    add("--timeout", type=float, default=3.0, metavar="S", help="ALLREDUCE_TIMEOUT_SECONDS (default: 3)")
    add("--limit", type=float, default=20.0, metavar="S", help="after which a program is said to hang (default: 20)")
    add("--jobs", type=int, default=2, metavar="N", help="how many mpiruns at once (default: 2)")
    options = parser.parse_args(arguments)
    options.kinds, options.checks = options.kinds.split(","), options.checks.split(",")
    for name, known in (("kinds", making.KINDS), ("checks", making.CHECKS)):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    return options


def make(seed: int, options: argparse.Namespace) -> making.Program:
    return making.make(seed, options.kinds, options.checks)


def run(seeds: Sequence[int], options: argparse.Namespace) -> list[Result]:
    """Return the outcome of each program, in the order of the seeds."""
    queues: dict[int, list[int]] = collections.defaultdict(list)
    for seed in seeds:
        queues[make(seed, options).ranks].append(seed)
    batches = [batch for ranks in sorted(queues, reverse=True) for batch in _batches(queues[ranks], options)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = [result for batch in pool.map(lambda batch: list(_run(batch, options)), batches) for result in batch]
    return sorted(results)


def _batches(seeds: list[int], options: argparse.Namespace) -> Iterator[list[int]]:
    """Yield programs of one number of ranks for each job; a program that ends its job comes last."""
    ending = [seed for seed in seeds if make(seed, options).kind in making.ENDINGS]
    going_on = [seed for seed in seeds if seed not in set(ending)]
    jobs = max(len(ending), -(-len(going_on) // JOB_PROGRAMS))
    for job in range(jobs):
        yield going_on[job::jobs] + ending[job : job + 1]


def _run(seeds: list[int], options: argparse.Namespace) -> Iterator[Result]:
    """Run programs in one job after another; each job begins after the program that ended the previous one."""
    ranks = make(seeds[0], options).ranks
    while seeds:
        with tempfile.TemporaryDirectory() as folder:
            code, printed = _job(ranks, seeds, folder, options)
            notes = _notes(folder, ranks)
        finished = True
        while seeds and finished:
            seed, seeds = seeds[0], seeds[1:]
            mine = [note for note in notes if note["seed"] == seed]
            finished = sum(note["outcome"] == "done" for note in mine) == ranks
            program = make(seed, options)
            yield _judge(program, mine) if finished else _judge_end(program, mine, code, printed)


def _job(ranks: int, seeds: list[int], folder: str, options: argparse.Namespace) -> tuple[int | None, str]:
    """Return the exit code of a job (None if it had to be killed), and its output."""
    environment = {
        "ALLREDUCE_TIMEOUT_SECONDS": str(options.timeout),
        "ALLREDUCE_STALL_SECONDS": str(min(1.0, options.timeout)),
        "ALLREDUCE_TABLE": "",
    }
    which = [",".join(options.kinds), ",".join(options.checks)]
    arguments = ["-m", RANK, folder, str(options.limit), *which, *map(str, seeds)]
    try:
        job = launch.mpirun(
            ranks, arguments, mpi=options.mpi, timeout=30 + options.limit * (1 + len(seeds) / 8), env=environment
        )
    except launch.JobTimeoutError as error:
        return None, str(error)
    return job.returncode, job.stdout + job.stderr


def _notes(folder: str, ranks: int) -> list[dict]:
    return [note for rank in range(ranks) for note in read(Path(folder), rank)]


def _judge(program: making.Program, notes: list[dict]) -> Result:
    """Judge a program after which all ranks could continue."""
    seed = program.seed
    outcomes = {note["outcome"] for note in notes} - {"done"}
    text = next((note["text"] for note in notes if note["text"]), "")
    texts = {note["text"] for note in notes if note["outcome"] != "done"}
    if len(outcomes) > 1 or len(texts) > 1:
        return Result(seed, "raw", f"ranks differ: {', '.join(sorted(outcomes))}; {'; '.join(sorted(texts))}")
    outcome = outcomes.pop()
    return Result(seed, "refused" if outcome == "named" and program.kind == "none" else outcome, text)


def _judge_end(program: making.Program, notes: list[dict], code: int | None, printed: str) -> Result:
    """Judge a program that ended its job."""
    seed = program.seed
    if program.ranks == 1 and program.kind in making.ENDINGS:
        return Result(seed, "right", "")  # nobody waits for it
    found: dict[str, str] = {}
    for note in sorted(notes, key=lambda note: note["rank"]):
        found[note["outcome"]] = "; ".join(filter(None, (found.get(note["outcome"]), note["text"])))
    for outcome in ("wrong", "raw", "hang"):
        if outcome in found:
            return Result(seed, outcome, found[outcome] or _last_words(printed))
    if code is None:
        return Result(seed, "hang", _last_words(printed))
    if code == 0:
        return Result(seed, "raw", f"the job ended with 0 in the middle: {_last_words(printed)}")
    words = set(re.findall(r"\w+Error\b", printed))
    killed = "signal 9" in printed or "KILLED BY SIGNAL: 9" in printed  # the launcher says it
    if words & NAMED or OURS.search(printed) or killed:
        return Result(
            seed,
            "refused" if program.kind == "none" else "named",
            ", ".join(sorted(words & NAMED)) or _last_words(printed),
        )
    return Result(seed, "raw", _last_words(printed))


def _last_words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip(" -")]
    return " | ".join(lines[-4:])[-400:]


def table(results: list[Result], options: argparse.Namespace) -> str:
    """Counts of outcomes by kind and check."""
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        program = make(result.seed, options)
        counts[program.kind, program.check][result.outcome] += 1
    rows = [f"{'injected':12}{'check':8}" + "".join(f"{outcome:>8}" for outcome in OUTCOMES)]
    for kind in options.kinds:
        for check in options.checks:
            found = counts[kind, check]
            rows.append(f"{kind:12}{check:8}" + "".join(f"{found[outcome] or '.':>8}" for outcome in OUTCOMES))
    for check in options.checks:
        found = sum((counts[kind, check] for kind in options.kinds), collections.Counter())
        rows.append(f"{'all':12}{check:8}" + "".join(f"{found[outcome] or '.':>8}" for outcome in OUTCOMES))
    return "\n".join(rows)


def _show(options: argparse.Namespace) -> int:
    program = make(options.only, options)
    print(program, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        code, printed = _job(program.ranks, [program.seed], folder, options)
        notes = _notes(folder, program.ranks)
    print(printed)
    for note in notes:
        print(f"rank {note['rank']}: {note['outcome']} {note['text']}")
    done = sum(note["outcome"] == "done" for note in notes) == program.ranks
    result = _judge(program, notes) if done else _judge_end(program, notes, code, printed)
    print(f"exit code {code}: {result.outcome}")
    return 1 if result.outcome in BAD else 0


if __name__ == "__main__":
    sys.exit(main())
