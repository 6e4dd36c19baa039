"""The sharded update: every rank updates only the slice of the parameters whose gradients it has finished.

reduce_scatter -> the user's own optimizer on the flat slice -> all_gather of the parameters. Optimizer
state exists once in all, divided by the ranks. Where ranks that together own everything share a node,
the parameters live in one window of the node, so every rank writes where all read, and nothing is gathered.
S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

import json
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.optim import Optimizer

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.backend import TwoPhase
from allreduce.errors import OptionError
from allreduce.transport.control import all_values, combine, on_all, raise_together, together
from allreduce.transport.shared_segment import CommonSegment
from allreduce.transport.wait import waiting
from trainers.pytorch.buckets import Block, Flat, blocks, changed, flat, parts, version_of
from trainers.pytorch.reducer import Reducer
from trainers.pytorch.state import from_json, to_json
from trainers.replicas.pytorch import fused
from trainers.replicas.pytorch.optimizer import block_on, hyperparameters, optimizer_like
from trainers.replicas.pytorch.tensors import TORCH, as_bytes, as_tensor, shaped
from trainers.state.adopt import Piece, newest
from trainers.state.backup import Backup

PARAMETER = ""  # the name of a parameter among the tensors of its state, in a piece
# The arrays of a piece: JSON, for each block [parameter, offset, length, values], and the bytes of all its tensors.
TEXT, DATA = "entries", "data"
TEXT_BYTES = 1024  # the length of the JSON is a multiple of this
SCALARS = {"step", "eta", "mu", "mu_product"}  # state that is not elementwise, also of a parameter of no dimension


class Kernels:
    """The fused kernels of an optimizer: used only where they are right on all ranks, whose CPUs may differ.

    optimizer: the plain one, with the same options on all ranks. comm: a communicator of all ranks, for `look` alone.
    """

    def __init__(self, optimizer: Optimizer, comm: MPI.Intracomm) -> None:
        self._optimizer, self._rank = optimizer, comm.rank
        self._right: set[fused.Key] = set()
        self.look(comm)

    def look(self, comm: MPI.Intracomm) -> None:
        """Try the kernels for the options that the optimizer has now, on all ranks. Collective."""
        kind = type(self._optimizer)
        if kind not in fused.KINDS:
            return
        needed = [(group, dtype) for group in self._optimizer.param_groups for dtype in fused.dtypes_of(group)]
        right = np.array([fused.works(kind, *each) for each in needed], np.int64)
        combine(comm, right, "try fused kernels", MPI.MIN)
        self._right |= {fused.key_of(kind, *each) for each, is_right in zip(needed, right, strict=True) if is_right}

    def right(self, group: dict[str, object], dtype: torch.dtype) -> bool:
        """Whether the kernel gave the right numbers on all ranks; False when options were changed since. Local."""
        return fused.key_of(type(self._optimizer), group, dtype) in self._right

    def replace_broken(self) -> None:
        """Set `fused` to None in the optimizer's groups whose kernel is not right. Local."""
        if text := fused.replace_broken(self._optimizer, self.right):
            notices.once(self._rank, text)


class Whole(NamedTuple):
    """All parameters and all state of a sharded optimizer after `steps` steps, by the parameters' numbers."""

    steps: int
    parameters: list[Tensor]
    state: list[dict[str, Any]]


