"""What one run does: a program in a configuration, and the faults that are injected into it. Pure."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

OUTSIDE = "any instant"  # the driver sends the signal, at a drawn instant
START = "the start"
BETWEEN = "between two fits"  # the program does it itself

BACKENDS = ("auto", "shared", "ring", "halving_doubling", "reduce_to_one", "hierarchical_copy", "native")
TWO_PHASE = ("auto", "shared", "ring", "halving_doubling", "hierarchical_copy")
IN_TWO = ("halving_doubling", "hierarchical_copy")  # whose reductions are two calls of their own
ROWS, BATCH, EPOCHS = 480, 48, 6  # small, so that the losses and not the steps take the time
STEPS = ROWS // BATCH * EPOCHS


class Program(NamedTuple):
    """What the ranks of a run do. weight: how often it is drawn.

    module: of this package, whose `run` it is. backends: that it can have; none where it takes none.
    frameworks: of its model. checkpoints: numbers of steps between two; 0: none are written.
    exact: whether the result is that of one rank alone, to float rounding; otherwise only its accuracy is.
    together: whether the ranks take every step together, so that steps that were done again can be counted.
    least: ranks that it needs.
    """

    weight: int
    module: str
    backends: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ("numpy",) * 7 + ("torch",)
    checkpoints: tuple[int, ...] = (0,)
    exact: bool = True
    together: bool = True
    least: int = 2


PROGRAMS = {
    "mirrored": Program(6, "training", BACKENDS, checkpoints=(0, 3, 7)),
    "sharded": Program(4, "training", TWO_PHASE, checkpoints=(3, 7)),
    "central storage": Program(3, "training", checkpoints=(3, 7)),
    "synchronous servers": Program(3, "training", checkpoints=(0, 7), least=3),
    "asynchronous servers": Program(3, "training", checkpoints=(0, 7), exact=False, together=False, least=3),
    "spare replicas": Program(3, "training", checkpoints=(0, 7), exact=False, together=False),
    "spare ranks": Program(3, "training", BACKENDS, checkpoints=(0, 7), least=3),
    "optimizer": Program(3, "loop", BACKENDS, ("torch",)),
    "sharded optimizer": Program(2, "loop", TWO_PHASE, ("torch",), (3, 7)),
    "calls": Program(5, "calls", BACKENDS),
    "disagreement": Program(4, "disagreeing", BACKENDS),
}


@dataclass(frozen=True)
class Fault:
    """kind: one of `kinds.KINDS`. rank: the one that it happens to, of the whole job.

    point: where in its code, or OUTSIDE; of a disagreement, what it is about. turn: the how-manieth time that it comes
    there, or from OUTSIDE the step after which the signal is sent. after: whether the point is left already.
    delay: seconds: from OUTSIDE, until SIGCONT, or slow.
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
    """program: one of PROGRAMS. framework: of the model.

    goes_on: whether it goes on without ranks that are lost, under a launcher that lets it.
    copies: in how many ranks every slice of a sharded update is kept.
    checkpoint: steps between two; 0 for none. servers: how many of the last ranks are servers. spares: how many of the
    last ranks wait for a place; or for how many ranks a step of spare replicas does not wait.
    nodes: sizes of simulated nodes; empty for one real node.
    """

    number: int
    ranks: int
    program: str = "mirrored"
    framework: str = "numpy"
    backend: str = "auto"
    copies: int = 1
    checkpoint: int = 0
    servers: int = 0
    spares: int = 0
    optimizer: str = "momentum"
    goes_on: bool = True
    nodes: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.ranks} ranks", self.program, self.framework, self.backend, self.optimizer]
        parts += [f"nodes {'+'.join(map(str, self.nodes))}"] if self.nodes else []
        parts += [f"copies {self.copies}"] if self.copies > 1 else []
        parts += [f"{self.servers} servers"] if self.servers else []
        parts += [f"{self.spares} spare"] if self.spares else []
        parts += [f"checkpoint every {self.checkpoint} steps"] if self.checkpoint else []
        parts += [] if self.goes_on else ["without ULFM"]
        return f"run {self.number}: {', '.join(parts)}; {'; '.join(map(str, self.faults)) or 'no fault'}"

    @property
    def kind(self) -> Program:
        return PROGRAMS[self.program]

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks without one of which nobody could go on: they alone have a part of the state."""
        if self.copies > 1:
            return ()
        return (0,) if self.program == "spare replicas" else tuple(range(self.ranks - self.servers, self.ranks))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, held: dict[str, Any]) -> "Plan":
        faults = tuple(Fault(**fault) for fault in held["faults"])
        return cls(**{**held, "nodes": tuple(held["nodes"]), "faults": faults})
