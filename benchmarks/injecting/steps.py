"""The end of a step, whatever the program is: a point of its own."""

from benchmarks.injecting.notes import Notes


def note(notes: Notes, step: int, size: int) -> None:
    """A step is finished, on so many ranks."""
    notes.add("step", step=step, size=size)
