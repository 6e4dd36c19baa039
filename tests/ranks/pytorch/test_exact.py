"""MirroredOptimizer(average=Exact()): a loop of the user's own has the bits of one rank."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")

from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import allreduce  # noqa: E402
from allreduce.errors import OptionError  # noqa: E402
from tests.ranks.grid import shapes  # noqa: E402
from tests.ranks.pytorch.trained import SIZE, SMALL_BUCKETS  # noqa: E402
from tests.ranks.together import raised_everywhere  # noqa: E402
from trainers import Exact  # noqa: E402
from trainers.pytorch import Buckets, GradientError, MirroredOptimizer  # noqa: E402

JOBS = "openmpi 1 2"

WORLD = MPI.COMM_WORLD
ROWS, MICRO = 37, 5  # 8 micro-batches, the last one of 2 rows
OPTIMIZERS = {
    "adamw": lambda of: torch.optim.AdamW(of, lr=1e-2),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, weight_decay=1e-3),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.3), nn.Linear(300, 31), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(31, 2))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, ROWS, 20, generator=generator)
    return [(each, (each[:, 0] > each[:, 1]).long()) for each in x]


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, clips: bool = False) -> None:
    optimizer.zero_grad()
    for rows in optimizer.micro_batches(len(x)):
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
    if clips:
        assert optimizer.clip_grad_norm_(0.3) > 0.3
    optimizer.step()


def sha256_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def trained(kind: str, topology: allreduce.Topology, rows: int = ROWS, **options: Any) -> str:
    """Return the SHA-256 of parameters, statistics and the generator after 4 steps, equal on all ranks."""
    model = network()
    plain = OPTIMIZERS[kind](model.parameters())
    with MirroredOptimizer(plain, model, topology=topology, average=Exact(micro_batch=MICRO), **options) as optimizer:
        for x, y in batches(4):
            step(model, optimizer, x[:rows], y[:rows], clips=True)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = set(topology.world.allgather((sha256_of(model), float(torch.rand(())))))
    assert len(found) == 1, found
    return found.pop()[0]


def alone(kind: str, **options: Any) -> str:
    with allreduce.Topology(MPI.COMM_SELF) as topology:
        return trained(kind, topology, **options)


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_bits_of_one_rank(kind: str, topology_of: Callable[..., allreduce.Topology]) -> None:
    expected = alone(kind)
    assert alone(kind, update="sharded") == expected
    for shape in shapes(SIZE).values():
        for update in ("replicated", "sharded"):
            for buckets in ({}, {"buckets": Buckets(True, **SMALL_BUCKETS)}):
                assert trained(kind, topology_of(shape), update=update, **buckets) == expected, (shape, update)


def test_a_rank_without_micro_batches(flat: allreduce.Topology) -> None:
    for update in ("replicated", "sharded"):
        assert trained("adamw", flat, rows=MICRO, update=update) == alone("adamw", rows=MICRO)


def test_gradient_is_the_mean_over_the_rows(flat: allreduce.Topology) -> None:
    """Also of a parameter that only some micro-batches use; one that none uses keeps None."""
    model = nn.ModuleDict({name: nn.Linear(20, 1, bias=False) for name in ("all", "some", "unused")})
    x, _ = batches(1)[0]
    with MirroredOptimizer(
        torch.optim.SGD(model.parameters(), lr=1), model, average=Exact(), topology=flat
    ) as optimizer:
        for rows in optimizer.micro_batches(ROWS):
            loss = model["all"](x[rows]).mean()
            loss.backward()
            if rows.start == 0:
                model["some"](x[rows]).mean().backward()
        torch.testing.assert_close(model["all"].weight.grad[0], x.mean(0))
        torch.testing.assert_close(model["some"].weight.grad[0], x[:8].sum(0) / ROWS)
        assert model["unused"].weight.grad is None


def test_bad_input(flat: allreduce.Topology) -> None:
    def refused(text: str, model: Any = None, **options: Any) -> None:
        model = model or network()
        given = {"topology": flat, "average": Exact(), **options}
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        found = raised_everywhere(WORLD, OptionError, lambda: MirroredOptimizer(plain, model, **given))
        assert text in found, found

    refused("exclude each other", compress="bfloat16")
    refused("average=8 is unknown", average=8)
    refused("momentum=None", nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5, momentum=None)))
    refused("sparse gradients", nn.Embedding(5, 2, sparse=True))
    with allreduce.create("ring", flat) as given:
        refused("does not sum exactly", allreduce=given, topology=None)
        refused("does not sum exactly", allreduce=given.config)


def test_misuse(flat: allreduce.Topology) -> None:
    model = network()
    x, y = batches(1)[0]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with MirroredOptimizer(plain, model, topology=flat, average=Exact(micro_batch=MICRO)) as optimizer:

        def refused(text: str, call: Callable[[], object], kind: type[Exception] = OptionError) -> None:
            found = raised_everywhere(WORLD, kind, call)
            assert text in found, found

        refused("run `for rows in", optimizer.step)
        refused("outside of a micro-batch", lambda: model(x).sum().backward(), GradientError)
        refused("an integer >= 1", lambda: [*optimizer.micro_batches(0)])
        refused("an integer >= 0, not -1", lambda: [*optimizer.micro_batches(ROWS, seed=-1)])
        if SIZE > 1:
            differ = allreduce.errors.DisagreementError
            refused("micro_batches(36)", lambda: [*optimizer.micro_batches(ROWS - WORLD.rank)], differ)
            refused("micro_batches(37)", lambda: [*optimizer.micro_batches(ROWS, seed=WORLD.rank)], differ)
        refused("excludes no_sync()", lambda: optimizer.no_sync().__enter__())
        refused("excludes rows()", lambda: optimizer.rows(3))
        refused("excludes join()", lambda: optimizer.join().__enter__())
        refused("excludes step(closure)", lambda: optimizer.step(lambda: None))
        step(model, optimizer, x, y)  # errors leave it usable
        for rows in optimizer.micro_batches(len(x)):
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
        refused("outside of a micro-batch", lambda: model(x).sum().backward(), GradientError)
        refused("outside of a micro-batch", optimizer.step, GradientError)
        step(model, optimizer, x, y)
    with MirroredOptimizer(plain, model, topology=flat) as optimizer:
        refused("needs MirroredOptimizer", lambda: [*optimizer.micro_batches(3)])


@pytest.mark.parametrize("leave", ["exception", "break", "zero_grad"])
def test_a_loop_that_is_left(leave: str, flat: allreduce.Topology) -> None:
    """By one rank: all raise an error, in this batch or at the next call, and go on with the bits of one rank."""
    last = WORLD.rank == SIZE - 1
    model = network()
    plain = OPTIMIZERS["adamw"](model.parameters())
    texts = []
    with MirroredOptimizer(plain, model, topology=flat, average=Exact(micro_batch=MICRO)) as optimizer:
        for number, (x, y) in enumerate(batches(4)):
            try:
                for rows in optimizer.micro_batches(len(x)):
                    loss = functional.cross_entropy(model(x[rows]), y[rows])
                    if number == 2 and last:
                        if leave == "exception":
                            raise ValueError
                        if leave == "break":
                            break
                        optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
            except (ValueError, GradientError) as error:
                assert number == 2
                texts.append(str(error))
        assert optimizer.steps == 3
        state = optimizer.state_dict()
    if SIZE > 1 and not last:
        assert f"rank {SIZE - 1}: Exact: the loop over micro_batches() did not end" in texts[0]
    assert len(texts) == 1
    with allreduce.Topology(MPI.COMM_SELF) as single:
        other = network()
        given = {"topology": single, "average": Exact(micro_batch=MICRO)}
        with MirroredOptimizer(OPTIMIZERS["adamw"](other.parameters()), other, **given) as optimizer:
            for number, (x, y) in enumerate(batches(4)):
                if number != 2:
                    step(other, optimizer, x, y)
            assert str(optimizer.state_dict()) == str(state)
    assert set(WORLD.allgather(sha256_of(model))) == {sha256_of(other)}


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_resumed_loop_has_the_same_random_numbers(update: str, flat: allreduce.Topology) -> None:
    """The count of steps is in the state_dict, which the plain optimizer loads too; rank 0's counts."""
    given = {"topology": flat, "average": Exact(micro_batch=MICRO), "update": update}
    model = network()
    with MirroredOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, **given) as optimizer:
        for x, y in batches(4)[:2]:
            step(model, optimizer, x, y)
        state, parameters = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        for x, y in batches(4)[2:]:
            step(model, optimizer, x, y)
        expected = sha256_of(model)
    model.load_state_dict(parameters)
    plain = OPTIMIZERS["adamw"](model.parameters())
    plain.load_state_dict(state)
    with MirroredOptimizer(plain, model, **given) as optimizer:
        optimizer.load_state_dict(state if WORLD.rank == 0 else None)
        assert optimizer.state_dict()["exact"] == {"steps": 2}
        for x, y in batches(4)[2:]:
            step(model, optimizer, x, y)
        assert sha256_of(model) == expected
        broken = {**state, "exact": {"steps": "two"}}
        assert "'two'" in raised_everywhere(WORLD, OptionError, lambda: optimizer.load_state_dict(broken))


class Counting(nn.Linear):
    """A layer with a buffer that is not averaged."""

    def __init__(self) -> None:
        super().__init__(20, 2)
        self.register_buffer("mass", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mass += x.sum()
        return super().forward(x)


def test_buffers_that_depend_on_the_ranks_are_refused(flat: allreduce.Topology) -> None:
    model = Counting()
    with MirroredOptimizer(torch.optim.SGD(model.parameters()), model, topology=flat, average=Exact()) as optimizer:
        for _ in range(2):
            text = raised_everywhere(WORLD, OptionError, lambda: step(model, optimizer, *batches(1)[0]))
            assert "mass changes in training" in text, text
