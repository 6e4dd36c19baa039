"""Faults that are not left to chance: one run of each kind, and of moments that a loss may come at.

tests/faults/test_faults.py runs those of SHORT; python -m benchmarks.faults --scenarios all of them.
"""

from benchmarks.injecting.plans import BETWEEN, START, Fault, Plan

SCENARIOS = {
    "stop": Plan(1, 2, goes_on=False, faults=(Fault("stop", 1, turn=10, delay=2.5),)),
    "slow": Plan(2, 2, goes_on=False, backend="ring", faults=(Fault("slow", 1, "compute", delay=0.01),)),
    "raise": Plan(3, 2, goes_on=False, faults=(Fault("raise", 1, "compute", 20),)),
    "nan": Plan(9, 2, goes_on=False, faults=(Fault("nan", 1, "compute", 20, after=True),)),
    "exit": Plan(4, 3, goes_on=False, faults=(Fault("exit", 2, "compute", 20),)),
    "truncate": Plan(6, 2, goes_on=False, checkpoint=7, faults=(Fault("truncate", 0, BETWEEN),)),
    "alter": Plan(7, 2, goes_on=False, checkpoint=7, faults=(Fault("alter", 0, BETWEEN),)),
    "shm": Plan(8, 2, goes_on=False, backend="shared", faults=(Fault("shm", 0, START),)),
    "losses in calls": Plan(
        10,
        4,
        program="calls",
        backend="halving_doubling",
        faults=(
            Fault("kill", 0, "middle of a reduction", 10),
            Fault("kill", 2, "survivors", 1),
            Fault("kill", 1, turn=30, delay=0.002),
        ),
    ),
    "losses in shared": Plan(
        11, 3, program="calls", backend="shared", faults=(Fault("kill", 1, "reduce", 20, after=True),)
    ),
    "losses in a training": Plan(
        12,
        4,
        backend="hierarchical_copy",
        nodes=(2, 2),
        checkpoint=7,
        faults=(
            Fault("kill", 0, turn=12, delay=0.001),
            Fault("kill", 1, "checkpoint", 6),
            Fault("kill", 3, "evaluate", 6),
        ),
    ),
    "losses in a sharded training": Plan(
        13,
        3,
        program="sharded",
        backend="ring",
        checkpoint=7,
        faults=(Fault("kill", 0, "update", 30), Fault("kill", 1, "edit", 1)),
    ),
    "an alarm while a rank waits": Plan(
        17, 2, program="spare ranks", spares=1, faults=(Fault("revoke", 0, "compute", 20),)
    ),
    "a wrong summand": Plan(14, 2, backend="native", faults=(Fault("spoil", 1, "reduce", 20),)),
    "a wrong sum": Plan(
        15, 2, program="calls", backend="native", faults=(Fault("spoil", 1, "reduce", 20, after=True),)
    ),
    "disagreement": Plan(16, 3, program="disagreement", backend="ring", faults=(Fault("differ", 1, "op", 20),)),
    "term": Plan(5, 2, goes_on=False, checkpoint=7, faults=(Fault("term", 1, turn=20),)),
}
# Exceptions and SIGTERM have tests of their own, test_abort.py and test_terminating.py.
SHORT = (
    "stop", "exit", "truncate", "shm", "losses in calls", "losses in a training", "losses in a sharded training",
    "an alarm while a rank waits",    "a wrong summand", "disagreement",
)  # fmt: skip
