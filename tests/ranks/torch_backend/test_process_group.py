"""torch.distributed over our collectives: operations, dtypes, works, groups. test_layouts.py has every call on tensors
of all dtypes and layouts.

Values depend on rank and index; `of(rank, ...)` returns the values of any rank, so every rank can compute the result.
"""

import functools
import gc
import json
import operator
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_world_size as size

import allreduce.torch_backend
from allreduce.algorithms.native import Native
from allreduce.algorithms.shared import Shared
from allreduce.errors import DisagreementError, UnavailableError

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16]
Op = dist.ReduceOp
BITWISE = {Op.BAND: operator.and_, Op.BOR: operator.or_, Op.BXOR: operator.xor}
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # old names that libraries still call
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


def of(rank: int, shape: int | tuple[int, ...] = 11, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of `rank`: small integers, exact in every dtype."""
    shape = (shape,) if isinstance(shape, int) else shape
    index = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    return ((index * (rank + 2) + rank) % 5).to(dtype)


def mine(shape: int | tuple[int, ...] = 11, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return of(dist.get_rank(), shape, dtype)


def everyone(shape: int | tuple[int, ...] = 11, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [of(rank, shape, dtype) for rank in range(size())]


def reduced(tensors: list[torch.Tensor], op: Op) -> torch.Tensor:
    """Return the expected value, in float64 or int64."""
    stack = torch.stack([each.to(torch.float64 if each.is_floating_point() else torch.int64) for each in tensors])
    if op == Op.AVG:
        return stack.mean(0) if stack.is_floating_point() else torch.div(stack.sum(0), size(), rounding_mode="trunc")
    if op in BITWISE:
        return functools.reduce(BITWISE[op], stack)
    simple = {Op.SUM: stack.sum, Op.PRODUCT: stack.prod}
    return simple[op](0) if op in simple else (stack.amax(0) if op == Op.MAX else stack.amin(0))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype))


@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.MAX, Op.MIN, Op.PRODUCT, *BITWISE], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_all_reduce(dtype: torch.dtype, op: Op) -> None:
    if op == Op.PRODUCT and dtype in (torch.int8, torch.uint8) and size() > 3:
        pytest.skip("the product does not fit into 8 bits")
    if op in BITWISE and dtype in FLOATS:
        pytest.skip("floats have no such operation")
    for length in (1, 11, 40_000):
        tensor = mine(length, dtype)
        dist.all_reduce(tensor, op)
        same(tensor, reduced(everyone(length, dtype), op))


def test_operations_of_other_dtypes() -> None:
    """And a factor. A sum of bool is an "or", as test_layouts.py finds."""
    for op, expected in ((Op.MAX, torch.any), (Op.PRODUCT, torch.all), (Op.MIN, torch.all)):
        tensor = mine() > 1
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected(torch.stack([each > 1 for each in everyone()]), 0))
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = mine().to(dtype)
        dist.all_reduce(tensor, Op.AVG)
        assert torch.equal(tensor.to(torch.int64), reduced(everyone(11, torch.int64), Op.AVG))
    tensor = mine()
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, reduced(everyone(), Op.SUM) / 2)
    for dtype in (torch.int8, torch.uint8, torch.int16):  # sums wrap round as torch's; Open MPI's would saturate
        tensor = torch.full((1000,), torch.iinfo(dtype).max, dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((1000,), torch.iinfo(dtype).max * size()).to(dtype))


def test_tensors_without_elements_or_dimensions_and_of_a_graph() -> None:
    dist.all_reduce(torch.zeros(0))
    dist.all_reduce(torch.zeros(3, 0))
    scalar = torch.tensor(float(dist.get_rank()), requires_grad=True)
    dist.all_reduce(scalar)
    assert scalar == sum(range(size()))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_average_of_integers_that_floats_round(dtype: torch.dtype, sparse: bool) -> None:
    """Towards zero, as PyTorch divides; sums beyond 2**53 keep all their digits."""
    large = (torch.iinfo(dtype).max - 10) // 8
    sent = torch.tensor([large, -large, 3, -3, 0, 1], dtype=dtype) + dist.get_rank()
    total = [sum(each + rank for rank in range(size())) for each in [large, -large, 3, -3, 0, 1]]
    tensor = sent.to_sparse() if sparse else sent
    dist.all_reduce(tensor, Op.AVG)
    averages = [abs(each) // size() * (1 if each > 0 else -1) for each in total]
    assert (tensor.to_dense() if sparse else tensor).tolist() == averages


def test_inputs_that_are_outputs() -> None:
    """The input is read before it is overwritten: MPI forbids memory that is both sent and received."""
    rank, ranks = dist.get_rank(), range(size())
    whole = torch.stack([of(10 * rank + to, 4) for to in ranks])
    dist.all_to_all_single(whole, whole)
    same(whole, torch.stack([of(10 * source + rank, 4) for source in ranks]))
    tensors = [of(10 * rank + to, 4) for to in ranks]
    dist.all_to_all(tensors, tensors)
    same(torch.stack(tensors), torch.stack([of(10 * source + rank, 4) for source in ranks]))
    places = [mine(4) for _ in ranks]
    dist.gather(places[0], places if rank == 0 else None, dst=0)
    assert rank or all(torch.equal(place, of(source, 4)) for source, place in enumerate(places))
    sources = [of(10 + to, 4) for to in ranks]
    dist.scatter(sources[-1], sources if rank == 0 else None, src=0)
    same(sources[-1], of(10 + rank, 4))
    whole = torch.zeros(size(), 5)
    whole[rank] = mine(5)
    dist.all_gather_into_tensor(whole.view(-1), whole[rank])
    same(whole, torch.stack(everyone(5)))


@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.MAX], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int16], ids=str)
def test_reduce_scatter(dtype: torch.dtype, op: Op) -> None:
    rank = dist.get_rank()
    for length in (3, 30_000):
        total = reduced(everyone(size() * length, dtype), op)[rank * length : (rank + 1) * length]
        source, output = mine(size() * length, dtype), torch.zeros(length, dtype=dtype)
        dist.reduce_scatter_tensor(output, source, op)
        same(output, total)
        same(source, mine(size() * length, dtype))  # the input keeps its content
        output.zero_()
        dist.reduce_scatter(output, list(source.chunk(size())), op)
        same(output, total)


@pytest.mark.parametrize("backend", ["ring", "halving_doubling", "native"])
def test_a_backend_chosen_by_name(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_BACKEND", backend)
    for options in (None, allreduce.torch_backend.Options(backend), backend):
        group = dist.new_group(pg_options=options)
        tensor, output = mine(1000), torch.zeros(10)
        dist.all_reduce(tensor, Op.AVG, group=group)
        same(tensor, reduced(everyone(1000), Op.AVG))
        dist.reduce_scatter_tensor(output, mine(10 * size()), group=group)
        same(output, reduced(everyone(10 * size()), Op.SUM).chunk(size())[dist.get_rank()])
        assert group._reducer._backends.keys() == {backend}
        dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["auto", "ring", "shared", "native"])
def test_settings_are_those_of_every_reduction(backend: str, tmp_path: Path) -> None:
    """Also of reduce_scatter, with which FSDP averages; if the backend has two phases, it stays a reduce_scatter."""
    settings: dict[str, Any] = {"check": False, "trace": tmp_path / "trace.json"}
    compress = None if backend == "native" else "bfloat16"  # native sums no 16-bit floats
    options = allreduce.torch_backend.Options(backend, settings=settings, compress=compress, compress_from=0)
    group = dist.new_group(pg_options=options)
    fine = torch.full((10 * size(),), 1 + 2**-10)  # one more digit than bfloat16 has
    output = torch.zeros(10)
    dist.all_reduce(fine.clone(), group=group)
    dist.reduce_scatter_tensor(output, fine, group=group)
    rounded = backend != "native" and size() > 1
    same(output, torch.full((10,), size() * (1 if rounded else 1 + 2**-10)))
    assert {each.config.options["check"] for each in group._reducer._backends.values()} == {False}
    dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        calls = {
            event["name"].partition(",")[0]
            for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        }
        wanted = {"all_reduce"} if backend == "native" else {"all_reduce", "reduce_scatter"}
        assert wanted <= calls
        assert backend != "native" or "reduce_scatter" not in calls


def test_operations_are_compared_where_calls_of_the_backend_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """check=False on a node without shared memory: operations that differ are an error on all ranks."""
    if size() == 1:
        pytest.skip("one rank compares nothing")
    monkeypatch.setattr("allreduce.call.rendezvous.Tables.take", lambda _: None)
    group = dist.new_group(pg_options=allreduce.torch_backend.Options("ring", settings={"check": False}))
    tensor = mine(8)
    dist.all_reduce(tensor, group=group)
    call = functools.partial(dist.broadcast, src=0) if dist.get_rank() == 0 else dist.all_reduce
    with pytest.raises(DisagreementError, match=r"rank 0: broadcast(.*\n)+.*rank 1: all_reduce"):
        call(tensor, group=group)
    tensor = mine(8)
    dist.all_reduce(tensor, group=group)
    same(tensor, reduced(everyone(8), Op.SUM))
    dist.destroy_process_group(group)


def test_a_backend_that_lacks_something_is_refused_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, and its topology is closed."""
    made, of_ranks = [], allreduce.Topology.of_ranks
    monkeypatch.setattr(allreduce.Topology, "of_ranks", lambda *given: made.append(of_ranks(*given)) or made[-1])
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnavailableError, match="CuPy can't be imported"):
        dist.new_group(pg_options="nccl")
    assert [topology.closed for topology in made] == [True]
    dist.barrier()


