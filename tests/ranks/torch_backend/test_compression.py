"""Options(compress=...) of the process group: what is compressed and what is not, error feedback, DDP."""

import functools
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from allreduce.errors import DisagreementError, OptionError, UnknownBackendError
from allreduce.torch_backend import Options
from allreduce.torch_backend.reduce import COMPRESS_FROM
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 1 2"
Op = dist.ReduceOp
LONG = COMPRESS_FROM + 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # old names of PyTorch's functions


def several() -> bool:
    return dist.get_world_size() > 1


@pytest.fixture(params=["int8", "bfloat16"])
def compress(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def group(compress: str) -> Generator[Any]:
    made = dist.new_group(pg_options=Options(compress=compress))
    yield made
    dist.destroy_process_group(made)


def mine(length: int = LONG, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that 8 and 16-bit floats round, different on each rank."""
    return torch.linspace(-3.3, 3.1 + dist.get_rank(), length, dtype=torch.float64).to(dtype)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the exact sum over all ranks, by the world's group."""
    tensor = tensor.to(torch.float64)
    dist.all_reduce(tensor)
    return tensor


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest relative error of any rank; all ranks must have the same bits."""
    copy = found.clone()
    dist.broadcast(copy, 0)
    largest = (found.to(torch.float64) - wanted).abs().max() / wanted.abs().max()
    largest = torch.where(torch.equal(copy, found) * torch.ones(1, dtype=torch.bool), largest, torch.inf)
    dist.all_reduce(largest, Op.MAX)
    return float(largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG], ids=str)
def test_long_sums_and_averages_are_compressed(group: Any, op: Op, dtype: torch.dtype) -> None:
    tensor = mine(dtype=dtype)
    dist.all_reduce(tensor, op, group=group)
    assert several() * 1e-4 <= error(tensor, summed(mine()) / (dist.get_world_size() if op == Op.AVG else 1)) < 0.1


def test_a_reduce_scatter_is_compressed_by_the_length_of_its_inputs(group: Any) -> None:
    length = -(-COMPRESS_FROM // dist.get_world_size())
    output, source = torch.zeros(length), mine(length * dist.get_world_size())
    dist.reduce_scatter_tensor(output, source, group=group)
    whole = torch.cat([torch.empty_like(output) for _ in range(dist.get_world_size())])
    dist.all_gather_into_tensor(whole, output)
    assert several() * 1e-4 <= error(whole, summed(source)) < 0.1
    assert torch.equal(source, mine(source.numel()))


def test_all_other_values_are_exact(group: Any) -> None:
    """Losses, counts and flags; and what is not a sum of floats."""
    short = mine(COMPRESS_FROM - 1)
    dist.all_reduce(short, group=group)
    assert error(short, summed(mine(COMPRESS_FROM - 1))) < 1e-6
    counts = torch.arange(LONG) + 2**40 * dist.get_rank()
    for tensor, op in ((counts, Op.SUM), (counts, Op.MAX), (mine(), Op.MIN), (mine(dtype=torch.float16), Op.MIN)):
        found, expected = tensor.clone(), tensor.clone()
        dist.all_reduce(found, op, group=group)
        dist.all_reduce(expected, op)
        assert torch.equal(found, expected)
    for call in (dist.all_reduce_coalesced, lambda tensors, group: dist.reduce(tensors[0], 0, group=group)):
        found = mine()
        call([found], group=group)
        dist.broadcast(found, 0)
        assert error(found, summed(mine())) < 1e-6


@pytest.mark.parametrize("compress", ["int8"])
def test_a_tensor_that_is_reduced_again_has_error_feedback(group: Any) -> None:
    """The sum of ten results is as near to the exact one as a single result; the errors of new tensors add up."""
    exact, steps = summed(mine()), 10
    for kept in (torch.empty(LONG), None):
        total = torch.zeros(LONG, dtype=torch.float64)
        for _ in range(steps):
            tensor = torch.empty(LONG) if kept is None else kept
            tensor.copy_(mine())
            dist.all_reduce(tensor, group=group)
            total += tensor
            single = error(tensor, exact)
            del tensor
        several_times = error(total, steps * exact)
        assert several_times <= single / 5 if kept is not None else several_times >= single / 4


@pytest.mark.parametrize("compress", ["int8"])
def test_error_feedback_ends_with_its_tensor_and_with_reset_compression(group: Any) -> None:
    tensor, address = mine(), 0
    for begin in ("a new tensor", "reset_compression"):
        for _ in range(3):
            tensor.copy_(mine())
            dist.all_reduce(tensor, group=group)
        if begin == "a new tensor":
            address = tensor.data_ptr()
            del tensor
            tensor = torch.zeros(LONG)  # malloc gives the same memory again, usually
        else:
            group.reset_compression()
            tensor.zero_()
        dist.all_reduce(tensor, group=group)
        assert not tensor.any(), f"{begin}: an old error was added, at {address} and {tensor.data_ptr()}"


class Model(torch.nn.Sequential):
    """Three layers, in two buckets of DDP."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 400), torch.nn.Tanh())
        self.append(torch.nn.Linear(400, 10))


def train(group: Any, steps: int = 6) -> tuple[torch.Tensor, DistributedDataParallel]:
    """Return the model's parameters after training on this rank's rows, and the model."""
    model = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 200, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]), model


@pytest.mark.parametrize("compress", ["bfloat16", "int8"])
def test_ddp_trains_through_the_compression(group: Any) -> None:
    begin = torch.cat([each.detach().reshape(-1) for each in Model().parameters()])
    exact, _ = train(None)
    found, model = train(group)
    assert error(found, exact.to(torch.float64)) < 0.02
    change = float((found - exact).norm() / (exact - begin).norm())
    assert several() * 1e-5 <= change < 0.1
    if several():
        backend = group._reducer.backend(group.options.compress)
        entries = [each for each in backend._allocations._entries.values() if each.keeps]
        assert len(entries) >= 2  # the buckets
        del model
        assert not any(each.keeps for each in backend._allocations._entries.values())  # DDP has freed its buckets


def test_bad_options_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackendError, match="'rign'; the backends are: ring"):
        Options("rign")
    monkeypatch.setenv("ALLREDUCE_BACKEND", "rign")
    with pytest.raises(UnknownBackendError, match="ALLREDUCE_BACKEND"):
        dist.new_group()
    for options, text in (
        ({"compress": "itn8"}, "compress='itn8' is unknown; did you mean 'int8'?"),
        ({"settings": {"compress": "float16"}}, "give Options(compress=...)"),
        ({"compress": "powersgd:4"}, "use PyTorch's powerSGD_hook"),
        ({"compress": "int8", "compress_from": -1}, "compress_from=-1: give a number of elements"),
    ):
        with pytest.raises(OptionError) as caught:
            Options(**options)
        assert text in str(caught.value)


def test_different_compressions_are_one_error_on_all_ranks() -> None:
    if several():
        for options in ({"compress": None}, {"compress": "float16"}, {"compress": "int8", "compress_from": 7}):
            given = Options(**({"compress": "int8"} if dist.get_rank() else options))
            create = functools.partial(dist.new_group, pg_options=given)
            text = raised_everywhere(MPI.COMM_WORLD, DisagreementError, create)
            assert "rank 1: pg_options=Options('auto', compress='int8', compress_from=16384)" in text
    dist.barrier()
