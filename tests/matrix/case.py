"""A case of the matrix: which features meet in a fit, drawn by a seed, and the rows that the fit visits."""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tests.backends import ON_CPU, SHARDED

FEATURES, CLASSES, MOST_RANKS = 4, 3, 5
FRAMEWORKS = {"numpy": 6, "torch": 6, "jax": 1, "keras": 1}  # how often each is drawn
OWNERS = ("replicated", "sharded", "copies", "central", "servers", "spare", "optimizer", "sharded optimizer")
LOADERS = ("arrays", "whole", "divided", "stream", "shards", "dataset")
TRANSFORMS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {  # draw their arguments
    "ClipNorm": lambda draw: (draw.choice([0.02, 0.2, 1.0]),),
    "Accumulate": lambda draw: (draw.choice([2, 3]),),
    "EMA": lambda draw: (draw.choice([0.5, 0.9]),),
    "SkipNotFinite": lambda draw: (),
    "Schedule": lambda draw: (draw.choice(["constant", "linear", "cosine", "inverse_sqrt"]), draw.choice([0, 2])),
}
AVERAGES = ("", "Exact", "LocalSGD")
MIRRORED = ("replicated", "sharded", "copies")  # owners of a MirroredTrainer
OPTIMIZER = ("optimizer", "sharded optimizer")  # of a MirroredOptimizer, in a PyTorch loop
WAYS = {"": "", "closure": "step(closure)", "two": "an optimizer for each layer", "clip": "clip_grad_norm_"}
LAYERS = ("", "groups", "frozen", "scalar")  # two groups with own rates; the first layer is not trained; 0 dimensions
INPUTS = ("", "dict", "tuple")  # of two arrays
LOSSES = ("", "weighted", "ignored")  # of PyTorch: with weights of the classes; some rows do not count
IGNORED = -100
UPDATES = ("sgd", "momentum", "adam")  # of all frameworks
MORE_UPDATES = ("nesterov", "adamw", "amsgrad", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "asgd")
CLASS_WEIGHT = {0: 3.0, 2: 0.5}
OWNER_NAMES = {
    "replicated": "",
    "sharded": 'update="sharded"',
    "copies": "Sharded(copies=2)",
    "central": "CentralStorageTrainer",
    "servers": 'ParameterServerTrainer(updates="sync")',
    "spare": "SpareReplicasTrainer(spare=0)",
    "optimizer": "MirroredOptimizer",
    "sharded optimizer": 'MirroredOptimizer(update="sharded")',
}
LOADER_NAMES = {"arrays": "", "stream": "Loader(steps=)", "shards": "load_shards", "dataset": "a data set"}
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y, weights


