"""The trials of "auto": in the first calls of a signature several backends take turns, and the fastest one stays.

The calls are the user's own. Each rank measures its time from the rendezvous to the end of its part of the call. At the
end of a round the ranks agree on the slowest rank's time of each call, by one small message, so all of them find the
same medians and select the same backend. The closer the medians are, the more rounds follow: beside other programs some
calls take ten times as long as the others. Later calls cost one more Python call (0.1 us). After CHECK calls the
backends take turns again, then after twice as many, and so on: a machine's state changes.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from allreduce.arrays.ops import Op
from allreduce.engine.call import Call
from allreduce.engine.engine import BoundWork, DirectWork, Work
from allreduce.errors import OptionError, UnavailableError

LEAST_BYTES = 2 * 1024  # shorter arrays are not tried: the MPI library's latency is the lowest
# (bytes, calls): shorter arrays are reduced so many times in a row by one backend. The first call of a row is not
# counted, because it finds another backend's code and data in the cache; nor is the first round, if others follow.
ROWS = (1 << 20, 6), (8 << 20, 4)
LONGEST_ROW = 2  # calls in a row of longer arrays
SAMPLES = 3  # counted calls of a backend before another one replaces it
# (rounds, times): a backend that is so many times as fast as all others is selected after that many rounds. If it is
# 1.25 times as fast, the backend in use is selected after one round of a later trial, and the rule's backend after two
# rounds of the first trial of long arrays.
CLEAR = (3, 2.0), (4, 1.25)
ROUNDS = 6  # at most; in each, every backend has its row of calls
GAIN = 0.95  # another backend replaces the one in use if it takes at most this part of its time
CHECK, LONGEST_CHECK = 100, 16_000  # calls from one trial to the next
SAME_BITS = "same_bits"
TRIALS = (True, False, SAME_BITS)
clock = time.perf_counter


def check(trial: object) -> None:
    """Raise OptionError if `trial` is none of TRIALS. Local."""
    if not any(trial is each or (isinstance(trial, str) and trial == each) for each in TRIALS):
        raise OptionError(f"trial={trial!r} is unknown; use {', '.join(map(repr, TRIALS))}")


def applies(trial: bool | str, call: Call, ranks: int) -> bool:
    """Return whether calls like `call` are tried, if the option `trial` is as given. The same on all ranks."""
    if trial is False or call.length * call.dtype.itemsize < LEAST_BYTES:
        return False
    return trial is True or order_is_free(call, ranks)


def order_is_free(call: Call, ranks: int) -> bool:
    """Return whether every backend gives the same bits: of integers, and of sums and products of two ranks. Local.

    Of more ranks the backends add floats in different orders. The maximum of 0 and -0 may be either.
    """
    return call.dtype.kind in "iub" or (ranks == 2 and call.op in ("sum", "mean", "prod"))


class Selection:
    """Selects the backend for calls of one signature. `run` is the work of each call.

    names: the candidates, the same on all ranks; the first one stays unless another is faster. work_of: returns the
    work of a backend. agree: overwrites an array by its maximum over all ranks; collective. drop: told when a candidate
    turns out to be unavailable. decisions: class of signatures -> name of the backend selected last; a new signature
    of a known class begins with that one. ready: wraps work so that it ignores NumPy's floating-point errors.

    name, why: the backend of the present or the next call, and the reason.
    """

    def __init__(
        self,
        call: Call,
        op: Op,
        names: Sequence[str],
        *,
        work_of: Callable[[str], Work],
        agree: Callable[[np.ndarray], np.ndarray],
        drop: Callable[[str, UnavailableError], None],
        ready: Callable[[Work], Callable[..., Any]],
        decisions: dict[tuple, str],
    ) -> None:
        self._op, self._names = op, list(names)
        self._work_of, self._agree, self._drop, self._ready = work_of, agree, drop, ready
        nbytes = call.length * call.dtype.itemsize
        self._row = next((calls for most, calls in ROWS if nbytes < most), LONGEST_ROW)
        self._class, self._decisions = (nbytes.bit_length(), call.dtype, call.op, call.memory), decisions
        self._plan: list[str] = []  # the backends of the next calls of this round
        self._times: dict[str, list[list[float]]] = {}  # by backend and round
        self._calls, self._wait, self._checks = 0, CHECK, False
        self._left = 1  # calls until the next one of a trial
        known = decisions.get(self._class)
        if known in self._names:
            self._adopt(known, f"measured with another array of this size: {known}")
        else:
            self._use(self._names[0], "on trial")

    def run(self, flat: Any, _: Any) -> None:
        """Reduce a 1-D array in place."""
        self._left -= 1
        if self._left:
            self._work(flat, self._argument)
        else:
            self._try(flat)

    def bind(self, flat: np.ndarray) -> BoundWork:
        """Return the fastest way to do `run` on one array again and again."""
        held, bound = "", (self._work, flat, self._argument)  # of the backend `held`

        def run(flat: np.ndarray, argument: Any) -> None:
            nonlocal held, bound
            if self._left == 1:
                self.run(flat, argument)
                return
            self._left -= 1
            if held != self.name:
                held, fastest = self.name, getattr(self._work_of(self.name), "bind", None)
                bound = (self._work, flat, self._argument) if fastest is None else fastest(flat)
            function, first, second = bound
            function(first, second)

        return run, flat, None

    def work(self) -> DirectWork:
        """Return the work of calls of this signature."""
        return DirectWork(self.run, bind=self.bind)

    def _use(self, name: str, why: str) -> None:
        work = self._work_of(name)
        self.name, self.why = name, why
        if isinstance(work, DirectWork):
            self._work, self._argument = work.run, self._op if work.argument is None else work.argument
        else:
            self._work, self._argument = self._ready(work), self._op

    def _adopt(self, name: str, why: str) -> None:
        """Use `name` for the next calls, until the next trial."""
        self._use(name, why)
        self._names = [name, *(other for other in self._names if other != name)]
        self._decisions[self._class] = name
        self._left = self._wait + 1 if len(self._names) > 1 else sys.maxsize
        self._calls += self._wait
        self._plan, self._times = [], {}

    def _try(self, flat: Any) -> None:
        """Reduce an array by the next candidate, and measure it."""
        self._left = 1  # the next call is of the trial, too
        if not self._times:
            self._checks = self._calls > 0
            self._begin_round()
        name = self._plan[0]
        try:
            if name != self.name:
                self._use(name, "on trial")
            begin = clock()
            self._work(flat, self._argument)
            seconds = clock() - begin
        except UnavailableError as error:  # raised on all ranks, before anything was changed
            if len(self._names) == 1:
                raise
            self._drop_candidate(name, error)
            self._try(flat)
            return
        self._times[name][-1].append(seconds)
        self._plan.pop(0)
        if not self._plan:
            self._judge()

    def _begin_round(self) -> None:
        self._plan = [name for name in self._names for _ in range(self._row)]
        for name in self._names:
            self._times.setdefault(name, []).append([])

    def _drop_candidate(self, name: str, error: UnavailableError) -> None:
        self._drop(name, error)
        self._names.remove(name)
        self._plan, self._times = [], {}
        self._use(self._names[0], "on trial")

    def _judge(self) -> None:
        """End a round: select a backend if it is clear which one is the fastest. Collective."""
        rounds = len(self._times[self._names[0]])
        self._calls += len(self._names) * self._row
        if rounds < self._least_rounds():
            self._begin_round()
            return
        counted = [[row[1:] for row in self._times[name][rounds > 1 :]] for name in self._names]
        agreed = self._agree(np.array(counted).reshape(len(counted), -1)).tolist()
        medians = {name: median(times) for name, times in zip(self._names, agreed, strict=True)}
        before = self._names[0]
        fastest, second = sorted([*medians.values(), math.inf])[:2]
        stays = self._trusted() and medians[before] == fastest
        decides = stays or len(agreed[0]) >= SAMPLES
        needed = min((times for least, times in CLEAR if stays or (decides and rounds >= least)), default=math.inf)
        if second <= needed * fastest and rounds < ROUNDS:
            self._begin_round()
            return
        gain = GAIN if self._trusted() else 1.0
        name = before if fastest > gain * medians[before] else min(medians, key=lambda each: medians[each])
        self._wait = min(2 * self._wait, LONGEST_CHECK) if self._checks and name == before else CHECK
        self._adopt(name, _reason(medians, self._calls, rounds * len(self._names) * self._row))

    def _trusted(self) -> bool:
        """Return whether the first candidate stays unless another one is faster for certain: it has been measured, or
        it is the rule's for long arrays, of which every call of a trial is dear."""
        return self._checks or self._row == LONGEST_ROW

    def _least_rounds(self) -> int:
        """Return the number of rounds before the first comparison."""
        return 1 if self._checks else 2 if self._trusted() else CLEAR[0][0]


def _reason(medians: Mapping[str, float], calls: int, tried: int) -> str:
    """Format the times of a trial that took the last `tried` of `calls` calls."""
    times = ", ".join(
        f"{name} {1e6 * medians[name]:.4g} us" for name in sorted(medians, key=lambda each: medians[each])
    )
    where = f"the first {calls} calls" if calls == tried else f"calls {calls - tried + 1} to {calls}"
    return f"measured: {times}, in {where}"
