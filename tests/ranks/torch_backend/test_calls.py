"""The forms of calls on a group: PyTorch's several signatures of each call, compiled and profiled, and refused
calls."""

import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from allreduce import torch_backend
from allreduce.call.executor import Executor
from allreduce.errors import DisagreementError, UnavailableError
from allreduce.transport import control

Op = dist.ReduceOp
Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # Dynamo's, and of old names


def mine() -> Tensor:
    """Return this rank's number plus one, twice."""
    return torch.full((2,), rank() + 1.0)


def zeros() -> list[Tensor]:
    return [torch.zeros(2) for _ in range(size())]


def numbers(tensors: list[Tensor]) -> list[float]:
    return [tensor[0].item() for tensor in tensors]


# The forms of a call


def test_one_tensor_instead_of_a_list_and_operations_and_roots_by_name() -> None:
    """Time-outs are also given in seconds, as PyTorch's own groups take them."""
    group, last, limit = dist.group.WORLD, size() - 1, timedelta(seconds=30)
    largest, total = [size()] * 2, [sum(range(1, size() + 1))] * 2
    everywhere: list[tuple[Callable[[Tensor], dist.Work], list[int]]] = [
        (lambda tensor: group.allreduce(tensor, op=Op.MAX), largest),
        (lambda tensor: group.allreduce([tensor], op=Op.MAX, timeout=limit), largest),
        (lambda tensor: group.allreduce(tensor, Op.MIN, 30.0), [1] * 2),
        (lambda tensor: group.reduce_scatter(tensor, [mine()] * size(), op=Op.MAX), largest),
        (lambda tensor: group.broadcast(tensor, root=last), largest),
        (lambda tensor: group.broadcast(tensor, last), largest),
    ]
    on_rank_0: list[tuple[Callable[[Tensor], dist.Work], list[int]]] = [
        (lambda tensor: group.reduce(tensor, 0), total),
        (lambda tensor: group.reduce(tensor, root=0, op=Op.SUM), total),
        (lambda tensor: group.reduce(tensor, 0, Op.MAX), largest),
    ]
    for number, (call, expected) in enumerate(everywhere + on_rank_0):
        tensor = mine()
        call(tensor).wait()
        assert tensor.tolist() == (expected if number < len(everywhere) or rank() == 0 else mine().tolist()), number
    group.barrier(timeout=limit).wait()
    group.barrier(limit).wait()
    assert dist.all_reduce(mine(), async_op=True).wait(30.0)
    group.monitored_barrier(30.0)
    group.set_timeout(60.0)


def test_operations_are_compared_without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node, in shared memory."""
    executor = dist.group.WORLD._reducer.main.executor
    if not executor.meets:
        pytest.skip("one rank compares nothing; several nodes compare by messages")
    tensor, sent = torch.ones(8), []
    dist.all_reduce(tensor)
    monkeypatch.setattr(control, "wait_for", lambda comm, request, what, *_: sent.append(what))
    monkeypatch.setattr(Executor, "_alike_between", lambda *_: sent.append("compare numbers"))
    compared, compare = [], Executor.compare
    monkeypatch.setattr(Executor, "compare", lambda it, text, where: compared.append(text) or compare(it, text, where))
    dist.all_reduce(tensor)  # compared by the call of its backend alone
    dist.all_reduce(tensor, async_op=True).wait()
    dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(size()))
    assert compared == []
    dist.barrier()
    assert compared == ["barrier"]
    assert sent == []
    assert tensor.tolist() == [size() ** 3] * 8


def test_lists_of_tensors_instead_of_lists_of_lists() -> None:
    group, everyone = dist.group.WORLD, [float(each + 1) for each in range(size())]
    places = zeros() if rank() == 0 else []
    group.gather(places, mine(), root=0).wait()
    assert numbers(places) == (everyone if rank() == 0 else [])
    output = torch.zeros(2)
    group.scatter(output, [torch.full((2,), each) for each in everyone] if rank() == 0 else [], root=0).wait()
    assert output.tolist() == mine().tolist()
    places = zeros()
    group.allgather(places, mine(), timeout=timedelta(seconds=30)).wait()
    assert numbers(places) == everyone
    places = zeros()
    group.alltoall(places, [mine()] * size(), timeout=timedelta(seconds=30)).wait()
    assert numbers(places) == everyone
    output = torch.zeros(size())
    group.alltoall_base(output, mine()[:1].repeat(size()), [], [], timeout=timedelta(seconds=30)).wait()
    assert output.tolist() == everyone


def test_all_to_all_single_counts_elements_where_nothing_is_split() -> None:
    """As gloo: the tensor is a single row, which can't be split, with as many elements as there are ranks."""
    output = torch.zeros(size(), 1)
    dist.all_to_all_single(output, torch.full((1, size()), float(rank())))
    assert output.flatten().tolist() == list(range(size()))


