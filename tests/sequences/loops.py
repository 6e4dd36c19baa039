"""Random sequences of PyTorch training loops: several MirroredOptimizers, and DDP over our process group, side by
side."""

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import allreduce
from allreduce.arrays.chunks import chunk
from tests.backends import ON_CPU, ON_NODES, SHARDED
from tests.sequences.calls import Calls, FailureError
from tests.sequences.models import CLASSES, FEATURES
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.pytorch import Buckets, MirroredOptimizer

WIDTH = 5


class WantedError(Exception):
    """An error that a backward raises on purpose."""


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise WantedError("as the sequence wants it")


class Net(nn.Module):
    """A model with two branches; a batch may use only one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, branches: str = "both", raises: bool = False) -> Tensor:
        hidden = self.first(x) if branches in ("both", "first") else 0.0
        if raises:
            hidden = Raises.apply(hidden)
        if branches in ("both", "second"):
            hidden = hidden + self.second(x)
        return self.last(torch.tanh(hidden))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def loss(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(x, **options), y)


class Loop:
    """A model with its shadow; `optimizer` is the mirrored one, or a plain one beside DDP."""

    def __init__(self, kind: str, seed: int, ddp: bool) -> None:
        torch.manual_seed(seed)
        self.kind, self.ddp = kind, ddp
        self.model = Net()
        self.shadow = copy.deepcopy(self.model)
        self.shadow_optimizer = KINDS[kind](self.shadow.parameters())
        self.plain = KINDS[kind](self.model.parameters())
        self.called: Any = nn.parallel.DistributedDataParallel(self.model) if ddp else self.model
        self.optimizer: Any = self.plain
        self.name = "DDP" if ddp else "none"
        self.skips = self.raises = False


class Loops(Calls):
    """One sequence. Collective."""

    def __init__(self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool) -> None:
        super().__init__(comm, seed, folder, verbose)
        self.loops: list[Loop] = []
        self.topologies: list[allreduce.Topology] = []
        self.numbers = np.random.default_rng(seed)

    def run(self, calls: int) -> None:
        actions: list[tuple[Callable[[Loop], None], int]] = [
            (self.steps, 6), (self.rows, 2), (self.accumulates, 2), (self.clips, 2), (self.closure, 1),
            (self.forgets, 2), (self.not_finite, 2), (self.raises, 2), (self.join, 1), (self.edit, 1), (self.rates, 1),
            (self.again, 2), (self.refused_again, 1), (self.together, 2), (self.forward, 1), (self.state, 1),
        ]  # fmt: skip
        for _ in range(calls):
            if not self.loops or (len(self.loops) < 3 and self.chance(0.15)):
                self.begin()
                continue
            loop = self.pick(*self.loops)
            ((action, _),) = self.draw.choices(actions, [weight for _, weight in actions])
            action(loop)
            for each in self.loops:
                self.compare(each)
        while self.loops:
            loop = self.pick(*self.loops)
            self.loops.remove(loop)
            if not loop.ddp:
                self.note(f"close {loop.name}")
                self.well("close", loop.optimizer.close)
        for topology in self.topologies:
            self.well("Topology.close", topology.close)

    # Making

    def begin(self) -> None:
        kind, seed, ddp = self.pick(*KINDS), self.draw.randrange(100), self.chance(0.2)
        loop = self.well("Net", lambda: Loop(kind, seed, ddp))
        if ddp:
            self.note(f"DDP with {kind}")
        else:
            self.make(loop)
        self.loops.append(loop)

    def make(self, loop: Loop) -> None:
        update = self.pick("replicated", "sharded")
        backend = self.pick(*(SHARDED if update == "sharded" else ON_CPU))
        if not self.topologies or self.chance(0.1):
            nodes = self.pick(None, None, 2, 1)
            made = self.well("Topology", lambda: allreduce.Topology(ranks_per_node=nodes))
            self.topologies.append(made)
        topology = self.pick(None, *self.topologies) if backend in ON_NODES else None
        options = {
            "update": update,
            "buckets": Buckets(self.pick(True, False, "auto"), self.pick(25.0, 1e-4), self.pick(1.0, 1e-5)),
        }
        every, on_bad = self.pick(1000, 1, 0), self.pick(None, "raise", "skip")
        options["checks"] = [CheckDivergence(every), *([] if on_bad is None else [CheckGradients(on_bad)])]
        loop.name = f"MirroredOptimizer({loop.kind}, {backend}, {options})"
        self.note(f"make {loop.name}, {'own' if topology is None else 'shared'} topology")
        loop.raises, loop.skips = on_bad == "raise", on_bad == "skip"
        loop.optimizer = self.well(
            "make", lambda: MirroredOptimizer(loop.plain, loop.model, backend, topology=topology, **options)
        )

    def compare(self, loop: Loop) -> None:
        here = [parameter.detach().numpy().tobytes() for parameter in loop.model.parameters()]
        self.check(here == self.comm.bcast(here), f"{loop.name}: ranks have different parameters")
        pairs = zip(loop.model.named_parameters(), loop.shadow.parameters(), strict=True)
        for (name, parameter), wanted in pairs:
            near = torch.allclose(parameter, wanted, rtol=2e-3, atol=5e-4)
            self.check(near, f"{loop.name}: {name} is {parameter}, and one rank has {wanted}")
        with torch.no_grad():
            for parameter, wanted in zip(loop.model.parameters(), loop.shadow.parameters(), strict=True):
                wanted.copy_(parameter)

    # Batches

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return all rows, on every rank."""
        x = self.numbers.normal(size=(rows, FEATURES)).astype("float32")
        return torch.from_numpy(x), torch.from_numpy(np.abs(x[:, :CLASSES]).argmax(1))

    def equal(self) -> tuple[Tensor, Tensor, slice]:
        share = self.draw.randrange(1, 4)
        return (*self.batch(share * self.size), slice(self.rank * share, (self.rank + 1) * share))

    def shadow_step(self, loop: Loop, x: Tensor, y: Tensor, **options: Any) -> None:
        loop.shadow_optimizer.zero_grad()
        loss(loop.shadow, x, y, **options).backward()
        loop.shadow_optimizer.step()

    def step(self, loop: Loop, x: Tensor, y: Tensor, **options: Any) -> None:
        loop.optimizer.zero_grad()
        loss(loop.called, x, y, **options).backward()
        loop.optimizer.step()

    # Steps

    def steps(self, loop: Loop) -> None:
        count = self.draw.randrange(1, 4)
        branches = "both" if loop.ddp else self.pick("both", "both", "first")
        self.note(f"{count} steps of {loop.name}, {branches}")
        for _ in range(count):
            x, y, mine = self.equal()
            self.well("step", lambda x=x, y=y, mine=mine: self.step(loop, x[mine], y[mine], branches=branches))
            self.shadow_step(loop, x, y, branches=branches)

    def rows(self, loop: Loop) -> None:
        """Train with different numbers of rows on the ranks, perhaps none."""
        if loop.ddp:
            return
        number = self.pick(1, self.size, self.size + 1, 7)
        self.note(f"{number} rows for {loop.name}")
        x, y = self.batch(number)
        mine = chunk(number, self.size, self.rank)

        def action() -> None:
            optimizer = loop.optimizer
            optimizer.zero_grad()
            optimizer.rows(mine.stop - mine.start)
            if mine.stop > mine.start:
                loss(loop.model, x[mine], y[mine]).backward()
            else:
                (loss(loop.model, *self.nothing()) * 0).backward()
            optimizer.step()

        self.well("rows", action)
        self.shadow_step(loop, x, y)

    @staticmethod
    def nothing() -> tuple[Tensor, Tensor]:
        return torch.zeros(1, FEATURES), torch.zeros(1, dtype=torch.int64)

    def accumulates(self, loop: Loop) -> None:
        """Two backwards for one step: with no_sync, or each averaged."""
        apart = loop.ddp or self.chance(0.5)
        self.note(f"two backwards of {loop.name}, {'no_sync' if apart else 'each averaged'}")
        parts = [self.equal() for _ in range(2)]
        loop.shadow_optimizer.zero_grad()
        for x, y, _ in parts:
            loss(loop.shadow, x, y).backward()
        loop.shadow_optimizer.step()

        def action() -> None:
            loop.optimizer.zero_grad()
            (x, y, mine), (x2, y2, mine2) = parts
            if apart:
                with loop.called.no_sync() if loop.ddp else loop.optimizer.no_sync():
                    loss(loop.called, x[mine], y[mine]).backward()
            else:
                loss(loop.called, x[mine], y[mine]).backward()
                loop.optimizer.synchronize()
            loss(loop.called, x2[mine2], y2[mine2]).backward()
            loop.optimizer.step()

        self.well("accumulate", action)

    def clips(self, loop: Loop) -> None:
        self.note(f"clip gradients of {loop.name}")
        x, y, mine = self.equal()
        loop.shadow_optimizer.zero_grad()
        loss(loop.shadow, x, y).backward()
        nn.utils.clip_grad_norm_(loop.shadow.parameters(), 0.1)
        loop.shadow_optimizer.step()

        def action() -> None:
            loop.optimizer.zero_grad()
            loss(loop.called, x[mine], y[mine]).backward()
            if not loop.ddp:
                loop.optimizer.synchronize()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()

        self.well("clip", action)

    def closure(self, loop: Loop) -> None:
        self.note(f"a closure for {loop.name}")
        x, y, mine = self.equal()

        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            value = loss(loop.called, x[mine], y[mine])
            value.backward()
            return value

        self.well("closure", lambda: loop.optimizer.step(closure))
        self.shadow_step(loop, x, y)

    def forgets(self, loop: Loop) -> None:
        """A backward whose gradients are not used, and whose rows were set."""
        self.note(f"a backward of {loop.name} that is forgotten")
        x, y, mine = self.equal()
        tells, apart = not loop.ddp and self.chance(0.3), not loop.ddp and self.chance(0.3)

        def action() -> None:
            if tells:
                loop.optimizer.rows(1)
            if apart:
                with loop.optimizer.no_sync():
                    loss(loop.called, x[mine], y[mine]).backward()
            else:
                loss(loop.called, x[mine], y[mine]).backward()
            loop.optimizer.zero_grad()

        self.well("forget", action)

    def not_finite(self, loop: Loop) -> None:
        """One rank's gradients are NaN."""
        if not (loop.raises or loop.skips):
            return
        victim = self.draw.randrange(self.size)
        self.note(f"NaN on rank {victim} for {loop.name}")
        x, y, mine = self.equal()
        x[mine] *= np.nan if self.rank == victim else 1.0
        if loop.raises:
            self.refused("NaN", lambda: self.step(loop, x[mine], y[mine]), "NotFiniteError")
        else:
            self.well("NaN", lambda: self.step(loop, x[mine], y[mine]))
        self.well("zero_grad", loop.optimizer.zero_grad)

    def raises(self, loop: Loop) -> None:
        """A backward raises on all ranks, in the middle or before it begins, and the loop continues."""
        if loop.ddp:  # whose buckets are half reduced then, for good
            return
        where = self.pick("forward", "backward")
        self.note(f"an error in {where} of {loop.name}")
        x, y, mine = self.equal()

        def action() -> None:
            loop.optimizer.zero_grad()
            if where == "forward":
                loss(loop.called, x[mine, :-1], y[mine]).backward()
            loss(loop.called, x[mine], y[mine], raises=True).backward()

        self.refused("error", action, "WantedError", "RuntimeError")
        self.well("zero_grad", loop.optimizer.zero_grad)

    def join(self, loop: Loop) -> None:
        """Ranks with different numbers of batches."""
        if loop.ddp or len([each for each in self.loops if not each.ddp]) > 1:
            return
        counts = [self.draw.randrange(0, 4) for _ in range(self.size)]
        self.note(f"join of {loop.name}: {counts} batches")
        batches = [self.batch(self.size) for _ in range(max(counts))]

        def action() -> None:
            with loop.optimizer.join():
                for x, y in batches[: counts[self.rank]]:
                    loop.optimizer.zero_grad()
                    loss(loop.model, x[self.rank :][:1], y[self.rank :][:1]).backward()
                    loop.optimizer.step()

        self.well("join", action)
        for number, (x, y) in enumerate(batches):
            there = [rank for rank in range(self.size) if counts[rank] > number]
            self.shadow_step(loop, x[there], y[there])

    def together(self, loop: Loop) -> None:
        """One backward through several models, in a different order on each rank."""
        loops = [each for each in self.loops if not each.ddp]
        if len(loops) < 2 or loop.ddp:
            return
        self.note(f"one backward of {len(loops)} models")
        x, y, mine = self.equal()
        for each in loops:
            self.shadow_step(each, x, y)

        def action() -> None:
            for each in loops:
                each.optimizer.zero_grad()
            ordered = loops if self.rank % 2 else loops[::-1]
            sum(loss(each.model, x[mine], y[mine]) for each in ordered).backward()  # type: ignore[union-attr]
            for each in loops:
                each.optimizer.step()

        self.well("together", action)

    # Others

    def forward(self, loop: Loop) -> None:
        x, _ = self.batch(3)
        with torch.no_grad():
            found = self.well("forward", lambda: loop.model(x))
            near = torch.allclose(found, loop.shadow(x), rtol=1e-2, atol=1e-3)
        self.check(near, f"{loop.name}: forward gave {found}")

    def edit(self, loop: Loop) -> None:
        if loop.ddp:
            return
        self.note(f"edit {loop.name}")

        def action() -> None:
            with loop.optimizer.editing(), torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.mul_(0.9)

        self.well("editing", action)
        with torch.no_grad():
            for parameter in loop.shadow.parameters():
                parameter.mul_(0.9)

    def rates(self, loop: Loop) -> None:
        factor = self.pick(0.5, 2.0)
        self.note(f"learning rates of {loop.name} times {factor}")
        for optimizer in (loop.optimizer, loop.shadow_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = min(0.05, group["lr"] * factor)

    def state(self, loop: Loop) -> None:
        """Take the state and load it again, perhaps from rank 0 alone; the shadow does the same."""
        alone = not loop.ddp and self.chance(0.5)
        self.note(f"state_dict of {loop.name}, and back")
        taken = self.well("state_dict", lambda: copy.deepcopy(loop.optimizer.state_dict()))
        wanted = loop.shadow_optimizer.state_dict()["state"]
        self.check(
            set(taken["state"]) == set(wanted), f"{loop.name}: state of {set(taken['state'])}, not {set(wanted)}"
        )
        for number, entries in wanted.items():
            for name, value in entries.items():
                found = taken["state"][number][name]
                near = found is value or torch.allclose(
                    torch.as_tensor(found, dtype=torch.float32), torch.as_tensor(value, dtype=torch.float32),
                    rtol=1e-2, atol=1e-3,
                )  # fmt: skip
                self.check(near, f"{loop.name}: {name} of parameter {number} is {found}, and one rank has {value}")
        given = None if alone and self.rank else taken
        self.well("load_state_dict", lambda: loop.optimizer.load_state_dict(given))

    def again(self, loop: Loop) -> None:
        """Close the optimizer, and create it again with other options and its state."""
        if loop.ddp:
            return
        self.note(f"close {loop.name}, and make it again")
        taken = self.well("state_dict", lambda: copy.deepcopy(loop.optimizer.state_dict()))
        self.well("close", loop.optimizer.close)
        if self.chance(0.3):
            self.well("close again", loop.optimizer.close)
        if self.chance(0.3):
            x, y = self.batch(2)
            self.refused("backward after close", lambda: loss(loop.model, x, y).backward(), "ClosedError")
            loop.model.zero_grad()
        loop.plain = KINDS[loop.kind](loop.model.parameters())
        self.make(loop)
        self.well("load_state_dict", lambda: loop.optimizer.load_state_dict(taken))

    def refused_again(self, loop: Loop) -> None:
        if loop.ddp:
            return
        self.note(f"a second optimizer on what {loop.name} has")
        other = KINDS[loop.kind](loop.model.parameters())
        self.refused("second", lambda: MirroredOptimizer(other, loop.model), "OptionError")


def begin_group(comm: MPI.Intracomm) -> None:
    """Create the process group that DDP uses, once in a process."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "localhost")
        dist.init_process_group("allreduce")


__all__ = ["FailureError", "Loops", "begin_group"]
