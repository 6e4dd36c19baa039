"""Faults, injected into real jobs: what is drawn, what one rank runs, how a job is driven, and what became of it."""


def job_of(name: str) -> list[str]:
    """What a rank runs of a program in `moments`, as arguments of python."""
    return ["-m", f"tests.faults.moments.{name}"]
