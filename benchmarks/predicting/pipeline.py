"""The cost of pipeline stages: the bubble, the messages between stages, and the time of a step.

A rank waits while the pipeline fills and drains. With S stages, M microbatches and C chunks of each rank, a rank
computes M C pieces and waits for S - 1 more, so the bubble is (S - 1) / (M C + S - 1) of the time. C = 1: GPipe
(Y. Huang et al.: GPipe, 2019) and 1F1B, which needs less memory. C > 1: the interleaved schedule (D. Narayanan et al.:
Efficient large-scale language model training on GPU clusters using Megatron-LM, 2021): the bubble, relative to the
computation, is (S - 1) / M divided by C. The model assumes that all pieces take the same time.

If ranks outnumber cores, a rank computes for cores / ranks of the time at most. Other ranks compute while it waits in
the bubble, so the parts don't add up: a rank waits for the larger of both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from allreduce.transport.cost import Layout, Machine, link, message
from benchmarks.predicting.costs import predict, usable
from benchmarks.predicting.forecast import Model, placed

SCHEDULES = ("gpipe", "1f1b", "interleaved")


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the part of a step in which a rank waits for other stages. chunks: stages of each rank."""
    return (stages - 1) / (microbatches * chunks + stages - 1)


def crowded(ranks: int, cores: int) -> float:
    """Return the part of a step in which a rank waits, at least, because ranks outnumber cores: others compute."""
    return max(0.0, 1 - cores / ranks)


@dataclass(frozen=True)
class Plan:
    """How a replica's model and batch are divided. chunks: stages of each rank (1, unless interleaved)."""

    stages: int
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def messages(self) -> int:
        """Messages of a replica in a step: an activation and a gradient for each microbatch and boundary."""
        return 2 * self.microbatches * (self.stages * self.chunks - 1)


@dataclass(frozen=True)
class StagedStep:
    """The prediction for one number of ranks. Times in seconds; efficiency relative to one rank."""

    ranks: int
    nodes: int
    replicas: int
    transfer: float  # of one message
    pipeline: float  # forward and backward of all microbatches, with the bubble and the messages that nothing hides
    seconds: dict[str, float]  # backend -> all-reduce of a stage's gradients among the replicas
    winner: str
    step: float
    efficiency: float


@dataclass(frozen=True)
class StagedForecast:
    """A model in stages on growing numbers of ranks. Each rank computes as long as one rank with the whole model does:
    a replica's batch is `stages` times as large.
    """

    model: Model
    plan: Plan
    bubble: float
    message_bytes: int
    gradient_bytes: int  # of a stage
    rows: list[StagedStep]


def forecast(
    model: Model, machine: Machine, node_size: int, plan: Plan, *, itemsize: int = 4, cores: int = 0, most: int = 4096
) -> StagedForecast:
    """Predict a model's training on 1, 2, 4, ... replicas of plan.stages ranks, up to `most` ranks."""
    samples = model.samples * plan.stages / plan.microbatches  # of a microbatch
    sent = round(samples * model.activation * itemsize)
    reduced = model.parameters * itemsize // plan.stages
    rows = [
        _row(model, machine, node_size, cores, plan, replicas, sent, reduced)
        for replicas in _replicas(plan.stages, most)
    ]
    return StagedForecast(model, plan, bubble(plan.stages, plan.microbatches, plan.chunks), sent, reduced, rows)


def _replicas(stages: int, most: int) -> Iterator[int]:
    replicas = 1
    while replicas == 1 or replicas * stages <= most:
        yield replicas
        replicas *= 2


def _row(
    model: Model, machine: Machine, node_size: int, cores: int, plan: Plan, replicas: int, sent: int, reduced: int
) -> StagedStep:
    ranks = plan.stages * replicas
    at = placed(ranks, node_size, cores)
    transfer = _transfer(machine, at, node_size, plan, sent)
    pieces = plan.microbatches * plan.chunks
    # A rank exchanges the messages of a piece while it computes another one. The first and the last messages, which
    # cross all stages, are hidden by nothing.
    piece = max(model.step_seconds / pieces, 2 * transfer)
    pipeline = (pieces + plan.stages - 1) * piece + 2 * (plan.stages - 1) * transfer
    pipeline = max(pipeline, model.step_seconds / (1 - crowded(min(ranks, node_size), cores or ranks)))
    group, shared_link = _replica_group(at, node_size, plan.stages, replicas)
    k = replace(machine, net_beta=machine.net_beta * shared_link)
    seconds = {name: predict(name, k, group, reduced) for name in usable(group)}
    winner = min(seconds, key=lambda name: seconds[name])
    step = pipeline + seconds[winner]
    return StagedStep(ranks, at.nodes, replicas, transfer, pipeline, seconds, winner, step, model.step_seconds / step)


def _transfer(machine: Machine, at: Layout, node_size: int, plan: Plan, sent: int) -> float:
    """Return the time of the slowest message between two stages. The stages of a replica are on ranks in a row."""
    if plan.stages == 1:
        return 0.0
    if at.nodes == 1 or node_size % plan.stages == 0:
        return message(sent, at, machine)
    return link(sent, machine)


def _replica_group(at: Layout, node_size: int, stages: int, replicas: int) -> tuple[Layout, int]:
    """Return the replicas of one stage, and how many such groups use the link of a node at once."""
    crowd = at.largest
    if at.nodes == 1:
        return replace(at, sizes=(replicas,), sharing=crowd), 1
    together = max(1, node_size // stages)  # replicas of a node
    full, rest = divmod(replicas, together)
    return replace(at, sizes=(together,) * full + ((rest,) if rest else ()), sharing=crowd), min(stages, node_size)