# What is refused, at the call and by name


Call = Callable[[], object]


def refused() -> dict[str, Call]:
    """Return invalid calls by their error text; none of them may send anything to another rank."""
    group, ranks, two = dist.group.WORLD, size(), [torch.zeros(2), torch.zeros(2)]
    some, long, integers = torch.zeros(2), torch.zeros(2 * ranks), torch.zeros(2, dtype=torch.int64)
    three, four, double = torch.zeros(3), torch.zeros(4), torch.zeros(2 * ranks, dtype=torch.float64)
    calls: dict[str, Call] = {
        "reduce: root -1 is not a rank of the group": lambda: dist.reduce(some, dst=-1),
        f"broadcast: root {ranks} is not a rank": lambda: dist.broadcast(some, src=ranks),
        f"gather: root {ranks} is not a rank": lambda: dist.gather(some, None, dst=ranks),
        f"scatter: root {ranks} is not a rank": lambda: dist.scatter(some, None, src=ranks),
        f"send: rank {ranks} is not a rank of the group": lambda: dist.send(some, ranks),
        f"recv: rank {ranks} is not a rank of the group": lambda: group.recv([some], ranks, 0),
        "all_reduce .*one tensor of each rank, not 2": lambda: group.allreduce(two),
        "broadcast .*one tensor of each rank, not 2": lambda: group.broadcast(two, 0),
        "all_gather .*one list .*not 2": lambda: group.allgather([zeros(), zeros()], [some]),
        "send .*one tensor of each rank, not 2": lambda: group.send(two, 0, 0),
        "all_reduce_coalesced: no tensor": lambda: group.allreduce_coalesced([]),
        "all_reduce_coalesced: .*float32.*int64": lambda: group.allreduce_coalesced([some, integers]),
        "all_gather_coalesced: no tensor": lambda: group.allgather_coalesced([[]] * ranks, []),
        f"all_gather_coalesced: {ranks + 1} .*for {ranks} ranks": lambda: group.allgather_coalesced(
            [[some]] * (ranks + 1), [some]
        ),
        "all_gather_coalesced: 1 tensors .* for 0 outputs": lambda: group.allgather_coalesced([[]] * ranks, [some]),
        "tensor_coalesced: 1 tensors .* for 2 outputs": lambda: group.reduce_scatter_tensor_coalesced(two, [long]),
        f"all_gather: {ranks + 1} tensors": lambda: group.allgather([[some] * (ranks + 1)], [some]),
        r"all_gather: .*torch\.int64": lambda: group.allgather([[some] * ranks], [integers]),
        f"all_to_all: {ranks + 1} tensors": lambda: group.alltoall([some] * ranks, [some] * (ranks + 1)),
        r"TypeError: .*BXOR is not defined .* of torch\.float32": lambda: group.allreduce([some], Op.BXOR),
        r"TypeError: .*AVG is not defined .* of torch\.bool": lambda: dist.all_reduce(some > 1, Op.AVG),
        "NotImplementedError: broadcast .*sparse_coo": lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        r".*does not reduce torch\.float8_e5m2": lambda: group.allreduce([some.to(torch.float8_e5m2)]),
        r".*does not reduce torch\.complex32": lambda: group.allreduce([some.to(torch.complex32)]),
        "NotImplementedError: .*split_group": lambda: group.split_group([0]),
        "NotImplementedError: .*completion hooks": lambda: group._register_on_completion_hook(print),
        "NotImplementedError: broadcast .* TwoTensor, which wraps": lambda: dist.broadcast(TwoTensor(some, some), 0),
        r"TypeError: .*the input is torch\.int64 and the output torch\.float32": lambda: dist.all_gather_into_tensor(
            torch.zeros(4 * ranks), integers
        ),
        "TypeError: reduce_scatter_tensor: the input is": lambda: dist.reduce_scatter_tensor(some, double),
        "TypeError: all_to_all_single: the input is": lambda: group.all_to_all_single(double, long, [], []),
        r"all_gather: this rank's tensor has shape \(3,\), but its entry in the list \(2,\)": lambda: dist.all_gather(
            [some] * ranks, three
        ),
        "reduce_scatter_tensor: the output has 3 elements and this": lambda: dist.reduce_scatter_tensor(three, long),
        "scatter: this rank's tensor": lambda: dist.scatter(some, [three] * ranks, src=rank()),
        "gather: this rank's tensor": lambda: dist.gather(three, [some] * ranks, dst=rank()),
    }
    if ranks > 1:
        more = torch.zeros(ranks + 1)
        calls |= {
            "the output has 4 rows, and the split": lambda: dist.all_to_all_single(four, four, *[[4] * ranks] * 2),
            "all_to_all_single: .* split sizes": lambda: dist.all_to_all_single(four, four, [5, -1], [5, -1]),
            f"all_to_all_single: the output has {ranks + 1} elements": lambda: dist.all_to_all_single(more, more),
            f"the input has {2 * ranks} elements and the output {ranks + 1}": lambda: dist.all_to_all_single(
                more, long
            ),
        }
    return calls


