"""What on_failure=... may be, where it is refused, and what is said of it."""

from typing import TYPE_CHECKING

from allreduce.base import AllReduce
from allreduce.errors import UnavailableError
from allreduce.messages import losses
from allreduce.program import program
from allreduce.spares import Manned
from allreduce.topology import Topology
from trainers import renewing
from trainers.errors import ArgumentError
from trainers.replica import Replica

if TYPE_CHECKING:
    from trainers.base import Trainer

CHOICES = ("stop", "continue", "replace")
GOING_ON = ("continue", "replace")


def refusal(
    on_failure: str | None, ranks: Topology, replica: Replica, backend: str | AllReduce | None = None
) -> ArgumentError | None:
    """What is wrong with on_failure=... here. Local."""
    if on_failure is not None and on_failure not in CHOICES:
        return ArgumentError(f"on_failure={on_failure!r} is unknown; use one of {', '.join(CHOICES)}, or None")
    if on_failure == "replace" and renewing.made:
        return ArgumentError(
            'on_failure="replace" is for one trainer of a program: a process that is started runs the program from its '
            'beginning, and joins the first one that was made so; "continue" is for any number of others'
        )
    if on_failure not in GOING_ON or ranks.size == 1:
        return None
    if not losses.in_force():
        return ArgumentError(
            f'on_failure="{on_failure}" needs an MPI that lets the others live when a rank is lost: Open MPI 5, '
            "started as mpirun --with-ft ulfm -n 4 python ...; otherwise leave it out, and go on from a checkpoint "
            "(resume=True)"
        )
    if replica.device != "cpu":
        return ArgumentError(f'on_failure="{on_failure}" works on the CPU, and this replica is on {replica.device}')
    if isinstance(backend, AllReduce) and backend.recipe is None:
        return ArgumentError(
            f'on_failure="{on_failure}": {backend!r} has no recipe by which it can be made again on other ranks; make '
            "it with allreduce.create(), or give its name"
        )
    return _no_new_ranks(ranks) if on_failure == "replace" else None


def _no_new_ranks(ranks: Topology) -> ArgumentError | None:
    """Why no process can be started for a rank that is lost. Local."""
    way = 'on_failure="replace": '
    if isinstance(ranks, Manned):
        return ArgumentError(
            f'{way}ranks that wait (spares.man) take the places of lost ones; use "continue" with them'
        )
    if ranks.simulated:
        return ArgumentError(f"{way}not on simulated nodes (ranks_per_node), which have no new ranks")
    if ranks.is_part:
        return ArgumentError(
            f"{way}this topology is a part of another one, and a process that is started could not tell which part it "
            'belongs to; give a topology of all ranks, or use "continue"'
        )
    try:
        program()
    except UnavailableError as error:
        return ArgumentError(f"{way}{error}, as a process that is started has to")
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
    renews = trainer._survival is not None and trainer._survival.renewal is not None
    return f"the others go on{back}{'; after a coming epoch a new one takes its place' if renews else ''}"
