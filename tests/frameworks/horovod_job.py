"""Started by test_horovod.py on 3 ranks: checks Horovod's API, call by call, against known values."""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tests.without_dynamo  # noqa: F401

# isort: split
import numpy as np
import pytest
import torch

import trainers.horovod.torch as hvd
from allreduce.call.queue import Worker
from allreduce.errors import CollectiveTimeoutError, DisagreementError, OptionError
from allreduce.topology import Topology
from trainers.horovod import session
from trainers.horovod.errors import OrderError

with pytest.raises(OptionError, match="this function of Horovod"):
    hvd.size()
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TOTAL = sum(range(SIZE))  # of all ranks' numbers


def here(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of this rank's number."""
    return torch.full(shape, RANK, dtype=dtype)


def same(found: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-6, atol=1e-6)


def who_is_where() -> None:
    hvd.init()  # once more: nothing happens
    assert hvd.is_initialized()
    assert hvd.mpi_enabled()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (RANK, SIZE, 0, 1)
    assert hvd.is_homogeneous()
    assert not hvd.gloo_built()


def reductions() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        tensor = here(2, 3, dtype=dtype)
        same(hvd.allreduce(tensor, op=hvd.Sum), torch.full((2, 3), TOTAL))
        same(tensor, here(2, 3))  # not modified
    expected = {hvd.Sum: TOTAL + SIZE, hvd.Min: 1, hvd.Max: SIZE, hvd.Product: int(np.prod(range(1, SIZE + 1)))}
    for op, value in expected.items():
        same(hvd.allreduce(here(3) + 1, op=op), [value] * 3)
    same(hvd.allreduce(here(3)), [TOTAL / SIZE] * 3)
    same(hvd.allreduce(here(3, dtype=torch.int32)), [TOTAL // SIZE] * 3)
    same(hvd.allreduce(here(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), [2 * TOTAL] * 2)
    strided = here(4, 3).t()
    hvd.allreduce_(strided, op=hvd.Sum)
    same(strided, torch.full((3, 4), TOTAL))
    one, two = hvd.grouped_allreduce([here(2), here(3, dtype=torch.int64)], op=hvd.Sum)
    same(one, [TOTAL] * 2)
    same(two, [TOTAL] * 3)
    assert hvd.allreduce(here(2), compression=hvd.Compression.fp16).dtype == torch.float32
    halves = type("Halves", (), {"compress": lambda x: (x / 2, None), "decompress": lambda x, _: 2 * x})
    same(hvd.allreduce(torch.ones(2), compression=halves), [1, 1])


def adasum() -> None:
    """Adasum adds orthogonal tensors and averages equal ones, each tensor on its own; it combines the updates of an
    optimizer in the same way."""
    numbers = torch.arange(1.0, SIZE + 1)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine, equal = (numbers * (torch.arange(SIZE) == RANK)).to(dtype), torch.full((2, 2), 3.0, dtype=dtype)
        same(hvd.allreduce(mine, op=hvd.Adasum), numbers)
        one, two = hvd.grouped_allreduce([mine, equal], op=hvd.Adasum)
        same(one, numbers)
        same(two, equal)
    same(hvd.allreduce(equal, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0), torch.full((2, 2), 6.0))
    strided = torch.full((4, 3), 3.0).t()
    hvd.allreduce_(strided, op=hvd.Adasum)
    same(strided, torch.full((3, 4), 3.0))
    one, two = torch.nn.Parameter(torch.zeros(SIZE)), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, two], lr=0.5), op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in (1, 2):
        optimizer.zero_grad()
        (one[RANK] * (RANK + 1) + two.sum()).backward()
        assert one.grad is not None
        same(one.grad, numbers * (torch.arange(SIZE) == RANK))  # this rank's own
        optimizer.synchronize()
        optimizer.step()
        same(one.detach(), -0.5 * step * numbers)
        same(two.detach(), [-0.5 * step] * 2)
    with pytest.raises(OrderError, match="nothing to skip"):
        optimizer.skip_synchronize()


def many_at_once() -> None:
    """Calls of all kinds of tensors that are submitted without waiting, on each rank in another order; one that is
    refused fails alone."""
    tensors = [here(7), torch.tensor(float(RANK)), here(0), here(4, 3).t(), here(300_000), here(2, 2).requires_grad_()]
    integers = [here(number + 1, dtype=torch.int32) for number in range(3)]
    halves = [here(number + 1, dtype=torch.float16) for number in range(3)]
    sums = list(enumerate([*tensors, *halves]))
    order = sums if RANK % 2 else sums[::-1]
    handles = {at: hvd.allreduce_async(each, name=f"sum {at}", op=hvd.Sum) for at, each in order}
    odd = hvd.allreduce_async(here(3 + RANK), name="odd", op=hvd.Sum)
    mean = [hvd.allreduce_async_(each, name=f"mean {at}") for at, each in enumerate(integers)]
    least = [hvd.allreduce_async(each > 0, name=f"least {at}", op=hvd.Min) for at, each in enumerate(halves)]
    with pytest.raises(hvd.HorovodInternalError, match="odd: float32") as met:
        hvd.synchronize(odd)
    assert isinstance(met.value.__cause__, DisagreementError)
    for at, each in sums:
        same(hvd.synchronize(handles[at]), torch.full(each.shape, TOTAL))
    assert hvd.poll(handles[0])
    assert hvd.synchronize(handles[0]) is None
    for handle, each in zip(mean, integers, strict=True):
        assert hvd.synchronize(handle) is each
        same(each, torch.full(each.shape, TOTAL // SIZE))
    for number, handle in enumerate(least, 1):
        assert hvd.synchronize(handle).tolist() == [False] * number


def movements() -> None:
    rows = hvd.allgather(here(RANK + 1, 2))  # other first dimensions, and none of rank 0's below
    same(rows, [[rank] * 2 for rank in range(SIZE) for _ in range(rank + 1)])
    same(hvd.allgather(here(RANK)), [rank for rank in range(SIZE) for _ in range(rank)])
    one, two = hvd.grouped_allgather([here(1), here(RANK + 1, dtype=torch.uint8)])
    same(one, list(range(SIZE)))
    same(two, [rank for rank in range(SIZE) for _ in range(rank + 1)])
    mine = here(2, 2)
    same(hvd.broadcast(mine, SIZE - 1), [[SIZE - 1] * 2] * 2)
    same(mine, [[RANK] * 2] * 2)
    hvd.broadcast_(mine, 1)
    same(mine, [[1, 1]] * 2)
    same(hvd.alltoall(torch.arange(SIZE) + 10 * RANK), [RANK + 10 * rank for rank in range(SIZE)])
    splits = torch.arange(SIZE)  # r rows to rank r
    rows, received = hvd.alltoall(here(int(splits.sum()), 3), splits)
    same(rows, torch.arange(SIZE).repeat_interleave(RANK)[:, None].expand(-1, 3))
    assert received.tolist() == [RANK] * SIZE
    whole = torch.arange(SIZE + 1.0)  # the first rank has one row more
    same(hvd.reducescatter(whole, op=hvd.Sum), [[0, 3], [6], [9]][RANK])
    assert [len(part) for part in hvd.grouped_reducescatter([whole, whole[:1]])] == [1 + (RANK == 0), int(RANK == 0)]
    hvd.barrier()


def gradients() -> None:
    def gradient(call: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> torch.Tensor:
        tensor = torch.ones(shape, requires_grad=True)
        output = call(tensor)
        output.backward(torch.full_like(output, RANK + 1.0))
        assert tensor.grad is not None
        return tensor.grad

    mean = (TOTAL + SIZE) / SIZE
    same(gradient(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum), 2), [mean * SIZE] * 2)
    same(gradient(hvd.allreduce, 2), [mean] * 2)
    same(gradient(lambda tensor: hvd.grouped_allreduce([tensor, tensor])[1], 2), [mean] * 2)
    same(gradient(hvd.allgather, RANK + 1), [mean] * (RANK + 1))
    same(gradient(lambda tensor: hvd.broadcast(tensor, 1), 2), [mean if RANK == 1 else 0] * 2)
    same(gradient(hvd.alltoall, SIZE), [rank + 1 for rank in range(SIZE)])
    same(gradient(lambda tensor: hvd.alltoall(tensor, [1] * SIZE)[0], SIZE + 1), [*range(1, SIZE + 1), 0])
    same(gradient(hvd.reducescatter, SIZE), list(range(1, SIZE + 1)))


def joined() -> None:
    """A rank without more data takes part with neutral values."""
    if RANK == 0:  # what the others submit soon is decided together
        session.world().service(Worker)._work_lock.acquire()
        threading.Timer(0.3, session.world().service(Worker)._work_lock.release).start()
    else:
        handles = [hvd.allreduce_async(here(2 + at), name=f"small {at}", op=hvd.Sum) for at in range(5)]
        for at, handle in enumerate(handles):
            same(hvd.synchronize(handle), [TOTAL] * (2 + at))
        same(hvd.allreduce(here(2), op=hvd.Sum), [TOTAL] * 2)
        same(hvd.allreduce(here(2)), [TOTAL / SIZE] * 2)
        same(hvd.allreduce(here(2), op=hvd.Min), [1] * 2)
        same(hvd.allreduce(here(2), op=hvd.Min, prescale_factor=-1.0), [1 - SIZE] * 2)
        assert (hvd.allreduce(torch.full((2,), -torch.inf), op=hvd.Max) == -torch.inf).all()
        same(hvd.grouped_allreduce([here(2), here(1, dtype=torch.int64)], op=hvd.Product)[0], [max(1, SIZE - 1)] * 2)
        with pytest.raises(hvd.HorovodInternalError, match=r"ranks \[0\] have joined"):
            hvd.allgather(here(1))
    last = hvd.join()
    assert last > 0
    assert hvd.allgather_object(last) == [last] * SIZE


def sparse() -> None:
    """Row 1 is on two ranks, twice on one of them."""
    places = torch.tensor([[1, 1, 3], [0, 0, 0]]) if RANK == 0 else torch.tensor([[RANK], [0]])
    values = torch.ones(places.size(1))
    tensor = torch.sparse_coo_tensor(places, values, (4, 1))
    expected = torch.zeros(4, 1)
    expected[1], expected[2], expected[3] = 3, 1, 1
    same(hvd.sparse_allreduce_async(tensor, None, hvd.Sum)().to_dense(), expected)
    counts = torch.sparse_coo_tensor(places, values.to(torch.int32), (4, 1))
    same(hvd.sparse_allreduce_async(counts, "counts", hvd.Sum)().to_dense(), expected.to(torch.int32))
    hybrid = torch.sparse_coo_tensor(places[:1], values[:, None].expand(-1, 2), (4, 2))
    same(hvd.sparse_allreduce_async(hybrid, "hybrid", hvd.Average)().to_dense(), expected.expand(-1, 2) / SIZE)


def process_sets() -> None:
    first = hvd.add_process_set([0])
    others = hvd.add_process_set(hvd.ProcessSet(range(1, SIZE)))
    own, ranks = (first, [0]) if RANK == 0 else (others, list(range(1, SIZE)))
    assert (own.size(), own.rank(), own.included()) == (len(ranks), ranks.index(RANK), True)
    same(hvd.allreduce(here(2), op=hvd.Sum, process_set=own), [sum(ranks)] * 2)
    same(hvd.broadcast(here(2), ranks[-1], process_set=own), [ranks[-1]] * 2)
    assert hvd.allgather_object(RANK, process_set=own) == ranks
    with pytest.raises(OptionError, match=f"rank {RANK} is not in"):
        hvd.allreduce(here(2), process_set=others if RANK == 0 else first)
    with pytest.raises(OptionError, match="already"):
        hvd.add_process_set([0])
    with pytest.raises(OptionError, match="some of the ranks"):
        hvd.add_process_set([0, SIZE])
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=own)
    (model.weight.sum() * RANK).backward()
    optimizer.step()
    same(model.weight.grad, [[sum(ranks) / len(ranks)]])
    assert hvd.remove_process_set(first)
    assert hvd.remove_process_set(others)
    assert not hvd.remove_process_set(first)
    with pytest.raises(DisagreementError, match="add_process_set"):
        hvd.add_process_set([min(RANK, 1)])
    with pytest.raises(OptionError, match="not in use"):
        hvd.allreduce(here(2), process_set=own)


def network(seed: int = RANK) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


ROWS = torch.arange(36.0).view(12, 3) / 36


def optimizers() -> None:
    """The results are those of one process with all rows, for all arguments."""
    make, mine = partial(torch.optim.SGD, lr=0.1, momentum=0.9), ROWS[RANK::SIZE]
    alone = network(seed=0)
    plain = make(alone.parameters())
    for _ in range(3):
        plain.zero_grad()
        alone(ROWS).square().mean().backward()
        plain.step()
    for arguments, tolerance in (
        ({}, 1e-6),
        ({"groups": 2}, 1e-6),
        ({"gradient_predivide_factor": 2.0}, 1e-6),
        ({"compression": hvd.Compression.fp16}, 1e-2),
        ({"compression": hvd.Compression.bf16, "groups": 1}, 5e-2),
        ({"backward_passes_per_step": 2}, 1e-6),
    ):
        model = network()
        names = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=names, **arguments)
        assert isinstance(optimizer, torch.optim.SGD)
        passes = optimizer.backward_passes_per_step
        for _ in range(3):
            optimizer.zero_grad()
            for part in mine.chunk(passes):
                (model(part).square().mean() / passes).backward()
            with pytest.raises(OrderError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    optimizer.zero_grad()
    model(mine).sum().backward()
    model(mine).sum().backward()
    with pytest.raises(OrderError, match="more than 2 times"):
        model(mine).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def later() -> None:
    """The gradients of parameters that are added to an optimizer are averaged too."""
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=1.0))
    optimizer.add_param_group({"params": list(second.parameters())})
    (second.weight.sum() * RANK).backward()
    optimizer.step()
    same(second.weight.grad, [[TOTAL / SIZE]])


def unused_embeddings() -> None:
    """In each step another rank uses the first table; only the last rank uses the second one, from a later step on."""
    for dense in (False, True):
        torch.manual_seed(0)
        table, late = (torch.nn.Embedding(10, 2, sparse=True) for _ in range(2))
        model = torch.nn.ModuleList([table, late, torch.nn.Linear(2, 1)])
        expected = [table.weight.detach().clone(), late.weight.detach().clone()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sparse_as_dense=dense)
        for step in range(2 * SIZE + 1):
            optimizer.zero_grad()
            loss = model[2](torch.full((1, 2), float(RANK))).sum()
            if step % SIZE == RANK:
                loss = loss + table(torch.tensor([RANK, 5])).sum()
            if step > SIZE and RANK == SIZE - 1:
                loss = loss + late(torch.tensor([1])).sum()
            loss.backward()
            optimizer.step()
            expected[0][[step % SIZE, 5]] -= 1 / SIZE
            expected[1][1] -= (step > SIZE) / SIZE
        same(table.weight.detach(), expected[0])
        same(late.weight.detach(), expected[1])
        same(model[2].weight.grad, [[TOTAL / SIZE] * 2])


def first_used_after_a_join() -> None:
    """The last rank has no batch at first; afterwards it takes part as the others do."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for batches in (RANK < SIZE - 1, 1):
        for _ in range(batches):
            optimizer.zero_grad()
            model(torch.full((1, 1), RANK + 1.0)).sum().backward()
            with pytest.raises(OrderError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.step()
        hvd.join()
    same(model.weight.grad, [[sum(range(SIZE + 1)) / SIZE]])


def states() -> None:
    """The state of Adam, which only rank 0 has; its hyperparameters; objects. test_horovod.py has more objects."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + RANK))
    if RANK == 0:
        model(ROWS).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    digest = [each["exp_avg"].sum().item() for each in optimizer.state_dict()["state"].values()]
    everyone = hvd.allgather_object([digest, optimizer.param_groups[0]["lr"]])
    assert len(digest) == 4
    assert everyone == [everyone[0]] * SIZE
    same(hvd.broadcast_object(here(2) if RANK == 1 else None, root_rank=1), [1, 1])
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(OptionError, match="no pickle"):
            call(network if RANK == 0 else 1)
        for tensor, words in (
            (torch.eye(2).to_sparse(), "can't be sent .*dense tensors"),
            (here(2).to("meta"), "meta tensor"),
        ):
            with pytest.raises(OptionError, match=words):
                call(tensor if RANK == 0 else 1)


def batch_norm() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 3, 2)
    plain, ours = torch.nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
    mine = torch.arange(7) % SIZE == RANK  # not equally many
    whole, part = rows.clone().requires_grad_(), rows[mine].clone().requires_grad_()
    for _ in range(2):
        plain(whole).pow(3).sum().backward()
        ours(part).pow(3).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[mine], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), plain.weight.grad, rtol=1e-4, atol=1e-4)
    same(ours.running_mean, plain.running_mean)
    same(ours.running_var, plain.running_var)
    torch.testing.assert_close(ours.eval()(part), plain.eval()(whole)[mine])


