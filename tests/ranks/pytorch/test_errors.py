"""Invalid use of MirroredOptimizer raises one named error on every rank."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from allreduce import errors
from tests.ranks.pytorch.trained import EDITS, SIZE, Clipped, Raises, both_overlaps, plain_sgd, several
from tests.ranks.together import raised_everywhere
from trainers import (
    Exact,
    LocalSGD,
    Sharded,
    SkipNotFinite,
)
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.pytorch import Buckets, GradientError, MirroredOptimizer, assembly

JOBS = "openmpi 1 2"


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def backward(model: nn.Module) -> None:
    model(torch.ones(2, model[0].in_features)).sum().backward()


def test_memory_that_one_node_can_not_have(
    topology_of: Callable[..., allreduce.Topology], world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank then keeps its own copy of the parameters of a sharded optimizer, on all nodes."""

    def full(*_: Any) -> None:
        raise errors.UnavailableError("shared memory is too small")

    if world.rank == SIZE - 1:
        monkeypatch.setattr("trainers.state.sharded.shared_array", full)
    model, plain = model_of(3, 2), model_of(3, 2)
    plain.load_state_dict({name: world.bcast(each) for name, each in model.state_dict().items()})
    with MirroredOptimizer(plain_sgd(model), model, topology=topology_of(1), update="sharded") as optimizer:
        assert not optimizer._parts.owners.shards.shared
        for each, step in ((model, optimizer.step), (plain, plain_sgd(plain).step)):
            backward(each)
            step()
        assert all(map(torch.allclose, model.parameters(), plain.parameters()))


TOGETHER = 'LBFGS can\'t be used with update="sharded": it reads all parameters together'


