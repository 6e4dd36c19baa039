"""How the members of an ensemble vote, and how votes are scored. Arrays only, no MPI."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.apps.export.running import are_probabilities, softmax
from trainers.arguments import FLAG, name_error, require
from trainers.data import Tree, leaves, mapped, row_count, structure_of
from trainers.errors import ArgumentError

SOFT, HARD = "soft", "hard"
LEAST_PROBABILITY = 1e-12  # in a logarithm


@dataclass(frozen=True)
class Voting:
    """How members vote.

    kind: "soft": the mean of the members' outputs. "hard": every member has one vote, for the class of its largest
        output; the result has the share of the votes of each class, and among equal shares argmax finds the first.
    logits: the members' outputs are logits, of which softmax makes probabilities before the vote: as those of a PyTorch
        module that is trained by CrossEntropyLoss.

    Raises ArgumentError.
    """

    kind: str = SOFT
    logits: bool = False

    def __post_init__(self) -> None:
        require(name_error("voting", self.kind, (SOFT, HARD)), FLAG.error("logits", self.logits))

    def votes(self, outputs: Tree) -> Tree:
        """Return the votes of one member from its outputs: floating, of the same shape. Raises ArgumentError."""
        return mapped(self._votes, outputs)

    def _votes(self, outputs: np.ndarray) -> np.ndarray:
        values, dtype = np.asarray(outputs, np.float64), np.result_type(outputs.dtype, np.float32)
        if (self.kind == HARD or self.logits) and (values.ndim < 2 or values.shape[-1] < 2):
            what = f"voting={HARD!r}" if self.kind == HARD else "logits=True"
            raise ArgumentError(f"{what} is for classes, (rows, classes); the outputs have the shape {values.shape}")
        if self.kind == HARD:
            voted = np.zeros(values.shape, dtype)
            np.put_along_axis(voted, values.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
            voted[np.isnan(values).any(axis=-1)] = np.nan  # argmax would take the place of the NaN for the class
            return voted
        return (softmax(values) if self.logits else values).astype(dtype)

    def combined(self, votes: Mapping[int, Tree]) -> Tree:
        """Return the mean of the votes of members, by their numbers. Raises ArgumentError if the members' outputs
        differ in shape or dtype."""
        first = next(iter(votes.values()))
        for number, each in votes.items():
            if error := misfit(each, first):
                raise ArgumentError(f"member {number} can't vote: {error}")
        columns = zip(*(leaves(tree) for tree in votes.values()), strict=True)
        return mapped(lambda like: np.mean(next(columns), axis=0, dtype=np.float64).astype(like.dtype), first)


def misfit(votes: Tree, others: Tree) -> str:
    """Return why the votes of a member can't be combined with those of another one; "" if they can."""
    own, wanted = structure_of(votes), structure_of(others)
    if own != wanted:
        return f"its outputs, {shown(own)} for a row, differ from those of other members, {shown(wanted)}"
    if row_count(votes) != row_count(others):
        return f"it has {row_count(votes)} rows of outputs, and another member has {row_count(others)}"
    return ""


def shown(structure: Any) -> str:
    """Return a structure (`structure_of`) as text."""
    if isinstance(structure, list):
        return f"{structure[0]} of shape {tuple(structure[1])}"
    if "dict" in structure:
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in structure["dict"]) + "}"
    return "(" + ", ".join(map(shown, structure["tuple"])) + ")"


class Scorer:
    """Scores outputs for rows against the true y of these rows.

    y: class numbers, (rows, ...) integers for outputs (rows, ..., classes); one-hot rows of them; or numbers, of the
        shape of the outputs.
    outputs: of any member, from which the kind of the score follows. Raises ArgumentError if y does not fit them.
    """

    def __init__(self, outputs: Tree, y: Tree) -> None:
        if not isinstance(outputs, np.ndarray) or not isinstance(y, np.ndarray):
            raise ArgumentError("an ensemble scores models of one output: leave out weights, and use predict")
        self._y, self._classes = (
            y,
            outputs.ndim == y.ndim + 1 and outputs.shape[:-1] == y.shape and y.dtype.kind in "iu",
        )
        if outputs.ndim > 1 and outputs.shape == y.shape and _is_one_hot(y) and are_probabilities(outputs):
            self._y, self._classes = y.argmax(axis=-1), True
        if self._classes and y.size and not 0 <= self._y.min() <= self._y.max() < outputs.shape[-1]:
            raise ArgumentError(f"y has classes from {y.min()} to {y.max()}, and the members have {outputs.shape[-1]}")
        if not self._classes and outputs.size != y.size:
            raise ArgumentError(f"y of shape {y.shape} does not fit outputs of shape {outputs.shape}")

    def __call__(self, outputs: np.ndarray) -> dict[str, float]:
        """Return {"loss", "accuracy"} of classes: the mean negative log-likelihood, left out if the outputs are no
        probabilities; or {"loss"} of numbers: the mean squared error."""
        if not self._classes:
            return {"loss": float(np.mean((outputs.reshape(-1) - self._y.reshape(-1)) ** 2, dtype=np.float64))}
        accuracy = float(np.mean(outputs.argmax(axis=-1) == self._y))
        if not are_probabilities(outputs):
            return {"accuracy": accuracy}
        right = np.take_along_axis(outputs, self._y[..., None], axis=-1)
        loss = -np.log(np.maximum(right, LEAST_PROBABILITY)).mean(dtype=np.float64)
        return {"loss": float(loss), "accuracy": accuracy}


def _is_one_hot(y: np.ndarray) -> bool:
    return bool(((y == 0) | (y == 1)).all() and (y.sum(axis=-1) == 1).all())
