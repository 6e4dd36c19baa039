"""Owners: which ranks hold and update which part of the parameters, and of the state that belongs to them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from trainers.replica import Slices

INNER = "inner."  # prefix, in a rank's local state, of the entries that owners add


class Owners:
    """The ranks that hold and update the parameters: here every rank holds and updates all of them.

    `apply` is the step of every synchronous training: a trainer's (trainers.strategies.step) and MirroredOptimizer's.

    kind: the update, for checkpoints. any_rank_may_fail: whether the remaining ranks have the complete state, whichever
        rank fails. shares_parameters: whether the ranks of a node share one copy of the parameters.
    own_part: the part of the parameters that this rank updates; None for all.
    """

    kind = "replicated"
    any_rank_may_fail = True
    shares_parameters = False
    own_part: Slices | None = None

    def begin_batch(self) -> None:
        """Called before a batch is computed, because that may change entries of the state (statistics). Local."""

    def apply(self) -> None:
        """Average the gradients of all ranks, and update the parameters by them. A transaction: all ranks make the
        update, or none. Collective."""
        if self.reduce():
            self.transform()
            self.update()
            self.share()

    def reduce(self) -> bool:
        """Bring the averages of the gradients to the ranks that need them. Return whether the ranks are to update, the
        same on all. Collective."""
        raise NotImplementedError

    def transform(self) -> None:
        """Let the transforms of the training change the averages. Collective."""
        raise NotImplementedError

    def update(self) -> None:
        """Update this rank's part of the parameters."""
        raise NotImplementedError

    def share(self) -> None:
        """Give all ranks the parameters that each has updated in a step. Collective."""

    def share_parameters(self) -> None:
        """Give all ranks the parameters that each rank has in its `own_part`. Collective."""

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `state` (this rank's replica state) with the parts that other ranks hold filled in. Collective."""
        return dict(state)

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return copies of state of these owners that is not the replica's, equal on all ranks, for checkpoints. Local.
        Strategy.load_state takes it with the replica's."""
        return {}

    def local_state(self) -> dict[str, np.ndarray]:
        """Return state that differs between ranks and is not in Replica.local_state, for checkpoints. Local. The names
        begin with INNER."""
        return {}

    def load_local_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a result of `local_state`, of any owners. Local. Raises ModelFileError if it is of another model."""

    def reset(self) -> None:
        """Reset this state, because another model was loaded. Local, called on all ranks."""

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """Return a copy of the complete state on rank 0 (wanted=True), and {} elsewhere. Collective. memory: see
        `snapshot_of` of trainers.replica."""
        raise NotImplementedError

    def whole(self) -> AbstractContextManager[object]:
        """Context manager: in its block the parameters of all ranks are equal, as a checkpoint has them; at its end
        each rank goes on with its own. Collective."""
        return nullcontext()

    def not_replicated(self) -> dict[str, str]:
        """Return the state entries that are not equal copies on all ranks: {name: reason as text}. Local."""
        return {}

    def check_edits(self) -> None:
        """Raise ArgumentError, on this rank only, if parameters that ranks share were edited in place. Local."""

    def end_round(self) -> None:
        """Make the parameters of all ranks equal, if ranks have taken steps on their own since they were. Called before
        anything looks at the model. Collective."""

    def begin_change(self) -> None:
        """Call before another state is loaded; `synchronize_state` ends the change. Local.

        Between the two calls other ranks may change their state, so a rank with backups then offers only its backups.
        """

    def synchronize_state(self) -> None:
        """Call after each rank has changed its state other than by a step; returns when all ranks have. Collective."""