class Counting(torch.optim.SGD):
    """Counts its steps in the groups, which all ranks share."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1


def _bad_arguments() -> dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any], type[Exception], str]]:
    model, frozen, half = model_of(3, 2), model_of(3, 2).requires_grad_(False), model_of(3, 2).to(torch.float8_e5m2)
    gpu, sparse = model_of(3, 2).to("meta"), torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), model)
    fine = lambda: (plain_sgd(model), model)  # noqa: E731
    option = errors.OptionError
    return {
        "another model": (lambda: (plain_sgd(model_of(3, 2)), model), {}, option, "another model: 2 of its 2"),
        "no module": (lambda: (plain_sgd(model), [1]), {}, option, "not SGD and list"),
        "wrong order": (lambda: (model, plain_sgd(model)), {}, option, "not Sequential and SGD"),
        "nothing to train": (lambda: (plain_sgd(frozen), frozen), {}, option, "nothing to train"),
        "dtype": (
            lambda: (plain_sgd(half), half), {}, errors.UnsupportedDtypeError,
            "0.weight has dtype torch.float8_e5m2",
        ),
        "device": (lambda: (plain_sgd(gpu), gpu), {}, option, "0.weight is on meta"),
        "update": (fine, {"update": "half"}, option, "update='half' is unknown"),
        "sparse copies": (lambda: (plain_sgd(sparse), sparse), {"update": Sharded(copies=2)}, option, "copies=2"),
        "buckets": (fine, {"buckets": 25}, option, "buckets must be a Buckets, got 25"),
        "trace": (fine, {"trace": "/missing/trace.json"}, option, "the trace can't be written"),
        "no list": (fine, {"transforms": CheckGradients()}, option, "transforms is a list of Trans"),
        "twice": (fine, {"transforms": [CheckGradients(), SkipNotFinite()]}, option, "at most one CheckGrad"),
        "no average": (fine, {"average": "local"}, option, "average='local' is unknown; use None or a LocalSGD"),
        "exact": (fine, {"average": Exact()}, option, "is of trainers: MirroredTrainer(TorchReplica(module"),
        "backend": (fine, {"allreduce": "rinng"}, errors.UnknownBackendError, "did you mean 'ring'?"),
        "one phase": (fine, {"allreduce": "native", "update": "sharded"}, option, "'native' has none"),
        "LBFGS": (lambda: (torch.optim.LBFGS(model.parameters()), model), {"update": "sharded"}, option, TOGETHER),
        "SparseAdam": (lambda: (torch.optim.SparseAdam(model.parameters()), model), {}, option, "use Adam"),
        "whole tensors": (
            lambda: (torch.optim.Adafactor(model.parameters()), model), {"update": Sharded(shard="elements")}, option,
            'it reads whole tensors. Use shard="tensors"',
        ),
        "trial": (
            lambda: (Clipped(model.parameters(), lr=0.1), model), {"update": "sharded"}, option,
            "in a trial it changed tensors otherwise when it had only some",
        ),
        "groups": (
            lambda: (Counting(model.parameters(), lr=0.1), model), {"update": "sharded"}, option,
            "changes param_groups",
        ),
        "fragments": (fine, {"average": LocalSGD(9999, fragments=9999)}, option, "this model has only"),
        "local, sharded": (fine, {"average": LocalSGD(4), "update": "sharded"}, option, 'use update="replicated"'),
        **{
            str(bad): (fine, {"transforms": [bad]}, option, words)
            for bad, words in (
                (CheckDivergence(-1), "CheckDivergence: every must be an integer >= 0, got -1"),
                (CheckDivergence(True), "got True"),
                (CheckGradients("ignore"), "on_bad='ignore'"),
            )
        },
    }  # fmt: skip


@pytest.mark.skipif(SIZE > 2, reason="each rank finds them alone")
@pytest.mark.parametrize("case", _bad_arguments())
def test_bad_arguments(world: MPI.Intracomm, flat: allreduce.Topology, case: str) -> None:
    make, options, kind, words = _bad_arguments()[case]
    assert words in raised_everywhere(world, kind, lambda: MirroredOptimizer(*make(), topology=flat, **options))


def test_two_topologies(world: MPI.Intracomm, topology_of: Callable[..., allreduce.Topology]) -> None:
    model = model_of(3, 2)
    with allreduce.create("ring", topology_of(None)) as backend:
        make = lambda: MirroredOptimizer(plain_sgd(model), model, backend, topology=topology_of(1))  # noqa: E731
        text = raised_everywhere(world, errors.OptionError, make)
        assert "has a topology of its own; pass the backend's name, or no topology" in text
        MirroredOptimizer(plain_sgd(model), model, backend, topology=backend.topology).close()


@several
@pytest.mark.parametrize(
    ("sizes", "words"),
    [((3, 4, 2), "rank 1: 4 parameters, number 0 is 0.weight (4, 3)"), ((3, 3), "number 0 is 0.weight (3, 3) float32")],
    ids=["number", "shape"],
)
def test_models_differ(world: MPI.Intracomm, flat: allreduce.Topology, sizes: tuple[int, ...], words: str) -> None:
    model = model_of(*sizes) if world.rank == 1 else model_of(3, 2)
    make = lambda: MirroredOptimizer(plain_sgd(model), model, topology=flat)  # noqa: E731
    text = raised_everywhere(world, errors.DisagreementError, make)
    assert words in text
    assert "rank 0: 2 parameters, number 0 is 0.weight (2, 3)" in text


@several
def test_optimizer_of_one_rank_is_bad(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    model = model_of(3, 2)
    given = plain_sgd(model_of(3, 2) if world.rank == SIZE - 1 else model)
    text = raised_everywhere(world, errors.OptionError, lambda: MirroredOptimizer(given, model, topology=flat))
    assert text.startswith(f"rank {SIZE - 1}: the optimizer is of another model")


def leaves_out_a_step(model: nn.Module, optimizer: MirroredOptimizer) -> None:
    """`if loss.isnan(): continue` between backward and step on one rank."""
    for number in range(4):
        optimizer.zero_grad()
        backward(model)
        if not (optimizer.topology.rank == 1 and number == 2):
            optimizer.step()


def leaves_out_an_iteration(model: nn.Module, optimizer: MirroredOptimizer) -> None:
    """It closes the optimizer while the others still wait for its gradients."""
    for number in range(3):
        if not (optimizer.topology.rank == SIZE - 1 and number == 1):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    optimizer.close()


def saves_alone(model: nn.Module, optimizer: MirroredOptimizer) -> None:
    """`if rank == 0: torch.save(optimizer.state_dict())` with the sharded update."""
    if optimizer.topology.rank == 0:
        optimizer.state_dict()
    backward(model)


APART = [
    (
        leaves_out_a_step,
        "replicated",
        "rank 0: averages gradients, after 3 steps and 3 averages",
        "rank 1: averages gradients, after 2 steps and 3 averages",
    ),
    *(
        (
            leaves_out_an_iteration,
            update,
            "rank 0: averages gradients, after 2 steps",
            f"rank {SIZE - 1}: closes the optimizer, after 2 steps",
        )
        for update in ("replicated", "sharded")
    ),
    (saves_alone, "sharded", "rank 0: gathers the optimizer's state", "rank 1: averages gradients"),
]


@several
@both_overlaps
@pytest.mark.parametrize(
    ("loop", "update", "first", "other"), APART, ids=[f"{loop.__name__}, {update}" for loop, update, *_ in APART]
)
def test_ranks_whose_calls_differ(
    world: MPI.Intracomm, flat: allreduce.Topology, loop: Any, update: str, first: str, other: str, overlap: bool
) -> None:
    model = model_of(3, 2)
    optimizer = MirroredOptimizer(plain_sgd(model), model, topology=flat, update=update, buckets=Buckets(overlap))
    text = raised_everywhere(world, errors.DisagreementError, lambda: loop(model, optimizer))
    assert first in text
    assert other in text


@several
@pytest.mark.parametrize("call", ["step", "synchronize"])
@pytest.mark.parametrize("how", EDITS)
def test_gradients_that_are_changed_while_sharded(
    world: MPI.Intracomm, flat: allreduce.Topology, how: str, call: str
) -> None:
    """The other ranks neither wait for the rank that has changed its own nor use its gradients."""
    model = model_of(3, 2)
    with MirroredOptimizer(plain_sgd(model), model, topology=flat, update="sharded") as optimizer:
        backward(model)
        for parameter in model.parameters() if world.rank == 1 or how.startswith("scale_") else ():
            EDITS[how](parameter)
        text = raised_everywhere(world, GradientError, getattr(optimizer, call))
        assert "gradients were changed between backward and step()" in text
        assert how.startswith("scale_") or text.startswith("rank 1: ")
        optimizer.zero_grad()
        backward(model)
        text = raised_everywhere(world, GradientError, lambda: backward(model))
        assert "a second gradient after its first was averaged in slices" in text
        optimizer.zero_grad()
        backward(model)
        optimizer.synchronize()
        if world.rank == 0:
            model[0].weight.grad.data = torch.ones(7)
        text = raised_everywhere(world, GradientError, optimizer.step)
        assert "0.weight has become (7,) torch.float32" in text
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


MISUSED: dict[str, tuple[Callable[[Any, Any, Any], object], str]] = {
    "unfrozen": (
        lambda model, plain, optimizer: [model[1].bias.requires_grad_(True), backward(model), optimizer.step()],
        "1.bias was frozen when",
    ),
    "group": (lambda model, plain, optimizer: optimizer.add_param_group({"params": []}), "were added after"),
    "group of the plain optimizer": (  # whose gradients would never be averaged
        lambda model, plain, optimizer: [plain.add_param_group({"params": model[0].weight}), optimizer.step()],
        "parameters were added after",
    ),
    "no state": (lambda model, plain, optimizer: optimizer.load_state_dict(None), "load_state_dict(None) on rank 0"),
    "second one": (
        lambda model, plain, optimizer: MirroredOptimizer(plain_sgd(model), model, topology=optimizer.topology),
        "1.weight belongs to another MirroredOptimizer",
    ),
    "wrapped twice": (
        lambda model, plain, optimizer: MirroredOptimizer(optimizer, model, topology=optimizer.topology),
        "a MirroredOptimizer already",
    ),
    "closed, backward": (
        lambda model, plain, optimizer: [optimizer.close(), backward(model)],
        "backward after close()",
    ),
    "closed, step": (lambda model, plain, optimizer: [optimizer.close(), optimizer.step()], "is closed"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_misuse(world: MPI.Intracomm, flat: allreduce.Topology, case: str) -> None:
    call, words = MISUSED[case]
    model = model_of(3, 4, 2)
    model[1].bias.requires_grad_(False)
    plain = plain_sgd(model[1])
    with MirroredOptimizer(plain, model, topology=flat) as optimizer:
        backward(model)
        optimizer.step()
        kind = errors.ClosedError if "closed" in case else errors.OptionError
        assert words in raised_everywhere(world, kind, lambda: call(model, plain, optimizer))


@several
@pytest.mark.parametrize("option", ["update", "buckets", "transforms", "allreduce", "average", "trace"])
def test_options_differ(world: MPI.Intracomm, flat: allreduce.Topology, option: str) -> None:
    model = model_of(3, 2)
    checks = [CheckDivergence(1000), CheckGradients()]
    values = {"update": "sharded", "buckets": Buckets(mb=7.0), "transforms": checks, "allreduce": "ring"}
    value = {**values, "average": LocalSGD(4), "trace": "/dev/null"}[option]
    options = {option: value} if world.rank == 1 else {}
    make = lambda: MirroredOptimizer(plain_sgd(model), model, topology=flat, **options)  # noqa: E731
    text = raised_everywhere(world, errors.DisagreementError, make)
    assert "rank 0: MirroredOptimizer(allreduce='auto', update='replicated', " in text
    shown = {"average": value, "trace": "..."}.get(option, repr(value))  # the ranks may differ in `every`
    assert f"{option}={shown}" in text.splitlines()[2]


def test_equal_options_in_several_forms_are_no_difference(flat: allreduce.Topology) -> None:
    model = model_of(3, 2)
    forms: list[dict[str, Any]] = [
        {"buckets": Buckets(mb=25), "transforms": [SkipNotFinite(), CheckDivergence(1000)], "update": Sharded()},
        {"buckets": Buckets("auto", 25.0, 1), "transforms": (CheckGradients("skip"),), "update": "sharded"},
        {"transforms": [CheckDivergence(1000), CheckGradients("skip")], "update": "sharded"},
    ]
    MirroredOptimizer(plain_sgd(model), model, topology=flat, **forms[flat.rank % len(forms)]).close()


@several
def test_backward_raises_on_one_rank(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """This rank catches the error and continues, with the first bucket reduced: the others neither hang nor use the
    averages. The rows of the step do not count in the next one."""
    model = model_of(3, 4, 2)
    options = {"topology": flat, "buckets": Buckets(True, first_mb=1e-6, mb=1e-6)}
    optimizer = MirroredOptimizer(plain_sgd(model), model, **options)
    optimizer.rows(1 + world.rank)
    hidden = model[0](torch.ones(2, 3))
    if world.rank == 1:
        with pytest.raises(ZeroDivisionError):
            model[1](Raises.apply(hidden)).sum().backward()
    else:
        with pytest.raises(GradientError, match="rank 1: backward raised"):
            model[1](hidden).sum().backward()
    optimizer.zero_grad()
    ((1.0 + world.rank) * model[1].bias.sum()).backward()
    assert model[1].bias.grad.tolist() == pytest.approx([(SIZE + 1) / 2] * 2)


class Unloved(torch.optim.SGD):
    """A state that can't be sent: a lambda can't be pickled, and a named tuple is not created from an iterable."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": self.value}


