"""Owners: which ranks hold and update which part of the parameters, and of the state that belongs to them."""

from collections.abc import Mapping

import numpy as np

from trainers.replica import Slices


class Owners:
    """The ranks that hold and update the parameters: here every rank holds and updates all of them.

    kind: the update, for checkpoints. any_rank_may_fail: whether the remaining ranks have the complete state, whichever
        rank fails. shares_parameters: whether the ranks of a node share one copy of the parameters.
    """

    kind = "replicated"
    any_rank_may_fail = True
    shares_parameters = False

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
