"""MirroredTrainer(TorchReplica, buckets=Buckets(True)): the bits of one call after backward, also after errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import allreduce
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import Once, data
from trainers import EMA, Accumulate, ClipNorm, Exact, LocalSGD, MirroredTrainer, SkipNotFinite
from trainers.errors import ArgumentError
from trainers.pytorch import Buckets
from trainers.replicas.pytorch import TorchReplica

JOBS = "openmpi 1 2"


torch.set_num_threads(1)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
KIB = 1 / 1024
DURING, AFTER = Buckets(True, mb=2 * KIB, first_mb=KIB), Buckets(False)
ALGORITHM = "halving_doubling"  # it adds the ranks' values of an element in the same order, wherever the element is
ROWS, BATCH = 90, 30


class Net(nn.Module):
    """Nine layers. `extra` has no gradient in a batch whose first row begins with a negative number.
    watch: is called in backward, when the gradients of the last layers are complete and that of the first is not."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.BatchNorm1d if norm else nn.Identity
        layers = [nn.Sequential(nn.Linear(24, 24), kind(24), nn.Tanh()) for _ in range(6)]
        self.first, self.extra = nn.Linear(6, 24), nn.Linear(24, 24)
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(24, 3)
        self.watch: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.watch())
        hidden = self.layers(hidden)
        if x[0, 0] > 0:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)


def replica(norm: bool = True) -> TorchReplica:
    """With a frozen layer, and two groups."""
    model = Net(norm)
    model.layers[2].requires_grad_(False)
    biases = [each for name, each in model.named_parameters() if "bias" in name]
    others = [each for name, each in model.named_parameters() if "bias" not in name]
    groups = [{"params": biases, "lr": 0.01}, {"params": others, "weight_decay": 0.1}]
    return TorchReplica(model, nn.CrossEntropyLoss(), torch.optim.Adam(groups, lr=0.02))


def fit(trainer: MirroredTrainer, epochs: int = 1, **options: Any) -> list[float]:
    options = {"epochs": epochs, "batch_size": BATCH, "progress": False, "shuffle": False} | options
    return [each.loss for each in trainer.fit(*data(ROWS), **options)]


