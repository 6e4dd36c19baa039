"""What rank 0 says of calls that are matched by their names: which are next, and which of them run as one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Sides = list[Any]  # by rank; None of a rank that has joined


class Decision(NamedTuple):
    """A call that is next. same, kin, nbytes: see named.Side. refusal: what the ranks brought, or why it can't be.

    sides: None where no rank brings anything of its own.
    """

    name: str
    same: Any
    sides: Sides | None
    refusal: list[str] | str | None
    kin: str
    nbytes: int


def groups(decisions: Sequence[Decision], limit: int) -> list[list[Decision]]:
    """Which calls run as one: those of one kin, in the order in which they came, up to `limit` bytes; 0: none."""
    found: list[list[Decision]] = []
    begun: dict[str, tuple[list[Decision], int]] = {}  # kin -> the group that the next one may join, and its bytes
    for decision in decisions:
        if not decision.kin or decision.nbytes >= limit:
            found.append([decision])
            continue
        group, held = begun.get(decision.kin, ([], limit))
        if held + decision.nbytes > limit or not group:
            group, held = [], 0
            found.append(group)
        group.append(decision)
        begun[decision.kin] = group, held + decision.nbytes
    return found