Pair = collections.namedtuple("Pair", "a b")


@several
@pytest.mark.parametrize("value", [lambda: None, Pair(1, 2)], ids=["a lambda", "a named tuple"])
def test_state_that_can_not_be_sent(world: MPI.Intracomm, flat: allreduce.Topology, value: Any) -> None:
    """Only rank 0 detects it; the others wait for its message."""
    model = model_of(3, 2)
    plain = Unloved(model.parameters(), lr=0.1)
    plain.value = value if world.rank == 0 else None
    make = lambda: MirroredOptimizer(plain, model, topology=flat)  # noqa: E731
    with pytest.raises(Exception, match="rank 0: ") as caught:
        make()
    assert len(set(world.allgather((type(caught.value).__name__, str(caught.value))))) == 1
    plain.value = None
    make().close()


def test_threads_are_compared_with_the_cores_that_there_are(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores that this job may use, not all cores of the machine: a container or a job may have only a few."""
    texts: list[str] = []
    monkeypatch.setattr(assembly.notices, "once", lambda rank, text: texts.append(text))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(flat, "cores", 2 * SIZE)
    assembly.warn_of_threads(flat)
    assert not texts
    monkeypatch.setattr(flat, "cores", 2 * SIZE - 1)
    assembly.warn_of_threads(flat)
    assert ["threads each on" in text for text in texts] == [True] * (SIZE > 1)
