"""Every collective of torch.distributed on tensors that are not contiguous, of every dtype.

Each call is done with each layout as its input and with another layout as its output, other ones on each rank and for
each dtype; of dtypes of the same kind and size, with one layout. gloo returns wrong values without an error for some
layouts (PyTorch's issue 192920).
"""

from collections.abc import Callable, Collection, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size

import allreduce.torch_backend  # noqa: F401
from allreduce.torch_backend import move
from allreduce.torch_backend.reduce import Reduction
from allreduce.transport import chunked
from tests.gpu import fake_cupy
from tests.gpu.fake_gpu import TorchCuda

Tensor = torch.Tensor
Op = dist.ReduceOp
Pairs = list[tuple[Tensor, Tensor]]  # of results and the values that they must have
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ALL_REDUCED = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
DTYPES = [*ALL_REDUCED, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
# A dtype of each kind, and of each size in bytes: these have all layouts. 2 ranks have the others too, with one layout.
REDUCED = [torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.float32, torch.complex128]
MOVED = [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.complex32, torch.float64, torch.complex128]


# Tensors of shape (rows, 3, 2, 2) on the elements of a flat one

LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "plain": lambda flat, rows: flat[: 12 * rows].view(rows, 3, 2, 2),
    "shifted": lambda flat, rows: flat[5 : 5 + 12 * rows].view(rows, 3, 2, 2),
    "channels last": lambda flat, rows: flat[: 12 * rows].view(rows, 2, 2, 3).permute(0, 3, 1, 2),
    "turned": lambda flat, rows: flat[: 12 * rows].view(2, 2, 3, rows).permute(3, 2, 1, 0),
    "every other": lambda flat, rows: flat[: 24 * rows].view(rows, 3, 2, 4)[..., ::2],
    "column": lambda flat, rows: flat[: 48 * rows].view(rows, 3, 2, 2, 4)[..., 1],
    "slice": lambda flat, rows: flat[: 40 * (rows + 2)].view(rows + 2, 5, 2, 4)[1:-1, 1:4, :, 1:3],
}
# of real floats only: a lazily negated tensor
NEGATED = {"negated": lambda flat, rows: torch.view_as_complex(flat[: 24 * rows].view(rows, 3, 2, 2, 2)).conj().imag}
# for inputs only; all values are equal along the third dimension
EXPANDED = {"expanded": lambda flat, rows: flat[: 6 * rows].view(rows, 3, 1, 2).expand(rows, 3, 2, 2)}


