"""What an all-reduce costs a training: step time, efficiency, saturation, and which backend to take."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.predicting.cost_model import FORMULAS, predict
from benchmarks.predicting.cost_parts import Machine, Place

BACKWARD = 2 / 3  # of a step: the backward pass takes twice the forward pass; only it can hide communication
GAIN = 0.10  # saturated: doubling the ranks brings less than this
MOST_RANKS = 4096


@dataclass(frozen=True)
class Model:
    """What a training step exchanges and how long it computes, on one device."""

    name: str
    title: str
    parameters: int
    step_seconds: float
    samples: int  # of a step and device
    source: str


_NVIDIA = (
    "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, README: one A100 80 GB, mixed precision"
)
_BERT = (
    "26.04 sequences/s at batch 14 (NVIDIA DeepLearningExamples, BERT, README of 2019-03: V100 32 GB, FP16; from "
    "memory, not checked)"
)
MODELS = {
    model.name: model
    for model in (
        Model(
            "resnet50",
            "ResNet-50",
            25_557_032,
            256 / 2470,
            256,
            f"2470 images/s ({_NVIDIA}); the batch of 256 is assumed",
        ),
        Model(
            "bert-base",
            "BERT-base",
            110_000_000,
            14 / 26.04 * 110 / 340,
            14,
            f"110 M (Devlin et al. 2019); time of BERT-large scaled by the parameters ({_BERT})",
        ),
        Model("bert-large", "BERT-large", 340_000_000, 14 / 26.04, 14, f"340 M (Devlin et al. 2019); {_BERT}"),
        Model(
            "gpt2-xl",
            "GPT-2 XL",
            1_557_611_200,
            6 * 1_557_611_200 * 8 * 1024 / 137e12,
            8,
            "6 x parameters x tokens floating-point operations (Kaplan et al. 2020) for 8 sequences of 1024 at "
            "137 Tflop/s, an A100 on a model of 1.7 G parameters (Narayanan et al. 2021, table 1); batch assumed",
        ),
    )
}


@dataclass(frozen=True)
class Prediction:
    """One number of ranks. Seconds; speeds are relative to one rank."""

    ranks: int
    nodes: int
    seconds: dict[str, float]  # backend -> all-reduce
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
    """A model on growing numbers of ranks, each with the same work (weak scaling)."""

    model: Model
    gradient_bytes: int
    rows: list[Prediction]
    saturation: int | None  # ranks from which doubling them gains less than GAIN; None: beyond the last row
    efficient: int  # most ranks with an efficiency of at least one half
    best_strong: int  # ranks with the shortest step when one rank's batch is divided among all


def placed(ranks: int, node_size: int) -> Place:
    """Full nodes; the last takes what is left."""
    full, rest = divmod(ranks, node_size)
    return Place((node_size,) * full + ((rest,) if rest else ()))


def exposed(communication: float, compute: float, overlap: float) -> float:
    """What is left of `communication` when it may hide behind the fraction `overlap` of the computation."""
    return max(0.0, communication - overlap * compute)


def forecast(
    model: Model,
    machine: Machine,
    node_size: int,
    *,
    itemsize: int = 4,
    most: int = MOST_RANKS,
    overlap: float = BACKWARD,
    counts: Iterable[int] | None = None,
) -> Forecast:
    """Predict a model's training on 1, 2, 4, ... ranks up to `most`."""
    nbytes = model.parameters * itemsize
    rows = [_row(model, machine, placed(count, node_size), nbytes, overlap) for count in counts or _doubling(most)]
    return Forecast(
        model,
        nbytes,
        rows,
        _saturation(rows),
        max(row.ranks for row in rows if row.efficiency >= 0.5),
        min(rows, key=lambda row: model.step_seconds / row.ranks + row.seconds[row.winner]).ranks,
    )


def _doubling(most: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _row(model: Model, machine: Machine, at: Place, nbytes: int, overlap: float) -> Prediction:
    backends = [name for name in FORMULAS if name != "shared" or at.m == 1]
    seconds = {name: predict(name, machine, at, nbytes) for name in backends}
    winner = min(seconds, key=lambda name: seconds[name])
    compute = model.step_seconds
    step = compute + seconds[winner]
    hidden = compute + exposed(seconds[winner], compute, overlap)
    return Prediction(at.n, at.m, seconds, winner, step, compute / step, hidden, compute / hidden)


def _saturation(rows: list[Prediction]) -> int | None:
    for row, double in pairwise(rows):
        if row.ranks > 1 and double.speedup < row.speedup * (1 + GAIN) * double.ranks / row.ranks / 2:
            return row.ranks
    return None
