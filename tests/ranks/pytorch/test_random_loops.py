"""MirroredOptimizer in loops that are drawn: whatever a program does before, in and after a step, the parameters and
the state are those of one process that has the rows of all ranks."""

import contextlib
import copy
import gc
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn import functional

import allreduce
from allreduce import errors
from tests.ranks.pytorch.trained import EDITS, OPTIMIZERS, SIZE, SMALL_BUCKETS, Raises, assert_mirrored
from trainers import ClipNorm, Sharded, SkipNotFinite
from trainers.callbacks import CheckDivergence
from trainers.pytorch import Buckets, MirroredOptimizer

RANK, STEPS, NORM = MPI.COMM_WORLD.rank, 8, 0.1


class Net(nn.Module):
    """A parameter without dimensions, and layers of two dtypes and two layouts; `middle` has two names, and is used as
    often as a rank likes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Conv2d(3, 16, 2).to(memory_format=torch.channels_last)
        self.middle = self.again = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3).double()

    def forward(self, x: Tensor, first: bool = True, middles: int = 1, fails: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x).flatten(1) * self.scale)
        hidden = hidden if first else hidden.detach()
        for _ in range(middles):
            hidden = torch.tanh(self.middle(hidden))
        return self.last(Raises.apply(hidden).double() if fails else hidden.double())


class Loop:
    """A model under MirroredOptimizer, or under two, and one that this rank trains alone. All ranks draw the same.

    did: what was drawn, for the texts of errors. frozen: the names of parameters. counts: of the steps since the
    optimizers were made, and of those that were left out. norms: of the last step that was taken.
    """

    def __init__(self, seed: int, topology: allreduce.Topology, stack: contextlib.ExitStack) -> None:
        self.draw = random.Random(seed)
        self.kind, overlap = self.draw.choice([*OPTIMIZERS]), self.chance(0.6)
        self.two, self.clips = self.chance(), self.chance()
        self.skips = not self.two and self.chance()
        transforms: list[Any] = [ClipNorm(NORM)] * self.clips + [SkipNotFinite()] * self.skips
        transforms += [CheckDivergence(1)] * self.chance()
        self.options: dict[str, Any] = {"transforms": transforms, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
        self.options["update"] = self.draw.choice(["replicated", "sharded", Sharded(shard="tensors")])
        self.did: list[Any] = [self.kind, self.two, self.options]
        backend = self.two and self.chance()
        shared = {"allreduce": stack.enter_context(allreduce.create("ring", topology))} if backend else {}
        own = self.two and not backend and self.chance(0.5)
        self.where: list[dict[str, Any]] = [shared or {"topology": topology}] * 2
        if own:
            self.where[1] = {"topology": stack.enter_context(allreduce.Topology())}
        self.model, self.alone = Net(seed + RANK), Net(seed)
        self.plain = self.made(self.alone)
        self.frozen: set[str] = set()
        self.wrap()

    def chance(self, probability: float = 0.3) -> bool:
        return self.draw.random() < probability

    def modules(self, net: Net) -> list[nn.Module]:
        """Return the modules, one for each optimizer."""
        parameters = [*net.parameters()]
        return [nn.ParameterList(parameters[:3]), nn.ParameterList(parameters[3:])] if self.two else [net]

    def made(self, net: Net) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[self.kind](module.parameters()) for module in self.modules(net)]

    def wrap(self, states: Any = None) -> None:
        """Wrap the model anew; rank 0's plain optimizers have the states, or they are loaded then."""
        for name in [*self.frozen]:
            self.freeze(name)
        before, made = self.chance(0.5), self.made(self.model)
        for number, plain in enumerate(made):
            if states is not None and before and RANK == 0:
                plain.load_state_dict(states[number])
        self.optimizers = [
            MirroredOptimizer(plain, module, **where, **self.options)
            for plain, module, where in zip(made, self.modules(self.model), self.where, strict=False)
        ]
        for number, optimizer in enumerate(self.optimizers):
            if states is not None and not before:
                optimizer.load_state_dict(states[number] if RANK == 0 else None)
        self.counts, self.norms = [0, 0], [float("nan")] * len(made)

    def states(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    # One step

    def batch(self) -> tuple[tuple[Tensor, bool, int], Tensor]:
        """Draw the rows of a backward of one rank, with the layers that it uses."""
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        x = torch.randn(4, 3, 2, 2, generator=generator)
        return (x, self.chance(0.8), self.draw.choice([0, 1, 1, 2])), torch.randint(0, 3, (4,), generator=generator)

    def step(self) -> None:
        """One step of both models, whose gradients are the sums of up to four backwards of each rank."""
        told, again = self.chance(), self.options["update"] == "replicated" and not self.two and self.chance()
        rows = [self.draw.randrange(4) for _ in range(SIZE)] if told else [1] * SIZE
        rows[self.draw.randrange(SIZE)] += told
        counts = [2 if again else self.draw.randrange(4) for _ in range(SIZE)]
        counts[rows.index(max(rows))] += not again
        batches = [[self.batch() for _ in range(count)] for count in counts]
        uses = [given for of_rank in batches for given, _ in of_rank]
        kept = not self.frozen and any(first for _, first, _ in uses) and any(middles for *_, middles in uses)
        way = self.draw.choice(["none", "model none", *["zeros"] * kept])
        if kept and self.options["update"] == "replicated" and self.chance():
            way = "model zeros"
        alone, closure = self.chance() and not told, not (again or self.two) and self.chance(0.2)
        bad = rows.index(max(rows)) if self.skips and not (again or closure) and self.chance() else None
        self.did.append([rows * told, counts, again, way, alone, closure, bad])

        def forget(model: nn.Module, optimizers: Any) -> None:
            for each in [model] if "model" in way else optimizers:
                each.zero_grad(set_to_none="none" in way)

        def tell() -> None:
            for optimizer in self.optimizers if told else ():
                optimizer.rows(rows[RANK])

        def backward() -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for number, (given, y) in enumerate(batches[RANK]):
                finite = closure or (rows[RANK] and bad != RANK)
                loss = functional.cross_entropy(self.model(*given), y) * (1 if finite else float("nan"))
                averages = again or (number + 1 == counts[RANK] and not alone)
                with contextlib.ExitStack() as stack:
                    for optimizer in () if averages else self.optimizers:
                        stack.enter_context(optimizer.no_sync())
                    loss.backward()
                total += loss.detach()
            return total

        if ("model" not in way or all(counts)) and self.chance():
            self.throw_away(told="model" not in way and self.chance(0.5))
        forget(self.alone, self.plain)
        losses = [sum(functional.cross_entropy(self.alone(*given), y) for given, y in each) for each in batches]
        mean = sum(loss * weight for loss, weight in zip(losses, rows, strict=True)) / sum(rows)
        mean.backward()
        steps = [tell, partial(forget, self.model, self.optimizers)]
        for each in steps if self.chance(0.5) else steps[::-1]:
            each()
        if closure:
            loss = self.optimizers[0].step(lambda: (forget(self.model, self.optimizers), backward())[1])
            torch.testing.assert_close(loss, mean.detach(), rtol=1e-4, atol=1e-5)
        else:
            backward()
            if not alone and all(counts) and bad is None and self.chance(0.2):
                self.did.append("forgotten")
                for net in (self.model, self.alone):
                    net.last.weight.grad = None
            if bad is None:
                self.edit()
            for optimizer in self.optimizers:
                optimizer.step()
        self.counts[0] += 1
        self.counts[1] += bad is not None
        if bad is None:
            self.step_alone()

    def step_alone(self) -> None:
        if self.clips:
            self.norms = self.clip_alone()
        for plain in self.plain:
            plain.step()

    def throw_away(self, told: bool) -> None:
        """A backward, on all ranks, whose gradients are forgotten; some raise in the middle. told: of rows."""
        fails = self.chance(0.5)
        self.did.append(["thrown away", fails, told])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            if told and not fails:
                optimizer.rows(RANK + 1)
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            self.model(torch.ones(1, 3, 2, 2), fails=fails).sum().backward()
        self.states()

    def clip_alone(self) -> list[float]:
        clip = nn.utils.clip_grad_norm_
        return [float(clip([p for group in plain.param_groups for p in group["params"]], NORM)) for plain in self.plain]

    def edit(self) -> None:
        """Change the averages of both models alike."""
        for _ in range(number := self.draw.choice([0, 0, 1, 2])):
            for optimizer in self.optimizers:
                optimizer.synchronize()
        if number and self.chance(0.5):
            how, part = self.draw.choice([*EDITS]), self.draw.randrange(3)
            self.did.append([how, part])
            for pair in [*zip(self.model.parameters(), self.alone.parameters(), strict=True)][part:]:
                here, there = (each.grad is not None for each in pair)
                assert here == there, str(self.did)
                for each in pair:
                    if here or how == "give":
                        EDITS[how](each)
        if self.chance():
            self.did.append("clip")
            norms = self.clip_alone()
            assert [each.clip_grad_norm_(NORM) for each in self.optimizers] == pytest.approx(norms, rel=1e-4), str(
                self.did
            )

    # Between two steps

    def change(self) -> None:
        """Something that a program does between steps."""
        ways = [self.other_memory, self.editing, self.toggle, self.begin_again, self.drop, self.pickle, self.compare]
        way = self.draw.choice([*ways, self.compare if self.two else self.join])
        self.did.append(way.__name__)
        way()

    def join(self) -> None:
        """Ranks have different numbers of batches, with equal numbers of rows."""
        batches, told = [[self.batch() for _ in range(self.draw.randrange(4))] for _ in range(SIZE)], self.chance(0.5)
        self.did.append([[*map(len, batches)], told])
        (optimizer,), (plain,) = self.optimizers, self.plain
        with optimizer.join():
            for given, y in batches[RANK]:
                optimizer.zero_grad()
                if told:
                    optimizer.rows(len(y))
                functional.cross_entropy(self.model(*given), y).backward()
                optimizer.step()
        for step in range(steps := max(map(len, batches))):
            plain.zero_grad()
            active = [each[step] for each in batches if each[step:]]
            losses = [functional.cross_entropy(self.alone(*given), y) for given, y in active]
            (sum(losses) / len(losses)).backward()
            self.step_alone()
        self.counts[0] += steps

    def other_memory(self) -> None:
        way = self.draw.choice(["data", "vector", "double"])
        for net in (self.model, self.alone):
            if way == "data":
                net.middle.weight.data = net.middle.weight.data * 0.5
            elif way == "vector":
                vector = nn.utils.parameters_to_vector(net.middle.parameters()).detach().clone()
                nn.utils.vector_to_parameters(vector * 0.5, net.middle.parameters())
            else:
                net.first.double().float()

    @torch.no_grad()
    def editing(self) -> None:
        """Each edit counts once, and all ranks get rank 0's result."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.editing())
            for each in self.model.parameters():
                each.mul_(0.5 + RANK)
        for each in self.alone.parameters():
            each.mul_(0.5)

    def freeze(self, name: str) -> None:
        """Freeze a parameter, or train it again."""
        self.frozen ^= {name}
        for net in (self.model, self.alone):
            net.get_parameter(name).requires_grad_(name not in self.frozen)

    def toggle(self) -> None:
        self.freeze(self.draw.choice(["first.weight", "middle.bias", "last.bias"]))

    def begin_again(self) -> None:
        states = self.states()
        for optimizer in self.optimizers:
            optimizer.close()
        self.wrap(states)

    def drop(self) -> None:
        """Without close(): backward raises until there are new optimizers."""
        states = copy.deepcopy(self.states())
        del self.optimizers
        gc.collect()
        with pytest.raises(errors.ClosedError, match=r"was dropped without close\(\)"):
            self.model(torch.ones(1, 3, 2, 2)).sum().backward()
        self.model.zero_grad()
        self.wrap(states)

    def pickle(self) -> None:
        """The records about the parameters are not in the pickle."""
        loaded = pickle.loads(pickle.dumps(self.model))
        loaded(torch.ones(1, 3, 2, 2)).sum().backward()
        assert all(map(torch.equal, loaded.parameters(), self.model.parameters()))

    # The comparison

    def compare(self) -> None:
        if self.clips:
            measured = [optimizer.measured["grad_norm"] for optimizer in self.optimizers]
            assert measured == pytest.approx(self.norms, rel=1e-4, nan_ok=True), str(self.did)
        for (name, here), there in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            assert torch.allclose(here, there, rtol=1e-4, atol=1e-4), f"{name}: {self.did}"
            assert here.stride() == there.stride()

    def compare_state(self, here: dict[str, Any], there: dict[str, Any]) -> None:
        assert here["param_groups"] == there["param_groups"]
        assert here["state"].keys() == there["state"].keys(), str(self.did)
        for index, expected in there["state"].items():
            assert here["state"][index].keys() == expected.keys()
            for key, value in expected.items():
                if value is not None:
                    near = {
                        "rtol": 1e-3,
                        "atol": 1e-4,
                        "check_dtype": False,
                    }  # a state that was loaded has that of its parameter
                    torch.testing.assert_close(here["state"][index][key], value, **near)


@pytest.mark.parametrize("seed", range(20 if SIZE == 2 else 8))
def test_as_one_process(world: MPI.Intracomm, flat: allreduce.Topology, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        loop = Loop(seed, flat, stack)
        for _ in range(STEPS):
            loop.step()
            loop.compare()
            loop.change()
        for optimizer, state, plain in zip(loop.optimizers, loop.states(), loop.plain, strict=True):
            assert [optimizer.steps, optimizer.steps_skipped] == loop.counts, str(loop.did)
            loop.compare_state(state, plain.state_dict())
        loop.begin_again()
        loop.compare()
        assert_mirrored(world, loop.model)
        for optimizer in loop.optimizers:
            optimizer.close()
        loop.pickle()
