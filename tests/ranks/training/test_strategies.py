"""Parameter servers and spare replicas on several ranks: results equal to one rank's where possible, errors on all
ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.arrays.chunks import chunk
from allreduce.call import queue
from allreduce.errors import CollectiveTimeoutError, RankLostError, UnavailableError
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE, Once, fail
from trainers import (
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    SkipNotFinite,
    SpareReplicasTrainer,
)
from trainers.data import Samples
from trainers.errors import ArgumentError, DataError, DivergedError
from trainers.group import RankGroup
from trainers.strategies.servers.service import ServerStrategy
from trainers.trainer import Trainer
from trainers.watching.callback import Callback
from trainers.watching.history import History

JOBS = "openmpi 1 2 3 5"

ROWS, BATCH = 53, 20
STEPS = 3
Make = Callable[[NumpyNetwork, allreduce.Topology], Trainer]

served = pytest.mark.skipif(SIZE < 2, reason="one rank is a server, so others must compute")
few = pytest.mark.skipif(SIZE not in (2, 3), reason="what happens on two and three ranks happens on more")
straggling = pytest.mark.skipif(SIZE < 3, reason="a slow worker, a fast one and a server")


def network(optimizer: str = "adam", **options: Any) -> NumpyNetwork:
    return fits.network(optimizer=optimizer, **options)


def data() -> tuple[np.ndarray, np.ndarray]:
    return fits.data(ROWS)


def asynchronous(replica: NumpyNetwork, topology: allreduce.Topology, **options: Any) -> ParameterServerTrainer:
    return ParameterServerTrainer(replica, topology, **options)


def in_step(replica: NumpyNetwork, topology: allreduce.Topology) -> ParameterServerTrainer:
    return ParameterServerTrainer(replica, topology, servers=min(2, SIZE - 1), updates="sync")


def with_spare(replica: NumpyNetwork, topology: allreduce.Topology) -> SpareReplicasTrainer:
    return SpareReplicasTrainer(replica, topology, spare=min(1, SIZE - 1))


STRATEGIES: dict[str, Make] = {"async": asynchronous, "sync": in_step, "spare": with_spare}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=list(STRATEGIES))


class Seen(Callback):
    """Counts the batches of this rank, and records their losses."""

    def __init__(self) -> None:
        self.batches, self.losses = 0, list[float]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.losses.append(logs["loss"])


@straggling
def test_one_worker_of_several_servers_trains_as_one_rank(flat: allreduce.Topology) -> None:
    """All servers have received its gradients before it reads their parameters."""
    x, y = data()
    sums = []
    for updates in ("sync", "async"):
        with ParameterServerTrainer(network("momentum"), flat, servers=SIZE - 1, updates=updates) as trainer:
            trainer.fit(x, y, 5, 2, progress=False)
            sums.append(trainer.parameters_sha256())
    assert sums[0] == sums[1]


def applied(history: History) -> list[int]:
    return [sum(epoch.staleness) + epoch.dropped for epoch in history]


@served
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stale": "scale"},
        {"stale": "drop", "max_staleness": 1},
        {"max_staleness": 0},
        {"max_staleness": 2, "servers": max(1, SIZE - 2)},
        {"warm_up": 2},
    ],
    ids=str,
)
def test_asynchronous_training_visits_every_part_once(
    options: dict[str, Any], flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    x, y = data()
    seen = Seen()
    with asynchronous(network(), flat, **options) as trainer:
        first = trainer.evaluate(x, y)
        history = trainer.fit(x, y, 6, BATCH, progress=False, callbacks=[seen])
        last = trainer.evaluate(x, y)
        assert len(set(trainer.parameters_sha256())) == 1
        workers = len(trainer.workers)
    assert last["loss"] < first["loss"]
    assert applied(history) == [STEPS * workers] * 6  # no batch is so short that a worker has no rows
    parts, used = 6 * STEPS * workers, sum(sum(epoch.staleness) for epoch in history)
    batches = world.allgather(seen.batches)
    assert sum(batches[rank] for rank in range(SIZE) if rank not in trainer.servers) == parts
    assert batches[trainer.servers[0]] == used
    assert len(set(world.allgather(str(history)))) == 1
    bound = options.get("max_staleness")
    assert bound is None or all(len(epoch.staleness) <= bound + 1 for epoch in history)
    if "warm_up" in options:
        assert [epoch.staleness for epoch in history[:2]] == [(STEPS * workers,)] * 2


class Stuck(Callback):
    """The rank `slow` stays in its first batch until other ranks have reported `batches` batches."""

    def __init__(self, world: MPI.Intracomm, slow: int, others: list[int], batches: int) -> None:
        self._world, self._slow, self._others, self._missing = world, slow, others, batches
        self._first, self._told = True, list[MPI.Request]()
        self.batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._first and self._world.rank == self._slow:
            for rank in self._others:  # so that nobody is through before this rank has begun
                self._world.send("begins", rank)
            for _ in range(self._missing):
                assert self._world.recv() == "a batch"
        elif self._first and self._world.rank in self._others:
            assert self._world.recv(source=self._slow) == "begins"
        self._first = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self._world.rank in self._others:
            self._told.append(self._world.isend("a batch", self._slow))

    def counts(self) -> list[int]:
        """Return the numbers of batches of all ranks, after the fit. Collective."""
        counts = self._world.allgather(self.batches)
        if self._world.rank == self._slow:
            for _ in range(sum(counts[rank] for rank in self._others) - self._missing):
                self._world.recv()
        MPI.Request.waitall(self._told)
        return counts


@straggling
@pytest.mark.parametrize("place", ["first", "last"])
def test_servers_serve_whoever_is_ready(place: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """The slow worker is stuck until the others have done all parts but those already dealt to it."""
    x, y = data()
    workers = list(range(flat.size - 1))
    slow = workers[0 if place == "first" else -1]
    stuck = Stuck(world, slow, [rank for rank in workers if rank != slow], 53 - 8)
    with asynchronous(network(), flat) as trainer:
        history = trainer.fit(x, y, 1, len(workers), progress=False, callbacks=[stuck])
    batches = stuck.counts()
    assert 1 <= batches[slow] <= 8
    assert sum(batches[rank] for rank in workers) == 53  # a row each; parts without rows are nobody's batch
    assert batches[-1] == 53  # the server's
    assert applied(history) == [53]


@straggling
@pytest.mark.parametrize("place", ["chief", "last"])
def test_a_step_does_not_wait_for_the_spare_rank(place: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """The spare rank sleeps until the others have done ten steps; then it continues with the newest step."""
    x, y = data()
    ranks = list(range(flat.size))
    slow = 0 if place == "chief" else ranks[-1]
    stuck = Stuck(world, slow, [rank for rank in ranks if rank != slow], 10 * (flat.size - 1))
    with SpareReplicasTrainer(network(), flat, spare=1) as trainer:
        history = trainer.fit(x, y, 2, flat.size, progress=False, callbacks=[stuck])
        assert len(set(trainer.parameters_sha256())) == 1
    steps = 2 * -(-ROWS // flat.size)
    batches = stuck.counts()
    assert max(batches) <= steps
    assert 1 <= batches[slow] <= steps - 9  # it has skipped to the newest step
    assert history[0].dropped >= 1


class Late(Callback):
    """The last rank begins an epoch when the other ranks have reported `batches` batches of it."""

    def __init__(self, world: MPI.Intracomm, batches: int) -> None:
        self._world, self._missing, self._last = world, batches, world.rank == world.size - 1
        self._told = list[MPI.Request]()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for _ in range(self._missing if self._last else 0):
            assert self._world.recv() == "a batch"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._last:
            self._told.append(self._world.isend("a batch", self._world.size - 1))

    def finish(self) -> None:
        """Receive what is left. Collective."""
        told = sum(self._world.allgather(len(self._told)))
        for _ in range(told - self._missing if self._last else 0):
            self._world.recv()
        MPI.Request.waitall(self._told)


@straggling
@pytest.mark.parametrize("late", ["all steps", "half of the steps"])
def test_a_spare_rank_that_begins_late_has_the_newest_parameters(
    late: str, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    size, steps = flat.size, 10
    x, y = (rows[: steps * size] for rows in data())
    each = steps if late == "all steps" else steps // 2
    callback = Late(world, each * (size - 1))
    with SpareReplicasTrainer(network(), flat, spare=1) as trainer:
        trainer.fit(x, y, 1, size, progress=False, callbacks=[callback])
        assert len(set(trainer.parameters_sha256())) == 1
    callback.finish()


@few
@every_strategy
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("event", ["on_epoch_begin", "on_train_batch_end"])
def test_an_error_of_one_rank_is_raised_on_all(make: Make, event: str, place: str, flat: allreduce.Topology) -> None:
    """The last rank is a server, or a spare replica. Afterwards the ranks are in step, and the trainer works."""
    x, y = data()
    rank = 0 if place == "first" else flat.size - 1
    failing = [Once(event, fail, batch=None)] if flat.rank == rank else []
    with make(network(), flat) as trainer:
        with pytest.raises(OSError, match="the disk is full") as caught:
            # Many epochs, because in one of them others may have done everything when a worker asks.
            trainer.fit(x, y, 100, BATCH, callbacks=failing, progress=False)
        assert caught.value.ranks == tuple(range(flat.size))  # type: ignore[attr-defined]
        assert len(set(trainer.parameters_sha256())) == 1
        assert len(trainer.fit(x, y, 2, BATCH, progress=False)) == 2


@few
@every_strategy
@pytest.mark.parametrize("where", ["gradients", "update"])
def test_an_error_of_a_replica_is_raised_on_all(
    make: Make, where: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first rank computes, and while the serving rank updates."""
    if make is in_step and where == "update":
        return  # as with mirrored replicas it ends the job
    x, y = data()
    replica = network()
    with make(replica, flat) as trainer:
        whose = 0 if where == "gradients" or make is with_spare else flat.size - 1  # rank 0 leads spare replicas
        if flat.rank == whose:
            monkeypatch.setattr(replica, where, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(x, y, 100, BATCH, progress=False)
        monkeypatch.undo()
        assert len(trainer.fit(x, y, 2, BATCH, progress=False)) == 2


@served
@every_strategy
def test_fits_of_one_epoch_train_one_after_the_other(make: Make, flat: allreduce.Topology) -> None:
    """Each fit starts anew: the progress of a fit in its epoch does not count in the next fit."""
    x, y = data()
    with make(network(), flat) as trainer:
        models = [trainer.parameters_sha256()[0]]
        for _ in range(3):
            trainer.fit(x, y, 1, BATCH, progress=False)
            models.append(trainer.parameters_sha256()[0])
        assert len(set(models)) == len(models)


class Breaks:
    """A data set with a row that can't be read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if row == ROWS - 2:
            raise OSError("no such row")
        x, y = data()
        return x[row], y[row]


@few
@every_strategy
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_data_set_that_fails_fails_on_all(make: Make, prefetch: bool, flat: allreduce.Topology) -> None:
    with make(network(), flat) as trainer:
        with pytest.raises(DataError, match="no such row") as caught:
            # twenty epochs: spare replicas leave out a late rank, which then never reads the row in that epoch
            trainer.fit(Loader(Breaks(), prefetch=prefetch), epochs=20, batch_size=BATCH, progress=False)
        assert caught.value.ranks == tuple(range(flat.size))
        x, y = data()
        assert len(trainer.fit(Samples(list(zip(x, y, strict=True))), None, 2, BATCH, progress=False)) == 2


@served
@pytest.mark.parametrize("strategy", ["async", "sync", "no spare replica", "local", "local, with a loader"])
def test_discarded_rows_weigh_nothing_in_the_loss(strategy: str, flat: allreduce.Topology) -> None:
    """The history's loss is the mean over the rows that took part in an update: of the batches, or of a rank's parts of
    them, without the part with a NaN."""
    x, y = data()
    x[7] = np.nan
    replica = network("sgd", lr=1e-30)
    alone = network("sgd", lr=1e-30)
    if "local" in strategy:
        trainer: Trainer = MirroredTrainer(replica, "ring", flat, average=LocalSGD(2))
    else:
        spare = {"no spare replica": lambda: SpareReplicasTrainer(replica, flat, spare=0)}
        trainer = spare[strategy]() if strategy in spare else STRATEGIES[strategy](replica, flat)
    with trainer:
        given: dict[str, Any] = {"epochs": 1, "progress": False, "transforms": [SkipNotFinite()]}
        if "loader" in strategy:
            batches = [slice(at, min(at + BATCH, ROWS)) for at in range(0, ROWS, BATCH)]
            own = [chunk(each.stop - each.start, SIZE, flat.rank) for each in batches]
            rows = [np.arange(ROWS)[each][mine] for each, mine in zip(batches, own, strict=True)]
            history = trainer.fit(Loader([(x[each], y[each]) for each in rows], rows="divided"), **given)
        else:
            history = trainer.fit(x, y, batch_size=BATCH, shuffle=False, **given)
    (loss,) = history.column("loss")
    parts = {"async": SIZE - 1, "sync": 1}.get(strategy, SIZE)
    spans = [chunk(BATCH, parts, part) for part in range(parts)]
    (gone,) = (span for span in spans if span.start <= 7 < span.stop)
    kept = np.delete(np.arange(ROWS), gone)
    assert loss == pytest.approx(alone.evaluate(x[kept], y[kept])[0] / len(kept), rel=1e-4)


@few
@every_strategy
def test_divergence_is_told_on_all_ranks(make: Make, flat: allreduce.Topology) -> None:
    x, y = data()
    with make(network("sgd", lr=1e30), flat) as trainer, pytest.raises(DivergedError) as caught:
        trainer.fit(x, y, 5, BATCH, progress=False)
    assert caught.value.ranks == tuple(range(flat.size))


@few
def test_an_mpi_without_threads(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers request parameters after they have computed; a chief, which must serve while it computes, is
    impossible."""
    monkeypatch.setattr(queue, "thread_error", lambda: UnavailableError("no MPI_THREAD_MULTIPLE"))
    x, y = data()
    with flat.split(0) as own:  # nobody has started the thread of its worker
        with asynchronous(network(), own) as trainer:
            assert applied(trainer.fit(x, y, 2, BATCH, progress=False)) == [STEPS * (SIZE - 1)] * 2
        with pytest.raises(UnavailableError, match="MPI_THREAD_MULTIPLE") as caught:
            with_spare(network(), own)
        assert caught.value.ranks == tuple(range(SIZE))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"servers": SIZE}, "leaves no worker"),
    ({"servers": SIZE + 1}, f"there are {SIZE} ranks"),
    ({"servers": 0}, "servers must be an integer >= 1, got 0"),
    ({"servers": (0, SIZE)}, f"there are {SIZE} ranks"),
    ({"servers": (0, 0)}, "each of them once"),
    ({"servers": "all"}, "neither a number nor ranks"),
    ({"updates": "later"}, "use one of sync, async"),
    ({"stale": "burn"}, "use one of keep, drop, scale"),
    ({"stale": "drop"}, "needs max_staleness"),
    ({"max_staleness": -1}, "max_staleness must be an integer >= 0, or None, got -1"),
    ({"updates": "sync", "warm_up": 1}, "no use"),
    ({"on_failure": "replace"}, "on_failure='replace' is unknown; use one of stop, continue"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=str)