def record_submits(trainer: MirroredTrainer, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    submit = trainer.allreduce.submit
    monkeypatch.setattr(trainer.allreduce, "submit", lambda *given: events.append("submit") or submit(*given))


def bits(made: TorchReplica) -> bytes:
    return b"".join(each.tobytes() for _, each in sorted(made.state().items()))


def same_bits(
    world: MPI.Intracomm,
    flat: allreduce.Topology,
    make: Callable[[], TorchReplica],
    run: Callable[[MirroredTrainer], object],
    during: Buckets = DURING,
) -> None:
    """Both ways end with the same bits on all ranks, and the same result of `run`. Collective."""
    found = []
    for buckets in (AFTER, during):
        made = make()
        with MirroredTrainer(made, ALGORITHM, flat, buckets=buckets) as trainer:
            found.append((run(trainer), world.allgather(bits(made))))
    assert found[0] == found[1]
    assert len(set(found[0][1])) == 1


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated, clipped, averaged": {"transforms": [Accumulate(2), ClipNorm(0.5), EMA(0.9)]},
    "short batches": {"batch_size": 16},
    "ranks without rows": {"batch_size": 4},
    "ranks of few rows": {"batch_size": 4, "transforms": [Accumulate(2)]},
    "skipped": {"transforms": [SkipNotFinite()]},
    "weighed": {"sample_weight": np.arange(ROWS) % 3 / 2.0},
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits(world: MPI.Intracomm, flat: allreduce.Topology, case: str) -> None:
    same_bits(world, flat, partial(replica, norm="ranks" not in case), partial(fit, **CASES[case]))


def test_buckets_are_submitted_before_backward_ends(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    made, events = replica(), list[str]()
    made.module.watch = lambda: events.append("first layer")
    with MirroredTrainer(made, ALGORITHM, flat, buckets=DURING) as trainer:
        record_submits(trainer, monkeypatch, events)
        fit(trainer)
        if SIZE == 1:  # nothing is sent
            assert set(events) == {"first layer"}
            return
        steps = " ".join(events).split("first layer")
        assert len(steps) == 1 + ROWS // BATCH
        assert all("submit" in each for each in steps[:-1])
        events.clear()
        fit(trainer, transforms=[SkipNotFinite()])  # which looks at the gradients first
        assert events[0] == "first layer"
        assert "submit" in events


def fail() -> None:
    raise ZeroDivisionError("in backward")


def test_backward_raises_on_one_rank(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """No rank takes the step, and the next fit is as if it had not been tried."""

    def run(trainer: MirroredTrainer) -> None:
        model = trainer.replica.module
        for rank in range(SIZE):  # when some buckets have been submitted, in the second step
            fails = Once("on_train_batch_begin", lambda _: setattr(model, "watch", fail), epoch=0)
            failing = partial(fit, trainer, callbacks=[fails] if rank == RANK else [])
            assert "in backward" in raised_everywhere(world, ZeroDivisionError, failing)
            model.watch = lambda: None
        fit(trainer)

    same_bits(world, flat, replica, run)


class Twice(nn.Module):
    """A layer that is used in two checkpoints: autograd completes its gradient twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)


def test_gradient_that_is_complete_twice(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = Twice()
    made = TorchReplica(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with MirroredTrainer(made, ALGORITHM, flat, buckets=Buckets(True, 1e-6, 1e-6)) as trainer:
        if SIZE == 1:
            fit(trainer)
            return
        text = raised_everywhere(world, ArgumentError, lambda: fit(trainer))
        assert "layer." in text
        assert "use_reentrant=False" in text


def test_hook_that_changes_a_complete_gradient(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """The gradient may be half summed, so every rank would keep another one."""

    def change() -> None:
        made.module.last.weight.grad.clamp_(-0.01, 0.01)

    made = replica()
    made.module.watch = change
    with MirroredTrainer(made, ALGORITHM, flat, buckets=DURING) as trainer:
        if SIZE == 1:
            fit(trainer)
            return
        assert "half summed" in raised_everywhere(world, ArgumentError, lambda: fit(trainer))


def test_hook_that_takes_a_gradient(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    def make() -> TorchReplica:
        made = replica()
        if RANK == 0:
            made.module.first.bias.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        return made

    same_bits(world, flat, make, fit)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("during", "late"), [(DURING, 1), (Buckets(True, 1.0, 1.0), SIZE)], ids=["apart", "within"])
def test_interrupt(world: MPI.Intracomm, flat: allreduce.Topology, during: Buckets, late: int) -> None:
    """When the ranks have summed different buckets, and when some gradients of a bucket are complete on all; the next
    fit begins anew. late: so many ranks have all gradients but those of the first layer."""

    def run(trainer: MirroredTrainer) -> None:
        model = trainer.replica.module
        hook = model.last.register_full_backward_pre_hook(interrupt if late <= RANK else lambda *_: None)
        model.watch = interrupt
        with pytest.raises(KeyboardInterrupt):
            fit(trainer)
        model.watch = lambda: None
        hook.remove()
        fit(trainer)

    same_bits(world, flat, partial(replica, norm=False), run, during)


class Quiet(TorchReplica):
    """A replica that does not tell its first parameter."""

    def gradients(self, *given: Any) -> Any:
        if ready := self.ready:
            self.ready = lambda number: ready(number) if number else None
        return super().gradients(*given)


def test_parameter_that_is_not_told(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """It keeps the sum of the micro-batches before the last one."""

    def make() -> TorchReplica:
        model = Net()
        made = Quiet(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        made.early = True  # its gradients stay as they are
        return made

    same_bits(world, flat, make, partial(fit, transforms=[Accumulate(3)]))


class Post(TorchReplica):
    """A replica that changes its gradients when it has all."""

    def gradients(self, *given: Any) -> Any:
        found = super().gradients(*given)
        with torch.no_grad():
            for each in self.module.parameters():
                each.grad.clamp_(-0.01, 0.01)
        return found


def test_what_can_not_be_summed_early_is_refused(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model, some = Net(), replica()
    post = Post(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    some.shapes = dict([*some.shapes.items()][:2])
    cases: list[tuple[TorchReplica, dict[str, Any], str]] = [
        (post, {}, "before it has all"),
        (some, {}, "shapes"),
        (replica(), {"update": "sharded"}, 'only gradients of update="replicated"'),
        (replica(), {"average": LocalSGD(2)}, "without `average`"),
        (replica(), {"average": Exact()}, "without `average`"),
        (replica(), {"compress": "bfloat16"}, "compressed and exact gradients"),
    ]
    for made, options, why in cases:
        make = partial(MirroredTrainer, made, ALGORITHM, flat, buckets=DURING, **options)
        text = raised_everywhere(world, ArgumentError, make)
        assert why in text
        assert "leave it out" in text


def test_auto_keeps_the_bits(topology_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of two nodes with a rank each are summed in buckets, whose sums have the same bits."""
    found, count = [], 0
    for buckets in (AFTER, Buckets("auto", mb=2 * KIB, first_mb=KIB)):
        made = replica()
        with MirroredTrainer(made, "ring", topology_of((1,) * SIZE), buckets=buckets) as trainer:
            events: list[str] = []
            record_submits(trainer, monkeypatch, events)
            fit(trainer)
            found.append(bits(made))
            count = len(events)
    assert found[0] == found[1]
    assert (count > 0) == (SIZE == 2)