@dataclass(frozen=True)
class Case:
    """One fit. ranks: those that train. resumed: the ranks that train on after a stop in step `stop`; 0 for no stop.
    killed: the rank that dies in step `stop`, after which the others continue; -1 for none. nodes: simulated ranks per
    node; 0 for the real node. bad: the row whose features are not finite, with SkipNotFinite. weighs, classes: whether
    rows, and classes, have weights. uneven: whether the ranks' parts of divided rows have any lengths, 0 too. buckets:
    gradients are summed in buckets during backward. way: how a PyTorch loop uses MirroredOptimizer, see WAYS. layers:
    the peculiarity of a PyTorch module, see LAYERS. inputs: how a model gets the features, see INPUTS. loss: the kind
    of a PyTorch loss, see LOSSES."""

    framework: str = "numpy"
    owner: str = "replicated"
    average: str = ""
    transforms: tuple[str, ...] = ()
    loader: str = "arrays"
    backend: str = "ring"
    compress: str = ""
    update: str = "momentum"  # the optimizer
    dtype: str = "float32"
    ranks: int = 2
    nodes: int = 0
    stop: int = 0
    resumed: int = 0
    killed: int = -1
    rows: int = 24
    batch_size: int = 8
    epochs: int = 2
    shuffle: bool = True
    seed: int = 0
    bad: int | None = None
    weighs: bool = False
    classes: bool = False
    uneven: bool = False
    buckets: bool = False
    way: str = ""
    layers: str = ""
    inputs: str = ""
    loss: str = ""
    number: int = -1

    @property
    def needed(self) -> int:
        """The number of ranks of a job that runs this case."""
        return max(self.ranks, self.resumed)

    def features(self) -> list[str]:
        """Return the features that meet, as a program writes them."""
        loader = f'Loader(rows="{self.loader}")' if self.loader in ("whole", "divided") else LOADER_NAMES[self.loader]
        named = [
            OWNER_NAMES[self.owner], self.average, *self.transforms, loader, f'allreduce="{self.backend}"',
            f'compress="{self.compress}"' * bool(self.compress), "several nodes" * bool(self.nodes),
            "resume on other ranks" * (self.resumed not in (0, self.ranks)), f"a {self.dtype} model",
            "sample_weight" * self.weighs, "class_weight" * self.classes, "Buckets(overlap=True)" * self.buckets,
            "a killed rank" * (self.killed >= 0), WAYS[self.way],
        ]  # fmt: skip
        return [name for name in named if name not in ("", "a float32 model")]

    def __str__(self) -> str:
        names = [each.name for each in fields(self)]
        shown = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(Case, name)}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    # The rows

    @functools.cached_property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.random.default_rng(self.seed)
        x = numbers.normal(size=(self.rows, FEATURES)).astype(self.dtype)
        y = np.abs(x[:, :CLASSES]).argmax(1).astype(np.int64)
        if self.bad is not None:
            x[self.bad] = np.nan
        if self.loss == "ignored":
            y[numbers.random(self.rows) < 0.4] = IGNORED
        return x, y

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """The weights of the rows: multiples of 1/4, some 0."""
        drawn = np.random.default_rng(self.seed).integers(0, 8, self.rows) / 4
        return drawn if self.weighs else np.ones(self.rows)

    @property
    def class_weights(self) -> np.ndarray:
        """The weights of the rows by their classes."""
        return np.array([CLASS_WEIGHT.get(label, 1.0) if self.classes else 1.0 for label in self.data[1].tolist()])

    def share(self, rows: int, parts: int, part: int) -> slice:
        """Return the part of a batch's rows that one of `parts` ranks has. A loader skips batches without rows, so a
        rank that has no rows of a full batch has none of the last one."""
        if not (self.uneven and self.loader == "divided"):
            return slice(rows * part // parts, rows * (part + 1) // parts)
        cuts = np.sort(np.random.default_rng([self.seed, parts]).integers(0, self.batch_size + 1, parts - 1))
        ends = [min(end, rows) for end in (0, *cuts.tolist(), self.batch_size)]
        return slice(ends[part], ends[part + 1])

    def files(self) -> list[slice]:
        """Return the rows of each shard."""
        ends = [0, self.rows // 5, self.rows // 2, self.rows]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows in the order in which an epoch visits them, from what the documentation says of it."""
        if self.loader == "shards":  # spread evenly in one order, shuffled among those of the same shard
            counts = [len(range(*span.indices(self.rows))) for span in self.files()]
            places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            own = [
                span.start + (np.random.default_rng([self.seed, epoch, shard]).permutation(count)
                if self.shuffle else np.arange(count))
                for shard, (span, count) in enumerate(zip(self.files(), counts, strict=True))
            ]  # fmt: skip
            return np.concatenate(own)[np.argsort(places, kind="stable")]
        if self.shuffle and self.loader in ("arrays", "dataset"):
            return np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return np.arange(self.rows)

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return math.ceil(self.rows / self.batch_size)

    def batches(self, classes: bool = False) -> list[list[Batch]]:
        """Return the global batches of each epoch. classes: with weights of classes too."""
        x, y = self.data
        orders = [self.order(epoch) for epoch in range(self.epochs)]
        size, weights = self.batch_size, self.weights * (self.class_weights if classes else 1.0)
        parts = [[rows[at : at + size] for at in range(0, self.rows, size)] for rows in orders]
        return [[(x[rows], y[rows], weights[rows]) for rows in epoch] for epoch in parts]

    def left(self, rows: int, step: int) -> np.ndarray:
        """Return the rows of a batch that are trained on: a rank that dies takes its part of divided rows with it."""
        gone = self.killed >= 0 and self.loader == "divided" and self.owner not in OPTIMIZER and step >= self.stop
        part = self.share(rows, self.ranks, self.killed) if gone else slice(0)
        return np.delete(np.arange(rows), part)

    def servers(self, ranks: int) -> set[int]:
        """Return the ranks that are servers: the first one, or some of the last ones."""
        return {0} if self.seed % 3 == 2 else set(range(ranks - 1 - self.seed % (ranks - 1), ranks))

    # Local SGD: ranks train alone between meetings

    @property
    def stopper(self) -> int:
        """The rank that asks to stop in step `stop`. With LocalSGD it has rows in that step: of a loader a rank knows
        the steps in which it has rows, and the first step after a meeting."""
        parts = range(self.ranks)
        if self.average == "LocalSGD":
            rows = min(self.batch_size, self.rows - (self.stop - 1) % self.steps * self.batch_size)
            parts = [part for part in parts if len(range(rows)[self.share(rows, self.ranks, part)])]
        return parts[self.seed % len(parts)]

    @property
    def stopped(self) -> int:
        """The step after which the ranks of LocalSGD stop: at a meeting, or the end of an epoch."""
        every = self.every
        if self.owner in OPTIMIZER:  # whose loop ends the round
            return self.stop
        return min(-(-self.stop // every) * every, -(-self.stop // self.steps) * self.steps)

    def workers(self, step: int) -> int:
        """Return how many workers train alone in a step (0, 1, ...)."""
        if self.average != "LocalSGD":
            return 1
        return self.resumed if self.resumed and step >= self.stopped else self.ranks

    def meets(self, steps: int) -> bool:
        """Return whether the workers take the mean of their parameters after so many steps."""
        if self.average != "LocalSGD":
            return False
        goes_on = self.resumed == self.ranks and self.owner not in OPTIMIZER  # with the round, after the stop
        stopped = self.stopped if self.resumed and not goes_on else 0
        due = (steps - (stopped if steps > stopped else 0)) % self.every == 0
        return due or steps in (self.epochs * self.steps, stopped)

    # The transforms

    @functools.cached_property
    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """The arguments of each transform, and the steps of LocalSGD."""
        draw = random.Random(self.seed)
        return {name: chosen(draw) for name, chosen in TRANSFORMS.items()} | {"every": (draw.choice([1, 2, 3]),)}

    @property
    def every(self) -> int:
        """The number of steps between meetings of LocalSGD."""
        return int(self.arguments["every"][0])

    def argument(self, name: str) -> Any:
        """Return the first argument of a transform of this case; None if it has no such transform."""
        return self.arguments[name][0] if name in self.transforms else None

    def fraction(self, step: int) -> float:
        """Return the fraction of the learning rate in a step."""
        if "Schedule" not in self.transforms:
            return 1.0
        name, warmup = self.arguments["Schedule"]
        rising = min(1.0, (step + 1) / (warmup + 1))
        after, total = max(0, step - warmup), self.epochs * self.steps - warmup
        shapes = {
            "constant": 1.0,
            "linear": 1 - after / total if total > 0 else 1.0,
            "cosine": (1 + math.cos(math.pi * after / total)) / 2 if total > 0 else 1.0,
            "inverse_sqrt": (after + 1) ** -0.5,
        }
        return rising * shapes[name]


def draw_case(seed: int, number: int) -> Case:
    """Draw the case of this number, whatever other cases are drawn."""
    draw = random.Random(f"{seed} {number}")
    (framework,) = draw.choices([*FRAMEWORKS], [*FRAMEWORKS.values()])
    owner = draw.choice([each for each in OWNERS if framework == "torch" or each not in OPTIMIZER])
    sharded = owner in ("sharded", "copies", "sharded optimizer")
    average = draw.choice(["", "", *AVERAGES]) if owner in (*MIRRORED, *OPTIMIZER) else ""
    chosen = draw.sample([*TRANSFORMS], draw.choice([0, 1, 2, 2, 3]))
    if owner in OPTIMIZER:  # the user's loop keeps an average, if any
        chosen = [name for name in chosen if name != "EMA"]
    ranks = draw.choice([1, 2, 2, 3, 3, 4, 5])
    if owner == "servers":
        ranks = max(ranks, 2)
    stops = draw.random() < 0.5
    rows = draw.choice([9, 16, 24, 37])
    batch_size = draw.choice([size for size in (3, 5, 8, 16, 40) if size * 6 >= rows])
    backends = SHARDED if sharded else ON_CPU
    compress = draw.choice([""] * 5 + ["bfloat16"]) if owner in (*MIRRORED, *OPTIMIZER) else ""
    case = Case(
        framework, owner, average, tuple(sorted(chosen)), draw.choice(LOADERS),
        draw.choice(backends) if owner in (*MIRRORED, *OPTIMIZER) else "auto", compress,
        draw.choice(["sgd", "momentum"] + ["adam"] * (not compress)),
        draw.choice(["float32", "float64"]) if framework == "torch" else "float32",
        ranks, draw.choice([0, 0, 0, 1, 2]), rows=rows, batch_size=batch_size, epochs=draw.choice([1, 2, 3]),
        shuffle=draw.random() < 0.8, seed=draw.randrange(1000), number=number,
    )  # fmt: skip
    case = replace(case, weighs=draw.random() < 0.2, uneven=draw.random() < 0.5)
    if case.owner in OPTIMIZER or case.loader == "shards":
        case = replace(case, weighs=False)
    leaves_out = case.loader != "shards" and case.owner != "spare"  # whose steps go on without the bad row's rank
    if "SkipNotFinite" in chosen and leaves_out and draw.random() < 0.7:
        case = replace(case, bad=draw.randrange(rows))
    if stops and (last := case.epochs * case.steps) > 1:
        resumed = draw.choice([ranks, *range(1 + (owner == "servers"), MOST_RANKS + 1)])
        case = replace(case, stop=draw.randrange(1, last), resumed=resumed)
    case = _more(case, draw)
    if case.stop and average == "LocalSGD":  # the state of the inner optimizers is not carried over
        case = replace(case, update="sgd")
    return case


def _more(case: Case, draw: random.Random) -> Case:
    """Draw the features that not every framework, owner or loader has."""
    torch, loops = case.framework == "torch", case.owner in OPTIMIZER
    if torch and not case.compress:
        case = replace(case, update=draw.choice([*UPDATES, *MORE_UPDATES]), layers=draw.choice(LAYERS))
    if case.owner in ("replicated", *OPTIMIZER) and torch and not case.average:
        case = replace(case, buckets=(loops or not case.compress) and draw.random() < 0.8)
    if loops:
        ways = [way for way in WAYS if way != "closure" or case.bad is None]  # which would have no loss
        way = draw.choice(ways)
        layers = "" if way == "two" else case.layers  # an optimizer has something to train, in one group
        return _killed(replace(case, way=way, layers=layers), draw)
    if case.loader != "shards":
        case = replace(case, inputs=draw.choice(INPUTS), classes=draw.random() < 0.2)
    if torch and case.average != "LocalSGD" and case.loader != "shards" and not (case.weighs or case.classes):
        case = replace(case, loss=draw.choice(LOSSES))
    return _killed(case, draw)


def _apart(case: Case) -> bool:
    return case.average == "LocalSGD" and case.owner in OPTIMIZER


def _starts_again(case: Case) -> bool:
    return case.loader == "divided" and case.owner in ("sharded", "central", "servers", "spare")


def _killed(case: Case, draw: random.Random) -> Case:
    """Draw a rank that dies. The number of ranks that are left must be known when they divide the rows anew, so a
    killed rank does not take its rows with it where the others may go back to a checkpoint."""
    last = case.epochs * case.steps
    never = _apart(case) or _starts_again(case)
    fast = case.framework in ("numpy", "torch")
    if case.stop or last < 2 or never or case.way == "two" or not fast or draw.random() < 0.75:
        return case
    ranks = max(2 + (case.owner == "servers"), case.ranks)
    case = replace(case, ranks=ranks, stop=draw.randrange(1, last), killed=draw.randrange(ranks))
    serving = [case.servers(ranks), set(range(ranks)) - case.servers(ranks)] if case.owner == "servers" else []
    return replace(case, stop=0, killed=-1) if {case.killed} in serving else case  # the only server, or worker


SMALL_NORM = 3  # a seed whose ClipNorm clips each step
FOUND = [  # were wrong once, or need other numbers than the pairs have
    # the gaps between parameters kept the NaN of a step that was skipped
    Case("torch", "sharded optimizer", "", ("ClipNorm", "SkipNotFinite"), rows=16, seed=264, bad=4, buckets=True),
    # the norms of an epoch before a checkpoint were missing in the history
    Case("numpy", "servers", "", ("ClipNorm",), ranks=3, stop=1, resumed=2, rows=16, batch_size=5),
    # the norm counted each gradient once a rank: on nodes of one rank, each rank owns all gradients
    Case("numpy", "sharded", "", ("ClipNorm",), backend="hierarchical_copy", nodes=1),
    # a norm so small that each step is clipped, beside a compression
    Case("numpy", "replicated", "", ("ClipNorm",), compress="bfloat16", seed=SMALL_NORM),
    Case("torch", "sharded optimizer", "", ("ClipNorm",), compress="bfloat16", seed=SMALL_NORM),
    # the rank that was to stop had no rows, and stopped a round later
    Case(
        "torch", average="LocalSGD", transforms=("Schedule", "SkipNotFinite"), loader="divided", update="sgd", ranks=4,
        stop=2, resumed=2, rows=16, batch_size=5, epochs=1, seed=534, uneven=True,
    ),
]  # fmt: skip
LINEAR = 51  # a seed with which ClipNorm clips, Schedule is linear, and LocalSGD takes two steps


def features_and_pairs() -> list[dict[str, Any]]:
    """Return each feature and each pair of features, as fields of a case."""
    axes: list[list[dict[str, Any]]] = [
        [{"owner": owner} for owner in OWNERS[1:]],
        [{"average": average} for average in AVERAGES[1:]],
        [{"loader": loader} for loader in LOADERS[1:]],
        [{"backend": backend} for backend in ON_CPU if backend != Case.backend],
        [{"compress": "bfloat16"}],
        [{"nodes": 1}],
        [{"stop": 2, "resumed": 3}, {"ranks": 3, "stop": 2, "killed": 1}],
        [{"buckets": True}],
        [{"weighs": True}],
        *[[{"transforms": (name,)}] for name in TRANSFORMS],
    ]
    found = [chosen for axis in axes for chosen in axis]
    for one, other in itertools.combinations(axes, 2):
        found += [
            a | b | {"transforms": (*a.get("transforms", ()), *b.get("transforms", ()))} for a in one for b in other
        ]
    return [chosen for chosen in found if can_be_written(_beginning(chosen))]


def _beginning(chosen: dict[str, Any]) -> Case:
    framework = "torch" if chosen.get("owner") in OPTIMIZER or "buckets" in chosen else "numpy"
    given = {"update": "sgd"} if chosen.get("average") == "LocalSGD" else {}
    return replace(Case(framework, seed=LINEAR), **(given | chosen))


def can_be_written(case: Case) -> bool:
    """Whether there are arguments for this case: central storage, servers and spare replicas take no average, backend
    and compression, and the user's loop keeps the moving average and reads the batches."""
    anew = case.resumed or case.backend != Case.backend  # backends are made anew after a loss, whichever it is
    if case.killed >= 0 and (anew or _starts_again(case) or _apart(case)):
        return False
    plain = not (case.average or case.compress or case.buckets) and case.backend in ("auto", Case.backend)
    if case.owner in ("central", "servers", "spare") and not plain:
        return False
    if case.average == "LocalSGD" and case.buckets and case.owner in OPTIMIZER:
        return False
    if case.loader == "shards" and case.weighs:
        return False
    return case.owner not in OPTIMIZER or (case.loader == "arrays" and "EMA" not in case.transforms and not case.weighs)


CHOSEN = features_and_pairs()
FIXED = range(-len(FOUND) - len(CHOSEN), 0)  # the numbers of cases that are not drawn
MOST = 5  # features of a case that stands for several pairs


@functools.cache
def merged() -> list[Case]:
    """Return cases that together have all pairs of features, without those that are refused, and those with a
    compression, whose results are compared less closely. Their numbers come before those of FIXED."""
    from tests.matrix import refused

    listed, found = refused.listed(), list[Case]()

    def may_be(chosen: dict[str, Any]) -> bool:
        case = _beginning(chosen)
        few = len(case.features()) <= MOST + 1  # and the backend
        return few and not case.compress and can_be_written(case) and not refused.explained(case, listed)

    left = [chosen for chosen in CHOSEN if may_be(chosen)]
    while left:
        case = left.pop(0)
        for other in [*left]:
            if (both := _joined(case, other)) and may_be(both):
                case = both
                left.remove(other)
        found.append(_beginning(case))
    return found


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return the features of both; None if they differ."""
    if any(one.get(name, value) != value for name, value in other.items() if name != "transforms"):
        return None
    names = (*one.get("transforms", ()), *other.get("transforms", ()))
    return one | other | {"transforms": tuple(name for name in TRANSFORMS if name in names)}


def case_of(seed: int, number: int) -> Case:
    """Return a case by its number; -1, -2, ... are those of FOUND, of CHOSEN and of `merged`."""
    if number >= 0:
        return draw_case(seed, number)
    fixed = FOUND + [_beginning(chosen) for chosen in CHOSEN]
    return replace(fixed[-1 - number] if number in FIXED else merged()[FIXED[0] - 1 - number], number=number)