def test_options_that_make_no_sense_are_refused_on_all_ranks(
    options: dict[str, Any], words: str, flat: allreduce.Topology
) -> None:
    if SIZE == 1 and "servers" not in options:
        return
    replica = network()
    parameters = replica.parameters
    with pytest.raises(ArgumentError, match=words) as caught:
        ParameterServerTrainer(replica, flat, **options)
    assert caught.value.ranks == tuple(range(SIZE))
    assert replica.parameters is parameters  # nothing was made


@pytest.mark.parametrize("spare", [-1, SIZE, "one"])
def test_as_many_spare_replicas_as_ranks_are_refused(spare: Any, flat: allreduce.Topology) -> None:
    with pytest.raises(
        ArgumentError, match=f"spare must be an integer from 0 to {SIZE - 1}, .* got {spare!r}"
    ) as caught:
        SpareReplicasTrainer(network(), flat, spare=spare)
    assert caught.value.ranks == tuple(range(SIZE))


@served
def test_a_rank_that_is_gone_after_an_agreement_is_missed(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others wait for next, the wait ends in an error: here the exchange of an epoch's times."""
    ranks = allreduce.Topology(world, timeout=1)
    x, y = data()
    trainer = MirroredTrainer(network(), "ring", ranks)

    def agree(row: str, error: Exception | None = None) -> None:
        RankGroup.agree(trainer.group, row, error)
        if ranks.rank == ranks.size - 1 and "after the steps" in row:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.group, "agree", agree)
    with pytest.raises((KeyboardInterrupt, CollectiveTimeoutError)):
        trainer.fit(x, y, 1, BATCH, progress=False)
    trainer.abandon()
    ranks.abandon()


@served
def test_servers_are_abandoned_in_the_middle_of_their_construction(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the remaining ranks do when one fails there."""
    made: list[ServerStrategy] = []

    def fails(strategy: ServerStrategy) -> None:
        made.append(strategy)
        raise RankLostError("a rank has failed")

    monkeypatch.setattr(ServerStrategy, "_make_endpoints", fails)
    mine = network()
    with pytest.raises(RankLostError, match="a rank has failed"):
        ParameterServerTrainer(mine, topology=flat)
    bound = made[0]._parameters
    made[0].abandon()
    assert not np.shares_memory(mine.parameters, bound)
