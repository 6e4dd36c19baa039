"""The end of a step, whatever the program is: a point of its own."""

from allreduce.topology import Topology
from allreduce.transport import processes
from benchmarks.injecting.notes import Notes


def note(notes: Notes, step: int, topology: Topology) -> None:
    """A step is finished, on the ranks of this topology."""
    notes.add("step", step=step, ranks=members(topology))


def members(topology: Topology) -> list[int]:
    """Those of the job's first ranks; who was started in the place of a lost one is not counted."""
    return [rank for rank in processes.world_ranks(topology.world) if rank >= 0]
