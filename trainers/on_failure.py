"""What on_failure=... may be, where it is refused, and what is said of it."""

from typing import TYPE_CHECKING

from allreduce.base import AllReduce
from allreduce.messages import losses
from allreduce.topology import Topology
from trainers.errors import ArgumentError
from trainers.replica import Replica

if TYPE_CHECKING:
    from trainers.base import Trainer

CHOICES = ("stop", "continue")


def refusal(
    on_failure: str | None, ranks: Topology, replica: Replica, backend: str | AllReduce | None = None
) -> ArgumentError | None:
    """What is wrong with on_failure=... here. Local."""
    if on_failure is not None and on_failure not in CHOICES:
        return ArgumentError(f"on_failure={on_failure!r} is unknown; use one of {', '.join(CHOICES)}, or None")
    if on_failure != "continue" or ranks.size == 1:
        return None
    if not losses.in_force():
        return ArgumentError(
            'on_failure="continue" needs an MPI that lets the others live when a rank is lost: Open MPI 5, '
            "started as mpirun --with-ft ulfm -n 4 python ...; otherwise leave it out, and go on from a checkpoint "
            "(resume=True)"
        )
    if replica.device != "cpu":
        return ArgumentError(f'on_failure="continue" works on the CPU, and this replica is on {replica.device}')
    if isinstance(backend, AllReduce) and backend.recipe is None:
        return ArgumentError(
            f'on_failure="continue": {backend!r} has no recipe by which it can be made again on other ranks; make '
            "it with allreduce.create(), or give its name"
        )
    return None


def in_words(trainer: "Trainer") -> str:
    """What happens when a rank is lost, for the start of a program."""
    if trainer.size == 1:
        return "there are no others to go on"
    if not losses.in_force():
        return "the job ends (mpirun --with-ft ulfm lets the others live)"
    if not trainer.goes_on:
        return "the others stop (--on-failure continue: they go on)"
    back = ", from the last checkpoint (--copies 2: without one)" if trainer.goes_back else ""
    return f"the others go on{back}"
