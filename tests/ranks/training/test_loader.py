"""fit(loader): the training is that of one rank with all rows, for every strategy, however the batches are divided."""

import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from allreduce.transport import control
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import EVERY, TRAINERS, Once, Seen, X, Y, network, stop, trainer_of
from trainers import Checkpoint, Loader, MirroredTrainer, ParameterServerTrainer
from trainers.data import checksum
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit import prefetch
from trainers.fit.loader import LoaderBatches
from trainers.watching.callback import Callback

Pair = tuple[np.ndarray, np.ndarray]
EPOCHS = 2
GOOD = [(X[:4], Y[:4])] * 3  # batches


def batches_of(parts: int, seed: int) -> list[list[Pair]]:
    """Return the batches of every part: uneven numbers of batches of uneven sizes; one part may have none."""
    random, at = np.random.default_rng(seed), 0
    counts = random.permutation([random.integers(2, 4), *random.integers(0, 4, parts - 1)])
    found: list[list[Pair]] = []
    for count in counts:
        found.append([])
        for rows in random.integers(1, 6, count):
            found[-1].append((X[at : at + rows], Y[at : at + rows]))
            at += rows
    return found


def together(parts: list[list[Pair]]) -> list[Pair]:
    """Return the global batches."""
    steps = [[part[step] for part in parts if step < len(part)] for step in range(max(map(len, parts)))]
    return [(np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step])) for step in steps]


class Endless:
    """Gives batches for ever, which depend on the rank; `read` counts them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read = rank, 0

    def __iter__(self) -> Iterator[Pair]:
        while True:
            begin = (3 * self.read + self.rank) % 40
            self.read += 1
            yield X[begin : begin + 2 + self.rank], Y[begin : begin + 2 + self.rank]


@pytest.mark.parametrize("rows", ["divided", "whole"])
@pytest.mark.parametrize("kind", ["replicated", "async"])
def test_an_endless_loader_is_read_on_from_epoch_to_epoch(
    kind: str, rows: str, flat: allreduce.Topology, folder: Path
) -> None:
    """Each asynchronous worker takes `steps` batches of its own; of whole batches all of them read equally far."""
    loader = Endless(flat.rank if rows == "divided" else 0)
    with trainer_of(kind, flat) as trainer:
        own = None if trainer.strategy.part is None else loader
        options: dict[str, Any] = {"progress": False, "checkpoint": str(folder)}
        given = Loader(own, rows=rows, steps=4)
        assert len(trainer.fit(given, epochs=2, **options)) == 2
        assert own is None or own.read == 8  # none is read that is not used
        assert saved_steps(str(folder)) == [4, 8]
        assert len(trainer.fit(given, epochs=3, resume=True, **options)) == 3


def test_a_short_loader_begins_again_in_the_middle_of_an_epoch(flat: allreduce.Topology) -> None:
    passes: list[int] = []

    class Source(list):  # type: ignore[type-arg]
        def set_epoch(self, number: int) -> None:
            passes.append(number)

    with MirroredTrainer(network(), "ring", flat) as trainer:
        trainer.fit(Loader(Source([(X, Y)] * 3), rows="divided", steps=5), epochs=2, progress=False)
        assert trainer.steps == 10
        assert passes == [0, 1, 2, 3]
        passes.clear()
        trainer.fit(Loader(Source([(X, Y)] * 3), rows="divided"), epochs=2, progress=False)
        assert passes == [0, 1]
        assert trainer.steps == 16


def saved_steps(folder: str) -> list[int]:
    return sorted(int("".join(filter(str.isdigit, name))) for name in os.listdir(folder) if name.endswith(".npz"))


def test_checkpoints_of_a_stream_are_written_when_they_are_due(flat: allreduce.Topology, folder: Path) -> None:
    with MirroredTrainer(network(), "ring", flat) as trainer:
        checkpoint = Checkpoint(str(folder), "5 steps", keep=9)
        trainer.fit(Loader([(X, Y)] * 4, rows="whole"), epochs=3, progress=False, checkpoint=checkpoint)
        assert saved_steps(str(folder)) == [5, 10, 12]
        with pytest.raises(CheckpointError, match="of a training with steps=None, and this one has steps="):
            trainer.fit(Loader([(X, Y)] * 4, "whole", 3), epochs=4, progress=False, checkpoint=checkpoint, resume=True)


def test_other_ranks_resume_between_passes_only(flat: allreduce.Topology, folder: Path) -> None:
    """In the middle of a pass, each rank's loader would begin where the loaders of other ranks have been."""
    if flat.size == 1:
        pytest.skip("needs two ranks")
    loader = Loader([(X, Y)] * 3, rows="divided")
    for name, stopping in (("middle", [Once("on_train_batch_end", stop, 0, 0)]), ("end", [])):
        with MirroredTrainer(network(), "ring", flat) as trainer:
            checkpoint = Checkpoint(str(folder / name), "1 step")
            trainer.fit(loader, epochs=1, progress=False, callbacks=stopping, checkpoint=checkpoint)

    def resume() -> None:
        with allreduce.Topology(MPI.COMM_SELF) as alone, MirroredTrainer(network(), "ring", alone) as trainer:
            fit = functools.partial(trainer.fit, loader, epochs=2, progress=False, resume=True)
            with pytest.raises(CheckpointError, match="in the middle of the loaders' rows"):
                fit(checkpoint=str(folder / "middle"))
            assert len(fit(checkpoint=str(folder / "end"))) == 2
            assert len(fit(checkpoint=Checkpoint(str(folder / "middle"), same_data=False))) == 2

    control.together(flat.world, lambda: resume() if flat.rank == 0 else None)


