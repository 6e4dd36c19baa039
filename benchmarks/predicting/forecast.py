"""Training on more ranks: step time, efficiency, saturation and the best backend."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from allreduce.transport.cost import Machine
from benchmarks.predicting.costs import predict, usable
from benchmarks.predicting.pipeline import Plan, bubble, placed

BACKWARD = 2 / 3  # of a step: the backward pass takes twice the forward pass; only it can hide communication
GAIN = 0.10  # saturated: doubling the ranks gains less than this
MOST_RANKS = 4096
WHOLE = Plan()  # no stages: each rank has the whole model


@dataclass(frozen=True)
class Model:
    """A model: the size of its gradients, and the computing time of a step on one device."""

    name: str
    title: str
    parameters: int
    step_seconds: float
    samples: int  # of a step and device
    source: str
    activation: int  # numbers that one sample passes from one layer to the next


_NVIDIA = (
    "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, README: one A100 80 GB, mixed precision"
)
_BERT = (
    "26.04 sequences/s at batch 14 (NVIDIA DeepLearningExamples, BERT, README of 2019-03: V100 32 GB, FP16; from "
    "memory, not checked)"
)
_RESNET50 = f"2470 images/s ({_NVIDIA}); the batch of 256 is assumed"
_BASE = f"110 M (Devlin et al. 2019); time of BERT-large scaled by the parameters ({_BERT})"
_GPT2 = (
    "6 x parameters x tokens floating-point operations (Kaplan et al. 2020) for 8 sequences of 1024 at 137 Tflop/s, "
    "an A100 on a model of 1.7 G parameters (Narayanan et al. 2021, table 1); batch assumed"
)
_MODELS = (  # activations: of ResNet-50 after the first block (later ones are smaller); else tokens x width
    Model("resnet50", "ResNet-50", 25_557_032, 256 / 2470, 256, _RESNET50, 256 * 56 * 56),
    Model("bert-base", "BERT-base", 110_000_000, 14 / 26.04 * 110 / 340, 14, _BASE, 512 * 768),
    Model("bert-large", "BERT-large", 340_000_000, 14 / 26.04, 14, f"340 M (Devlin et al. 2019); {_BERT}", 512 * 1024),
    Model("gpt2-xl", "GPT-2 XL", 1_557_611_200, 6 * 1_557_611_200 * 8 * 1024 / 137e12, 8, _GPT2, 1024 * 1600),
)
MODELS = {model.name: model for model in _MODELS}


@dataclass(frozen=True)
class Prediction:
    """The prediction for one number of ranks. Times in seconds; efficiency relative to one rank."""

    ranks: int
    nodes: int
    replicas: int
    transfer: float  # of one message between stages
    pipeline: float  # forward and backward, with the bubble and the messages that nothing hides
    seconds: dict[str, float]  # backend -> all-reduce of a stage's gradients among the replicas
    winner: str
    step: float  # without overlap, with the winner
    efficiency: float  # of step
    step_overlapped: float
    efficiency_overlapped: float

    @property
    def speedup(self) -> float:
        return self.ranks * self.efficiency


@dataclass(frozen=True)
class Forecast:
    """A model on growing numbers of ranks, each with the same work (weak scaling): with stages, a replica's batch is
    `plan.stages` times as large."""

    model: Model
    plan: Plan
    bubble: float
    message_bytes: int
    gradient_bytes: int  # of a stage
    rows: list[Prediction]
    saturation: int | None  # ranks from which doubling them gains less than GAIN; None: beyond the last row
    efficient: int | None  # most ranks with an efficiency of at least one half; None: not even one replica
    best_strong: int  # ranks with the shortest step when one rank's batch is divided among all


def exposed(communication: float, compute: float, overlap: float) -> float:
    """Return the part of `communication` that remains if the fraction `overlap` of the computation can hide it."""
    return max(0.0, communication - overlap * compute)


def forecast(
    model: Model,
    machine: Machine,
    node_size: int,
    plan: Plan = WHOLE,
    *,
    itemsize: int = 4,
    cores: int = 0,
    most: int = MOST_RANKS,
    overlap: float = BACKWARD,
    counts: Iterable[int] | None = None,
) -> Forecast:
    """Predict a model's training on 1, 2, 4, ... replicas of plan.stages ranks, up to `most` ranks.

    counts: of replicas, instead.
    """
    sent = round(model.samples * plan.stages / plan.microbatches * model.activation * itemsize)
    reduced = model.parameters * itemsize // plan.stages
    powers = range(max(1, (most // plan.stages).bit_length()))

    def row(replicas: int) -> Prediction:
        at = placed(plan.stages * replicas, node_size, cores)
        transfer = plan.transfer(machine, at, node_size, sent)
        pipeline = plan.seconds(model.step_seconds, transfer, min(at.ranks, node_size), cores)
        group, sharing = plan.group(at, node_size)
        k = replace(machine, net_beta=machine.net_beta * sharing)
        seconds = {name: predict(name, k, group, reduced) for name in usable(group)}
        winner = min(seconds, key=lambda name: seconds[name])
        step = pipeline + seconds[winner]
        hidden = pipeline + exposed(seconds[winner], model.step_seconds, overlap)
        gains = model.step_seconds / step, model.step_seconds / hidden
        return Prediction(
            at.ranks, at.nodes, replicas, transfer, pipeline, seconds, winner, step, gains[0], hidden, gains[1]
        )

    rows = [row(replicas) for replicas in counts or (1 << power for power in powers)]
    return Forecast(
        model,
        plan,
        bubble(plan.stages, plan.microbatches, plan.chunks),
        sent,
        reduced,
        rows,
        saturation(rows),
        max((each.ranks for each in rows if each.efficiency >= 0.5), default=None),
        min(rows, key=lambda each: model.step_seconds / each.ranks + each.seconds[each.winner]).ranks,
    )


def saturation(rows: list[Prediction]) -> int | None:
    """Return the number of ranks from which doubling them gains less than GAIN; None if there is none."""
    for row, double in pairwise(rows):
        if row.ranks > 1 and double.speedup < row.speedup * (1 + GAIN) * double.ranks / row.ranks / 2:
            return row.ranks
    return None