def answer(call: Call) -> str:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_bad_roots_and_lists_are_refused_at_the_call() -> None:
    """Nothing is submitted, so no rank has to wait for anything."""
    before = dist.group.WORLD._get_sequence_number_for_group()
    answers = {words: answer(call) for words, call in refused().items()}
    assert {words: text for words, text in answers.items() if not re.search(words, text)} == {}
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    dist.barrier()


# torch.compile


@pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="compiling takes seconds, and depends on no number of ranks")
def test_compiled_calls() -> None:
    def step(x: Tensor) -> Tensor:
        doubled = x * 2
        dist.all_reduce(doubled)
        work = dist.broadcast(doubled, 0, async_op=True)
        work.wait()
        doubled = doubled + rank()
        if rank() == 0:
            dist.send(doubled, 1)
        else:
            dist.recv(doubled, 0)
        return doubled + 1

    run = torch.compile(step, backend="eager")  # Dynamo alone: no compiler is needed
    for _ in range(2):
        assert run(torch.ones(3)).tolist() == [2 * size() + 1] * 3


def test_builtin_comm_hooks_are_refused_by_name() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    with pytest.raises(NotImplementedError, match=r'backend "allreduce" does not offer the built-in comm hook .*FP16'):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model.register_comm_hook(None, fp16_compress_hook)
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.bias.grad.item() == 1


def test_gradients_of_no_sync_are_averaged_with_the_next() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    with model.no_sync():
        model(mine()[None]).sum().backward()
    assert model.module.weight.grad.tolist() == [mine().tolist()]
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [pytest.approx([(size() + 1) / 2 + 1] * 2)]


# DDP with fewer batches on some ranks


def test_join_counts_the_ranks_that_are_left() -> None:
    """The loss is the sum of the weights, so each rank's gradient is 1; rank r has r + 1 batches."""
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    seen = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank() + 1):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            seen.append(model.module.weight.grad[0, 0].item())
    assert seen == pytest.approx([1] * (rank() + 1))


# torch.profiler


def test_the_profiler_shows_collectives_and_messages() -> None:
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(mine()),
        "barrier": dist.barrier,
        "send": lambda: dist.isend(mine(), (rank() + 1) % size()).wait(),
        "recv": lambda: dist.recv(mine(), (rank() - 1) % size()),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for call in calls.values():
            call()
    events = [event.name for event in profile.events() if event.name.startswith("allreduce:")]
    assert sorted(events) == sorted(f"allreduce:{name}" for name in calls)


# Calls that differ, and ranks that are late


