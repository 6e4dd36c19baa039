"""CheckGradients: finds NaN and infinite gradients before they are averaged, and names the ranks that have them."""

from functools import partial
from typing import Any

from allreduce import notices
from allreduce.arrays import dtypes
from trainers import checks
from trainers.arguments import name_error
from trainers.checks import GradientArray, GradientCheck, Span
from trainers.errors import ArgumentError, NotFiniteError
from trainers.replica import parameter_slices
from trainers.watching.callback import Callback, Logs


class CheckGradients(Callback):
    """Checks every rank's own gradients in every step. Give it to all ranks or to none.

    on_bad: "raise": all ranks raise the same NotFiniteError, which names the ranks and parameters whose gradients are
        NaN or infinite. "skip": log a warning, and leave out the step on all ranks, which then does not count in the
        means of its epoch; a PyTorch module's buffers (batch norm's statistics) are set back. Where ranks do not take
        steps together (asynchronous servers, spare replicas), only the rank's own gradients are discarded.

    Gradients too large for the dtype in which they are sent (65504 for compress="float16") count as infinite, and so do
    gradients whose sum of absolute values over the ranks overflows. A check reads the gradients once, and costs a
    message of 16 bytes a step. Raises ArgumentError on all ranks when the fit begins.
    """

    collective = agrees = True
    reads_batches = False

    def __init__(self, on_bad: str = "raise") -> None:
        self.on_bad = on_bad
        self.skipped = 0  # steps that were left out
        self._made: GradientCheck | None = None  # made in the first step

    def __repr__(self) -> str:
        return f"CheckGradients(on_bad={self.on_bad!r})"

    def on_train_begin(self, logs: Logs | None = None) -> None:
        trainer, error = self.trainer, None
        if text := name_error("CheckGradients: on_bad", self.on_bad, checks.ANSWERS):
            error = ArgumentError(text)
        trainer.group.agree(repr(self), error)
        trainer.replica.undoable |= self.on_bad == "skip"
        self._made = None

    def on_ranks_change(self) -> None:
        self._made = None  # the backend has changed

    @property
    def _check(self) -> GradientCheck:
        """The check, created in the first step: a joining rank has no backend earlier."""
        if self._made is None:
            replica, backend = self.trainer.replica, self.trainer.strategy.allreduce
            own = dtypes.parse(replica.gradient_dtype)
            dense = GradientArray(_spans(replica), own, own if backend is None else backend.compression.sent(own))
            self._made = GradientCheck(self.on_bad, [dense])
        return self._made

    def before_update(self, epoch: int, batch: int) -> bool:
        check, strategy = self._check, self.trainer.strategy
        check.begin()
        gradients = strategy.core.local_gradients
        if gradients is not None:
            check.check_array(0, gradients)
        overflow = partial(self._overflow, gradients)
        self.skipped += check.finish(self.trainer.group.comm, overflow, f"in epoch {epoch + 1}, step {batch + 1}, ")
        return check.left_out

    def _overflow(self, gradients: Any, number: int) -> int:
        """Return the first element of the gradients whose sum may overflow, or -1. Collective."""
        _, _, sent = self._check.arrays[number]
        length = self.trainer.replica.gradient_length
        return checks.overflow(self.trainer.group.comm, gradients, length, sent)

    def unusable(self, gradients: Any) -> bool:
        check = self._check
        check.begin()
        check.check_array(0, gradients)
        if check.finite:
            return False
        rows = [checks.FINITE] * self.trainer.size
        rows[self.trainer.rank] = check.row
        problem = check.describe(rows)
        if self.on_bad == "raise":
            raise NotFiniteError(f"{problem.text}: {problem.advice}")
        self.skipped += 1
        notices.log.warning("allreduce: %s; they are discarded", problem.text)
        return True


def _spans(replica: Any) -> list[Span]:
    """Return the span of each parameter in the flat gradients. Statistics to be averaged may follow them."""
    slices = parameter_slices(replica)
    spans = [Span(name, each.start, each.stop - each.start) for name, each in zip(replica.shapes, slices, strict=True)]
    start = slices[-1].stop if slices else 0
    if start < replica.gradient_length:
        spans.append(Span("statistics" if spans else "parameters", start, replica.gradient_length - start))
    return spans
