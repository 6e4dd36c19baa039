"""The plan of one run: a program in a configuration, and the faults that are injected into it. No MPI."""

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from tests.backends import ON_CPU, SHARDED

OUTSIDE = "any instant"  # the driver sends the signal, at a drawn instant
START = "the start"
BETWEEN = "between two fits"  # the program does it itself

ROWS, BATCH, EPOCHS = 480, 48, 6  # small, so that the losses and not the steps take the time
STEPS = ROWS // BATCH * EPOCHS
ROUND = 4  # steps between two averages of local SGD
ALONE = "alone"  # the folder, among the files of a job, with the results of one rank alone
IN_TURN = "each in turn"  # in calls, in the place of a backend: another one after each loss
EDITED = ("mirrored", "sharded", "central storage")  # trainers whose model is edited, in the fit and after it


class Program(NamedTuple):
    """A program that the ranks of a run execute. weight: how often it is drawn.

    module: the module of `programs` with its `run`. backends: the backends that it can use; () if it uses none.
    checkpoints: possible numbers of steps between two checkpoints; 0: none are written.
    exact: whether the result equals that of one rank alone, to float rounding; otherwise only the accuracy does.
    together: whether the ranks take every step together, so that repeated steps can be counted.
    again: the number of steps that a loss may cost, which are done again; None: as many as since a checkpoint.
    least: the number of ranks that it needs.
    """

    weight: int
    module: str
    backends: tuple[str, ...] = ()
    checkpoints: tuple[int, ...] = (0,)
    exact: bool = True
    together: bool = True
    again: int | None = None
    least: int = 2


PROGRAMS = {
    "mirrored": Program(6, "training", ON_CPU, checkpoints=(0, 3, 7), again=0),
    "local SGD": Program(2, "training", ON_CPU, exact=False, again=ROUND),
    "sharded": Program(4, "training", SHARDED, checkpoints=(3, 7)),
    "central storage": Program(3, "training", checkpoints=(3, 7)),
    "synchronous servers": Program(3, "training", checkpoints=(0, 7), least=3),
    "asynchronous servers": Program(3, "training", checkpoints=(0, 7), exact=False, together=False, least=3),
    "spare replicas": Program(3, "training", checkpoints=(0, 7), exact=False, together=False),
    "spare ranks": Program(3, "training", ON_CPU, checkpoints=(0, 7), again=0, least=3),
    "spare ranks, central storage": Program(2, "training", checkpoints=(3, 7), least=3),
    "spare ranks, local SGD": Program(1, "training", ON_CPU, exact=False, again=ROUND, least=3),
    "optimizer": Program(3, "loop", ON_CPU, again=1),
    "sharded optimizer": Program(2, "loop", SHARDED),
    "local SGD optimizer": Program(1, "loop", ON_CPU, exact=False, again=ROUND),
    "calls": Program(5, "calls", (*ON_CPU, IN_TURN)),
}


@dataclass(frozen=True)
class Fault:
    """A fault. kind: one of KINDS. rank: the rank of the job that it happens to.

    point: a point in the code, or OUTSIDE. turn: the number of the visit to the point at which the fault happens, from
    1; with OUTSIDE, the step after which the signal is sent. after: whether the fault happens after the point. delay:
    seconds: with OUTSIDE, before the signal; of a stop, until SIGCONT; of a slow rank, its sleep.
    """

    kind: str
    rank: int
    point: str = OUTSIDE
    turn: int = 1
    after: bool = False
    delay: float = 0.0

    def __str__(self) -> str:
        where = f"after step {self.turn} + {self.delay * 1e3:.1f} ms" if self.point == OUTSIDE else ""
        where = where or f"{'after' if self.after else 'before'} {self.point} {self.turn}"
        return f"{self.kind} of rank {self.rank} {where}"

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.point}"


