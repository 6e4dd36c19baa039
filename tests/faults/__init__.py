"""The fault framework: real jobs in which ranks are killed, stopped or disturbed, and a verdict on each job.

plans      a run: a program in a configuration, and the faults that are injected into it
drawing    draws a plan from a number
points     the named points in the library's code, and the actions that a rank can do at a point
jobs       starts the job of a plan, sends signals to its ranks, and leaves nothing behind
notes      the events that each rank records while it runs
soak       one long training under random kills
judging    the verdict, from the notes, the output and the results
programs/  the programs that the ranks of a plan run;  moments/  jobs that tests start, whose ranks die at named points
"""


def job_of(name: str) -> list[str]:
    """Return the arguments of python that start a program of `moments` on a rank."""
    return ["-m", f"tests.faults.moments.{name}"]
