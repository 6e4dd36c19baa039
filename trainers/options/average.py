"""How the ranks' work is averaged (`average=`), and which ranks update which parameters (`update=`).

- Local SGD: S. U. Stich: Local SGD converges fast and communicates little, 2019.
- DiLoCo: A. Douillard et al.: DiLoCo: Distributed low-communication training of language models, 2023.
- Fragments: A. Douillard et al.: Streaming DiLoCo with overlapping communication, 2025.
- Sharded updates: S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from trainers.arguments import BELOW_ONE, FLAG, POSITIVE, Check, Checked, Flag, integer, name, require

AUTO, ELEMENTS, TENSORS = "auto", "elements", "tensors"
SHARDS = (AUTO, ELEMENTS, TENSORS)


@dataclass(frozen=True)
class Sharded(Checked):
    """Every rank updates its own part of the parameters (ZeRO-1): `update=Sharded(copies=2)`, or "sharded" for short.

    copies: 2: every part has a backup on another rank, if possible on another node, from which a training continues
        after a failure; each step sends and copies it. Memory: four more parts. If the other ranks can't continue after
        a failure, no backups are kept, and a notice reports it.
    shard: of MirroredOptimizer (a TorchReplica has a `shard` of its own). "elements": a rank updates an equal slice,
        for optimizers that update each element independently. "tensors": whole tensors, for those that update each
        tensor independently (Muon). "auto": elements for the classes in trainers.pytorch.ELEMENTWISE, tensors for those
        in TENSORWISE and for other classes that pass a trial on small tensors. By elements, SGD, Adam and AdamW use
        PyTorch's fused implementation, whose last bits may differ, unless they were made with fused= or foreach=.
    """

    copies: Annotated[int, Check("1, or 2 to have another rank keep each part too", lambda value: value in (1, 2))] = 1
    shard: Annotated[str, name(*SHARDS)] = AUTO


@dataclass(frozen=True)
class Exact(Checked):
    """The bits of the training depend on nothing but the data and the arguments: `average=Exact()`.

    They are equal on any number of ranks, with every backend, for either `update`, after failures and resumes, with
    equal processors, versions of libraries, and threads of a rank. Gradients are computed for each micro-batch, and
    summed exactly. Memory: 8 bytes a parameter, and the gradients of all micro-batches of a rank. It needs the
    library in C: without it a trainer raises UnavailableError.

    micro_batch: rows of a micro-batch, which decides the bits. Larger ones are faster, and leave ranks without work if
        a batch has fewer micro-batches than there are ranks.
    """

    micro_batch: Annotated[
        int,
        integer(1),
        Flag(
            "micro_batch",
            "N",
            "rows whose gradients are computed together; the same on any number of ranks",
            default="8",
        ),
    ] = 8


@dataclass(frozen=True)
class OuterSGD(Checked):
    """The outer optimizer: SGD with momentum on the averaged change of the parameters. By default DiLoCo's values.

    The change of a rank is start - parameters: the parameters after the last outer step less the parameters after the
    rank's inner steps. It takes the place of a gradient, in the formulas of torch.optim.SGD.

    learning_rate: > 0. momentum: 0 to 1 (not included). nesterov: Nesterov's momentum; needs momentum > 0.
    OuterSGD(1.0, 0.0, False) averages the parameters.
    """

    learning_rate: Annotated[float, POSITIVE] = 0.7
    momentum: Annotated[float, BELOW_ONE] = 0.9
    nesterov: Annotated[bool, FLAG] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require("OuterSGD: nesterov=True needs momentum > 0" if self.nesterov and not self.momentum else "")

    def step(self, start: Any, momentum: Any, delta: Any) -> None:
        """Update `start` and `momentum` in place by the averaged change `delta`, which is overwritten. Local.

        The arguments are 1-D arrays of one length and floating dtype: of NumPy or CuPy, or tensors of PyTorch. They
        should fit the cache. momentum: may be None if this optimizer has none.
        """
        if self.momentum:
            momentum *= self.momentum
            momentum += delta
            if self.nesterov:
                delta += momentum * self.momentum
            else:
                delta[...] = momentum
        if self.learning_rate != 1:
            delta *= self.learning_rate
        start -= delta


AVERAGE = OuterSGD(1.0, 0.0, False)
OUTER = {"average": AVERAGE, "diloco": OuterSGD()}
OF_OUTER = Check(
    f"{' or '.join(map(repr, OUTER))}, or an OuterSGD",
    lambda value: isinstance(value, OuterSGD) or (isinstance(value, str) and value in OUTER),
)


@dataclass(frozen=True)
class LocalSGD(Checked):
    """Every rank trains on its own rows for some steps without messages; then the ranks' changes are averaged.

    For slow networks: it sends 1/every of the bytes. It is another training, not that of one rank. The average is
    weighted by the steps of each rank; the inner optimizer's state stays on each rank, as in DiLoCo.

    every: the number of steps between averages, H: 50 to 500 for DiLoCo.
    outer: how the averaged change is applied. "average": the parameters become the ranks' mean. "diloco": Nesterov's
        momentum 0.9 with learning rate 0.7. Or an OuterSGD. Memory: one copy of the parameters, one for the momentum.
    fragments: cut the parameters into this number of slices, which are averaged one after the other, at equal distances
        in the steps: no step sends much. Divides `every`.
    """

    every: Annotated[
        int,
        integer(1),
        Flag(
            "sync_every",
            "H",
            "local SGD: every rank trains on its own rows for H steps, then the parameters are averaged; sends 1/H of "
            "the bytes, for slow networks",
            default="gradients are averaged in every step",
        ),
    ]
    outer: Annotated[
        str | OuterSGD,
        OF_OUTER,
        Flag(
            "outer_optimizer",
            "",
            "average: the parameters become the ranks' mean; diloco: an outer step with Nesterov's momentum on the "
            "ranks' averaged change, for H of 50 to 500",
            choices=tuple(OUTER),
        ),
    ] = "average"
    fragments: Annotated[
        int,
        integer(1),
        Flag("fragments", "N", "average the parameters in N fragments, one after the other within H steps"),
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every % self.fragments:
            require(
                f"LocalSGD: fragments={self.fragments}: every={self.every} must be a multiple of it, because one "
                "fragment after the other is averaged, at equal distances"
            )

    @property
    def outer_sgd(self) -> OuterSGD:
        """The outer optimizer."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer

    @property
    def interval(self) -> int:
        """The number of inner steps from the outer step of one fragment to that of the next."""
        return self.every // self.fragments

    def __str__(self) -> str:
        """The options that must be alike on the ranks of a MirroredOptimizer; `every` may differ."""
        return repr(self).replace(f"every={self.every!r}", "every=...", 1)

    def length_error(self, length: int) -> str:
        """Return why a model of `length` parameters can't be cut like this, as text; "" if it can."""
        return f"fragments={self.fragments}: this model has only {length} parameters" * (self.fragments > length)


REPLICATED, SHARDED = "replicated", "sharded"
UPDATES = (REPLICATED, SHARDED)
Average = Exact | LocalSGD


def sharded_of(update: Any) -> Sharded | None:
    """Return the options of a sharded update; None for any other value of `update`."""
    return (
        Sharded() if isinstance(update, str) and update == SHARDED else update if isinstance(update, Sharded) else None
    )


def choice_error(update: Any, average: Any, averages: str = "None, an Exact or a LocalSGD") -> str:
    """Return why these values of `update` and `average` are invalid, as text; "" if they are valid. averages: the
    valid kinds of `average`, for the text."""
    if not isinstance(update, Sharded) and not (isinstance(update, str) and update in UPDATES):
        return f'update={update!r} is unknown; use "{REPLICATED}", "{SHARDED}" or a Sharded'
    if average is not None and not isinstance(average, Average):
        return f"average={average!r} is unknown; use {averages}"
    if isinstance(average, LocalSGD) and sharded_of(update):
        return (
            f"{average!r} with a sharded update: ranks that train on their own need all parameters and the whole "
            'optimizer; use update="replicated"'
        )
    return ""
