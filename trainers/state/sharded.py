"""ShardedParameters: parameters of which every rank updates its own parts, and all ranks read everything (ZeRO-1).

reduce_scatter -> every rank updates its parts -> `ShardedParameters.share`. It serves trainers and MirroredOptimizer.

S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError
from allreduce.transport.control import all_values, combine, on_all
from allreduce.transport.shared_segment import shared_array
from allreduce.transport.wait import wait_for
from trainers.options.buckets import Bucket
from trainers.state.backup import Backup
from trainers.state.dealing import Share

EDITED_IN_PLACE = (
    '{} was edited in place (p.mul_(...), say), and with update="sharded" the parameters of all ranks of a node are '
    "the same memory, so it may have been edited several times; {}"
)
ALL = (slice(None),)


@dataclass(frozen=True)
class Flat:
    """A part of flat memory.

    array: the NumPy or CuPy array that the backend works on. tensor: the framework's tensor of the same memory, if it
        has one; if the model is on a GPU and the backend works on the host, GPU memory that is copied to and from
        `array`. staged: in that case `array` as a tensor, else None. alone: there is only one rank, so nothing is
        copied.
    """

    array: Any
    tensor: Any = None
    staged: Any = None
    alone: bool = field(default=False, kw_only=True)

    def part(self, start: int, stop: int) -> "Flat":
        tensor, staged = (None if each is None else each[start:stop] for each in (self.tensor, self.staged))
        return Flat(self.array[start:stop], tensor, staged, alone=self.alone)

    def run_on_array(
        self, work: Callable[[], object], reads: Sequence[slice] = ALL, writes: Sequence[slice] = ALL
    ) -> None:
        """Call `work`, which reads and writes these elements of `array`; copy them from and to the GPU where needed."""
        if self.staged is None or self.alone:
            work()
            return
        for span in reads:
            self.staged[span].copy_(self.tensor[span])
        work()
        for span in writes:
            self.tensor[span].copy_(self.staged[span])

    def fetched(self) -> Any:
        """Return `array` after copying the values of `tensor` to it, where these are separate."""
        if self.staged is not None:
            self.staged.copy_(self.tensor)
        return self.array

    def gathering(self, backend: AllReduce, share: Share) -> Callable[[], None]:
        """Return a function that gathers the parts that the ranks own of this memory. Collective, as the function.
        share: this rank's."""
        array, all_gather = self.array, backend.bind(self.array, kind="all_gather")

        def work() -> None:
            share.collect(array)
            all_gather()

        return partial(self.run_on_array, work, reads=share.parts)


class ShardedParameters:
    """Flat parameters, laid out in buckets, each divided among the ranks. The constructor is collective.

    If the ranks of each node together own every element, they share one memory. Otherwise, on a GPU, and where a node
    lacks room, each rank has memory of its own, and the parts are gathered.

    backend: reduces the gradients, which are laid out alike. comm: of all ranks. device: "cpu" or "cuda". buckets: in
    order, perhaps with gaps. shares: of each, the part that this rank updates. allocate: allocate(length, dtype,
    shared=array) returns a Flat, of new memory if the array is None. versions: returns how often each parameter was
    edited in place, by name; or None. copies: 1 or 2.

    cuts: of each bucket, where the parts of any rank begin. flats: the memory, by dtype. shared: whether a node's ranks
        share it. one_copy: whether all ranks do. tells: whether this rank is to send facts about its parts; if not, a
        rank of node 0 owns the same elements. backup: if copies are kept.
    """

    def __init__(
        self,
        backend: AllReduce,
        comm: MPI.Intracomm,
        buckets: Sequence[Bucket],
        shares: Sequence[Share],
        allocate: Callable[..., Flat],
        device: str,
        versions: Callable[[], Mapping[str, int]] | None,
        copies: int,
    ) -> None:
        topology, lengths = backend.topology, {each.dtype: each.stop for each in buckets}
        begins = [[part.start for part in each.parts] for each in shares]
        everyone = all_values(comm, begins, "learn where all ranks' parts begin")
        self.cuts = [sorted(set(chain(*of_bucket))) for of_bucket in zip(*everyone, strict=True)]
        starts = list(accumulate((each.stop - each.start for each in buckets), initial=0))
        places = zip(starts, shares, strict=False)
        parts = [[first + part.start, first + part.stop] for first, share in places for part in share.parts]
        owned = np.array([sum(stop - start for start, stop in parts)])
        of_node = combine(topology.node, owned, "add up the elements that the ranks of a node own")
        whole = on_all(comm, bool(of_node[0] == starts[-1]), "learn whether each node owns all elements")
        self.tells = not whole or topology.node_index == 0
        shared = _shared_by_nodes(comm, topology.node, lengths) if whole and device == "cpu" else {}
        self.shared, self._node = bool(shared), topology.node
        self.one_copy = self.shared and topology.nodes == 1
        self._versions = versions if self.shared and topology.node_size > 1 else None
        self._accepted: Mapping[str, int] = {}
        self.flats = {each: allocate(length, each, shared=shared.get(each)) for each, length in lengths.items()}
        self._gathers: list[Callable[[], None]] = []
        for bucket, share in zip(buckets, shares, strict=True):
            if not self.shared:
                memory = self.flats[bucket.dtype].part(bucket.start, bucket.stop)
                self._gathers.append(memory.gathering(backend, share))
        self.backup = Backup(comm, topology.node_index, parts) if copies == 2 else None

    def share(self) -> None:
        """Give all ranks the parts that each rank has updated. Collective."""
        self.fence()
        for gather in self._gathers:
            gather()

    def fence(self) -> None:
        """Wait until all ranks of a node that share memory have finished writing, and see all writes. Collective over
        the node."""
        if self.shared:
            wait_for(self._node, self._node.Ibarrier(), "fence of shared memory")

    def accept_edits(self, *_: object) -> None:
        """Accept all edits of parameters until now. Local.

        Also a hook of a module's load_state_dict(), which writes the same values on every rank of a node.
        """
        self._accepted = {} if self._versions is None else dict(self._versions())

    def edit_error(self, remedy: str) -> str:
        """Return as text that this rank has edited a parameter in place that other ranks may edit too; "" if it has
        not. Local."""
        now = {} if self._versions is None else self._versions()
        name = next((name for name, edits in now.items() if edits != self._accepted.get(name)), "")
        return EDITED_IN_PLACE.format(name, remedy) if name else ""

    def extend(self, step: int) -> None:
        """Take note that nothing was updated until step `step`. Local."""
        if self.backup is not None:
            self.backup.extend(step)

    def free(self) -> None:
        """Drop the memory, but not the backups. It lives as long as any rank holds a view of it. Local."""
        self.flats, self._gathers, self._versions, self.shared = {}, [], None, False


def _shared_by_nodes(comm: MPI.Intracomm, node: MPI.Intracomm, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return memory of these lengths, by dtype, that the ranks of each node share; {} where a node lacks room.
    Collective over `comm`."""
    arrays: dict[str, np.ndarray] = {}
    try:
        for dtype, length in lengths.items():
            arrays[dtype] = shared_array(node, length, dtypes.parse(dtype))
    except UnavailableError as error:  # raised on all ranks of this node, perhaps not on other nodes
        notices.once(node.rank, f"each rank keeps its own copy of the parameters: {error}")
    there = on_all(comm, len(arrays) == len(lengths), "learn whether each node has a shared segment")
    return arrays if there else {}