def test_calls_of_different_sizes_dtypes_or_roots_are_told() -> None:
    """MPI would take a shorter message for a longer one and leave old values in the rest; it would not notice another
    dtype."""
    ranks, later = dist.get_world_size(), min(dist.get_rank(), 1)
    if ranks == 1:
        pytest.skip("one rank agrees with itself")
    some, kind = torch.zeros(10 + 10 * later), [torch.float32, torch.int32][later]

    def places(length: int) -> list[torch.Tensor] | None:
        return None if later else [torch.zeros(length) for _ in range(ranks)]

    calls: dict[str, Call] = {
        r"broadcast of 10 elements of torch\.float32 from rank 0\n.*broadcast of 20": lambda: dist.broadcast(some, 0),
        r"broadcast of 3 .* from rank 0\n.* from rank 1": lambda: dist.broadcast(torch.zeros(3), later),
        r"reduce of 3 .* to rank 0\n.* to rank 1": lambda: dist.reduce(torch.zeros(3), later),
        r"all_gather_into_tensor of 10 .*\n.* of 20 ": lambda: dist.all_gather_into_tensor(some.repeat(ranks), some),
        r"all_gather_into_tensor of 2 .*float32\n.*int32": lambda: dist.all_gather_into_tensor(
            torch.zeros(2 * ranks, dtype=kind), torch.zeros(2, dtype=kind)
        ),
        r"all_gather of 10, .*\n.* of 20, ": lambda: dist.all_gather([some.clone() for _ in range(ranks)], some),
        r"gather of 10 .* to rank 0\n.* of 20 ": lambda: dist.gather(some, places(10)),
        r"scatter of 10 .* from rank 0\n.* of 20 ": lambda: dist.scatter(some, places(10)),
        r"gather of 10, 20 elements .* to rank 0\n.*gather of 10 elements": lambda: dist.gather(
            torch.zeros(10), None if later else [torch.zeros(10 + 10 * (each > 0)) for each in range(ranks)]
        ),
        r"scatter of 10, 5 elements .* from rank 0\n.*scatter of 10 elements": lambda: dist.scatter(
            torch.zeros(10), None if later else [torch.zeros(10 - 5 * (each > 0)) for each in range(ranks)]
        ),
        r"all_to_all_single of torch.float32\n.*int32": lambda: dist.all_to_all_single(
            torch.zeros(ranks, dtype=kind), torch.zeros(ranks, dtype=kind)
        ),
        r"all_reduce of 2 elements of torch\.complex64, sum\n.*4": lambda: dist.group.WORLD.allreduce(
            [torch.zeros(4) if later else torch.zeros(2, dtype=torch.complex64)]
        ).wait(),
        r"reduce_scatter_tensor_coalesced of .*\n.*rank 1: reduce_scatter": lambda: (
            dist.group.WORLD.reduce_scatter_single_coalesced(
                [torch.zeros(1)] * (2 - later), [torch.zeros(ranks)] * (2 - later)
            ).wait()
        ),
        r"reduce_scatter_tensor of .*\n.*all_reduce": lambda: (
            dist.all_reduce(torch.zeros(ranks), group=native)
            if later
            else dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(ranks), group=native)
        ),
    }
    native = dist.new_group(pg_options="native")  # which reduces both by one kind of call
    for text, call in calls.items():
        with pytest.raises(DisagreementError, match=text):
            call()
    dist.destroy_process_group(native)
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.broadcast(tensor, src=0)
    assert tensor.tolist() == [0, 0, 0]


@pytest.mark.parametrize("sent", [1, 3], ids=["less", "more"])
def test_parts_that_do_not_fit_their_peers_are_told_on_all_ranks(sent: int) -> None:
    """Rank 0 sends one or three elements to the last rank, which expects two; MPI notices only those that are more."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        pytest.skip("one rank sends nothing to others")
    last = ranks - 1
    rows = [2] * last + [sent if rank == 0 else 2]
    outputs, sources = [torch.zeros(2) for _ in rows], [torch.ones(each) for each in rows]
    if rank == 0:
        whole, split = torch.ones(sum(rows), 2), rows
    else:
        whole, split = torch.ones(2 * ranks, 2), []  # equal parts
    calls: dict[str, Call] = {
        f"all_to_all_single: rank 0 sends {2 * sent} elements to rank {last}, which expects 4": (
            lambda: dist.all_to_all_single(torch.zeros(2 * ranks, 2), whole, [2] * ranks, split)
        ),
        f"all_to_all: rank 0 sends {sent} elements to rank {last}, which expects 2": (
            lambda: dist.all_to_all(outputs, sources)
        ),
    }
    for text, call in calls.items():
        with pytest.raises(DisagreementError, match=text):
            call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [ranks] * 3


def test_a_monitored_barrier_after_one_that_timed_out() -> None:
    """The second barrier ignores what is left of the first: no rank passes before all have come."""
    if dist.get_world_size() == 1:
        pytest.skip("one rank waits for nobody")
    group = dist.new_group(backend="allreduce")
    backend = group._get_backend(torch.device("cpu"))
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(RuntimeError, match="monitoredBarrier"):
            backend.monitored_barrier(0.2)
    dist.barrier()
    if rank:
        with pytest.raises(RuntimeError, match="monitoredBarrier"):
            backend.monitored_barrier(0.2)
    came = time.monotonic()  # before those that sleep begin to
    dist.barrier()
    if rank:
        time.sleep(0.5)
    backend.monitored_barrier(30)
    assert rank or time.monotonic() - came >= 0.5
    dist.barrier()


def test_a_model_that_this_backend_does_not_average_is_told() -> None:
    if size() == 1:
        pytest.skip("one rank averages nothing")
    model, gloo = torch.nn.Linear(1, 1), dist.new_group(backend="gloo")
    ours, other = DistributedDataParallel(model), DistributedDataParallel(model, process_group=gloo)
    line = torch_backend.require()
    assert re.fullmatch(rf"torch.distributed: allreduce, \S.* on {size()} ranks on 1 node", line), line
    assert torch_backend.require(torch.nn.Sequential(ours)) == line
    with pytest.raises(UnavailableError, match=r"^Linear holds no DistributedDataParallel, so its gradients are not"):
        torch_backend.require(model)
    with pytest.raises(UnavailableError, match=r'averages over "gloo", not over "allreduce"$'):
        torch_backend.require(other)
    dist.destroy_process_group(gloo)
