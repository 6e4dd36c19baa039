"""What one run does: a training in a drawn configuration, and the faults that are injected into it. Pure.

All comes from the run's number, so that a run can be had again by it.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OUTSIDE = "any instant"  # the driver sends the signal, at a drawn instant
START = "the start"
BETWEEN = "between two fits"  # the program does it itself

# Places in the code of the rank that is lost: before, in the middle of, and after them. See `points`.
REDUCE_POINTS = ("call", "reduce", "middle of a reduction", "end of a step")
STEP_POINTS = ("compute", "update", *REDUCE_POINTS)
CALL_POINTS = ("evaluate", "predict", "mirror")
CHECKPOINT_POINTS = ("checkpoint",)
REPAIR_POINTS = ("finished", "survivors", "rebuild")  # with turns that a program without losses does not come to

BACKENDS = ("auto", "shared", "ring", "halving_doubling", "reduce_to_one", "hierarchical_copy", "native")
TWO_PHASE = ("auto", "shared", "ring", "halving_doubling", "hierarchical_copy")
IN_TWO = ("halving_doubling", "hierarchical_copy")  # whose reductions are two calls of their own
PROGRAMS = ("trainer", "trainer", "calls")
UPDATES = ("replicated",)
ROWS, BATCH, EPOCHS = 480, 48, 6  # small, so that the losses and not the steps take the time
STEPS = ROWS // BATCH * EPOCHS
DELAY_SECONDS = 0.01  # of a signal from outside, behind the step that it waits for: at most


@dataclass(frozen=True)
class Fault:
    """kind: one of `kinds.KINDS`. rank: the one that it happens to, of the whole job.

    point: where in its code, or OUTSIDE. turn: the how-manieth time that it comes there, or from OUTSIDE the step
    after which the signal is sent. after: whether the point is left already. delay: seconds: from OUTSIDE, or slow.
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


@dataclass(frozen=True)
class Plan:
    """program: one of PROGRAMS. framework: of the model. update: "replicated" or "sharded".

    goes_on: whether it goes on without ranks that are lost, under a launcher that lets it.
    copies: in how many ranks every slice of a sharded update is kept. checkpoint: steps between two; 0 for none.
    nodes: sizes of simulated nodes; empty for one real node.
    """

    number: int
    ranks: int
    program: str = "trainer"
    framework: str = "numpy"
    backend: str = "auto"
    update: str = "replicated"
    copies: int = 1
    checkpoint: int = 0
    optimizer: str = "momentum"
    goes_on: bool = True
    nodes: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.ranks} ranks", self.program, self.framework, self.backend, self.update, self.optimizer]
        parts += [f"nodes {'+'.join(map(str, self.nodes))}"] if self.nodes else []
        parts += [f"copies {self.copies}"] if self.copies > 1 else []
        parts += [f"checkpoint every {self.checkpoint} steps"] if self.checkpoint else []
        return f"run {self.number}: {', '.join(parts)}; {'; '.join(map(str, self.faults)) or 'no fault'}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, held: dict[str, Any]) -> "Plan":
        faults = tuple(Fault(**fault) for fault in held["faults"])
        return cls(**{**held, "nodes": tuple(held["nodes"]), "faults": faults})


def draw(
    number: int, programs: Sequence[str] = PROGRAMS, updates: Sequence[str] = UPDATES, most_ranks: int = 5
) -> Plan:
    """The run of a number: one to all but one of its ranks are killed."""
    chance = random.Random(number)
    ranks = min(most_ranks, chance.choice((2, 3, 3, 4, 5)))
    program = chance.choice(programs)
    update = "replicated" if program == "calls" else chance.choice(updates)
    nodes = chance.choice(_nodes(ranks))
    names: tuple[str, ...] = BACKENDS if update == "replicated" else TWO_PHASE
    names = tuple(name for name in names if name != "shared" or not nodes)
    copies = 2 if update == "sharded" and chance.random() < 0.5 else 1
    checkpoint = chance.choice((0, 3, 7)) if copies == 2 or update == "replicated" else chance.choice((3, 7))
    plan = Plan(
        number=number,
        ranks=ranks,
        program=program,
        framework="torch" if program == "optimizer" else chance.choice(("numpy",) * 7 + ("torch",)),
        backend=chance.choice(names),
        update=update,
        copies=copies,
        checkpoint=checkpoint if program == "trainer" else 0,
        optimizer=chance.choice(("momentum", "adam")),
        nodes=nodes,
    )
    return Plan(**{**plan.__dict__, "faults": tuple(_faults(chance, plan))})


def _nodes(ranks: int) -> list[tuple[int, ...]]:
    halves = (ranks - ranks // 2, ranks // 2)
    return [(), (), (), halves, (1,) * ranks]


def _faults(chance: random.Random, plan: Plan) -> list[Fault]:
    losses = chance.choice((1, 1, *range(1, plan.ranks)))
    victims = chance.sample(range(plan.ranks), losses)
    return [_fault(chance, plan, victim, first=not place) for place, victim in enumerate(victims)]


def _fault(chance: random.Random, plan: Plan, victim: int, first: bool) -> Fault:
    """One loss: at an instant, or at a point that the program comes to."""
    if chance.random() < 0.4:
        return Fault("kill", victim, turn=chance.randrange(STEPS), delay=chance.random() * DELAY_SECONDS)
    points = list(STEP_POINTS if plan.program == "trainer" else REDUCE_POINTS)
    if plan.program == "trainer":
        points += CALL_POINTS + (CHECKPOINT_POINTS if plan.checkpoint else ())
    if plan.backend not in IN_TWO:
        points.remove("middle of a reduction")
    if not first:
        points += REPAIR_POINTS * 2
    point = chance.choice(points)
    if point == "rebuild":
        return Fault("kill", victim, point, 2, after=chance.random() < 0.5)
    most = {"checkpoint": 8, "evaluate": EPOCHS + 1, **dict.fromkeys(STEP_POINTS, STEPS)}
    return Fault("kill", victim, point, 1 + chance.randrange(most.get(point, 1)), after=chance.random() < 0.5)
