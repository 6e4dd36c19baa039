"""TorchReplica under MirroredTrainer: several ranks train as one rank does, also with uneven parts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from tests.frameworks.replica_checks import (
    as_dict,
    as_tuple,
    check_edits,
    check_own_memory,
    check_weights,
)
from tests.ranks.pytorch.trained import Clipped
from tests.ranks.training.fits import STRATEGIES, TRAINERS, data, trainer_of
from trainers import CentralStorageTrainer, Exact, LocalSGD, MirroredTrainer
from trainers.arrays import average
from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import attach
from trainers.replicas.pytorch import TorchReplica
from trainers.watching.model_checkpoint import ModelCheckpoint


def replica(seed: int = 0, kind: str = "AdamW", hidden: int = 20, **options: Any) -> TorchReplica:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.02)
    return TorchReplica(module, nn.CrossEntropyLoss(), optimizer, **options)


@pytest.mark.skipif(MPI.COMM_WORLD.size != 3, reason="needs three ranks")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_nodes_of_different_size_hold_the_same_bits(world: MPI.Intracomm, topology_of: Any, shape: Any) -> None:
    """PyTorch's fused kernels give other bits at the end of an array, so all nodes must split at the same elements."""
    x, y = data(96)
    made = replica(hidden=191)
    made.optimizer.param_groups[0]["fused"] = True
    with MirroredTrainer(made, "hierarchical_copy", topology=topology_of(shape), update="sharded") as trainer:
        trainer.fit(x, y, epochs=10, batch_size=24, progress=False)
        found = world.allgather([each.detach().numpy().tobytes() for each in made.module.parameters()])
    assert found[0] == found[1] == found[2]


class SixteenBits(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@pytest.mark.filterwarnings("ignore:SGD.fused=True. of PyTorch")
@pytest.mark.parametrize("kind", ["replicated", "sharded", "central"])
def test_a_fused_kernel_that_is_wrong_is_not_used(kind: str, flat: allreduce.Topology) -> None:
    module = SixteenBits(6, 200, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1, fused=True)
    made, (x, y) = TorchReplica(module, nn.CrossEntropyLoss(), optimizer), data(40)
    before = module.weight.detach().clone()
    with STRATEGIES[kind](made, topology=flat) as trainer:
        trainer.fit(x, y, 1, 40, progress=False)
        assert (module.weight != before).any(1).sum() > 150  # the first ones too
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", ["AdamW", "Whole", "bfloat16"])
def test_central_storage_is_mirrored(kind: str, world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    """With running statistics, and an optimizer of whole tensors."""
    x, y = data(50)

    def make() -> TorchReplica:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        module = module.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        given = module.parameters()
        optimizer = Whole(given, 0.1, 0.9) if kind == "Whole" else torch.optim.AdamW(given)
        return TorchReplica(module, nn.CrossEntropyLoss(), optimizer)

    mirrored, central = make(), make()
    with MirroredTrainer(mirrored, "reduce_to_one", topology=flat) as trainer:
        expected = trainer.fit(x, y, epochs=2, batch_size=20, progress=False).column("loss")
    with CentralStorageTrainer(central, flat, storage=flat.size - 1) as trainer:
        assert trainer.fit(x, y, epochs=2, batch_size=20, progress=False).column("loss") == expected
        hashes = world.allgather([bytes(each.view(torch.uint8).numpy()) for each in _bits(central)])
        assert all(each == hashes[0] for each in hashes)
    for here, there in zip(_bits(central), _bits(mirrored), strict=True):
        assert torch.equal(here, there)
    assert central.state().keys() == mirrored.state().keys()


def _bits(made: TorchReplica) -> list[torch.Tensor]:
    return [each.detach().contiguous() for each in made.module.state_dict().values() if each.dim()]


def test_the_loss_of_a_16_bit_model_is_not_rounded_to_16_bits(flat: allreduce.Topology) -> None:
    """A loss of 1.001 is 1.0 in bfloat16; its mean over the ranks is exact to float32."""
    module = nn.Linear(2, 1).to(torch.bfloat16)
    made = TorchReplica(
        module, lambda output, y: 0 * output.sum() + 1.001, torch.optim.SGD(module.parameters(), lr=0.1)
    )
    made._values = lambda loss, output, target: [1.001]  # type: ignore[method-assign]  # as a float32 loss gives it
    with MirroredTrainer(made, topology=flat) as trainer:
        history = trainer.fit(np.ones((8, 2), "float32"), np.ones(8), 1, 4, progress=False)
    assert history[0].loss == pytest.approx(1.001, abs=1e-6)


def halve(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def test_running_statistics_and_frozen_parameters_are_edited(flat: allreduce.Topology) -> None:
    def made() -> TorchReplica:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        module[0].weight.requires_grad_(False)
        return TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters()))

    def edit(replica: TorchReplica) -> None:
        halve(replica.module)
        for statistic in (replica.module[1].running_mean, replica.module[1].running_var):
            statistic.mul_(0.5)

    check_edits(made, edit, flat, data(50))


def test_a_callback_saves_a_sharded_model_with_frozen_parameters(flat: allreduce.Topology, tmp_path: Path) -> None:
    x, y = data(60)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    mine = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module[1].parameters(), lr=0.1))
    saved = ModelCheckpoint(str(tmp_path / "model.npz"))
    with MirroredTrainer(mine, "shared", flat, update="sharded") as trainer:
        history = trainer.fit(x, y, 3, 20, progress=False, callbacks=[saved])
    assert len(history) == 3


