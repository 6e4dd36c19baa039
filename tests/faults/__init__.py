"""The fault framework: real jobs in which ranks are killed, stopped or made to differ, and a verdict on each job.

plans      a run: a program in a configuration, and the faults that are injected into it
drawing    draws a plan from a number
points     the named points in the library's code, and what can be done to a rank that comes to one
jobs       starts the job of a plan, sends signals to its ranks, and leaves nothing behind
notes      what each rank writes down while it runs
judging    the verdict, from the notes, the output and the results
programs/  what the ranks of a plan run;  moments/  jobs that tests start, whose ranks die at points that they name
random_programs/  random collective calls, in which one rank differs or ends
"""


def job_of(name: str) -> list[str]:
    """What a rank runs of a program in `moments`, as arguments of python."""
    return ["-m", f"tests.faults.moments.{name}"]