def bad_input() -> None:
    for rank in (0, 1):
        if rank == RANK:  # it is under way until the others come, after the barrier
            handle = hvd.allreduce_async(here(2), name=f"twice {rank}")
            with pytest.raises(OptionError, match=f"twice {rank} has not ended"):
                hvd.allreduce_async(here(2), name=f"twice {rank}")
        hvd.barrier()
        if rank != RANK:
            handle = hvd.allreduce_async(here(2), name=f"twice {rank}")
        same(hvd.synchronize(handle), [TOTAL / SIZE] * 2)
    for call, match in (
        (lambda: hvd.allreduce(here(3 + RANK), name="shape"), r"rank 0: allreduce.shape: float32 \[3\]; Average"),
        (lambda: hvd.allreduce(here(2), op=hvd.Sum if RANK else hvd.Average), r"float32 \[2\]; (Average|Sum)"),
        (lambda: hvd.broadcast(here(2), min(RANK, 1)), "from rank 1"),
        (lambda: hvd.allgather(here(2, 2 + RANK)), "the ranks disagree"),
        (lambda: hvd.reducescatter(here(2), op=hvd.Adasum), r"(?i)adasum"),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=match):
            call()
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(9))], lr=1.0)
    for call, match in (
        (lambda: hvd.allreduce(here(2), compression="int8"), r"give hvd.Compression.none, fp16 or bf16"),
        (lambda: hvd.DistributedOptimizer(sgd, compression="int8"), r"give hvd.Compression.none, fp16 or bf16"),
        (lambda: hvd.allreduce(here(2, dtype=torch.int32), op=hvd.Adasum), "floating-point"),
        (lambda: hvd.broadcast(here(2), SIZE), "root_rank"),
        (lambda: hvd.alltoall(here(SIZE + 1)), "divided equally"),
        (lambda: hvd.alltoall(here(2), [2] * SIZE), "more than the 2 rows"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "has no rows"),
        (lambda: hvd.allreduce(here(2), op=17), "op=17 is unknown"),
        (lambda: hvd.allreduce(here(2), average=True, op=hvd.Sum), "op= only"),
        (lambda: hvd.allreduce(here(2), postscale_factor=float("nan")), "finite"),
        (lambda: hvd.synchronize(10**6), "not a handle"),
        (lambda: hvd.DistributedOptimizer(network()), "takes an optimizer of torch.optim, not Sequential"),
        (lambda: hvd.broadcast_optimizer_state(network(), 0), "takes an optimizer of torch.optim, not Sequential"),
    ):
        with pytest.raises(OptionError, match=match):
            call()
    same(hvd.allreduce(here(2), op=hvd.Sum), [TOTAL] * 2)  # all goes on