class Flattens(nn.Module):
    """A model that accepts neither empty batches nor negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x < -1e6).any():
            raise KeyError("no such word")
        return self.last(x.reshape(x.shape[0], 2, -1).reshape(x.shape[0], -1))


def test_ranks_without_rows_predict_and_a_model_that_fails_fails_on_all(
    flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    module = Flattens()
    mine = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = data(9)
    bad = x.copy()
    bad[1] = -1e9  # in the rows of one rank
    everyone = tuple(range(world.size))
    with MirroredTrainer(mine, "ring", flat) as trainer:
        assert trainer.predict(x[:1]).shape == (1, 3)
        with pytest.raises(KeyError) as predicted:
            trainer.predict(bad)
        with pytest.raises(KeyError) as evaluated:
            trainer.evaluate(bad, y)
        assert predicted.value.ranks == evaluated.value.ranks == everyone  # type: ignore[attr-defined]
        first = bad[1:] if world.rank == 0 else x[1:]
        with pytest.raises(ArgumentError, match="no such word") as admitted:
            trainer.predict(first)
        assert admitted.value.ranks == everyone


def replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def test_what_sharded_refuses(flat: allreduce.Topology) -> None:
    if flat.size == 1:
        pytest.skip("with one rank nothing is divided")
    module = nn.Linear(3, 2)
    whole = TorchReplica(module, nn.CrossEntropyLoss(), Clipped(module.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match='Clipped can\'t be used with update="sharded": in a trial it changed'):
        MirroredTrainer(whole, topology=flat, update="sharded")
    for change, in_edit, words in (
        (halve, False, r"edited in place.*trainer\.edit"),
        (replace, False, r"a parameter's \.data was replaced"),
        (replace, True, r"\.data was replaced"),
    ):
        mine = replica()
        with MirroredTrainer(mine, "shared", flat, update="sharded") as trainer:
            trainer.fit(*data(20), 1, progress=False)
            if not in_edit:
                change(mine.module)
            with pytest.raises(ArgumentError, match=words) as caught:
                trainer.edit(partial(change, mine.module)) if in_edit else trainer.fit(*data(20), 1, progress=False)
            assert change is replace or caught.value.ranks == tuple(range(flat.size))


class Whole(torch.optim.SGD):
    """An optimizer that is not known to be elementwise."""


def bound_before(module: nn.Module) -> tuple[TorchReplica, np.ndarray]:
    """A replica that trains in its own memory after another memory was bound, as after a sharded fit."""
    made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    memory, before, buffer = (np.zeros(made.gradient_length, "float32") for _ in range(3))
    attach(made, memory, before)
    attach(made, None, buffer)
    average.keep(made, 0.5)
    return made, buffer


def test_a_replica_leaves_the_memory_of_a_trainer() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters()))
    check_own_memory(made, data(24)[0])


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_is_averaged_by_rows(
    dtype: torch.dtype, kind: str, world: MPI.Intracomm, flat: allreduce.Topology
) -> None:
    """The ranks' statistics are weighted by their rows, which differ in number."""
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).to(dtype)
    made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = data(3 * flat.size - 1)
    with trainer_of(kind, flat, made) as trainer:
        trainer.fit(x, y, 1, len(x), progress=False)
        mean = module[0].running_mean.float().numpy()
        assert len(set(world.allgather(mean.tobytes()))) == 1
        np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-3)


