"""Messages as pipeline stages send them: batches in both directions, in groups of some ranks, beside collectives."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import irecv, isend

import allreduce.torch_backend  # noqa: F401

JOBS = "openmpi 2"
pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="PyTorch refuses messages of a rank to itself")
LARGE = 300_000  # elements: MPI sends such a message only after a handshake


def neighbours() -> tuple[int, int, int]:
    """Return this rank, the next one and the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % ranks, (rank - 1) % ranks


def values(rank: int, number: int, length: int = LARGE) -> torch.Tensor:
    return (torch.arange(length) % 100 + 1000 * rank + 100 * number).float()


def test_what_stages_send() -> None:
    """Tensors of a graph, without dimensions, or without elements; test_layouts.py has the others."""
    rank, right, left = neighbours()
    for part in (lambda x: x.requires_grad_() * 2, lambda x: x[2, 3], lambda x: x[:0]):
        sent, wanted = (part(values(each, 0, 24).view(4, 6)) for each in (rank, left))
        place = torch.zeros(wanted.shape)
        work = isend(sent, right)
        dist.recv(place, left)
        work.wait()
        assert torch.equal(place, wanted)


def test_messages_are_received_by_their_tags() -> None:
    """Both neighbours send before they receive. Those with the same tag arrive in their order."""
    rank, right, left = neighbours()
    works = [isend(values(rank, number), right, tag=tag) for number, tag in enumerate((1, 2, 1, 1))]
    places = {number: torch.zeros(LARGE) for number in (1, 0, 2, 3)}
    works += [irecv(place, left, tag=2 if number == 1 else 1) for number, place in places.items()]
    for work in works:
        work.wait()
    assert all(torch.equal(place, values(left, number)) for number, place in places.items())


def test_messages_of_a_group_beside_a_collective_of_another() -> None:
    """Each rank waits in a pipeline's group while an all-reduce of another group runs, and the other way round."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages, replicas = dist.new_group(list(range(ranks))[::-1]), dist.new_group()  # ranks of the first: reversed
    total, place = torch.ones(LARGE), torch.zeros(LARGE)
    if rank == 0:
        dist.recv(place, ranks - 1, group=stages)  # which the last rank sends after the all-reduce has begun there
        assert torch.equal(place, values(ranks - 1, 7))
    work = dist.all_reduce(total, group=replicas, async_op=True)
    if rank == ranks - 1:
        dist.send(values(rank, 7), 0, group=stages)
    work.wait()
    assert total.eq(ranks).all()
    if rank == 0:
        dist.send_object_list([{"shape": (3, 4)}], ranks - 1, group=stages, use_batch=True)
    elif rank == ranks - 1:
        objects: list[object] = [None]
        dist.recv_object_list(objects, 0, group=stages, use_batch=True)
        assert objects == [{"shape": (3, 4)}]
    for group in (stages, replicas):
        dist.destroy_process_group(group)


def test_several_threads_wait_for_one_message() -> None:
    _, right, left = neighbours()
    place, seen = torch.zeros(LARGE), []
    work = irecv(place, left)
    assert work is not None

    def wait() -> None:
        work.wait()
        seen.append(float(place[-1]))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    dist.send(values(0, 3), right)
    for thread in threads:
        thread.join()
    assert seen == [float(values(0, 3)[-1])] * 4


@pytest.mark.parametrize("end", ["destroyed", "aborted"])
def test_the_end_of_a_group_ends_waits_for_its_messages(end: str) -> None:
    """Also the wait of another thread; without the time-out, of half an hour by default."""
    _, right, left = neighbours()
    group = dist.new_group()
    never, errors = irecv(torch.zeros(3), left, group=group), []
    assert never is not None

    def wait() -> None:
        try:
            never.wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    work = isend(torch.ones(3), right, tag=5, group=group)
    assert work is not None
    dist.recv(torch.zeros(3), left, tag=5, group=group)
    work.wait()
    if end == "aborted":
        group.abort()
    dist.destroy_process_group(group)
    thread.join(20)
    assert errors == [f"this process group has been {end}"]
    with pytest.raises(RuntimeError, match=f"has been {end}"):
        never.wait()


def test_a_late_stage_is_an_error_after_the_timeout() -> None:
    """It names the message. The message may still come later."""
    _, right, left = neighbours()
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    place = torch.zeros(3)
    work = irecv(place, left, tag=2, group=group)
    assert work is not None
    with pytest.raises(RuntimeError, match="with tag 2 was not done within 0"):
        work.wait()
    dist.barrier()
    dist.send(torch.ones(3), right, tag=2, group=group)
    work.wait(timedelta(seconds=60))
    assert place.tolist() == [1, 1, 1]
    dist.destroy_process_group(group)