@dataclass(frozen=True)
class Plan:
    """A run. program: one of PROGRAMS.

    goes_on: whether the remaining ranks continue after a failure; the launcher then lets them.
    copies: the number of ranks that keep each slice of a sharded update. storage: the rank of a central storage.
    rows: of a loader that gives the batches, see trainers.Loader; empty for arrays.
    checkpoint: the number of steps between two checkpoints; 0 for none. servers: the number of servers, the last ranks.
    ranks_per_worker: the number of ranks of each of their workers.
    spares: the number of standby ranks, the last ones; or the number of ranks for which a step of spare replicas does
    not wait. nodes: sizes of simulated nodes; empty for one real node. hosts: sizes of the hosts of
    scripts/cluster_sim.sh, on which the job runs; empty for this machine alone.
    """

    number: int
    ranks: int
    program: str = "mirrored"
    backend: str = "auto"
    copies: int = 1
    storage: int = 0
    rows: str = ""
    checkpoint: int = 0
    servers: int = 0
    ranks_per_worker: int = 1
    spares: int = 0
    optimizer: str = "momentum"
    goes_on: bool = True
    nodes: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)[1:-1]}
        shown = [f"{name}={value}" for name, value in values.items() if value != getattr(Plan, name, None)]
        return f"run {self.number}: {', '.join(shown)}; {'; '.join(map(str, self.faults)) or 'no fault'}"

    @property
    def kind(self) -> Program:
        return PROGRAMS[self.program]

    @property
    def torch(self) -> bool:
        """Whether the model is one of PyTorch; tests.matrix loses ranks of trainers of such models."""
        return self.kind.module == "loop"

    @property
    def exact(self) -> bool:
        """Whether the result equals that of one rank alone: not if the rows of a failed rank are missing."""
        return self.kind.exact and self.rows != "divided"

    @property
    def waits(self) -> bool:
        """Whether the last ranks stand by to replace failed ones."""
        return self.program.startswith("spare ranks")

    @property
    def trainer(self) -> str:
        """The kind of trainer: the name of a program without standby ranks."""
        return "mirrored" if self.program == "spare ranks" else self.program.removeprefix("spare ranks, ")

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the only copy of a part of the state: no rank can continue after one of them fails."""
        if self.copies > 1:
            return ()
        return (0,) if self.program == "spare replicas" else tuple(range(self.ranks - self.servers, self.ranks))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, held: dict[str, Any]) -> "Plan":
        faults = tuple(Fault(**fault) for fault in held["faults"])
        return cls(**{**held, "nodes": tuple(held["nodes"]), "hosts": tuple(held["hosts"]), "faults": faults})


# The kinds of faults, and the effects that each must have.


class Kind(NamedTuple):
    """A kind of fault. ends: whether it must end the job, with a code other than 0; if not, the job must end with the
    right result.

    words: a regular expression for the text that must be printed; {rank} is the rank of the fault.
    silent: whether the launcher's exit code is 0 although the job has ended.
    """

    ends: bool
    words: str = ""
    silent: bool = False


KINDS = {
    "kill": Kind(False),  # SIGKILL
    "crash": Kind(False),  # SIGSEGV
    # SIGSTOP, and SIGCONT after a while
    "stop": Kind(False, r"has waited \d+ s for other ranks in: [^\0]*rank {rank}: has not arrived"),
    "halt": Kind(True, r"CollectiveTimeoutError: [^\0]*rank {rank}"),  # SIGSTOP for good
    "slow": Kind(False),  # it sleeps in every step
    "raise": Kind(True, r"InjectedError: on purpose"),  # an exception that is not caught
    "exit": Kind(True, r"RankLeftError: rank {rank} has left"),  # sys.exit(0) in the middle
    # SIGTERM; after the fit, whose end it is no more, it kills the rank, and the others continue
    "term": Kind(True, r"SIGTERM|rank {rank} of the job failed in (evaluate|predict|save)"),
    "revoke": Kind(False),  # it ends all waits of its topology, as if a rank had failed
    "spoil": Kind(False),  # it sends a wrong summand, which must be detected
    "truncate": Kind(False, r"checkpoint"),  # the newest checkpoint is truncated before the job resumes
    "cut": Kind(True, r"lost communication with a remote daemon", True),  # the link of a host, in cluster_sim.sh
    "shm": Kind(True, r"shared memory is too small"),  # /dev/shm is full
}
LOSSES = ("kill", "crash")  # after these the other ranks go on
TOLD_SECONDS = 2.0  # after which a stopped rank must be reported, with the driver's ALLREDUCE_STALL_SECONDS=1


# Faults that are not left to chance: one run of each kind, and of moments that a loss may come at.
# tests/faults/test_faults.py runs them, and python -m tests.faults --scenarios.


def kills(*places: tuple[int, str, int] | tuple[int, str, int, bool]) -> tuple[Fault, ...]:
    """Return the losses of ranks: each with its point, the number of the visit to it, and whether it comes after it."""
    return tuple(Fault("kill", rank, point, turn, *after) for rank, point, turn, *after in places)


TWO_OF_THREE = kills((1, "compute", 13), (0, "end of an epoch", 4))  # which two standby ranks replace
SCENARIOS = {
    "truncate": Plan(51, 2, goes_on=False, checkpoint=7, faults=(Fault("truncate", 0, BETWEEN),)),
    "shm": Plan(8, 2, goes_on=False, backend="shared", faults=(Fault("shm", 0, START),)),
    "losses in calls": Plan(
        10, 8, "calls", backend=IN_TURN,
        faults=(
            *kills((7, "reduce", 10), (6, "middle of a reduction", 3), (5, "close", 2), (4, "agree in a call", 5)),
            *kills((3, "make a communicator", 12), (2, "gather", 5), (1, "reduce", 80, True)),
        ),
    ),
    "losses in calls on nodes": Plan(
        11, 6, "calls", backend=IN_TURN, nodes=(2, 2, 2),
        faults=(
            *kills((0, "gather", 1), (3, "agree in a call", 2), (2, "middle of a reduction", 3)),
            *kills((1, "survivors", 3), (4, "part", 5, True)),
        ),
    ),
    "losses in a training": Plan(
        12, 5, backend="hierarchical_copy", nodes=(2, 3), checkpoint=7,
        faults=(
            Fault("kill", 0, turn=12, delay=0.001),
            *kills((1, "checkpoint", 6), (3, "evaluate", 6), (4, "edit", 2, True)),
        ),
    ),
    "losses in a sharded training": Plan(
        13, 3, "sharded", backend="ring", checkpoint=7, faults=kills((0, "update", 30), (1, "edit", 1)),
    ),
    "nobody goes on while a trainer is made": Plan(25, 4, "sharded", checkpoint=7, faults=kills((3, "mirror", 1))),
    "loss of a node that copies": Plan(
        27, 4, "sharded", backend="ring", nodes=(2, 2), copies=2,
        faults=kills((2, "back up an array", 100), (3, "back up an array", 100)),
    ),
    "losses of ranks with copies": Plan(
        28, 4, "sharded", backend="shared", copies=2,
        faults=kills((1, "update", 21, True), (0, "back up", 32), (2, "evaluate", 4, True)),
    ),
    "nobody has a part": Plan(
        29, 3, "sharded", backend="shared", copies=2,
        faults=kills((0, "wait for a backup", 90), (1, "wait for a backup", 90)),
    ),
    "loss of a central storage": Plan(
        31, 4, "central storage", storage=2, checkpoint=7, faults=kills((2, "compute", 25), (3, "go back", 1)),
    ),
    "loss of a central storage with a copy": Plan(
        32, 3, "central storage", copies=2, faults=kills((0, "back up an array", 100)),
    ),
    "losses in a recovery, central storage": Plan(
        33, 4, "central storage", storage=3, faults=kills((0, "compute", 12), (1, "meet", 1)),
    ),
    "losses in a recovery, synchronous servers": Plan(
        34, 4, "synchronous servers", servers=1, rows="divided", faults=kills((0, "compute", 12), (1, "meet", 1)),
    ),
    "losses in a recovery, asynchronous servers": Plan(
        35, 4, "asynchronous servers", servers=1, rows="whole", faults=kills((0, "compute", 12), (1, "meet", 1)),
    ),
    "loss of a server with a copy": Plan(
        36, 4, "synchronous servers", servers=2, copies=2, faults=kills((3, "update", 20, True)),
    ),
    "losses in workers of two ranks": Plan(
        37, 5, "asynchronous servers", servers=1, ranks_per_worker=2,
        faults=kills((1, "compute", 8), (2, "end of an epoch", 4)),
    ),
    "nobody has the parameters": Plan(39, 3, "asynchronous servers", servers=1, faults=kills((2, "reply", 20))),
    "standby ranks": Plan(42, 6, "spare ranks", spares=3, faults=TWO_OF_THREE),
    "standby ranks, central storage": Plan(
        43, 5, "spare ranks, central storage", spares=2, storage=1, checkpoint=7, rows="whole", faults=TWO_OF_THREE,
    ),
    "standby ranks, local SGD": Plan(44, 5, "spare ranks, local SGD", spares=2, rows="whole", faults=TWO_OF_THREE),
    "losses of optimizers, one of them in the repair": Plan(
        45, 3, "optimizer", "ring", faults=kills((1, "backward", 8), (0, "rebuild", 2)),
    ),
    "a loss of a sharded optimizer with copies": Plan(
        47, 3, "sharded optimizer", copies=2, faults=kills((1, "share slices", 12)),
    ),
    "a loss of an optimizer in local SGD": Plan(
        48, 2, "local SGD optimizer", faults=kills((1, "backward", 7)),
    ),
    "an alarm while a rank waits": Plan(
        17, 2, program="spare ranks", spares=1, faults=(Fault("revoke", 0, "compute", 20),)
    ),
    "a wrong summand": Plan(14, 2, backend="native", faults=(Fault("spoil", 1, "reduce", 20),)),
    "halt": Plan(20, 2, goes_on=False, faults=(Fault("halt", 1, turn=20),)),
}  # fmt: skip
# Exceptions, SIGTERM, a NaN, a rank that holds the GIL and a changed byte of a checkpoint have tests of their own;
# tests.matrix loses a rank in each pair of a trainer and another feature.