class Numbered:
    """A loader whose batches have numbers: batch b of pass p has 100 p + b. noisy: random numbers instead."""

    def __init__(self, steps: int, noisy: bool = False) -> None:
        self.steps, self.noisy, self.number = steps, noisy, 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Pair]:
        for step in range(self.steps):
            value = np.random.normal() if self.noisy else 100 * self.number + step
            yield np.full((2, 1), value), np.zeros(2)


def read_by_one(source: Any, rows: str = "divided", steps: int | None = None, saves: bool = False) -> LoaderBatches:
    """Return the batches of a loader, of the only rank."""
    batches = LoaderBatches(source, rows, None, steps, 0, 1, saves=saves)
    batches.meet(lambda value, _: [value])
    return batches


def test_an_iterator_can_not_go_on_from_a_checkpoint() -> None:
    first, again = (read_by_one(iter([(X, Y)] * 4), "whole", 4, saves=True) for _ in range(2))
    for step in range(2):
        first.begin(0, step)
        first.learn(step, len(X))
    again.seek(0, 2, 2, *first.tell(0, 2))
    with pytest.raises(DataError, match="is an iterator and can't be read again from its beginning"):
        again.begin(0, 2)


def test_a_fit_goes_back_to_its_first_batch() -> None:
    """From the first batch of the second epoch, whose number in its epoch is the same."""
    batches = read_by_one(Numbered(1))
    batches.learn(0, batches.begin(0, 0))
    batches.begin(1, 0)
    batches.seek(0, 0, 0, {"sizes": []}, {})
    batches.begin(0, 0)
    assert batches.share(0, 0, 0).data[0][0] == 0
    resumed = read_by_one([(X, Y)] * 2, "whole")
    resumed.seek(0, 0, 0, {"sizes": []}, {})
    resumed.begin(0, 0)
    assert resumed.seen[0] == (len(X), checksum((X, Y)))  # the ranks compare what they have seen


