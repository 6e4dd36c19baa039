"""Embeddings with sparse gradients train as on one rank: MirroredOptimizer, all_reduce and DDP."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import allreduce.torch_backend  # noqa: F401
from allreduce import Topology
from allreduce.errors import OptionError
from allreduce.torch_backend import Options
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, ParameterServerTrainer, SpareReplicasTrainer
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.errors import ArgumentError, NotFiniteError
from trainers.pytorch import Buckets, MirroredOptimizer

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank is what the others are compared with")
both_updates = pytest.mark.parametrize("update", ["replicated", "sharded"])
RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS, STEPS = 40, 4
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5),
}


class Words(nn.Module):
    """A table of which a batch uses a few rows, and a second table that few batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.rare = nn.EmbeddingBag(5, 4, mode="sum", sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        table = self.words(words)
        rare = (words % 8 == 7).nonzero().squeeze(1)
        if len(rare):
            table = table.index_add(0, rare, self.rare(words[rare].unsqueeze(1) // 8))
        return self.out(table)


def batch(step: int) -> tuple[Tensor, Tensor, slice]:
    """Return the words and targets of all ranks, and this rank's part: rank 0 has none in one step, others more and
    more."""
    counts = [0 if step == 1 and rank == 0 else 3 + 2 * rank for rank in range(RANKS)]
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, ROWS, (sum(counts),), generator=generator)
    begin = sum(counts[:RANK])
    return words, torch.randn(sum(counts), 2, generator=generator), slice(begin, begin + counts[RANK])


def loss(model: nn.Module, words: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(words), targets)


CLIP = 0.1


def clip(model: nn.Module) -> float:
    """Clip the norm of all gradients, also of sparse ones, which torch.nn.utils.clip_grad_norm_ can't."""
    found = [each.grad for each in model.parameters() if each.grad is not None]
    norm = sum(float((each.coalesce().values() if each.is_sparse else each).square().sum()) for each in found) ** 0.5
    for each in found:
        each.mul_(min(1.0, CLIP / (norm + 1e-6)))
    return norm


def reference(make: Make, steps: int = STEPS) -> nn.Module:
    """Return the result of one rank."""
    model = Words()
    optimizer = make(model.parameters())
    for step in range(steps):
        words, targets, _ = batch(step)
        optimizer.zero_grad()
        loss(model, words, targets).backward()
        clip(model)
        optimizer.step()
    return model


def same(model: nn.Module, other: nn.Module) -> None:
    for here, there in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(here, there)


@both_updates
@pytest.mark.parametrize("name", MAKERS)
def test_trains_as_one_rank(name: str, update: str, flat: Topology) -> None:
    """With shares of different sizes, one of them empty; accumulated in two parts, of which a rank may have none."""
    model = Words()
    plain = MAKERS[name](model.parameters())
    overlap = (name == "sgd") == (update == "replicated")
    with MirroredOptimizer(
        plain,
        model,
        topology=flat,
        update=update,
        buckets=Buckets(overlap),
        transforms=[CheckDivergence(1), CheckGradients()],
    ) as optimizer:
        for step in range(STEPS):
            words, targets, mine = batch(step)
            words, targets = words[mine], targets[mine]
            optimizer.rows(len(words))
            optimizer.zero_grad()
            if len(words):
                with optimizer.no_sync():
                    (loss(model, words[:2], targets[:2]) * 2 / len(words)).backward()
                (loss(model, words[2:], targets[2:]) * (len(words) - 2) / len(words)).backward()
                grad = model.words.weight.grad
                assert grad is not None
                assert grad.is_sparse
                assert grad.is_coalesced()
            assert optimizer.clip_grad_norm_(CLIP) > CLIP
            optimizer.step()
        same(model, reference(MAKERS[name]))
        states = optimizer.state_dict()["state"]
        assert len(states) == (4 if name == "adagrad" else 0)
        optimizer.load_state_dict(optimizer.state_dict())


@both_updates
def test_joins(update: str, flat: Topology) -> None:
    """Ranks with fewer batches take part in the others' steps."""
    model = Words()
    with MirroredOptimizer(
        MAKERS["sgd"](model.parameters()), model, topology=flat, update=update, transforms=[CheckDivergence(RANKS)]
    ) as optimizer:
        with optimizer.join():
            for step in range(1, 1 + RANK):
                words, targets, mine = batch(step)
                optimizer.zero_grad()
                loss(model, words[mine], targets[mine]).backward()
                optimizer.step()
        assert optimizer.steps == RANKS - 1
        optimizer.step()  # compares


@both_updates
def test_sparse_adam(update: str, flat: Topology) -> None:
    """Dense and sparse gradients each have their own optimizer; rows that no rank has used keep their moments."""
    model, alone = Words(), Words()

    def pair(model: Words) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        tables = [model.words.weight, model.rare.weight]
        return torch.optim.SparseAdam(tables, lr=0.1), torch.optim.SGD(model.out.parameters(), lr=0.5)

    mirrored = [MirroredOptimizer(each, model, topology=flat, update=update) for each in pair(model)]
    for trained, optimizers in ((model, mirrored), (alone, pair(alone))):
        for step in range(2, 2 + STEPS):
            words, targets, mine = batch(step)
            part = mine if trained is model else slice(None)
            for optimizer in optimizers:
                optimizer.zero_grad()
                if isinstance(optimizer, MirroredOptimizer):
                    optimizer.rows(len(words[part]))
            loss(trained, words[part], targets[part]).backward()
            for optimizer in optimizers:
                optimizer.step()
    same(model, alone)
    for optimizer in mirrored:
        optimizer.close()


def test_other_gradients(flat: Topology, caplog: pytest.LogCaptureFixture) -> None:
    """Dense gradients of a sparse embedding, 16 bits, NaN, and optimizers that accept no sparse gradients."""
    table = nn.Embedding(6, 3, sparse=True).to(torch.bfloat16)
    before = table.weight.detach().clone()
    with MirroredOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table, topology=flat) as optimizer:
        if RANK == 1:
            nn.functional.linear(torch.ones(1, 3, dtype=torch.bfloat16), table.weight).sum().backward()  # as weights
        elif RANK == 0:
            table(torch.tensor([2, 2])).sum().backward()
        optimizer.step()
        expected = torch.full((6, 1), 1.0)
        expected[2] += 2
        expected = (expected / RANKS).to(torch.bfloat16)
        torch.testing.assert_close(table.weight.detach(), before - expected)

    model = Words()
    sgd = MAKERS["sgd"](model.parameters())
    with MirroredOptimizer(sgd, model, topology=flat, transforms=[CheckGradients()]) as optimizer:
        if RANK == 1:
            with torch.no_grad():
                model.words.weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(NotFiniteError, match=r"rank 1 has 8 NaN .* in words.weight \(element 12\)"):
            model(torch.tensor([3 + RANK, 3])).sum().backward()

    model = Words()
    with MirroredOptimizer(torch.optim.Adam(model.parameters()), model, topology=flat) as optimizer:
        model(torch.tensor([RANK])).sum().backward()
        assert model.words.weight.grad is not None
        assert not model.words.weight.grad.is_sparse
        optimizer.step()
    told = "the sparse gradients of words.weight, rare.weight are averaged as dense ones"
    assert caplog.text.count(told) == (RANK == 0)
    with pytest.raises(OptionError, match=r"out.weight gets dense ones"):
        MirroredOptimizer(torch.optim.SparseAdam(model.parameters()), model, topology=flat)
    with pytest.raises(OptionError, match="does not sum gradients"):
        MirroredOptimizer(torch.optim.SGD(model.parameters()), model, "adasum", topology=flat)


@pytest.fixture
def group() -> Generator[None]:
    dist.init_process_group("allreduce")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_all_reduces() -> None:
    """torch.distributed.all_reduce of sparse tensors with any number of entries gives the sum of the dense ones."""
    for dtype in (torch.float32, torch.int64, torch.float16):
        for shape, dims in (((10, 3), 1), ((4, 5, 2), 2), ((6,), 1)):
            generator = torch.Generator().manual_seed(RANK)
            indices = torch.stack([torch.randint(0, size, (3 * RANK,), generator=generator) for size in shape[:dims]])
            values = torch.randint(-8, 8, (3 * RANK, *shape[dims:]), generator=generator).to(dtype)
            tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
            dense = tensor.to_dense()
            dist.all_reduce(dense)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            assert work.result()[0] is tensor
            assert tensor.is_coalesced()
            assert torch.equal(tensor.to_dense(), dense)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            assert torch.equal(tensor.to_dense(), dense)
    with pytest.raises(NotImplementedError, match="with SUM and AVG"):
        dist.all_reduce(torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX)


@pytest.mark.usefixtures("group")
def test_under_ddp() -> None:
    """As with gloo, also with a comm hook."""
    gloo = dist.new_group(backend="gloo")
    ring = dist.new_group(backend="allreduce", pg_options=Options("ring"))
    trained = []
    for group, hook in ((None, None), (ring, default_hooks.allreduce_hook), (gloo, None)):
        words = Words()
        words.rare.requires_grad_(False)  # DDP wants every sparse gradient in every step
        model = DistributedDataParallel(words, process_group=group)
        if hook is not None:
            model.register_comm_hook(group, hook)
        optimizer = MAKERS["adagrad"](words.out.parameters())
        optimizer.add_param_group({"params": [words.words.weight]})
        for step in range(STEPS):
            inputs, targets, _ = batch(step)
            optimizer.zero_grad()
            loss(model, inputs[RANK::RANKS], targets[RANK::RANKS]).backward()
            assert words.words.weight.grad is not None
            assert words.words.weight.grad.is_sparse
            optimizer.step()
        trained.append(words)
    same(trained[0], trained[2])
    same(trained[1], trained[2])


def test_a_module_is_no_replica(flat: Topology) -> None:
    other: Any = nn.Linear(2, 2) if RANK == 1 else NumpyNetwork([4, 2])
    trainers: list[Callable[[Any], Any]] = [
        lambda given: MirroredTrainer(given, "ring", flat, update="sharded"),
        lambda given: CentralStorageTrainer(given, flat, storage=1),
        lambda given: SpareReplicasTrainer(given, flat, spare=0),
        lambda given: ParameterServerTrainer(given, flat),
    ]
    for make in trainers:
        with pytest.raises(ArgumentError, match="rank 1: a trainer takes a replica"):
            make(other)
