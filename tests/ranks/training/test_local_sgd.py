"""MirroredTrainer(average=LocalSGD(H)): what is sent, callbacks, errors and checkpoints.

tests/matrix compares its parameters with one process; tests/ranks/pytorch/test_local_sgd.py DiLoCo and fragments, which
are the same code, with the papers' algorithms.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.arrays.dtypes import parse
from allreduce.arrays.gpu import on_host
from allreduce.call.call import Call
from allreduce.errors import DisagreementError
from allreduce.health.dump import Entry
from tests.gpu import fake_cupy
from tests.ranks.together import raised_everywhere
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE, Once, X, Y, fail
from trainers import Checkpoint, LocalSGD, MirroredTrainer, NumpyNetwork, OuterSGD
from trainers.callbacks import Callback, CheckDivergence, CheckGradients
from trainers.errors import ArgumentError, ModelFileError
from trainers.files import checkpoint as files
from trainers.files import model_file
from trainers.local_sgd.rounds import Rounds
from trainers.state.sharded import Flat
from trainers.watching.history import History

BATCH, EPOCHS = 12, 4  # five steps in an epoch; the last has 2 rows, so not all ranks take it


def network(**options: Any) -> NumpyNetwork:
    return fits.network(**{"lr": 0.05, "optimizer": "sgd", **options})


def fitted(trainer: MirroredTrainer, **options: Any) -> History:
    return trainer.fit(X, Y, **{"epochs": EPOCHS, "batch_size": BATCH, "progress": False, **options})


def note_length(lengths: list[int], event: Entry) -> None:
    call = event[2]
    if isinstance(call, Call) and call.reduces:
        lengths.append(call.length)


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
@pytest.mark.parametrize("fragments", [1, 5])
def test_the_bytes_of_a_training(flat: allreduce.Topology, fragments: int) -> None:
    """20 steps with H = 10 send a tenth of what gradients need: no round is forced by the end of an epoch. The end of
    the fit averages the fragments whose turn has not come."""
    sent = []
    for average in (None, LocalSGD(10, fragments=fragments)):
        lengths: list[int] = []
        replica = network()
        with (
            allreduce.create("native", flat) as backend,
            MirroredTrainer(replica, backend, flat, average=average) as trainer,
        ):
            backend.observers.append(partial(note_length, lengths))
            fitted(trainer)
        sent.append(sum(lengths))
    assert 0 < sent[1] * (8 if fragments > 1 else 10) <= sent[0]


# Callbacks, errors, checkpoints


class Watching(Callback):
    """Notes at an event whether the parameters of all ranks are equal."""

    def __init__(self, world: MPI.Intracomm, event: str, reads_model: bool) -> None:
        self.world, self.reads_model, self.equal = world, reads_model, list[bool]()
        setattr(self, event, self.note)

    def note(self, *_: Any) -> None:
        bits = self.trainer.replica.state()["parameters"].tobytes()
        self.equal.append(len(set(self.world.allgather(bits))) == 1)


STREAMED = LocalSGD(8, fragments=2)
SCHEDULES = pytest.mark.parametrize("average", [LocalSGD(8), STREAMED], ids=["whole", "streamed"])


@SCHEDULES
def test_callbacks_see_averaged_parameters(world: MPI.Intracomm, flat: allreduce.Topology, average: LocalSGD) -> None:
    """Unless they say that they don't look; an evaluation sees them too."""
    for event, reads_model in (("on_epoch_end", True), ("on_epoch_begin", True), ("on_epoch_end", False)):
        watching = Watching(world, event, reads_model)
        check = [CheckDivergence(), CheckGradients()] if reads_model and event == "on_epoch_end" else []
        with MirroredTrainer(network(optimizer="adam", lr=0.01), "ring", flat, average=average) as trainer:
            history = fitted(trainer, callbacks=[watching, *check], validation_data=(X, Y) if check else None)
            assert len(set(trainer.parameters_sha256())) == 1
            last = trainer.evaluate(X, Y)["loss"]
        assert len(watching.equal) == EPOCHS
        assert all(watching.equal) == (reads_model or SIZE == 1)
        if check:
            assert history.column("validation_loss")[-1] == pytest.approx(last, rel=1e-6)


