"""Owners: which ranks hold and update which part of the parameters, and of the state that belongs to them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.replica import Slices


class Owners:
    """The ranks that hold and update the parameters: here every rank holds and updates all of them.

    In a step (trainers.strategies.step) they are called in this order: begin_batch, reduce, squares, update, share.

    kind: the update, for checkpoints. any_rank_may_fail: whether the remaining ranks have the complete state, whichever
        rank fails. shares_parameters: whether the ranks of a node share one copy of the parameters.
    """

    kind = "replicated"
    any_rank_may_fail = True
    shares_parameters = False

    def begin_batch(self) -> None:
        """Called before a batch is computed, because that may change entries of the state (statistics). Local."""

    def reduce(self) -> None:
        """Bring the sums of the gradients to the ranks that need them, and `Step.measured` to all. Collective."""
        raise NotImplementedError

    def squares(self) -> Any:
        """Return the sum of the squares of all gradients of this step. Collective."""
        raise NotImplementedError

    def update(self, squares: Any) -> None:
        """Update this rank's part of the parameters. squares: see UpdateRule.apply; None if gradients are not clipped.
        Local."""
        raise NotImplementedError

    def share(self) -> None:
        """Give all ranks the parameters that each has updated in a step. Collective."""

    @property
    def own_part(self) -> Slices | None:
        """The part of the parameters that this rank updates; None for all."""
        return None

    def share_parameters(self) -> None:
        """Give all ranks the parameters that each rank has in its `own_part`. Collective."""

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `state` (this rank's replica state) with the parts that other ranks hold filled in. Collective."""
        return dict(state)

    def not_replicated(self) -> dict[str, str]:
        """Return the state entries that are not equal copies on all ranks: {name: reason as text}. Local."""
        return {}

    def check_edits(self) -> None:
        """Raise ArgumentError, on this rank only, if parameters that ranks share were edited in place. Local."""

    def begin_change(self) -> None:
        """Call before another state is loaded; `synchronize_state` ends the change. Local.

        Between the two calls other ranks may change their state, so a rank with backups then offers only its backups.
        """

    def synchronize_state(self) -> None:
        """Call after each rank has changed its state other than by a step; returns when all ranks have. Collective."""