def test_a_message_that_nobody_keeps_arrives() -> None:
    """MPI still reads the tensor after the program has dropped it; its memory must not be reused."""
    for rank in range(1, size()):
        if dist.get_rank() == 0:
            dist.isend(torch.full((300_000,), float(rank)), rank)
    torch.full((300_000,), -1.0)
    dist.barrier()
    if dist.get_rank():
        tensor = torch.zeros(300_000)
        dist.recv(tensor, 0)
        assert (tensor == dist.get_rank()).all()


def test_a_message_of_another_length_is_an_error() -> None:
    if size() < 2 or dist.get_rank() > 1:
        return
    if dist.get_rank() == 0:
        dist.send(torch.zeros(3), 1)
    else:
        with pytest.raises(RuntimeError, match="12 bytes arrived and the tensor has 20"):
            dist.recv(torch.zeros(5), 0)


def test_coalesced_calls_may_be_waited_for_later() -> None:
    outputs = [torch.zeros(size() * 2), torch.zeros(size() * 3)]
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(outputs[0], mine(2))
        dist.all_gather_into_tensor(outputs[1], mine(3))
    works.wait()
    for output in outputs:
        same(output, torch.cat([of(rank, output.numel() // size()) for rank in range(size())]))
    mixed, right, left = mine(4), (dist.get_rank() + 1) % size(), (dist.get_rank() - 1) % size()
    tensor = of(left, 200_000) if size() == 1 else torch.zeros(200_000)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        work = dist.group.WORLD.allreduce([mixed])
        if size() > 1:
            dist.isend(mine(200_000), right)
            dist.irecv(tensor, left)
    works.wait()
    assert work.is_completed()
    same(mixed, reduced(everyone(4), Op.SUM))
    same(tensor, of(left, 200_000))


def test_works_and_futures() -> None:
    tensors = [mine(50_000) + index for index in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[2].get_future().then(lambda future: future.value()[0] * 2)
    for index, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait(timedelta(seconds=30))
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        same(tensor, reduced(everyone(50_000), Op.SUM) + index * size())
        assert work.result()[0] is tensor
    same(doubled.wait(), tensors[2] * 2)
    assert works[0].get_future().done()


@pytest.mark.parametrize("late", [False, True])
def test_a_finished_operation_keeps_no_tensor(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """late: a wait for it has timed out before."""
    tensor, leave = mine(), threading.Event()
    if late:
        monkeypatch.setattr(dist.group.WORLD._reducer, "all_reduce", lambda *_: leave.wait(30))
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match="was not done within"):
            work.wait(timedelta(milliseconds=1))
        leave.set()
        work.wait()
        del work
    else:
        dist.all_reduce(tensor)
    reference = weakref.ref(tensor)
    del tensor
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:  # the thread may just be leaving it
        gc.collect()
    assert reference() is None


@pytest.mark.parametrize("backend", ["native", "ring", "hierarchical_copy", "auto, shared", "auto, native"])
def test_a_caller_does_not_wait_inside_mpi_where_no_time_out_can_reach_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these, "auto" alone does the work in shared memory on one node, where a wait can end: two switches of threads
    cost more than a small sum. Overlapping operations run in the group's thread."""
    if size() == 1:
        pytest.skip("one rank does not wait")
    monkeypatch.setattr(Shared if backend == "auto, shared" else Native, "cost", lambda *_: 0.0)  # which auto selects
    group, threads = dist.new_group(pg_options=backend.split(",")[0]), []
    group._reducer.main.executor.observers.append(lambda *_: threads.append(threading.current_thread().name))
    whole, part = torch.ones(8 * size()), torch.empty(8)
    for call in (
        lambda: dist.all_reduce(whole, group=group),
        lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        lambda: dist.all_reduce(whole, group=group, async_op=True).wait(),
    ):
        group._operations.queue.worker.wait_idle(10)  # else the call is done after others, by the group's thread
        call()
    dist.destroy_process_group(group)
    own, worker = threading.current_thread().name, "allreduce worker"
    scattering = own if backend.startswith("auto") else worker
    assert threads[:3] == [own if backend == "auto, shared" else worker, scattering, worker]


def test_a_signal_handler_may_end_a_wait() -> None:
    """As with time-outs that a program sets itself: its TimeoutError is not taken for the end of a wait's limit."""
    if size() == 1:
        pytest.skip("one rank does not wait")

    def late(*_: object) -> None:
        raise TimeoutError("of the program")

    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, late)
        work = dist.all_reduce(tensor, async_op=True)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="of the program"):
            work.wait()
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, torch.full((3,), float(size())))


def test_memory_is_on_the_cpu_whatever_the_default_device() -> None:
    """torch.set_default_device("cuda") holds for the calling thread, which here does all operations itself."""
    group = dist.new_group(pg_options=allreduce.torch_backend.Options(overlap=False))
    whole, part, received = torch.ones(2 * size()), torch.zeros(4)[::2], torch.zeros(4)[::2]
    outputs, own = [torch.zeros(2)[::1] for _ in range(size())], torch.full((2,), float(dist.get_rank()))
    rows = torch.sparse_coo_tensor(torch.zeros((1, 1), dtype=torch.int64), torch.ones(1), (3,), check_invariants=False)
    left, right = (dist.get_rank() - 1) % size(), (dist.get_rank() + 1) % size()
    with torch.device("meta"):
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.all_gather(outputs, own, group=group)
        dist.all_reduce(rows, group=group)
        if size() > 1:
            works = [dist.isend(own, right, group=group), dist.irecv(received, left, group=group)]
            [work.wait() for work in works]
        dist.monitored_barrier(group)
    dist.destroy_process_group(group)
    assert part.tolist() == [size()] * 2
    assert [each.tolist() for each in outputs] == [[rank, rank] for rank in range(size())]
    assert rows.to_dense().tolist() == [size(), 0, 0]
    assert received.tolist() == ([left] * 2 if size() > 1 else [0, 0])


def test_collectives_inside_of_callbacks_keep_their_place() -> None:
    """As in PowerSGD's hook: submitted in a callback, and waited for in that callback."""

    def again(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    futures = [dist.all_reduce(mine(1000), async_op=True).get_future().then(again) for _ in range(5)]
    for future in futures:
        same(future.wait(), reduced(everyone(1000), Op.SUM) * size())


def test_an_error_ends_the_work_and_not_the_group() -> None:
    """An error that is detected while the ranks communicate: rank 1 contributes more than the others."""
    if size() > 1:
        for _ in range(2):
            work = dist.all_reduce(torch.zeros(777 + (dist.get_rank() == 1)), async_op=True)
            with pytest.raises(DisagreementError):
                work.wait()
            assert isinstance(work.exception(), DisagreementError)
            with pytest.raises(RuntimeError, match="DisagreementError: the ranks disagree"):
                work.get_future().wait()
        failing = dist.all_reduce(torch.zeros(777 + (dist.get_rank() == 1)), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="DisagreementError: the ranks disagree"):
            failing.wait()
    dist.barrier()


def test_a_group_of_some_ranks() -> None:
    even = list(range(0, size(), 2))
    group = dist.new_group(even)
    if dist.get_rank() in even:
        tensor = mine()
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced([of(rank) for rank in even], Op.SUM))
        dist.broadcast(tensor.copy_(mine()), src=even[-1], group=group)
        same(tensor, of(even[-1]))
        dist.barrier(group)
        dist.destroy_process_group(group)
    assert dist.get_backend() == "allreduce"


def test_groups_in_flight_at_once() -> None:
    """Waited for in a different order on each rank, while another group is created; one group is destroyed without a
    wait."""
    groups = [dist.new_group() for _ in range(3)]
    tensors = [mine(100_000) + index for index in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    groups.append(dist.new_group())
    dist.destroy_process_group(groups.pop(0))
    assert works[0].is_completed()
    for work in works[1:] if dist.get_rank() % 2 else works[:0:-1]:
        work.wait()
    for index, tensor in enumerate(tensors):
        same(tensor, reduced(everyone(100_000), Op.SUM) + index * size())
    for group in groups:
        dist.destroy_process_group(group)
