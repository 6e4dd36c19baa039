"""The options of local SGD, and the outer optimizer, which applies the ranks' averaged change.

- Local SGD: S. U. Stich: Local SGD converges fast and communicates little, 2019.
- DiLoCo: A. Douillard et al.: DiLoCo: Distributed low-communication training of language models, 2023.
- Fragments: A. Douillard et al.: Streaming DiLoCo with overlapping communication, 2025. The options have the names of
  torchft's local_sgd.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from trainers.arguments import flag_error, integer_error, is_number


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer: SGD with momentum on the averaged change of the parameters. By default DiLoCo's values.

    The change of a rank is start - parameters: the parameters after the last outer step less the parameters after the
    rank's inner steps. It takes the place of a gradient, in the formulas of torch.optim.SGD.

    learning_rate: > 0. momentum: 0 to 1 (not included). nesterov: Nesterov's momentum; needs momentum > 0.
    OuterSGD(1.0, 0.0, False) averages the parameters.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def error(self) -> str:
        """Return why the values are invalid, as text; "" if they are valid."""
        if not is_number(self.learning_rate) or self.learning_rate <= 0:
            return f"learning_rate must be a number > 0, got {self.learning_rate!r}"
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            return f"momentum must be a number >= 0 and < 1, got {self.momentum!r}"
        wrong = "nesterov=True needs momentum > 0" if self.nesterov and not self.momentum else ""
        return flag_error("nesterov", self.nesterov) or wrong

    def step(self, start: Any, momentum: Any, delta: Any) -> None:
        """Update `start` and `momentum` in place by the averaged change `delta`, which is overwritten. Local.

        The arguments are 1-D arrays of one length and floating dtype: of NumPy or CuPy, or tensors of PyTorch. They
        should fit the cache. momentum: may be None if this optimizer has none.
        """
        if self.momentum:
            momentum *= self.momentum
            momentum += delta
            if self.nesterov:
                delta += momentum * self.momentum
            else:
                delta[...] = momentum
        if self.learning_rate != 1:
            delta *= self.learning_rate
        start -= delta


AVERAGE = OuterSGD(1.0, 0.0, False)
OUTER = {"average": AVERAGE, "diloco": OuterSGD()}


class LocalOptions(NamedTuple):
    """The options of local SGD as the user gave them; `error` tells whether they are valid. Users' docstrings explain
    them (MirroredTrainer)."""

    sync_every: Any = None
    outer_optimizer: Any = "average"
    fragments: Any = 1
    fragment_sync_delay: Any = 0
    fragment_update_alpha: Any = 0.0

    @property
    def asked(self) -> bool:
        """Whether the user wants local SGD."""
        return self.sync_every is not None

    @property
    def outer(self) -> OuterSGD:
        given = self.outer_optimizer
        return OUTER[given] if isinstance(given, str) else given

    @property
    def interval(self) -> int:
        """The number of inner steps from the outer step of one fragment to that of the next."""
        return self.sync_every // self.fragments

    @property
    def equal_after(self) -> bool:
        """Whether all ranks have the same parameters after an outer step: all of them were replaced."""
        return self.fragments == 1 and self.fragment_update_alpha == 0

    def __str__(self) -> str:
        """The options that must be alike on the ranks; sync_every may differ."""
        values = zip(self._fields[1:], self[1:], strict=True)
        return f"sync_every={'...' if self.asked else None}, " + ", ".join(f"{name}={it!r}" for name, it in values)

    def error(self) -> str:
        """Return why the options are invalid, as text; "" if they are valid."""
        if not self.asked:
            given = [name for name, value in self._field_defaults.items() if getattr(self, name) != value]
            return f"{given[0]} needs sync_every, the number of steps between averages" if given else ""
        return self._type_error() or self._relation_error()

    def _type_error(self) -> str:
        for name, least in (("sync_every", 1), ("fragments", 1), ("fragment_sync_delay", 0)):
            if text := integer_error(name, getattr(self, name), least):
                return text
        alpha, outer = self.fragment_update_alpha, self.outer_optimizer
        if not is_number(alpha) or not 0 <= alpha <= 1:
            return f"fragment_update_alpha must be a number from 0 to 1, got {alpha!r}"
        if isinstance(outer, OuterSGD):
            return f"outer_optimizer: {outer.error()}" if outer.error() else ""
        if not isinstance(outer, str) or outer not in OUTER:
            names = " or ".join(f'"{name}"' for name in OUTER)
            return f"outer_optimizer={outer!r} is unknown; use {names}, or an OuterSGD"
        return ""

    def _relation_error(self) -> str:
        if self.sync_every % self.fragments:
            return (
                f"fragments={self.fragments}: sync_every={self.sync_every} must be a multiple of it, because one "
                "fragment after the other is averaged, at equal distances"
            )
        if self.fragment_sync_delay >= self.interval:
            return (
                f"fragment_sync_delay={self.fragment_sync_delay} must be less than sync_every / fragments = "
                f"{self.interval}, the steps until the next fragment is averaged"
            )
        return ""

    def length_error(self, length: int) -> str:
        """Return why a model of `length` parameters can't be cut like this, as text; "" if it can."""
        if self.fragments > length:
            return f"fragments={self.fragments}: this model has only {length} parameters"
        return ""