def test_the_average_leaves_batch_norm_statistics_after_a_bound_memory() -> None:
    x, y = data(24)
    made, buffer = bound_before(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    for _ in range(3):
        made.gradients(x, y, 1.0)
        buffer[made.parameter_count :] *= 2  # as other ranks change the averages
        made.update()
        made.average.move()
    norm = made.module[1]
    wanted = [norm.running_mean.clone(), norm.running_var.clone()]
    assert torch.equal(torch.cat(wanted), torch.from_numpy(buffer[made.parameter_count :]))
    made.use_average()
    made.use_parameters()
    assert torch.equal(norm.running_mean, wanted[0])
    assert torch.equal(norm.running_var, wanted[1])


@pytest.mark.parametrize("way", ["data", "channels_last"])
def test_the_state_is_the_modules_after_its_memory_was_replaced(way: str) -> None:
    made, _ = bound_before(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()))
    convolution = made.module[0]
    if way == "data":
        convolution.weight.data = convolution.weight.data + 1
    else:
        made.module.to(memory_format=torch.channels_last)

    def inside() -> np.ndarray:
        return np.concatenate([each.detach().numpy().ravel() for each in made.module.parameters()])

    with torch.no_grad():
        convolution.weight.mul_(2)
    state = made.state()
    np.testing.assert_array_equal(state["parameters"], inside())
    made.use_average()
    np.testing.assert_array_equal(inside(), state["ema"])
    made.use_parameters()
    np.testing.assert_array_equal(inside(), state["parameters"])
    made.load_state({**state, "parameters": state["parameters"] + 1})
    np.testing.assert_array_equal(inside(), state["parameters"] + 1)
    memory, buffer = np.zeros((2, made.gradient_length), "float32")
    attach(made, memory, buffer)
    np.testing.assert_array_equal(memory, state["parameters"] + 1)