def test_a_fit_goes_back_to_the_newest_attempt_at_a_step() -> None:
    """A loader that draws random numbers has others in the second attempt."""
    batches = read_by_one(Numbered(5, noisy=True), saves=True)

    def read() -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return batch 2, and its place as a checkpoint has it."""
        for step in range(3):
            batches.learn(step, batches.begin(0, step))
        return batches.share(0, 2, 0).data[0], batches.tell(0, 2)[1]

    first, _ = read()
    batches.seek(0, 0, 0, {"sizes": []}, {})
    second, place = read()
    assert not np.array_equal(first, second)
    batches.seek(0, 2, 2, {"sizes": [2, 2]}, place)
    batches.begin(0, 2)
    assert np.array_equal(batches.share(0, 2, 0).data[0], second)


@pytest.mark.parametrize(("limit", "number"), [(None, 300), (5, 15)])
def test_a_rank_that_joins_after_the_last_batch_of_an_epoch_reads_the_next_one(limit: int | None, number: int) -> None:
    """Without a limit that is another pass over the loader, with one the batches after those of the epochs before."""
    batches, resumed = (read_by_one(Numbered((limit and 99) or 5), "whole", limit) for _ in range(2))
    batches.seek(2, 5, 15, {"sizes": [2] * 5}, {})
    place = batches.tell(3, 0)
    resumed.seek(3, 0, batches.total(3, 0), *place)  # of a checkpoint that is written before the rank has read anything
    for each in (batches, resumed):
        each.learn(0, each.begin(3, 0))
        assert each.share(3, 0, 0).data[0][0] == number


class Closes:
    """A loader that counts its passes that are open."""

    def __init__(self) -> None:
        self.open = 0

    def __iter__(self) -> Iterator[Pair]:
        self.open += 1
        try:
            while True:
                yield (X, Y)
        finally:
            self.open -= 1


def test_a_fit_leaves_nothing_open(flat: allreduce.Topology) -> None:
    """No pass over the loader, also if the fit is refused; the user's own iterator stays open."""
    loader, iterator, threads = Closes(), iter(Closes()), set(threading.enumerate())
    with MirroredTrainer(network(), "ring", flat) as trainer:

        def fit(given: Any, **options: Any) -> None:
            trainer.fit(Loader(given, rows="divided", steps=2), epochs=1, progress=False, **options)

        fit(loader)
        assert loader.open == 0
        with pytest.raises(ArgumentError, match="needs the folder") as refused:  # holds the frames of the fit
            fit(loader, resume=True)
        with pytest.raises(ArgumentError, match="same number of rows") as again:
            fit(loader, validation_data=(np.zeros(2), np.zeros(3)))
        with pytest.raises(ArgumentError, match="6 features") as wide:
            trainer.evaluate(Loader(loader, rows="divided", collate=lambda pair: (pair[0][:, :3], pair[1])))
        assert loader.open == 0, (refused, again, wide)
        fit(iterator)
        assert len(next(iterator)) == 2
    assert set(threading.enumerate()) <= threads


def test_batches_without_rows_for_ever(flat: allreduce.Topology) -> None:
    """A loader whose pass has no rows counts as ended, and is not read again and again."""
    with MirroredTrainer(network(), "ring", flat) as trainer:

        def fit(batches: Any) -> None:
            trainer.fit(Loader(batches, rows="divided", steps=2), epochs=1, progress=False)

        with pytest.raises(DataError, match="no rank's loader gives a batch"):
            fit([(X[:0], Y[:0])])
        fit([(X[:0], Y[:0])] if flat.rank else [(X, Y)])
        assert trainer.steps == 2


def test_nothing_may_be_an_item() -> None:
    assert list(prefetch.ahead(iter([1, None, 2]))) == [1, None, 2]


def broken() -> dict[str, tuple[Any, type[Exception], str]]:
    """Return bad loaders, and the errors of a fit."""

    def raises() -> Iterator[Pair]:
        yield from GOOD[:2]
        raise OSError("the disk is gone")

    width = r"gave x float32\[5\], y int64\[\] as batch 3 of epoch 1, and first x float32\[6\]"
    return {
        "raises": (raises(), DataError, "batch 3 of epoch 1: OSError: the disk is gone"),
        "later width": ([*GOOD[:2], (X[:4, 1:], Y[:4])], DataError, width),
        "first width": ([(X[:4, 1:], Y[:4])], ArgumentError, "float32|x has 5"),
        "empty": ([], DataError, "no rank's loader gives a batch in epoch 1"),
        "no pairs": ([*GOOD[:2], X], DataError, "a batch is a ndarray, not a pair"),
        "lengths": ([(X, Y[1:])], DataError, "y has shape"),
        "no loader": (3, ArgumentError, "int is no loader"),
        "labels": ([(X[:4], Y[:4] + 7)], ArgumentError, "label"),
    }


def test_bad_arguments(flat: allreduce.Topology) -> None:
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (Y, {"batch_size": 10}, ArgumentError, "batch_size and shuffle are the loader's"),
        (Y, {"y": np.zeros(3)}, ArgumentError, "leave out its rows, or y"),
        (Y.astype(object), {}, DataError, f"shape {Y.shape} is of Python objects"),
    ]
    with MirroredTrainer(network(), "ring", flat) as trainer:
        for labels, options, kind, text in cases:
            fit = functools.partial(trainer.fit, Loader([(X, labels)], rows="whole"), progress=False, **options)
            assert text in raised_everywhere(flat.world, kind, fit)