@SCHEDULES
@pytest.mark.parametrize(("every", "compress"), [("epoch", None), ("7 steps", None), ("epoch", "int8")])
def test_a_resumed_training_has_the_same_bits(
    flat: allreduce.Topology, folder: Path, average: LocalSGD, every: str, compress: str | None
) -> None:
    """As a training that writes no checkpoints: with each rank's own moments of Adam, its part of the round, the outer
    momentum, and the error feedback of a compression."""

    def trained(name: str, seed: int, callbacks: Sequence[Callback] = (), resume: bool = False) -> tuple[Any, ...]:
        replica = network(optimizer="adam", lr=0.01, seed=seed)
        given: dict[str, Any] = {"average": replace(average, outer="diloco"), "compress": compress}
        with MirroredTrainer(replica, "ring", flat, **given) as trainer:
            checkpoint = Checkpoint(str(folder / name), every) if name else None
            history = fitted(trainer, checkpoint=checkpoint, resume=resume, callbacks=callbacks)
            return trainer.parameters_sha256(), history.column("loss"), history.column("accuracy")

    folder.mkdir(exist_ok=True)
    whole = trained("", 1)
    assert trained("whole", 1) == whole
    with pytest.raises(OSError, match="disk is full"):
        trained("parts", 1, [at_batch(fail, 2, 3)] if flat.rank == SIZE - 1 else [])
    flat.agree([], "rank 0 has written")
    assert trained("parts", flat.rank, resume=True) == whole


@SCHEDULES
def test_a_checkpoint_is_a_model_and_of_one_outer_optimizer(
    flat: allreduce.Topology, folder: Path, average: LocalSGD
) -> None:
    """It is a plain model file. Another number of ranks can continue from it; another strategy, and local SGD from that
    one's."""
    given: dict[str, Any] = {"average": replace(average, outer="diloco")}
    with MirroredTrainer(network(optimizer="adam"), "ring", flat, **given) as trainer:
        fitted(trainer, epochs=2, checkpoint=str(folder))
        expected = trainer.replica.parameters.copy()
        outer = trainer.strategy.owners.shared_state()
    assert list(outer) == ["trainer.outer_momentum"]
    assert np.abs(outer["trainer.outer_momentum"]).max() > 0
    if flat.rank == 0:
        found = files.newest(str(folder))
        assert found is not None
        assert np.array_equal(found[1].shared["trainer.outer_momentum"], outer["trainer.outer_momentum"])
        assert np.array_equal(NumpyNetwork.load(found[0]).parameters, expected)
    flat.agree([], "rank 0 has read")
    mine = folder.parent / str(flat.rank)
    shutil.copytree(folder, mine)
    with (
        flat.split(flat.rank) as alone,
        MirroredTrainer(network(seed=9, optimizer="adam"), "ring", alone, **given) as trainer,
    ):
        fitted(trainer, epochs=2, checkpoint=str(mine), resume=True)
        again = trainer.strategy.owners.shared_state()["trainer.outer_momentum"]
        assert np.array_equal(again, outer["trainer.outer_momentum"])
        assert len(fitted(trainer, checkpoint=str(mine), resume=True)) == EPOCHS
    with MirroredTrainer(network(seed=9, optimizer="adam"), "ring", flat) as trainer:
        fitted(trainer, epochs=3, checkpoint=str(folder), resume=True)
    with MirroredTrainer(network(seed=9, optimizer="adam"), "ring", flat, **given) as trainer:
        shared_state = trainer.strategy.owners.shared_state
        fitted(trainer, epochs=1)
        assert shared_state()["trainer.outer_momentum"].any()
        fitted(trainer, epochs=3, checkpoint=str(folder), resume=True)  # which has none
        assert not shared_state()["trainer.outer_momentum"].any()
        assert len(fitted(trainer, checkpoint=str(folder), resume=True)) == EPOCHS


def test_steps_before_an_error_count_in_the_next_average(flat: allreduce.Topology) -> None:
    """The error of one rank in the middle of an average, after which all ranks go on."""
    failing: list[Exception] = [OSError("in an average")]

    def average(array: np.ndarray, op: str) -> None:
        if failing:
            raise failing.pop()

    parameters, delta = np.zeros(4), np.zeros(4)
    rounds = Rounds(LocalSGD(2), flat.private(), [parameters], average, Flat(delta, delta))
    parameters += 1.0
    rounds.count_step()
    with pytest.raises(OSError, match="in an average"):
        rounds.end()
    rounds.end()
    assert (parameters == 1).all()