def values(seed: int, dtype: torch.dtype, rows: int = 2) -> Tensor:
    """Return small numbers, exact in every dtype."""
    index = torch.arange(6 * rows).view(rows, 3, 1, 2).expand(rows, 3, 2, 2).contiguous()
    real = (index * (seed % 7 + 2) + index // 5 + seed) % 5
    if dtype == torch.bool:
        return real % 2 == 1
    return torch.complex(real.double(), 2 * real.double()).to(dtype) if dtype.is_complex else real.to(dtype)


class Space:
    """The tensors of a call: of one layout for inputs, of another for outputs. The gaps must keep their content."""

    def __init__(self, dtype: torch.dtype, source: str, output: str) -> None:
        self.dtype, self._source, self._output = dtype, source, output
        self._made: list[tuple[Tensor, Tensor]] = []

    def _new(self, layout: str, rows: int) -> Tensor:
        flat = torch.ones((40 * (rows + 2) + 8 * rows) * self.dtype.itemsize, dtype=torch.uint8).view(self.dtype)
        view = {**LAYOUTS, **EXPANDED, **NEGATED}[layout](flat, rows)
        self._made.append((flat, view))
        return view

    def put(self, content: Tensor, layout: str = "") -> Tensor:
        """Return an input with this content."""
        layout = layout or self._source
        view = self._new(layout, len(content))
        target, content = (view[:, :, :1], content[:, :, :1]) if layout == "expanded" else (view, content)
        target.copy_(content)
        return view

    def place(self, rows: int = 2) -> Tensor:
        """Return an output."""
        return self._new(self._output, rows)

    def change(self, content: Tensor) -> Tensor:
        """Return a tensor with this content, which is input and output."""
        return self.put(content, self._output)

    def own(self, seed: int = 0, rows: int = 2) -> Tensor:
        """Return an input with values of this rank."""
        return self.put(self.of(dist.get_rank() + 10 * seed, rows))

    def of(self, seed: int, rows: int = 2) -> Tensor:
        return values(seed, self.dtype, rows)

    def all(self, rows: int = 2) -> list[Tensor]:
        """Return the values of `own` of all ranks."""
        return [self.of(rank, rows) for rank in range(size())]

    def total(self, rows: int = 2) -> Tensor:
        """Return the sum of the values of all ranks."""
        stack = torch.stack(self.all(rows))
        if self.dtype == torch.bool:
            return stack.any(0)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        return stack.to(wide).sum(0).to(self.dtype)

    def gaps_are_kept(self) -> bool:
        """Return whether the memory beside the tensors is as it was. Overwrites the tensors."""
        kept = True
        for flat, view in self._made:
            own = view[:, :, :1] if view.stride(2) == 0 else view
            own.fill_(-0.0 if own.is_neg() else 0)
            kept &= int(flat.view(torch.uint8).sum()) == (flat.numel() - own.numel()) * self.dtype.itemsize
        return kept


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(torch.uint8)


def differences(
    call: Callable[[Space], Pairs], dtypes: list[torch.dtype], others: Collection[torch.dtype] = ()
) -> list[str]:
    """Do a call with all layouts of some dtypes, and on 2 ranks with one layout of others; return the wrong results, in
    words. No rank leaves the others alone."""
    found = []
    for dtype in dict.fromkeys([*dtypes, *others] if size() == 2 else dtypes):
        pairs = [*spaces(dtype)]
        one = DTYPES.index(dtype) % len(pairs)
        for space, words in pairs if dtype in dtypes else pairs[one : one + 1]:
            for got, wanted in call(space):
                if got.shape != wanted.shape or got.dtype != wanted.dtype:
                    found.append(f"{words}: {got.dtype} of {tuple(got.shape)}, not {tuple(wanted.shape)}")
                elif not torch.equal(bits(got), bits(wanted)):
                    found.append(f"{words}: {got.flatten()[:8].tolist()}, not {wanted.flatten()[:8].tolist()}")
            if not space.gaps_are_kept():
                found.append(f"{words}: memory beside the tensors was written")
    return found


def spaces(dtype: torch.dtype) -> Iterator[tuple[Space, str]]:
    """Return each layout for inputs with one for outputs, others on each rank and for each dtype."""
    both = [*LAYOUTS, *(NEGATED if dtype in (torch.float32, torch.float64) else [])]
    sources, outputs = [*both, *EXPANDED], both
    for number in range(len(sources)):
        source = sources[(number + rank()) % len(sources)]
        output = outputs[(3 * number + 2 * rank() + DTYPES.index(dtype)) % len(outputs)]
        yield Space(dtype, source, output), f"{dtype}, {source} to {output}"


# Collectives that move


def broadcast(space: Space) -> Pairs:
    """The root's tensor is an input."""
    tensor = space.own() if rank() == size() - 1 else space.place()
    dist.broadcast(tensor, size() - 1)
    return [(tensor, space.of(size() - 1))]


def all_gather(space: Space) -> Pairs:
    """Of other numbers of rows on each rank."""
    places = [space.place(each + 1) for each in range(size())]
    dist.all_gather(places, space.own(rows=rank() + 1))
    return [(place, space.of(each, each + 1)) for each, place in enumerate(places)]


def all_gather_into_stack(space: Space) -> Pairs:
    place = space.place(size() * 2)
    dist.all_gather_into_tensor(place.unflatten(0, (size(), 2)), space.own())
    return [(place, torch.cat(space.all()))]


def all_gather_coalesced(space: Space) -> Pairs:
    places = [[space.place(), space.place(1)] for _ in range(size())]
    dist.group.WORLD.allgather_coalesced(places, [space.own(), space.own(rows=1)]).wait()
    return [(place, space.of(r, len(place))) for r, two in enumerate(places) for place in two]


def all_gather_into_tensors(space: Space) -> Pairs:
    places = [space.place(2 * size()), space.place(size())]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(places[0], space.own())
        dist.all_gather_into_tensor(places[1], space.own(rows=1))
    return [(place, torch.cat(space.all(len(place) // size()))) for place in places]


def gather(space: Space) -> Pairs:
    places = [space.place() for _ in range(size())] if rank() == size() - 1 else None
    dist.gather(space.own(), places, size() - 1)
    return list(zip(places or [], space.all(), strict=False))


def scatter(space: Space) -> Pairs:
    place = space.place()
    root = size() - 1
    dist.scatter(place, [space.put(each) for each in space.all()] if rank() == root else None, root)
    return [(place, space.of(rank()))]


def all_to_all(space: Space) -> Pairs:
    places = [space.place(rank() + 1) for _ in range(size())]
    dist.all_to_all(places, [space.put(space.of(10 * rank() + to, to + 1)) for to in range(size())])
    return [(place, space.of(10 * r + rank(), rank() + 1)) for r, place in enumerate(places)]


def all_to_all_single(space: Space) -> Pairs:
    sent = torch.cat([space.of(10 * rank() + to, to + 1) for to in range(size())])
    place = space.place(size() * (rank() + 1))
    dist.all_to_all_single(place, space.put(sent), [rank() + 1] * size(), [to + 1 for to in range(size())])
    return [(place, torch.cat([space.of(10 * r + rank(), rank() + 1) for r in range(size())]))]


def messages(space: Space) -> Pairs:
    place = space.place()
    works = [dist.isend(space.own(), (rank() + 1) % size()), dist.irecv(place, (rank() - 1) % size())]
    for work in works:
        work.wait()
    return [(place, space.of((rank() - 1) % size()))]


def messages_of_any_rank(space: Space) -> Pairs:
    pairs = []
    if rank():
        dist.send(space.own(), 0, tag=3)
    else:
        places = [space.place() for _ in range(1, size())]
        pairs = [(place, space.of(dist.recv(place, tag=3))) for place in places]
    dist.barrier()  # before messages of the next call
    return pairs


def batched_messages(space: Space) -> Pairs:
    places = [space.place() for _ in range(size())]
    sends = [dist.P2POp(dist.isend, space.put(space.of(10 * rank() + to)), to) for to in range(size()) if to != rank()]
    receives = [dist.P2POp(dist.irecv, place, r) for r, place in enumerate(places) if r != rank()]
    for work in dist.batch_isend_irecv(sends + receives) if sends else []:
        work.wait()
    return [(place, space.of(10 * r + rank())) for r, place in enumerate(places) if r != rank()]


def functional_moves(space: Space) -> Pairs:
    world = dist.group.WORLD
    sent = space.put(torch.cat([space.of(10 * rank() + to) for to in range(size())]))
    pairs = [
        (functional.all_gather_tensor(space.own(), 0, world), torch.cat(space.all())),
        (functional.all_gather_tensor(space.own(), 1, world), torch.cat(space.all(), 1)),
        (
            functional.all_to_all_single(sent, None, None, world),
            torch.cat([space.of(10 * r + rank()) for r in range(size())]),
        ),
        (functional.broadcast(space.own(), 0, world), space.of(0)),
    ]
    gathered = functional.all_gather_into_tensor_coalesced([space.own(), space.own(rows=1)], world)
    pairs += [(each, torch.cat(space.all(len(each) // size()))) for each in gathered]
    return pairs


MOVES = [
    broadcast,
    all_gather,
    all_gather_into_stack,
    all_gather_coalesced,
    all_gather_into_tensors,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    messages,
    messages_of_any_rank,
    batched_messages,
    functional_moves,
]


@pytest.mark.parametrize("call", MOVES, ids=lambda call: call.__name__)
def test_moves(call: Callable[[Space], Pairs]) -> None:
    assert differences(call, MOVED, DTYPES) == []


@pytest.mark.parametrize("call", [all_gather, gather, all_to_all, scatter, messages], ids=lambda call: call.__name__)
def test_moves_of_more_bytes_than_an_int_counts(
    call: Callable[[Space], Pairs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives move them in pieces, messages in larger units: in whole ones, and a rest."""
    for module, name in ((chunked, "PIECE"), (chunked, "SCRATCH_BYTES"), (move, "LARGEST")):
        monkeypatch.setattr(module, name, 32)
    assert differences(call, [torch.float32, torch.bfloat16]) == []


# Collectives that reduce


def all_reduce(space: Space) -> Pairs:
    tensor = space.change(space.of(rank()))
    dist.all_reduce(tensor)
    return [(tensor, space.total())]


def all_reduce_in_one_block(space: Space) -> Pairs:
    tensors = [space.change(space.of(rank(), rows)) for rows in (2, 1)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [(tensor, space.total(len(tensor))) for tensor in tensors]


def reduce(space: Space) -> Pairs:
    root = size() - 1
    tensor = space.change(space.of(rank())) if rank() == root else space.own()
    dist.reduce(tensor, root)
    return [(tensor, space.total() if rank() == root else space.of(rank()))]


def reduce_scatter(space: Space) -> Pairs:
    place = space.place()
    sources = [space.put(each) for each in space.of(rank(), 2 * size()).chunk(size())]
    dist.reduce_scatter(place, sources)
    return [(place, space.total(2 * size()).chunk(size())[rank()])]


def reduce_scatter_of_unequal_rows(space: Space) -> Pairs:
    place, rows = space.place(rank()), list(range(size()))  # none for rank 0
    dist.reduce_scatter(place, [space.put(each) for each in space.of(rank(), sum(rows)).split(rows)])
    return [(place, space.total(sum(rows)).split(rows)[rank()])]


def reduce_scatter_tensor(space: Space) -> Pairs:
    place, source = space.place(), space.own(rows=2 * size())
    dist.reduce_scatter_tensor(place, source)
    return [(place, space.total(2 * size()).chunk(size())[rank()]), (source, space.of(rank(), 2 * size()))]


def reduce_scatter_tensors(space: Space) -> Pairs:
    places = [space.place(), space.place(1)]
    with dist._coalescing_manager():
        for place in places:
            dist.reduce_scatter_tensor(place, space.own(rows=len(place) * size()))
    return [(place, space.total(len(place) * size()).chunk(size())[rank()]) for place in places]


def functional_reductions(space: Space) -> Pairs:
    world = dist.group.WORLD
    own, long = space.own(), space.own(rows=size())
    pairs = [
        (functional.all_reduce(own, "sum", world), space.total()),
        (functional.reduce_scatter_tensor(long, "sum", 0, world), space.total(size())[rank() : rank() + 1]),
        (own, space.of(rank())),
        (long, space.of(rank(), size())),
    ]
    found = functional.all_reduce_coalesced([own, long], "sum", world)
    pairs += [(each, space.total(len(each))) for each in found]
    found = functional.reduce_scatter_tensor_coalesced([long], "sum", [0], world)
    return [*pairs, (found[0], space.total(size())[rank() : rank() + 1])]


REDUCTIONS = [
    all_reduce,
    all_reduce_in_one_block,
    reduce,
    reduce_scatter,
    reduce_scatter_of_unequal_rows,
    reduce_scatter_tensor,
    reduce_scatter_tensors,
    functional_reductions,
]


@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.__name__)
def test_reductions(call: Callable[[Space], Pairs]) -> None:
    assert differences(call, REDUCED, ALL_REDUCED) == []


def test_cuda_tensors_of_other_layouts_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins for CuPy and CUDA: all ranks reduce GPU memory, whatever layout one rank's tensor has."""
    gpu = fake_cupy.install(monkeypatch).gpu
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", TorchCuda(gpu).current_stream)
    reducer, sum_up = dist.group.WORLD._reducer, Reduction("sum")
    for layout in ("turned", "negated", "slice"):
        for alone in (0, size() - 1):
            for call in (
                lambda it, to=alone: reducer.reduce(it, to, sum_up),
                lambda it: reducer.all_reduce(it, sum_up),
            ):
                space = Space(torch.float32, layout if rank() == alone else "plain", "plain")
                tensor = space.own()
                call(tensor)
                if rank() == alone:
                    assert torch.equal(tensor, space.total()), layout
                assert space.gaps_are_kept()


def test_lazily_conjugated_tensors() -> None:
    """By the group's methods: PyTorch's functions refuse them."""
    group, sizes = dist.group.WORLD, range(size())
    own, everyone = values(rank(), torch.complex64), torch.stack([values(each, torch.complex64) for each in sizes])
    tensors = [own.clone().conj() for _ in range(3)]
    places = [torch.zeros_like(own).conj() for _ in range(size() + 1)]
    group.allreduce([tensors[0]], Op.SUM).wait()
    group.broadcast([tensors[1]], 0).wait()
    group.allgather([places[:-1]], [tensors[2]]).wait()
    left, right = (rank() - 1) % size(), (rank() + 1) % size()
    for message in (group.send([own.clone().conj()], right, 0), group.recv([places[-1]], left, 0)):
        message.wait()
    assert all(each.is_conj() for each in [*tensors, *places])
    assert torch.equal(tensors[0], everyone.sum(0).conj())
    assert torch.equal(tensors[1], everyone[0].conj())
    assert torch.equal(torch.stack(places[:-1]), everyone.conj())
    assert torch.equal(places[-1], everyone[left].conj())


def test_an_output_whose_elements_share_memory_is_an_error() -> None:
    """On the rank that gives it, in that call only: the other ranks have their results, and the group works on."""
    other, last = (rank() + 1) % size(), size() - 1

    def output() -> Tensor:
        return torch.full((1,), 1.0).expand(3) if rank() == 0 else torch.ones(3)

    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda tensor: dist.broadcast(tensor, last),
        "scatter": lambda tensor: dist.scatter(tensor, [torch.ones(3)] * size() if rank() == last else None, last),
        "recv": lambda tensor: (dist.isend(torch.ones(3), other), dist.recv(tensor, (rank() - 1) % size())),
    }
    for name, call in calls.items():
        if rank() == 0 and not (name == "broadcast" and size() == 1):  # a root's tensor is only read
            with pytest.raises(RuntimeError, match="single memory location"):
                call(output())
        else:
            call(output())
    works = [dist.isend(torch.ones(3), other), dist.irecv(output(), (rank() - 1) % size())]
    dist.barrier()
    for _ in range(2):  # the second wait finds the same error
        if rank() == 0:
            with pytest.raises(RuntimeError, match="single memory location"):
                works[1].wait()
    for work in works[: 1 if rank() == 0 else 2]:
        work.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size()] * 3
