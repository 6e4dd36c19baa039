"""Refuses losses that are no means over the rows: ranks can't divide a batch for them."""

from collections.abc import Callable

import numpy as np

from trainers.data import Tree, leaves, mapped
from trainers.errors import ArgumentError

# the largest relative difference between the loss of rows and the mean of the losses of their parts
CLOSE, ROUGH = 1e-3, 0.02  # ROUGH: with 16-bit numbers
COMPARED, LOOKED_AT = 16, 1 << 16  # rows whose losses are compared, and from which these are chosen


def check_mean_of_rows(name: str, x: Tree, y: Tree, loss: Callable[[Tree, Tree], float], rough: bool) -> None:
    """Raise ArgumentError unless the loss of some rows is the mean of the losses of two halves of them.

    A loss that weighs rows by their class, or ignores some, is no mean. To find it, rows with many labels are compared.
    Losses with random numbers can't be compared, and pass. name: of the loss. loss: returns the loss of rows x, y.
    rough: whether it is computed with 16-bit numbers.
    """
    rows = _rows_to_compare(y)
    if len(rows) < 2:
        return

    def of(own: np.ndarray) -> float:
        return loss(mapped(lambda array: array[own], x), mapped(lambda array: array[own], y))

    whole, again = of(rows), of(rows)
    if whole != again:
        return
    halves = [of(rows[: len(rows) // 2]), of(rows[len(rows) // 2 :])]
    mean = sum(halves) / 2
    if not abs(whole - mean) <= (ROUGH if rough else CLOSE) * max(abs(whole), *map(abs, halves)):
        raise ArgumentError(
            f"the loss {name} is no mean over the rows: of {len(rows)} rows it is {whole:.6g}, and of their halves "
            f"{halves[0]:.6g} and {halves[1]:.6g}. So ranks, or micro-batches, that divide a batch would not train as "
            "one rank does. Weights of classes and ignored rows are known of PyTorch's CrossEntropyLoss and NLLLoss, "
            "and of Keras' ignore_class; for another loss use class_weight= or sample_weight= of fit, and a mean over "
            "all rows"
        )


def _rows_to_compare(y: Tree) -> np.ndarray:
    """Return the indices of an even number of rows with many different labels, sorted by label."""
    first = leaves(y)[0]
    count = min(len(first), LOOKED_AT)
    labels = np.asarray(first[:count])
    if labels.dtype.kind in "iu" and labels.size:
        least = labels.reshape(count, -1).min(axis=1)
        of_label = np.unique(least, return_index=True)[1]
        chosen = np.concatenate([of_label[: COMPARED // 4], of_label[-COMPARED // 4 :], np.arange(count)])
        chosen = np.array(list(dict.fromkeys(chosen.tolist()))[:COMPARED], np.int64)
        chosen = chosen[np.argsort(least[chosen], kind="stable")]
    else:
        chosen = np.arange(min(count, COMPARED))
    return chosen[: len(chosen) // 2 * 2]