def test_named_errors(flat: allreduce.Topology) -> None:
    module = nn.Linear(3, 2)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    for make, words in (
        (lambda: TorchReplica(module, nn.MSELoss(), other), "optimizer is of another model"),
        (
            lambda: TorchReplica(module, nn.MSELoss(), "adam"),
            "torch.optim.Optimizer are needed, not .* and builtins.str",
        ),
        (lambda: TorchReplica(module, nn.MSELoss(), torch.optim.LBFGS(module.parameters())), "LBFGS can't be used"),
        (lambda: TorchReplica(module, nn.MSELoss(), torch.optim.Adafactor(module.parameters())), "Adafactor can't be"),
        (lambda: TorchReplica(module, nn.MSELoss(reduction="sum"), torch.optim.SGD(module.parameters())), 'use "mean"'),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()
    with MirroredTrainer(replica(), topology=flat) as trainer:
        for x, y in ((np.zeros((4, 7), "float32"), np.zeros(4, int)), (np.zeros((4, 6)), np.zeros((4, 9, 9)))):
            with pytest.raises(ArgumentError, match="Sequential can't be fed with"):
                trainer.fit(x, y, progress=False)


@pytest.mark.parametrize("average", [LocalSGD(4), LocalSGD(4, outer="diloco", fragments=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_local_sgd_averages_parameters_and_statistics(
    world: MPI.Intracomm, flat: allreduce.Topology, dtype: torch.dtype, average: LocalSGD
) -> None:
    """Statistics of batch norm become the mean of the ranks', whatever the outer optimizer; replicas end up equal."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = np.random.default_rng(2)
    x = generator.normal(size=(40 * flat.size, 6)).astype(np.float32)
    y = x[:, :3].argmax(1)
    replica = TorchReplica(module, nn.CrossEntropyLoss(), optimizer)
    with MirroredTrainer(replica, "ring", flat, average=average) as trainer:
        before = trainer.evaluate(x, y)["loss"]
        trainer.fit(x, y, 6, 8 * flat.size, progress=False)
        assert trainer.evaluate(x, y)["loss"] < before
        assert len(set(trainer.parameters_sha256())) == 1
    for name in ("running_mean", "running_var"):
        statistic = getattr(module[1], name).float().numpy()
        assert len(set(world.allgather(statistic.tobytes()))) == 1
        assert np.isfinite(statistic).all()
    assert (module[1].running_var > 0).all()


def low() -> TorchReplica:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return TorchReplica(module, nn.CrossEntropyLoss(), optimizer, precision="bfloat16")


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "sharded"}, {"compress": "int8"}, {"average": Exact()}, {"average": LocalSGD(2)}],
    ids=str,
)
def test_bfloat16_autocast(options: dict[str, Any], flat: allreduce.Topology) -> None:
    """Replicas have equal bits; P ranks train as one rank to bfloat16's rounding, with Exact in every bit."""
    generator = np.random.default_rng(4)
    x = generator.normal(size=(60, 2, 4, 4)).astype("float32")
    y = x.mean((2, 3)).argmax(1)
    results, alone = [], allreduce.Topology(MPI.COMM_SELF)
    for ranks in (flat, alone):
        mine = low()
        with MirroredTrainer(mine, "ring", ranks, **options) as trainer:
            assert trainer.buffer.dtype == "float32"
            history = trainer.fit(x, y, epochs=3, batch_size=20, progress=False)
            assert len(set(trainer.parameters_sha256())) == 1
            scores, outputs = trainer.evaluate(x, y), trainer.predict(x)
        results.append((history.column("loss"), mine.state()["parameters"], scores["loss"], outputs))
    (losses, found, loss, outputs), (expected, there, _, _) = results
    assert found.dtype == outputs.dtype == np.float32
    if isinstance(options.get("average"), Exact):
        assert losses == expected
        np.testing.assert_array_equal(found, there)
    elif not isinstance(options.get("average"), LocalSGD):  # another training than that of one rank
        np.testing.assert_allclose(losses, expected, rtol=0.02)
        np.testing.assert_allclose(found, there, atol=0.01)
    assert not (outputs.view(np.uint32) & 0xFFFF).any(), "predictions are not numbers of bfloat16"
    assert loss == pytest.approx(nn.functional.cross_entropy(torch.from_numpy(outputs), torch.from_numpy(y)).item())


def test_a_model_file_loads_in_either_precision(world: MPI.Intracomm, flat: allreduce.Topology, tmp_path: Path) -> None:
    path = world.bcast(str(tmp_path / "model.npz"))
    first, second = replica(), replica(seed=1, precision="bfloat16")
    x, y = data(20)
    with MirroredTrainer(second, topology=flat) as trainer:
        trainer.fit(x, y, epochs=1, batch_size=20, progress=False)
        trainer.save(path)
    with MirroredTrainer(first, topology=flat) as trainer:
        trainer.load(path)
        assert not (trainer.predict(x) == second.predict(x)).all()
        np.testing.assert_allclose(trainer.predict(x), second.predict(x), atol=0.05)
    assert (first.config["precision"], second.config["precision"]) == ("float32", "bfloat16")
    with MirroredTrainer(replica(hidden=21), topology=flat) as trainer:
        text = r"parameters is \(203,\), and in this model \(213,\)"
        with pytest.raises(ModelFileError, match=text):
            trainer.load(path)
    for given, words in (("float16", "unless losses are scaled"), ("tf32", "use one of float32, bfloat16")):
        with pytest.raises(ArgumentError, match=words):
            replica(precision=given)
    with pytest.raises(ArgumentError, match="trains float32 parameters, and these are float64"):
        TorchReplica(
            module := nn.Linear(2, 2).double(), nn.MSELoss(), torch.optim.SGD(module.parameters()), precision="bfloat16"
        )


class Two(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return self.first(first) + torch.tanh(self.second(rest))


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "function": nn.functional.cross_entropy,
    "own function": lambda output, target: nn.functional.cross_entropy(output, target),
}


def two(loss: Any) -> TorchReplica:
    torch.manual_seed(0)
    module = Two()
    return TorchReplica(module, loss, torch.optim.Adam(module.parameters(), lr=0.02))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [as_tuple, as_dict])
def test_several_inputs_and_weights(shape: Any, loss: str) -> None:
    check_weights(two(LOSSES[loss]), shape)


def squares(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Of single rows this loss is a sum over the outputs, and of all rows a mean."""
    found = (output - nn.functional.one_hot(target, 3)) ** 2
    return found.sum(1) if reduction == "none" else found.mean()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "give fit class_weight= instead"),
        (lambda output, target: output.sum(), "is -?[0-9.]+, and the mean over single rows is"),
        (squares, "the mean over single rows is"),
        (lambda output, target: output.mean() * float(target[0]), "can't be called for single rows"),
    ],
    ids=["weighted", "sum", "squares", "item"],
)
def test_a_loss_without_rows_refuses_weights(loss: Any, text: str, flat: allreduce.Topology) -> None:
    x, y = data()
    replica = two(loss)
    with MirroredTrainer(replica, "ring", flat) as trainer:
        if isinstance(loss, nn.Module):
            trainer.fit(as_dict(x), y, 1, progress=False)
        before = trainer.parameters_sha256()
        with pytest.raises(ArgumentError, match=text) as caught:
            trainer.fit(as_dict(x), y, 1, class_weight="balanced", progress=False)
        assert caught.value.ranks == tuple(range(flat.size))
        assert trainer.parameters_sha256() == before


class Heads(nn.Module):
    """A model of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kind": self.kind(x), "size": self.size(x)}


def test_several_outputs(flat: allreduce.Topology) -> None:
    """A dict of targets, and of predictions; weights by torch.vmap over dicts."""

    def loss(output: Any, target: Any) -> torch.Tensor:
        sizes = nn.functional.mse_loss(output["size"], target["size"])
        return nn.functional.cross_entropy(output["kind"], target["kind"]) + sizes

    x, y = data()
    targets, found = {"size": x.sum(axis=1, keepdims=True), "kind": y}, []
    for topology in (flat, allreduce.Topology(MPI.COMM_SELF)):
        torch.manual_seed(0)
        module = Heads()
        replica = TorchReplica(module, loss, torch.optim.Adam(module.parameters(), lr=0.02))
        with MirroredTrainer(replica, "ring", topology) as trainer:
            trainer.fit(x, targets, 2, 40, sample_weight=np.arange(len(x)), progress=False)
            outputs = trainer.predict(x)
        found.append(np.concatenate([outputs["kind"], outputs["size"]], axis=1))
    topology.close()
    assert found[0].shape == (len(x), 4)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_local_state_is_what_makes_ranks_different() -> None:
    """Random numbers, and a buffer that counts. test_checkpoints.py has trainings that go on from a file."""
    module = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3))
    made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters()))
    assert set(made.local_state()) == {"random", "module.1.num_batches_tracked"}
    with pytest.raises(ModelFileError, match="local state is of another model"):
        made.load_local_state({})
