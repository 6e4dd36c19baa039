"""How far a long measurement is: an estimate at its begin, a bar on a terminal, lines that stay."""

import sys
from collections.abc import Sequence
from typing import Any

from allreduce.notices import on_terminal
from benchmarks.measuring.measure import Plan


class Progress:
    """Of sizes that are measured one after another.

    shown: false on all ranks but one. sizes: how many, for each dtype. plan: says what one of them may take.
    """

    def __init__(self, shown: bool, sizes: Sequence[int], plan: Plan) -> None:
        self._shown = shown
        self._bar: Any = None
        if not shown or not sum(sizes):
            return
        estimate = "" if plan.iterations else f", about {_minutes(sum(sizes) * plan.seconds)}"
        self.say(f"# {sum(sizes)} measurements{estimate}; what is measured is kept after each dtype")
        if on_terminal():
            from tqdm import tqdm

            self._bar = tqdm(total=sum(sizes), unit="size", leave=False, ncols=80, file=sys.stderr)

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def advance(self, what: str) -> None:
        """One size is measured."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