def test_loaders_that_differ_where_they_must_not(flat: allreduce.Topology) -> None:
    if flat.size == 1:
        pytest.skip("needs two ranks")
    first = [(X[:6], Y[:6])]
    with MirroredTrainer(network(), "ring", flat) as trainer:
        for given in (Loader(first, "whole", 1 + flat.rank), Loader(first, "divided" if flat.rank else "whole", 2)):
            with pytest.raises(DisagreementError, match="rows=whole, steps="):
                trainer.fit(given, progress=False)
            with pytest.raises(DisagreementError, match="rows=whole, steps="):
                trainer.evaluate(given)
        with pytest.raises(ArgumentError, match="other batches"):
            trainer.fit(Loader([(X[flat.rank :], Y[flat.rank :])], rows="whole"), progress=False)
        with pytest.raises(DataError, match="all loaders must give the same batches"):
            trainer.fit(Loader([*first, *[(X[:9], Y[:9])] * (1 + flat.rank)], rows="whole"), progress=False)
        with pytest.raises(DataError, match="1 batches, 50 rows, #"):
            trainer.evaluate(Loader([(X + (flat.rank == 1), Y)], rows="whole"))
        with pytest.raises(DataError, match="gives a batch in epoch 2"):
            trainer.fit(Loader(iter(first), rows="divided"), epochs=2, progress=False)
    with trainer_of("sync", flat) as trainer, pytest.raises(ArgumentError, match="this rank is a server"):
        trainer.fit(Loader(first, rows="divided"), progress=False)


def test_a_torch_loader_with_its_sampler(flat: allreduce.Topology) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    sampler = torch.utils.data.DistributedSampler(rows, flat.size, flat.rank)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, sampler=sampler)
    in_batches = torch.utils.data.DataLoader(rows, batch_sampler=torch.utils.data.BatchSampler(sampler, 5, False))
    with MirroredTrainer(network(), "ring", flat) as trainer:
        for each in (loader, in_batches):
            sampler.set_epoch(7)
            before = trainer.steps
            trainer.fit(Loader(each, rows="divided"), epochs=EPOCHS, progress=False)
            assert trainer.steps - before == EPOCHS * len(loader)
            assert sampler.epoch == EPOCHS - 1
        assert len(set(trainer.parameters_sha256())) == 1


@pytest.mark.parametrize("rows", ["divided", "whole"])
@pytest.mark.parametrize("kind", [*TRAINERS, "exact"])
def test_a_loader_is_evaluated_as_all_rows_by_one_rank(kind: str, rows: str, flat: allreduce.Topology) -> None:
    """By evaluate, and after each epoch of a fit; of an endless loader the first batches, in each epoch the same."""
    with trainer_of(kind, flat) as trainer:
        part, parts = trainer.strategy.part, trainer.strategy.parts
        divided = batches_of(parts, 1)
        batches = together(divided)
        own = None if part is None else batches if rows == "whole" else divided[part]
        x, y = (np.concatenate(sides) for sides in zip(*batches, strict=True))
        loader = Loader(own, rows=rows)
        assert trainer.evaluate(loader) == pytest.approx(trainer.evaluate(x, y), rel=1e-6)
        options: dict[str, Any] = {"epochs": EPOCHS, "progress": False, "validation_data": loader}
        assert trainer.fit(x, y, **options)[-1].validation == pytest.approx(trainer.evaluate(x, y), rel=1e-6)
        endless = None if part is None and rows == "divided" else Endless(part if rows == "divided" else 1)
        read = [next(iter(Endless(each))) for each in (range(parts) if rows == "divided" else [1])]
        expected = trainer.evaluate(*(np.concatenate(sides) for sides in zip(*read, strict=True)))
        for _ in range(2):
            if endless is not None:
                endless.read = 0
            assert trainer.evaluate(Loader(endless, rows=rows, steps=1)) == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_a_loader_may_have_no_weight(flat: allreduce.Topology) -> None:
    """In an evaluation, as in a fit; all rows together must have some."""
    weights = np.repeat([1.0, 0.0], 4)
    loader = Loader([(X[:4], Y[:4], weights[:4]), (X[4:8], Y[4:8], weights[4:])], rows="whole")
    with MirroredTrainer(network(), "ring", flat) as trainer:
        expected = trainer.evaluate(X[:8], Y[:8], sample_weight=weights)
        assert trainer.evaluate(loader) == pytest.approx(expected, rel=1e-6)
        fit = functools.partial(trainer.fit, X[:8], Y[:8], 1, sample_weight=0 * weights, progress=False)
        assert "nothing to train on" in raised_everywhere(flat.world, ArgumentError, fit)