@pytest.mark.parametrize("kind", ["bfloat16", "cupy"])
def test_a_round_goes_on_from_a_file(kind: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have no bfloat16, and CuPy's arrays take none of NumPy's."""
    dtype, there = parse("bfloat16" if kind == "bfloat16" else "float32"), np.array
    if kind == "cupy":
        there = fake_cupy.install(monkeypatch).asarray

    def rounds(value: float) -> tuple[Rounds, list[Any]]:
        parameters, delta = there(np.full(4, value, dtype)), there(np.full(4, np.nan, np.float32))
        options = LocalSGD(3, outer="diloco")
        made = Rounds(options, flat.private(), [parameters], lambda array, op: None, Flat(delta, delta))
        made.load(there(np.full(4, value, np.float32)), 0)
        return made, [parameters, made.start, made.momentum]

    (begun, arrays), (other, found) = rounds(1.5), rounds(2.0)
    begun.count_step()
    other.load_state(model_file.unpack(model_file.pack(begun.state())))
    assert [on_host(array).tolist() for array in found] == [on_host(array).tolist() for array in arrays]
    assert (other.left, other.begun) == (2, True)
    other.load(np.full(4, 3, np.float32), 1)
    assert on_host(found[2]).tolist() == [3] * 4


def at_batch(action: Callable[[Any], Any], epoch: int, batch: int) -> Callback:
    """Return a callback that acts before a batch, and does not look at the model."""
    callback = Once("on_train_batch_begin", action, epoch, batch)
    callback.reads_model = False
    return callback


def test_load_and_edit_begin_a_round_there(flat: allreduce.Topology, folder: Path) -> None:
    options: dict[str, Any] = {"average": LocalSGD(7, outer="diloco")}
    with MirroredTrainer(network(), "ring", flat, **options) as trainer:
        replica, path = trainer.replica, str(folder.parent / "model.npz")
        trainer.save(path)
        fitted(trainer, epochs=2)
        trainer.edit(lambda: replica.parameters.__imul__(0.5))
        assert np.array_equal(trainer.strategy.rounds.start, replica.parameters)
        with pytest.raises(ModelFileError, match="outer momentum is of another model"):
            trainer.strategy.load_state(0, replica.state() | {"trainer.outer_momentum": np.zeros(3)})
        trainer.load(path)
        fitted(trainer, epochs=2)
        again = trainer.parameters_sha256()
    with MirroredTrainer(network(), "ring", flat, **options) as trainer:
        fitted(trainer, epochs=2)
        assert trainer.parameters_sha256() == again


def test_wrong_options(world: MPI.Intracomm, flat: allreduce.Topology) -> None:
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (LocalSGD(100, fragments=100), {}, ArgumentError, "this model has only 83 parameters"),
        (LocalSGD(4), {"update": "sharded"}, ArgumentError, 'use update="replicated"'),
        ("local", {}, ArgumentError, "average='local' is unknown; use None, an Exact or a LocalSGD"),
    ]
    if SIZE > 1:
        others = (LocalSGD(4, outer="diloco"), LocalSGD(8), LocalSGD(4, fragments=2))
        wrong += [(each if flat.rank else LocalSGD(4), {}, DisagreementError, repr(each)) for each in others]
    for average, options, kind, words in wrong:
        make = partial(MirroredTrainer, network(), "ring", flat, average=average, **options)
        assert words in raised_everywhere(world, kind, make)


def test_memory_of_a_gpu_that_the_backend_can_not_read(flat: allreduce.Topology) -> None:
    """The changes are then copied to the backend's array, and the averages back; here by arrays of the host."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    parameters, sent = torch.ones(5), np.zeros(5, np.float32)
    memory = Flat(sent, torch.zeros(5), torch.from_numpy(sent))
    with allreduce.create("ring", flat) as backend:
        rounds = Rounds(LocalSGD(2, fragments=2), flat.private(), [parameters], backend, memory)
        parameters += float(flat.rank)
        rounds.count_step()
        rounds.end()
    assert parameters.tolist() == [1 + (SIZE - 1) / 2] * 5


def test_statistics_behind_the_parameters_have_no_outer_step(flat: allreduce.Topology) -> None:
    """Not even the first of them; running statistics, say, are averaged alone."""
    parameters, sent = np.ones(5, np.float32), np.zeros(5, np.float32)
    average = LocalSGD(2, OuterSGD(0.5, 0.0, nesterov=False), fragments=2)
    with allreduce.create("ring", flat) as backend:
        rounds = Rounds(average, flat.private(), [parameters], backend, Flat(sent, sent), averaged=2)
        parameters += flat.rank
        rounds.count_step()
        rounds.end()
    mean = (SIZE - 1) / 2
    assert parameters.tolist() == [1 + mean / 2] * 3 + [1 + mean] * 2
