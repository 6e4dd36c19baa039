"""Where the parameters of a sharded update live: in flat memory, which the ranks of a node may have in common."""

from functools import partial

import numpy as np
import torch
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.errors import OptionError
from allreduce.messages.agreement import combine, on_all, raise_together, together, waiting
from allreduce.messages.window import CommonWindow
from allreduce.two_phase import TwoPhase
from trainers.pytorch.averaging import Averager
from trainers.pytorch.buffers import Flat, flat
from trainers.pytorch.hooks import Hook
from trainers.replicas.pytorch.tensors import TORCH, as_tensor


class Placement:
    """Moves the parameters into flat memory, laid out like the gradients, and sees that they stay there.

    owned: for each bucket what this rank finishes. Where the ranks of each node together own everything, they have
        one memory in common, in which everyone writes what all read.
    comm: a communicator of all ranks. Creating it and `close` are collective, and so is what "runs in the lane".
    """

    def __init__(self, averager: Averager, backend: TwoPhase, comm: MPI.Intracomm, owned: list[slice]) -> None:
        self._averager, self._backend, self._comm = averager, backend, comm
        self._windows: list[CommonWindow] = []
        self._owned = owned
        self._memory = self._allocate()
        self.flats = {dtype: memory.tensor for dtype, memory in self._memory.items()}
        self._homes = [averager.place(index, self.flats) for index in range(len(averager.parameters))]
        self._addresses = [home.data_ptr() for home in self._homes]
        self._versions: list[int] = []  # of the parameters when they were last as they should be
        self.move_in()

    @property
    def in_common(self) -> bool:
        """True when the parameters live in memory that the ranks of the node have in common."""
        return bool(self._windows)

    @property
    def one_memory(self) -> bool:
        """True when all ranks have the parameters in common, so that they can't differ."""
        return self.in_common and self._backend.topology.nodes == 1

    def _allocate(self) -> dict[str, Flat]:
        node, device = self._backend.topology.node, self._averager.device
        mine = sum(each.stop - each.start for each in self._owned)
        of_node = combine(node, np.array([mine]), "add up what the ranks of a node own")
        whole = device.kind == "cpu" and of_node[0] == sum(memory.array.size for memory in self._averager.buckets)
        lengths = {dtype: flat.numel() for dtype, flat in self._averager.flats.items()}
        if on_all(self._comm, whole, "see whether each node owns everything"):
            make = partial(_windows, node, lengths)
            made = together(self._comm, make)  # one node's memory may be full
            self._windows = list(made.values())
            arrays = {dtype: window.array for dtype, window in made.items()}
            return {dtype: Flat(array, as_tensor(array, TORCH[dtype]), None) for dtype, array in arrays.items()}
        return {dtype: flat(self._backend, length, dtype, device) for dtype, length in lengths.items()}

    @torch.no_grad()
    def move_in(self) -> None:
        """Make every parameter a view of the flat memory, with its values, which are equal on all ranks. Collective.

        Raises an OptionError on all ranks, before anything is changed, when a parameter has another dtype or shape
        than it had.
        """
        raise_together(self._comm, self._misfit())
        writes = not self.in_common or self._backend.topology.node_rank == 0
        self._fence()  # nobody reads any more
        for parameter, home in zip(self._averager.parameters, self._homes, strict=True):
            if writes and parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter)
            parameter.data = home
        self._fence()
        self.accept()

    def accept(self) -> None:
        """Note that the parameters are as they should be: edits before this are no reason to complain. Local."""
        self._versions = [each._version for each in self._averager.parameters]

    def move_out(self) -> None:
        """Give every rank parameters of its own. Local."""
        for parameter, address in zip(self._averager.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def moved(self) -> list[str]:
        """The parameters that were given other memory: `p.data = ...`, `vector_to_parameters`, `model.double()`."""
        own = zip(self._averager.names, self._averager.parameters, self._addresses, strict=True)
        return [name for name, parameter, address in own if parameter.data_ptr() != address]

    def settle(self, moved: bool, error: Exception | None) -> np.ndarray:
        """See that all ranks may update; for each parameter whether any rank has a gradient of it. Runs in the lane.

        moved: whether some parameters have other memory; alike on all ranks. They are moved in again.
        error: why this rank can't go on, if it can't; raised on all ranks.
        When all ranks have come here they have stopped reading the parameters. Raises on all ranks when these
        were edited in a way that can't be made right.
        """
        if moved:
            self.move_in()
        edited = self._edited()
        used = [each.grad is not None for each in self._averager.parameters]
        found = np.array([error is not None, bool(edited), *used], np.uint8)
        if self._comm.size > 1:
            with waiting(self._comm, "begin an update"):
                self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        if found[0]:
            raise_together(self._comm, error)
        if found[1]:
            self._refuse_edits(edited)
            self.accept()
        return found[2:]

    def share(self) -> None:
        """Let all ranks see what each of them has updated. Runs in the lane."""
        if self.in_common:
            self._fence()
            return
        for bucket, mine in zip(self._averager.plan, self._owned, strict=True):
            memory = self._memory[bucket.dtype].part(bucket.start, bucket.stop)
            memory.through(self._backend.all_gather, reads=mine)

    def let_go(self) -> None:
        """Give this rank parameters of its own again. Local."""
        self.move_out()
        for held in (self._homes, self.flats, self._memory):
            held.clear()

    def close(self) -> None:
        """Give every rank parameters of its own again, and the memory back. Collective."""
        self.let_go()
        for window in self._windows:
            window.free()
        self._windows.clear()

    def _misfit(self) -> OptionError | None:
        for name, parameter, home in zip(self._averager.names, self._averager.parameters, self._homes, strict=True):
            if parameter.dtype != home.dtype or parameter.shape != home.shape:
                return OptionError(
                    f"{name} has become {tuple(parameter.shape)} {parameter.dtype} since MirroredOptimizer was made, "
                    f"where it was {tuple(home.shape)} {home.dtype}; close() it and make it again after such a change"
                )
        return None

    def _edited(self) -> list[str]:
        """The parameters of the common memory that were edited in place on this rank since the last update."""
        if not self.in_common:
            return []
        own = zip(self._averager.names, self._averager.parameters, self._versions, strict=True)
        return [name for name, parameter, version in own if parameter._version != version]

    def _refuse_edits(self, edited: list[str]) -> None:
        """Raise on all ranks unless one rank of every node has edited its memory. Collective."""
        topology = self._backend.topology
        what = "count the ranks that have edited parameters"
        editors = combine(topology.node, np.array([bool(edited)], np.int64), what)[0]
        nodes = combine(self._comm, np.array([topology.node_rank == 0 and editors > 0], np.int64), what)[0]
        most = combine(self._comm, np.array([editors]), what, MPI.MAX)[0]
        error = None
        if edited and (most > 1 or nodes < topology.nodes):
            where, hence = "several ranks", "it may have been edited several times"
            if most == 1:
                where, hence = f"{nodes} of {topology.nodes} nodes", "the replicas of the nodes differ now"
            error = OptionError(
                f'{edited[0]} was edited in place on {where} (p.mul_(...), say), and with update="sharded" the '
                f"parameters of all ranks of a node are the same memory, so {hence}; "
                "do it inside of `with optimizer.editing():`, which keeps what rank 0 makes of it"
            )
        raise_together(self._comm, error)

    def _fence(self) -> None:
        for window in self._windows:
            window.fence()


class AfterLoading(Hook[Placement]):
    """A model's: load_state_dict() has written the same values on every rank of a node, and may do so."""

    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        placement = self._user()
        if placement is not None:
            placement.accept()


def _windows(node: MPI.Intracomm, lengths: dict[str, int]) -> dict[str, CommonWindow]:
    return {dtype: CommonWindow(node, length, dtypes.parse(dtype)) for dtype, length in lengths.items()}