def test_a_bad_loader_to_evaluate_is_one_error_on_all_ranks(flat: allreduce.Topology) -> None:
    last, once = flat.rank == flat.size - 1, iter([(X, Y)])
    with MirroredTrainer(network(), "ring", flat) as trainer:

        def evaluate(batches: Any, rows: str = "divided", **options: Any) -> dict[str, float]:
            return trainer.evaluate(Loader(batches, rows=rows), **options)

        for kind in ("raises", "later width", "first width", "no pairs", "lengths", "no loader", "empty"):
            bad, error, text = broken()[kind]
            text = {"raises": "the disk is gone", "later width": "and first x", "empty": "to evaluate"}.get(kind, text)
            with pytest.raises((error, ArgumentError), match=text):
                evaluate(bad if last or kind == "empty" else GOOD)
        assert set(evaluate(once)) == {"loss", "accuracy"}
        with pytest.raises(DataError, match="to evaluate: it has no rows, or is an iterator that has ended"):
            evaluate(once)
        with pytest.raises(ArgumentError, match=r"a Loader with rows=.*: leave out its rows"):
            evaluate([(X, Y)], y=Y)
        with pytest.raises(ArgumentError, match="validation_data of fit: a int is no loader"):
            trainer.fit(X, Y, validation_data=Loader(5, rows="whole"), progress=False)
        if flat.size > 1:
            with pytest.raises(DataError, match="rank 1: 2 batches, 100 rows"):
                evaluate([(X, Y)] * (1 + flat.rank), rows="whole")


@pytest.mark.parametrize("rows", ["divided", "whole"])
def test_asynchronous_servers_train_on_every_row_once(rows: str, flat: allreduce.Topology) -> None:
    """With a learning rate of 0 the loss of an epoch is that of the model at its beginning, so it shows which rows were
    used."""
    if flat.size == 1:
        pytest.skip("a server needs a worker")
    for seed, warm_up, servers in ((0, 0, 1), (1, 1, max(1, flat.size - 2)), (2, 0, 1)):
        replica = network()
        replica.learning_rates = [0.0]
        options: dict[str, Any] = {"updates": "async", "warm_up": warm_up, "servers": servers, "max_staleness": 2}
        with ParameterServerTrainer(replica, topology=flat, **options) as trainer:
            part, parts = trainer.strategy.part, trainer.strategy.parts
            divided = batches_of(parts, seed)
            batches = together(divided)
            own = None if part is None else batches if rows == "whole" else divided[part]
            computed = Seen()
            history = trainer.fit(Loader(own, rows=rows), epochs=EPOCHS, callbacks=[computed], progress=False)
            x, y = (np.concatenate(sides) for sides in zip(*batches, strict=True))
            assert [each.loss for each in history] == pytest.approx([trainer.evaluate(x, y)["loss"]] * EPOCHS, rel=1e-5)
            updates = sum(map(len, divided)) if rows == "divided" else sum(min(parts, len(x)) for x, _ in batches)
            assert [sum(each.staleness) for each in history] == [updates] * EPOCHS
            if rows == "divided" and part is not None:
                assert computed.batches == EPOCHS * len(divided[part])
            assert len(set(trainer.parameters_sha256())) == 1


KINDS = [kind for kind in EVERY if kind not in ("exact", "workers")]
FEW = ("raises", "later width", "no pairs", "empty")  # of the errors, for strategies other than "replicated"


@pytest.mark.parametrize("strategy", KINDS)
def test_a_bad_loader_in_every_strategy(strategy: str, flat: allreduce.Topology) -> None:
    with trainer_of(strategy, flat) as trainer:
        reads = trainer.strategy.part is not None
        for kind in broken() if strategy == "replicated" else FEW:
            bad, error, text = broken()[kind]
            own = bad if flat.rank == 0 or kind == "empty" else GOOD
            with pytest.raises(error, match=text) as caught:
                trainer.fit(Loader(own if reads else None, rows="divided"), progress=False)
            assert type(caught.value) is error
            assert len(set(trainer.parameters_sha256())) == 1
        if trainer.strategy.parts > 1 and strategy != "local":
            own = [(X, Y)] * (2 + flat.rank) if reads else None
            with pytest.raises(DataError, match=r"loaders must give the same batches|have given other batches"):
                trainer.fit(Loader(own, rows="whole"), progress=False)


