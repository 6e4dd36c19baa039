"""Transform, the base of the objects of `fit(transforms=[...])`, and Applied, a transform in the steps of one fit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from trainers.arguments import Checked
from trainers.arrays.average import Spans
from trainers.arrays.squares import sum_of_squares
from trainers.data import Data
from trainers.errors import ArgumentError
from trainers.options.average import Average
from trainers.replica import Replica, Slices
from trainers.watching.callback import Callback
from trainers.watching.meter import NormMeter


class Rows(NamedTuple):
    """Rows whose gradients are to be computed: this rank's rows of a batch, or some of them.

    share: see Replica.gradients. memory: gets the gradients; `replica` is bound to it. ready: see Replica.ready.
    """

    data: Data
    share: float
    memory: Any
    replica: Replica
    ready: Callable[[int], None] | None = None


Compute = Callable[[Rows], Any]
"""Computes the gradients of rows; returns the metrics, as Replica.gradients."""


class Applied:
    """A transform in one fit: it has what changes while the fit runs. Override the methods that the transform needs.

    All methods are local, and called in the order of the list: `start`, `begin`, `plan`, `end_step` on all ranks, the
    others on the ranks that compute or update. An error of one ends the fit on all ranks. A MirroredOptimizer calls
    `begin` and `reduced` alone.

    meter: adds up a number of each step, of which the logs have the mean. watchers: callbacks of the fit.
    needs_squares: whether `reduced` gets the sum of the squares of all gradients, which may cost a message.
    """

    meter: NormMeter | None = None
    watchers: Sequence[Callback] = ()
    needs_squares = False

    def begin(self) -> None:
        """The fit begins; called again after a checkpoint has been loaded."""

    def plan(self, epochs: int, length: int | None) -> None:
        """Take note of the epochs of the training and the steps of each (None: unknown). Raises ArgumentError if the
        transform can't work with them."""

    def begin_step(self, number: int) -> None:
        """Step `number` of the training (0, 1, ...) begins on this rank. May raise any exception."""

    def end_step(self) -> None:
        """A checkpoint or a model is about to be written: undo what `begin_step` has changed in the replica."""

    def compute(self, inner: Compute, rows: Rows) -> Any:
        """Compute the gradients of rows by `inner`, once or for parts of them; returns the metrics of all rows.

        Here a rank has the gradients of all parameters, of its own rows; with a `compute` of a transform they are
        summed after it, not during it. Parameters must not move here: ranks may share their memory.
        """
        return inner(rows)

    def reduced(self, gradients: Sequence[Any], part: Slices | None, squares: Any) -> None:
        """Change averaged gradients in place, before the update.

        gradients: 1-D arrays: those of the parameters in `part`, which this rank updates; None: of all parameters. A
            slice may begin inside of a tensor, or be empty. Ranks that update the same parameters must get the same
            bits. With LocalSGD and asynchronous servers nothing is averaged: they are all gradients of this rank's
            own rows.
        squares: the sum of the squares of all gradients of all parameters; None without `needs_squares`.
        """

    def updated(self, spans: Spans | None) -> None:
        """The parameters in these slices were updated, on this rank; None: all."""


class Transform(Checked):
    """Base of the options that change the steps of a fit: frozen dataclasses; see Checked for their fields. The ranks
    compare their `repr`, so give one to a class whose fields have functions, as Schedule does.

    divides: whether it computes the rows of a batch in parts.
    """

    divides: ClassVar[bool] = False

    def start(self, replica: Replica) -> Applied:
        """Return this transform for a fit of a replica. Local."""
        raise NotImplementedError

    def error(self, replica: Replica, average: Average | None) -> str:
        """Return why a replica can't be trained with this transform, as text; "" if it can. Local.

        average: of the MirroredTrainer, which says how ranks combine their gradients.
        """
        return ""

    @property
    def validates_average(self) -> bool:
        """Whether validations use the moving average of the parameters, if there is one."""
        return True


class AppliedTransforms:
    """Transforms that have started, in their order, and the first error of one after the reduction. Local."""

    def __init__(self, applied: Sequence[Applied] = ()) -> None:
        self.applied = applied
        self._failed: Exception | None = None  # in this step

    def start(self, applied: Sequence[Applied], taken: Sequence[str] = ()) -> None:
        """Use these from now on. taken: names that their meters can't have. Raises ArgumentError if one has such a
        name, or two have the same."""
        self.applied, self._failed = applied, None
        names = [meter.name for meter in self.meters]
        if twice := [name for name in names if [*taken, *names].count(name) > 1]:
            raise ArgumentError(
                f'two numbers of a step are named "{twice[0]}": give the meter of a transform another name'
            )

    @property
    def meters(self) -> list[NormMeter]:
        """The meters of the transforms that have one."""
        return [each.meter for each in self.applied if each.meter is not None]

    @property
    def needs_squares(self) -> bool:
        """Whether a transform needs the sum of the squares of all gradients."""
        return any(each.needs_squares for each in self.applied)

    def transform(
        self, gradients: Sequence[Any], part: Slices | None = None, squares: Callable[[], Any] | None = None
    ) -> None:
        """Let the transforms change averaged gradients. Collective if `squares` is. The error of one is kept.

        gradients, part: see Applied.reduced. squares: returns the sum of the squares of all gradients of all ranks, if
            these are only a part.
        """
        for each in self.applied:
            found = None
            if each.needs_squares:
                found = sum(map(sum_of_squares, gradients)) if squares is None else squares()
            self.keep(partial(each.reduced, gradients, part, found))

    def keep(self, action: Callable[[], object]) -> None:
        """Do the work of a transform, unless one has failed: other ranks wait for this one in the rest of the step."""
        if self._failed is None:
            try:
                action()
            except Exception as error:  # any exception, of a user's transform
                self._failed = error

    def take_kept(self) -> Exception | None:
        """Return the error of a transform in this step, if there was one, and forget it."""
        error, self._failed = self._failed, None
        return error

    def raise_kept(self) -> None:
        """Raise the error of a transform in this step, if there was one."""
        error = self.take_kept()
        if error is not None:
            raise error
