"""A metric that callbacks watch: where it is found, and when it has become better."""

import math
import numbers
from typing import Any

from trainers.errors import ArgumentError
from trainers.watching.callback import Logs

MODES = ("auto", "min", "max")
LARGER_IS_BETTER = ("acc", "auc", "fmeasure", "precision", "recall", "f1")  # the beginning of a metric's name


def is_number(value: Any) -> bool:
    """Whether an argument is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


class Monitor:
    """name: in logs: "val_loss", "accuracy", ... mode: "min", "max", or "auto", which goes by the name.

    min_delta: a change that is no larger counts as none. Raises ArgumentError.
    """

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ArgumentError(f"mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        if not is_number(min_delta):
            raise ArgumentError(f"min_delta must be a finite number, got {min_delta!r}")
        self.name, self._min_delta = name, abs(float(min_delta))
        if mode == "auto":
            mode = "max" if name.removeprefix("val_").startswith(LARGER_IS_BETTER) else "min"
        self._larger = mode == "max"

    def value(self, logs: Logs | None) -> float:
        """What was measured. Raises ArgumentError when nothing was measured under this name."""
        logs = logs or {}
        if self.name not in logs:
            hint = "; pass validation_data to fit" if self.name.startswith("val_") else ""
            raise ArgumentError(f"monitor={self.name!r} is not measured here{hint}; there are: {', '.join(logs)}")
        return float(logs[self.name])

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` is an improvement; the first number always is."""
        if than is None or math.isnan(value):
            return not math.isnan(value)
        return value - self._min_delta > than if self._larger else value + self._min_delta < than
