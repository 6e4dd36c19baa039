"""Training on more ranks: step time, efficiency, saturation and the best backend, as numbers and as a picture."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from allreduce.transport.cost import Machine
from benchmarks.lib import outputs
from benchmarks.lib.plot import colour, content, kind_of, mark, width
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


MODEL_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff8c00", "#17becf")
SLOWEST = 30.0  # lines slower than the fastest by more than this factor are cut off


def save(path: str, forecasts: list[Forecast], setting: str) -> None:
    """Draw forecasts into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 5.2), layout="constrained")
    axes = figure.subplots(1, 2)
    figure.suptitle(f"Predicted: {setting}", fontsize=12)
    _all_reduce(axes[0], forecasts[0])
    _efficiency(axes[1], forecasts)
    outputs.write(path, content(figure, kind_of(path)))


def _all_reduce(axis: Any, found: Forecast) -> None:
    rows = found.rows[1:]
    best = [row.seconds[row.winner] * 1e3 for row in rows]
    top = max(max(best) * SLOWEST, found.model.step_seconds * 2e3)
    for name in dict.fromkeys(name for row in rows for name in row.seconds):
        line = [(row.ranks, row.seconds[name] * 1e3) for row in rows if name in row.seconds]
        label = name + " (in one node)" * (len(line) < len(rows)) + " (beyond the top)" * (line[-1][1] > top)
        style = {"color": colour(name), "marker": mark(name)[0], "ms": 4, "lw": width(name)}
        axis.plot(*zip(*line, strict=True), **style, label=label)
    axis.axhline(found.model.step_seconds * 1e3, color="#888888", ls=":", lw=1.6, label="computation of a step")
    axis.set_ylim(min(*best, found.model.step_seconds * 1e3) / 2, top)
    _ranks(axis, found)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("all-reduce (ms)")
    axis.set_title(f"All-reduce of {found.model.title}'s gradients ({found.gradient_bytes / 1e6:.0f} MB)", fontsize=11)
    _legend(axis)


def _efficiency(axis: Any, forecasts: list[Forecast]) -> None:
    for index, found in enumerate(forecasts):
        ranks, shade = [row.ranks for row in found.rows], MODEL_COLOURS[index % len(MODEL_COLOURS)]
        thick = 1.6 + 1.1 * (len(forecasts) - 1 - index)  # so that coinciding lines stay visible
        axis.plot(ranks, [100 * row.efficiency for row in found.rows], color=shade, lw=thick, label=found.model.title)
        axis.plot(ranks, [100 * row.efficiency_overlapped for row in found.rows], color=shade, lw=thick * 0.7, ls="--")
        if found.saturation:
            at = next(row for row in found.rows if row.ranks == found.saturation)
            axis.plot(at.ranks, 100 * at.efficiency, "X", color=shade, ms=10)
    axis.plot([], [], color="#555555", ls="-", label="nothing overlaps")
    axis.plot([], [], color="#555555", ls="--", label="hidden behind the backward pass")
    if any(found.saturation for found in forecasts):
        axis.plot([], [], "X", color="#555555", ls="", label="saturation: twice as many ranks gain < 10 %")
    _ranks(axis, forecasts[0])
    axis.set_ylim(0, 104)
    axis.set_ylabel("scaling efficiency (%)")
    axis.set_title("Speed per rank, a rank alone = 100 % (best backend)", fontsize=11)
    _legend(axis)


def _legend(axis: Any) -> None:
    """Draw the legend below the panel, where it hides no line."""
    axis.legend(fontsize=8.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)


def _ranks(axis: Any, found: Forecast) -> None:
    from matplotlib.ticker import NullLocator

    ranks = [row.ranks for row in found.rows]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(each) for each in ranks], rotation=45 if len(ranks) > 8 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True, which="major", alpha=0.35)
    axis.set_xlabel("ranks")
    inside = max(row.ranks for row in found.rows if row.nodes == 1)
    if inside < ranks[-1]:
        axis.axvline(inside, color="#aaaaaa", ls="-.", lw=1)
        place = (inside, 0.02)
        axis.annotate(
            "one node | several", place, xycoords=("data", "axes fraction"), ha="center", fontsize=8.5, color="#555555"
        )