@pytest.mark.parametrize("strategy", ["exact", *KINDS])
def test_whole_batches_with_other_values_on_one_rank(strategy: str, flat: allreduce.Topology) -> None:
    """Only some of the values differ. The number of rows is the same."""
    good = [(X[at : at + 12], Y[at : at + 12]) for at in range(0, 48, 12)]
    with trainer_of(strategy, flat) as trainer:
        part, parts = trainer.strategy.part, trainer.strategy.parts
        if parts == 1:  # no rank reads the batches with the only one that computes
            return
        for epoch, number in ((0, 2), (1, 0)):
            passes = [[*good] for _ in range(2)]
            if part == parts - 1:
                changed = good[number][0].copy()
                changed[-1, 0] += 1
                passes[epoch][number] = changed, good[number][1]
            own = None if part is None else itertools.chain(*passes)
            text = f"batch {number + 1} of epoch {epoch + 1} is not the same on all ranks"
            with pytest.raises(DataError, match=text + r"(.|\n)*rank 0: #(.|\n)*rank 1: "):
                trainer.fit(Loader(own, rows="whole", steps=4), epochs=2, progress=False)
            assert len(set(trainer.parameters_sha256())) == 1
        history = trainer.fit(Loader(None if part is None else good, rows="whole"), epochs=2, progress=False)
        assert len(history) == 2


class Sleeps(Callback):
    """Rank 1 is slow to begin."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.4 * (self.trainer.rank == 1))


@pytest.mark.parametrize("kind", ["async", "spare 1"])
def test_an_error_in_batches_that_a_late_rank_reads_at_the_end(kind: str, flat: allreduce.Topology) -> None:
    """Each rank reads all whole batches, also those that it does not compute."""
    if flat.size < (3 if kind == "async" else 2):
        pytest.skip("needs two ranks that compute")

    def batches() -> Iterator[Pair]:
        yield from [(X, Y)] * 5
        if flat.rank == 1:
            raise OSError("the disk is full")
        yield (X, Y)

    with trainer_of(kind, flat) as trainer, pytest.raises(DataError, match="the disk is full"):
        trainer.fit(Loader(batches(), rows="whole"), epochs=1, progress=False, callbacks=[Sleeps()])


class First:
    """A loader that ends after some batches of another one."""

    def __init__(self, loader: Any, count: int) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Iterator[Pair]:
        return itertools.islice(self._loader, self._count)


class Slow(Endless):
    """Rank 1 is slow. same: all ranks have the same batches."""

    def __init__(self, rank: int, same: bool) -> None:
        super().__init__(0 if same else rank)
        self.slow = rank == 1

    def __iter__(self) -> Iterator[Pair]:
        for pair in super().__iter__():
            time.sleep(0.02 * self.slow)
            yield pair


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("rows", ["divided", "whole"])
def test_a_late_rank_of_spare_replicas_goes_on_with_its_loader(
    rows: str, ends: bool, flat: allreduce.Topology, folder: Path
) -> None:
    """Divided rows: with its next batch, so it reads fewer; those of a loader that ends are the last steps, which no
    other rank has. Whole batches: with that of the newest step."""
    loader = Slow(flat.rank, rows == "whole")
    with trainer_of("spare 1", flat) as trainer:
        options: dict[str, Any] = {"progress": False, "checkpoint": str(folder)}
        given = Loader(First(loader, 5), rows) if ends else Loader(loader, rows, steps=9)
        history = trainer.fit(given, epochs=2, **options)
        assert len(set(trainer.parameters_sha256())) == 1
        assert np.isfinite([each.loss for each in history]).all()
        if ends:
            assert loader.read == 10
            return
        assert saved_steps(str(folder)) == [9, 18]
        assert loader.read == 18 if rows == "whole" else loader.read <= 18
        if rows == "divided" and loader.slow:
            assert loader.read < 18
        assert len(trainer.fit(given, epochs=3, resume=True, **options)) == 3
