"""Draws a plan from a number: the same number gives the same plan. Pure."""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.backends import IN_TWO
from tests.faults.plans import EDITED, EPOCHS, LOSSES, PROGRAMS, STEPS, Fault, Plan
from tests.random_calls import nodes_for

# Places in the code of the rank that is lost: before, in the middle of, and after them. See `points`.
REDUCE_POINTS = ("call", "reduce", "middle of a reduction", "end of a step")
STEP_POINTS = ("compute", "update", *REDUCE_POINTS)
SERVED_POINTS = ("compute", "push", "reply", "update", "end of a step")
CALL_POINTS = ("evaluate", "predict", "mirror", "end of an epoch")
REPAIR_POINTS = ("finished", "survivors", "rebuild", "meet")
POINTS = {*STEP_POINTS, *SERVED_POINTS, *CALL_POINTS, *REPAIR_POINTS, "backward", "edit", "checkpoint"}

DELAY_SECONDS = 0.01  # of a signal from outside, behind the step that it waits for: at most
STOP_SECONDS = 1.0
OTHERS = ("stop", "term", "raise", "exit")  # kinds of faults besides a loss
OTHERS_SHARE = 0.15
SEVERAL, HOST = "several", "host"  # ways to draw: two or three losses 10 ms to 1 s apart; all ranks of a host at once
WAYS = ("mixed", SEVERAL, HOST)
PACE_SECONDS = 0.02  # of a step, so that a job is still training when the last rank is lost
HOSTS = ((2, 2), (1, 2), (2, 1), (3, 1))
HOLDERS_STAY = 0.85  # how often nobody is lost without whom the others can't go on
COPIED = ("sharded", "central storage")  # programs whose slices another rank can keep too


def draw(number: int, programs: Sequence[str] = tuple(PROGRAMS), most_ranks: int = 5, way: str = WAYS[0]) -> Plan:
    """Return the run of a number: its faults kill between one and all but one of its ranks, or are another fault of one
    rank. way: one of WAYS."""
    chance = random.Random(number)
    program = chance.choices(programs, [PROGRAMS[name].weight for name in programs])[0]
    kind = PROGRAMS[program]
    ranks = max(kind.least, min(most_ranks, chance.choice((2, 3, 3, 4, 5))))
    hosts = chance.choice(HOSTS) if way == HOST else ()
    ranks = sum(hosts) or max(ranks, 3 * (way == SEVERAL))
    nodes = () if program.startswith("spare ranks") or hosts else nodes_for(chance, ranks)
    names = tuple(name for name in kind.backends if name != "shared" or not (nodes or hosts))
    plan = Plan(
        number=number,
        ranks=ranks,
        program=program,
        backend=chance.choice(names) if names else "auto",
        checkpoint=chance.choice(kind.checkpoints),
        optimizer=chance.choice(("momentum", "adam")),
        nodes=nodes,
        hosts=hosts,
    )
    if program in COPIED and chance.random() < 0.5:
        plan = replace(plan, copies=2, checkpoint=chance.choice((0, 0, 7)))
    if program.endswith("servers"):
        most = min([ranks - 2, *hosts[1:]])  # all on one host
        plan = replace(plan, servers=chance.choice(range(1, most + 1)))
    if (program == "synchronous servers" and plan.servers > 1) or program == "sharded optimizer":
        plan = replace(plan, copies=2)
    if program == "asynchronous servers":
        plan = replace(plan, ranks_per_worker=min(chance.choice((1, 1, 2, 2, 3)), ranks - plan.servers))
    if program.startswith("spare "):
        plan = replace(plan, spares=chance.randrange(program.startswith("spare ranks"), ranks - 1))
    if plan.trainer == "central storage":
        plan = replace(plan, storage=chance.randrange(ranks - (plan.spares if plan.waits else 0)))
    if kind.module == "training":
        plan = replace(plan, rows=chance.choice(("", "", "", "whole", "whole", "divided" * (not plan.waits))))
    drawn = {SEVERAL: _several, HOST: _host}.get(way, _faults)(chance, plan)
    return replace(plan, faults=tuple(drawn))