class ShardedOptimizer:
    """Updates this rank's blocks of the parameters, which `placement` has moved into flat memory.

    plain: the user's optimizer. Its hyperparameters are used; it has the state only of parameters that are frozen or
        have sparse gradients. comm: a communicator of all ranks. kernels: of `plain`. copies: 2 for a backup.

    `update` is `placement.begin_update`, `step` and `placement.share`. Then every rank updates all parameters with
    sparse gradients: they are in no bucket, and a batch uses a few of their rows, which may all be of one slice.
    """

    def __init__(
        self,
        plain: Optimizer,
        reducer: Reducer,
        backend: TwoPhase,
        comm: MPI.Intracomm,
        kernels: Kernels,
        copies: int = 1,
    ) -> None:
        self._plain, self.reducer, self._comm, self._kernels = plain, reducer, comm, kernels
        kernels.replace_broken()
        group_of = {id(each): at for at, group in enumerate(plain.param_groups) for each in group["params"]}
        self._groups = [group_of[id(each)] for each in reducer.parameters]
        self.apart = dict(zip(reducer.sparse.names, reducer.sparse.parameters, strict=True))  # updated whole
        owned = reducer.owned
        starts = all_values(comm, [each.start for each in owned], "learn where the slices of all ranks begin")
        self._cuts = [sorted(set(of_bucket)) for of_bucket in zip(*starts, strict=True)]  # the same on all ranks
        self.placement = Placement(reducer, backend, comm, owned)
        self.blocks = blocks(reducer.plan, owned, block_on(reducer.device.kind), self._cuts)
        flats = self.placement.flats
        self._parts = [flats[each.dtype][each.start : each.stop] for each in self.blocks]
        self._grads = [reducer.flats[each.dtype][each.start : each.stop] for each in self.blocks]
        self._begun: set[int] = set()  # parameters that have been updated before, by any rank
        self._dtypes: list[set[torch.dtype]] = [set() for _ in plain.param_groups]  # of the averaged parameters
        for group, parameter in zip(self._groups, reducer.parameters, strict=True):
            self._dtypes[group].add(parameter.dtype)
        self.optimizer = optimizer_like(plain, (self._of_group(at) for at in range(len(plain.param_groups))))
        self._starts = list(accumulate((bucket.stop - bucket.start for bucket in reducer.plan), initial=0))
        mine = [[start + own.start, start + own.stop] for start, own in zip(self._starts, owned, strict=False)]
        self.backup = Backup(comm, backend.topology.node_index, mine) if copies == 2 else None
        self.load()
        self.keep(reducer.steps)

    def _one_pass(self, at: int, group: dict[str, Any], parts: list[Tensor], begun: bool) -> dict[str, Any]:
        """The fused implementation, where the user has named none, it can do it, and every state has begun.

        begun: whether that is so on all ranks, which must choose alike: the bits of the two differ.
        """
        free = all(group.get(key) is None for key in ("fused", "foreach"))
        plain = not any(group.get(key) for key in ("differentiable", "capturable"))
        numbers = not any(isinstance(value, Tensor) for key, value in group.items() if key != "params")
        on_host = self.reducer.device.kind == "cpu"  # the states of fused updates on a GPU are others
        if not (type(self._plain) in fused.KINDS and free and plain and numbers and on_host):
            return {}
        begun &= all(self._kernels.right(group, dtype) for dtype in self._dtypes[at])
        states = [self.optimizer.state.get(part) for part in parts if part.grad is not None]
        begun &= all(state and all(value is not None for value in state.values()) for state in states)
        return {"fused": begun or None}

    def _of_group(self, group: int) -> list[Tensor]:
        own = zip(self.blocks, self._parts, strict=True)
        return [part for block, part in own if self._groups[block.parameter] == group]

    def update(self) -> None:
        """Update the parameters from gradients that are averaged, in this rank's part of them at least. Collective."""
        reducer, placement = self.reducer, self.placement
        moved = placement.moved()
        what = f"updates parameters with lr {', '.join(str(float(group['lr'])) for group in self._plain.param_groups)}"
        if moved:
            what += f" after {', '.join(moved)} got other memory"
        begin = partial(placement.begin_update, bool(moved), reducer.take_edits())
        used = reducer.clock.wait(partial(reducer.together, what, begin))
        self.step(used)
        count = reducer.clock.wait if placement.in_common else reducer.clock.communicate
        count(partial(reducer.together, "shares parameters", placement.share))
        if self.apart:
            for parameter in reducer.parameters:
                parameter.grad = None  # these are updated
            self._plain.step()
        if self.backup is not None:
            work = partial(self.keep, reducer.steps + 1)
            reducer.clock.communicate(partial(reducer.together, "backs up slices", work))

    def keep(self, step: int) -> None:
        """Back up the slices, as they are after this step. Runs in the queue."""
        if self.backup is not None:
            self.backup.keep(step, self._pieces())

    def step(self, used: np.ndarray) -> None:
        """Update this rank's blocks. Local.

        used: for each parameter whether any rank has a gradient of it; others are left as they are.
        """
        for block, part, grad in zip(self.blocks, self._parts, self._grads, strict=True):
            part.grad = grad if used[block.parameter] else None
        now = {int(index) for index in np.flatnonzero(used)}
        new = {self._groups[index] for index in now - self._begun}
        self._kernels.replace_broken()  # a state that was loaded may ask for one again
        # Schedulers change the user's groups.
        for at, (mine, group) in enumerate(zip(self.optimizer.param_groups, self._plain.param_groups, strict=True)):
            mine.update(hyperparameters(group) | self._one_pass(at, group, mine["params"], begun=at not in new))
        self.optimizer.step()
        self._begun |= now
        vars(self._plain)["_opt_called"] = True  # schedulers warn when it never was

    def abandon(self) -> None:
        """Give this rank parameters of its own again, and drop the state. Local."""
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()  # its keys lie in the flat memory
        self._parts.clear()
        self._grads.clear()
        self.placement.abandon()

    def close(self) -> None:
        """As `abandon`, and give the memory back. Collective."""
        self.abandon()
        self.placement.close()

    # State, in the format of the plain optimizer

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state_dict, gathered from all ranks, on every rank. Collective."""
        whole = self.join(self._comm, self._pieces(with_parameters=False))
        assert whole is not None
        return self.as_plain(whole.state)

    def _pieces(self, with_parameters: bool = True) -> list[Piece]:
        """This rank's slices of the parameters and of their state. Local.

        A piece is a part of a bucket, cut alike on all ranks, so that pieces of nodes of different sizes fit together.
        """
        held: dict[int, list[tuple[Block, Tensor]]] = {}
        for block, part in zip(self.blocks, self._parts, strict=True):
            held.setdefault(self.reducer.bucket_of[block.parameter], []).append((block, part))
        pieces = []
        for at, (bucket, own, cuts) in enumerate(zip(self.reducer.plan, self.reducer.owned, self._cuts, strict=True)):
            for begin, end in parts(own, cuts):
                inside = [each for each in held.get(at, []) if begin <= each[0].start - bucket.start < end]
                arrays = self._packed(inside, with_parameters)
                pieces.append(Piece(0, 0, self._starts[at] + begin, self._starts[at] + end, {}, arrays))
        return pieces

    def _packed(self, held: list[tuple[Block, Tensor]], with_parameters: bool) -> dict[str, np.ndarray]:
        """The arrays of a piece: these blocks."""
        entries: list[Any] = []
        tensors: list[Tensor] = []
        for block, part in held:
            state = self.optimizer.state.get(part, {})
            values = {PARAMETER: part.detach(), **state} if with_parameters else state
            elementwise = {key: each for key, each in values.items() if isinstance(each, Tensor) and each.dim()}
            rest = {key: each.dtype if key in elementwise else each for key, each in values.items()}
            entries.append([block.parameter, block.offset, part.numel(), rest])
            tensors += elementwise.values()
        text = json.dumps(to_json(entries)).encode()
        text = text.ljust(-(-len(text) // TEXT_BYTES) * TEXT_BYTES)  # counters grow, and the backup's memory stays
        packed = [as_bytes(each.contiguous()) for each in tensors]  # one array: a backup sends each array by itself
        return {TEXT: np.frombuffer(text, np.uint8), DATA: np.concatenate(packed or [np.empty(0, np.uint8)])}

    @torch.no_grad()
    def join(self, comm: MPI.Intracomm, pieces: list[Piece]) -> Whole | None:
        """The newest parameters and state that the pieces of all ranks make up; None when none is whole. Collective."""
        found = newest(comm, pieces, self._starts[-1])
        if found is None:
            return None
        parameters = self.reducer.parameters
        state: list[dict[str, Any]] = [{} for _ in parameters]
        for piece in found.pieces:
            entries = from_json(json.loads(piece.rest[TEXT].tobytes()))
            data = piece.rest[DATA]
            for at, offset, length, values in entries:
                for key, value in values.items():
                    if not isinstance(value, torch.dtype):
                        state[at][key] = value
                        continue
                    if key not in state[at]:
                        state[at][key] = torch.empty(parameters[at].numel(), dtype=value)
                    part = as_bytes(state[at][key][offset : offset + length])
                    part[:], data = data[: part.size], data[part.size :]
        for own, parameter in zip(state, parameters, strict=True):
            for key, value in own.items():
                if isinstance(value, Tensor) and value.dim():
                    own[key] = shaped(value, 0, parameter).to(parameter.device)
        return Whole(found.step, [own.pop(PARAMETER, each) for own, each in zip(state, parameters, strict=True)], state)

    def as_plain(self, gathered: list[dict[str, Any]]) -> dict[str, Any]:
        """The plain optimizer's state_dict, with this state of the averaged parameters. Local."""
        result = self._plain.state_dict()
        numbers = {
            parameter: number
            for packed, group in zip(result["param_groups"], self._plain.param_groups, strict=True)
            for number, parameter in zip(packed["params"], group["params"], strict=True)
        }
        held = [(numbers[each], state) for each, state in zip(self.reducer.parameters, gathered, strict=True) if state]
        result["state"] = dict(sorted([*result["state"].items(), *held], key=lambda each: each[0]))
        return result

    @torch.no_grad()
    def load(self) -> None:
        """Move this rank's part of the state that the user's optimizer holds to here, and drop the rest."""
        self.optimizer.state.clear()
        self._begun = {at for at, each in enumerate(self.reducer.parameters) if self._plain.state.get(each)}
        parts: dict[int, list[tuple[Block, Tensor]]] = {}
        for block, part in zip(self.blocks, self._parts, strict=True):
            parts.setdefault(block.parameter, []).append((block, part))
        for at, parameter in enumerate(self.reducer.parameters):
            for key, value in self._plain.state.pop(parameter, {}).items():
                elementwise = isinstance(value, Tensor) and value.shape == parameter.shape
                if not elementwise or (parameter.dim() == 0 and key in SCALARS):
                    for _, part in parts.get(at, []):
                        self.optimizer.state[part][key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
                shaped(flat, 0, parameter).copy_(value)
                for block, part in parts.get(at, []):
                    stop = block.offset + block.stop - block.start
                    self.optimizer.state[part][key] = flat[block.offset : stop].clone()


class Placement:
    """Moves the parameters into flat memory, laid out like the gradients, and checks that they stay there.

    owned: the part of each bucket that this rank updates. Where the ranks of each node together own everything, they
        share one memory: each rank writes its part, and all ranks read all parts.
    comm: a communicator of all ranks. Creating it and `close` are collective, and so is what "runs in the queue".
    """

    def __init__(self, reducer: Reducer, backend: TwoPhase, comm: MPI.Intracomm, owned: list[slice]) -> None:
        self._reducer, self._backend, self._comm = reducer, backend, comm
        self._windows: list[CommonSegment] = []
        self._owned = owned
        self._memory = self._allocate()
        self.flats = {dtype: memory.tensor for dtype, memory in self._memory.items()}
        self._homes = [reducer.view(index, self.flats) for index in range(len(reducer.parameters))]
        self._addresses = [home.data_ptr() for home in self._homes]
        self._versions: list[int] = []  # of the parameters when their edits were accepted
        self.move_in()

    @property
    def in_common(self) -> bool:
        """True when the ranks of the node share the parameters' memory."""
        return bool(self._windows)

    @property
    def one_memory(self) -> bool:
        """True when all ranks share the parameters' memory, so that these can't differ."""
        return self.in_common and self._backend.topology.nodes == 1

    def _allocate(self) -> dict[str, Flat]:
        node, device = self._backend.topology.node, self._reducer.device
        mine = sum(each.stop - each.start for each in self._owned)
        of_node = combine(node, np.array([mine]), "add up what the ranks of a node own")
        whole = device.kind == "cpu" and of_node[0] == sum(memory.array.size for memory in self._reducer.buckets)
        lengths = {dtype: flat.numel() for dtype, flat in self._reducer.flats.items()}
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
        self._fence()  # no rank reads any more
        for parameter, home in zip(self._reducer.parameters, self._homes, strict=True):
            if writes and parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter)
            parameter.data = home
        self._fence()
        self.accept()

    def accept(self, *_: object) -> None:
        """Accept all edits of parameters until now. Local.

        A hook of the model: load_state_dict() writes the same values on every rank of a node.
        """
        self._versions = [version_of(each) for each in self._reducer.parameters]

    def move_out(self) -> None:
        """Give every rank parameters of its own. Local."""
        for parameter, address in zip(self._reducer.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def moved(self) -> list[str]:
        """The names of parameters with other memory now: `p.data = ...`, `vector_to_parameters`, `model.double()`."""
        own = zip(self._reducer.names, self._reducer.parameters, self._addresses, strict=True)
        return [name for name, parameter, address in own if parameter.data_ptr() != address]

    def begin_update(self, moved: bool, error: Exception | None) -> np.ndarray:
        """Check that all ranks may update. Returns for each parameter whether any rank has a gradient of it.

        Runs in the queue. Once all ranks are here, no rank reads the parameters any more. Raises on all ranks when
        parameters were edited in a way that can't be made right.

        moved: whether some parameters have other memory, alike on all ranks; they are moved back. error: why this rank
            can't update; raised on all ranks.
        """
        if moved:
            self.move_in()
        edited = self._edited()
        used = [each.grad is not None for each in self._reducer.parameters]
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
        """Give all ranks the parts that each rank has updated. Runs in the queue."""
        if self.in_common:
            self._fence()
            return
        for bucket, mine in zip(self._reducer.plan, self._owned, strict=True):
            memory = self._memory[bucket.dtype].part(bucket.start, bucket.stop)
            memory.through(self._backend.all_gather, reads=mine)

    def abandon(self) -> None:
        """Give this rank parameters of its own again. Local."""
        self.move_out()
        for held in (self._homes, self.flats, self._memory):
            held.clear()

    def close(self) -> None:
        """Give every rank parameters of its own again, and the memory back. Collective."""
        self.abandon()
        for window in self._windows:
            window.free()
        self._windows.clear()

    def _misfit(self) -> OptionError | None:
        for name, parameter, home in zip(self._reducer.names, self._reducer.parameters, self._homes, strict=True):
            if parameter.dtype != home.dtype or parameter.shape != home.shape:
                return OptionError(changed(name, parameter, tuple(home.shape), home.dtype))
        return None

    def _edited(self) -> list[str]:
        """The names of parameters in shared memory that this rank has edited in place since the last update."""
        if not self.in_common:
            return []
        own = zip(self._reducer.names, self._reducer.parameters, self._versions, strict=True)
        return [name for name, parameter, version in own if version_of(parameter) != version]

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


def _windows(node: MPI.Intracomm, lengths: dict[str, int]) -> dict[str, CommonSegment]:
    return {dtype: CommonSegment(node, length, dtypes.parse(dtype)) for dtype, length in lengths.items()}
