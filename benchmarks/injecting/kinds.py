"""What kinds of faults there are, and what must be seen of each."""

from typing import NamedTuple


class Kind(NamedTuple):
    """about: what is done to a rank. ends: whether the job has to end, with a code; if not, with the right result.

    words: what has to be printed, a regular expression; {rank} is the rank that it happens to.
    silent: whether the launcher's exit code is 0 although the job has ended.
    """

    about: str
    ends: bool
    words: str = ""
    silent: bool = False


KINDS = {
    "kill": Kind("SIGKILL", False),
    "stop": Kind(
        "SIGSTOP, and SIGCONT after a while",
        False,
        r"has waited \d+ s for other ranks in: [^\0]*rank {rank}: has not come",
    ),
    "slow": Kind("it sleeps in every step", False),
    "raise": Kind("an exception that nobody catches", True, r"InjectedError: on purpose"),
    "nan": Kind("a gradient that is no number, with CheckGradients", True, r"NotFiniteError: .*rank {rank}"),
    "exit": Kind("sys.exit(0) in the middle", True, r"RankLeftError: rank {rank} has left"),
    "term": Kind("SIGTERM", True, r"SIGTERM"),
    "differ": Kind("it does something else than the others, see `disagreements`", False),
    "revoke": Kind("it ends all waits of its topology, as if it had heard of a loss", False),
    "spoil": Kind("it brings a wrong summand, or takes a wrong sum: that has to be found", False),
    "truncate": Kind("the newest checkpoint is cut off, and gone on from", False, r"checkpoint"),
    "alter": Kind("a byte of the newest checkpoint is changed, and gone on from", False, r"checkpoint"),
    "cut": Kind(
        "the link of a host is cut, in scripts/cluster_sim.sh", True, r"lost communication with a remote daemon", True
    ),
    "shm": Kind("/dev/shm is full", True, r"shared memory is too small"),
}
TOLD_SECONDS = 2.0  # after which a stop must be told of, with the driver's ALLREDUCE_STALL_SECONDS=1