def _faults(chance: random.Random, plan: Plan) -> list[Fault]:
    if chance.random() < OTHERS_SHARE:
        return [_other(chance, plan)]
    losses = chance.choice((1, 1, *range(1, plan.ranks)))
    victims = chance.sample(range(plan.ranks), losses)
    if plan.holders and chance.random() < HOLDERS_STAY:
        left = [rank for rank in victims if rank not in plan.holders]
        victims = left or [min(set(range(plan.ranks)) - set(plan.holders))]
    return [_loss(chance, plan, victim, first=not place) for place, victim in enumerate(victims)]


def _several(chance: random.Random, plan: Plan) -> list[Fault]:
    """Return two or three losses 10 ms to 1 s apart, of ranks without which the others go on."""
    free = [rank for rank in range(plan.ranks) if rank not in plan.holders]
    losses = min(chance.choice((2, 2, 3)), plan.ranks - 1, len(free))
    victims = chance.sample(free, losses)
    turn, delay, faults = chance.randrange(STEPS // 2), 0.0, []
    for victim in victims:
        faults.append(Fault(chance.choice(LOSSES), victim, turn=turn, delay=delay))
        delay += 10 ** chance.uniform(-2, 0)
    return [*faults, _pace(plan, victims)]


def _host(chance: random.Random, plan: Plan) -> list[Fault]:
    """Return the loss of all ranks of one host at once, where the other hosts' ranks can go on."""
    hosts = [range(plan.hosts[0]), range(plan.hosts[0], plan.ranks)]
    victims = chance.choice([host for host in hosts if not set(host) & set(plan.holders)] or hosts)
    turn = chance.randrange(STEPS // 2)
    return [*(Fault("kill", victim, turn=turn) for victim in victims), _pace(plan, victims)]


def _pace(plan: Plan, victims: Sequence[int]) -> Fault:
    """Return the slow rank that gives the steps their pace: one that is not lost."""
    rank = next(rank for rank in range(plan.ranks) if rank not in victims)
    return Fault("slow", rank, "end of a step", delay=PACE_SECONDS)


def _other(chance: random.Random, plan: Plan) -> Fault:
    """Return a fault other than a kill, which ends the job in order or is survived."""
    kind = chance.choice(OTHERS if plan.kind.module == "training" else ("stop", "raise", "exit"))
    working = plan.ranks - (plan.spares if plan.waits else 0)
    rank, turn = chance.randrange(working), chance.randrange(STEPS - 10)
    if kind == "stop":
        return Fault(kind, rank, turn=turn, delay=chance.random() * STOP_SECONDS)
    if kind == "term":
        return Fault(kind, rank, turn=turn, delay=chance.random() * DELAY_SECONDS)
    return Fault(kind, rank, "end of a step", 1 + turn % 10, after=True)


def _loss(chance: random.Random, plan: Plan, victim: int, first: bool) -> Fault:
    """Return a kill at a random instant, or at a point that the program reaches."""
    waits = plan.waits and victim >= plan.ranks - plan.spares
    if waits or chance.random() < 0.4:
        return Fault("kill", victim, turn=chance.randrange(STEPS), delay=chance.random() * DELAY_SECONDS)
    points = list(_points(plan))
    if not first:
        points += [point for point in REPAIR_POINTS * 2 if point != "meet" or plan.kind.module == "training"]
    point = chance.choice(points)
    if point == "rebuild":
        return Fault("kill", victim, point, 2, after=chance.random() < 0.5)
    most = {
        "checkpoint": 8,
        "evaluate": EPOCHS + 1,
        "end of an epoch": EPOCHS,
        "edit": 2,
        **dict.fromkeys((*STEP_POINTS, *SERVED_POINTS), STEPS),
    }
    return Fault("kill", victim, point, 1 + chance.randrange(most.get(point, 1)), after=chance.random() < 0.5)


def _points(plan: Plan) -> tuple[str, ...]:
    """Return the points that this program reaches if no rank fails."""
    module = plan.kind.module
    points = {"calls": REDUCE_POINTS, "loop": (*STEP_POINTS, "backward")}.get(module, STEP_POINTS)
    if not plan.kind.backends and plan.trainer not in ("central storage", "synchronous servers"):
        points = SERVED_POINTS + REDUCE_POINTS * (plan.ranks_per_worker > 1)
    if module == "training":
        points += CALL_POINTS
    if plan.trainer in EDITED:
        points += ("edit",)
    if plan.checkpoint:
        points += ("checkpoint",)
    return tuple(point for point in points if point != "middle of a reduction" or plan.backend in IN_TWO)
