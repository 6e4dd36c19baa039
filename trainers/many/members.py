"""The members of a served ensemble on several ranks: which rank holds which, and how their votes become an answer.

No MPI. Of a model that is no ensemble, or that every rank holds as a whole, the members are None.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trainers.malloc import return_freed_memory
from trainers.many.ensemble_model import EnsembleModel
from trainers.many.models import Model

Members = tuple[int, ...] | None


def voters_of(model: Model) -> Members:
    """Return the numbers of the members that vote; None if the model is no ensemble."""
    return model.voters if isinstance(model, EnsembleModel) else None


def share_of(voters: Members, position: int, ranks: int) -> Members:
    """Return the members that one of some ranks is to hold."""
    return None if voters is None else voters[position::ranks]


def keep(model: Model, members: Members) -> Model:
    """Drop all other members of an ensemble, and return it."""
    if members is not None and isinstance(model, EnsembleModel):
        model.replicas = {number: model.replicas[number] for number in members}
        return_freed_memory()
    return model


def computed(model: Model, rows: np.ndarray, members: Members) -> list[np.ndarray]:
    """Return the votes of some members for these rows; without members the outputs of the model, alone in a list."""
    if members is None:
        return [model.predict(rows)]
    assert isinstance(model, EnsembleModel)
    return [model.votes(number, rows) for number in members]


def combined(model: Model, votes: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the outputs of an ensemble from the votes of all members that vote."""
    assert isinstance(model, EnsembleModel)
    return model.voting.combined(dict(sorted(votes.items())), model.weights)


def divided(voters: Sequence[int], holders: Mapping[int, Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Return the members that each rank computes for a batch: each member once, those without a holder on rank 0.

    holders: rank -> the members that it holds.
    """
    found: dict[int, tuple[int, ...]] = {}
    left = list(voters)
    for rank, held in holders.items():
        if own := tuple(number for number in left if number in held):
            found[rank] = own
            left = [number for number in left if number not in own]
    if left:
        found[0] = tuple(left)
    return found
