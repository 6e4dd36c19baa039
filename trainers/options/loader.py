"""Loader: how the rows of a fit or of an evaluation are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from trainers.arguments import FLAG, Checked, integer, name, require

DIVIDED, WHOLE = "divided", "whole"


@dataclass(frozen=True)
class Loader(Checked):
    """Says how rows are read: `fit(Loader(dataloader, rows="divided"))`, `evaluate(Loader(dataloader, rows="whole"))`.

    data: with `rows` any iterable of batches (x, y) or (x, y, weights), such as a DataLoader; None on a rank that
        computes nothing. Without `rows` a data set with len() and rows by number, or arrays (x, y).
    rows: "divided": each rank its own; a rank whose loader ends first brings no rows until all have ended. "whole": the
        same batches on all ranks; each rank takes its share. The training is that of one rank with all rows.
        `set_epoch` of the loader, its sampler or its data set is called before each pass. The loader cuts and shuffles
        batches, so `fit` refuses batch_size and shuffle.
    steps: the number of batches in an epoch or an evaluation, for a loader that is endless or is read on from one epoch
        to the next. None: one pass.
    collate: makes (x, y), or (x, y, weights), of new arrays, from a batch, or from a list of a data set's rows, which
        by default are stacked.
    prefetch: without `rows`: whether a thread fetches the next batches of a fit. None: of data sets and memory maps
        only.
    """

    data: Any
    rows: Annotated[str | None, name(DIVIDED, WHOLE).or_none()] = None
    steps: Annotated[int | None, integer(1).or_none()] = None
    collate: Callable[[Any], Any] | None = None
    prefetch: Annotated[bool | None, FLAG.or_none()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "Loader: steps are of batches: give rows too" if self.steps is not None and self.rows is None else "",
            "Loader: prefetch is of data sets and memory maps: leave it out, and give a loader that reads ahead itself"
            if self.prefetch and self.rows is not None
            else "",
        )