def never_comes() -> None:
    """Only rank 0 submits a name; the other ranks are elsewhere."""
    apart = Topology(timeout=120)
    old, other = hvd.add_process_set([0]), hvd.ProcessSet([1])
    hvd.shutdown()
    with pytest.raises(OptionError, match="already"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert not hvd.is_initialized()
    hvd.init(process_sets=[other])
    assert other.size() == 1
    with pytest.raises(OptionError, match="not in use"):
        old.size()
    if RANK == 0:
        detector = session.world().detector  # short from here on: on a busy machine the others may be late in `init`
        detector.timeout, detector.stall = 4.0, 1.0
        with pytest.raises(
            hvd.HorovodInternalError, match=r"waited \d+ s for other ranks in: allreduce.never: float32 \[2\]"
        ) as met:
            hvd.allreduce(here(2), name="never")
        assert isinstance(met.value.__cause__, CollectiveTimeoutError)
    apart.agree([], "all have waited")
    if RANK == 0:
        hvd.shutdown()  # local, as its calls have failed
    assert hvd.is_initialized() == (RANK > 0)


def timeline() -> None:
    """Rank 0 writes the timeline, with an event for each call."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(here(2), name="seen")
        hvd.stop_timeline()
        if RANK == 0:
            (event,) = json.loads(path.read_text())
            assert (event["name"], event["ph"], event["dur"] > 0) == ("allreduce.seen", "X", True)
        with pytest.raises(OptionError, match="folder that exists") if RANK == 0 else contextlib.nullcontext():
            hvd.start_timeline(str(path / "none" / "t.json"))


for check in (
    who_is_where, reductions, adasum, many_at_once, movements, gradients, joined, sparse,
    process_sets, optimizers, later,
    unused_embeddings, first_used_after_a_join, states, batch_norm, timeline, bad_input, never_comes,
):  # fmt: skip
    check()
    if RANK == 0:
        print(check.__name__, flush=True)
