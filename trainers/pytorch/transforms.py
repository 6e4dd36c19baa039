"""The transforms of a MirroredOptimizer: those of a fit that only change averaged gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

from allreduce.errors import OptionError
from trainers.options.average import Average
from trainers.strategies.transforms.accumulate import Accumulate
from trainers.strategies.transforms.ema import EMA
from trainers.strategies.transforms.schedule import Schedule
from trainers.strategies.transforms.skip import SkipNotFinite
from trainers.strategies.transforms.transform import Applied, AppliedTransforms, Transform
from trainers.watching.check_divergence import CheckDivergence
from trainers.watching.check_gradients import CheckGradients

Listed = Transform | CheckDivergence | CheckGradients
CHECKS = (CheckDivergence, CheckGradients | SkipNotFinite)  # at most one of each

INSTEAD = {
    Accumulate: "backward inside of optimizer.no_sync(), but for the last part of a batch",
    EMA: "torch.optim.swa_utils.AveragedModel",
    Schedule: "a scheduler of torch.optim.lr_scheduler",
}
UNUSED = ("plan", "begin_step", "end_step", "compute", "updated")  # methods of Applied that need a fit


def list_error(given: Any) -> str:
    """Return why this is no list of transforms and checks, as text; "" if it is."""
    each = list(given) if isinstance(given, Sequence) else [None]
    kinds = [next((kind for kind in CHECKS if isinstance(one, kind)), type(one)) for one in each]
    if all(isinstance(one, Listed) for one in each) and len(set(kinds)) == len(kinds):
        return ""
    return (
        "transforms is a list of Transforms of different classes, such as ClipNorm(1.0), with at most one "
        f"CheckDivergence, and at most one CheckGradients or SkipNotFinite, got {given!r}"
    )


def without_checks(given: Iterable[Any]) -> list[Transform]:
    """Return the transforms that change averaged gradients."""
    return [each for each in given if isinstance(each, Transform) and not isinstance(each, SkipNotFinite)]


def started(given: Iterable[Any], average: Average | None) -> AppliedTransforms:
    """Return the transforms in this list, begun, without the checks. Local.

    Raises OptionError for one that needs a fit.
    """
    chain = AppliedTransforms()
    chain.start([_started(each, average) for each in without_checks(given)])
    return chain


def _started(transform: Transform, average: Average | None) -> Applied:
    refused = f"transforms: a MirroredOptimizer, which has no replica, can't use {transform!r}"
    for kind, instead in INSTEAD.items():
        if isinstance(transform, kind):
            raise OptionError(f"{refused}: the program itself computes gradients and counts steps; use {instead}")
    replica: Any = None
    try:
        wrong = transform.error(replica, average)
        applied = transform.start(replica)
        if not isinstance(applied, Applied):
            wrong = wrong or f"start must return an Applied, got {applied!r}"
        elif not wrong:
            applied.begin()
    except (OptionError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.obj is not None:  # not of the replica
            raise
        raise OptionError(f"{refused}: {error}") from error
    if wrong:
        raise OptionError(f"{refused}: {wrong}")
    if unused := [name for name in UNUSED if getattr(type(applied), name) is not getattr(Applied, name)]:
        raise OptionError(
            f"{refused}: nothing calls {type(applied).__name__}.{unused[0]} in a PyTorch loop; only begin and reduced "
            "are called"
        )
    if applied.watchers:
        raise OptionError(f"{refused}: it has callbacks of a fit (watchers)")
    return applied
