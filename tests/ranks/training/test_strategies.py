"""Parameter servers, their workers of several ranks, spare replicas and central storage: results equal to one rank's
where possible, errors on all ranks."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.arrays.chunks import chunk
from allreduce.call import queue
from allreduce.errors import AllReduceError, CollectiveTimeoutError, DisagreementError, RankLostError, UnavailableError
from tests.ranks.training import fits
from tests.ranks.training.fits import SIZE, Once, stop, trainer_of
from trainers import (
    EMA,
    Accumulate,
    CentralStorageTrainer,
    ClipNorm,
    Loader,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    SkipNotFinite,
    SpareReplicasTrainer,
)
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.strategies.servers.service import ServerStrategy
from trainers.strategies.sharded import SliceOwners
from trainers.watching.callback import Callback
from trainers.watching.history import History

JOBS = "openmpi 1 2 3 5"

ROWS, BATCH = 53, 20
STEPS = 3

served = pytest.mark.skipif(SIZE < 2, reason="one rank is a server, so others must compute")
few = pytest.mark.skipif(SIZE not in (2, 3), reason="what happens on two and three ranks happens on more")
straggling = pytest.mark.skipif(SIZE < 3, reason="a slow worker, a fast one and a server")


X, Y = fits.data(ROWS)


def network(optimizer: str = "adam", **options: Any) -> NumpyNetwork:
    return fits.network(optimizer=optimizer, **options)


@straggling
def test_one_worker_of_several_servers_trains_as_one_rank(flat: allreduce.Topology) -> None:
    """All servers have received its gradients before it reads their parameters."""
    sums = []
    for updates in ("sync", "async"):
        with ParameterServerTrainer(network("momentum"), flat, servers=SIZE - 1, updates=updates) as trainer:
            trainer.fit(X, Y, 5, 2, progress=False)
            sums.append(trainer.parameters_sha256())
    assert sums[0] == sums[1]


def applied(history: History) -> list[int]:
    return [sum(epoch.staleness) + epoch.dropped for epoch in history]


class Stuck(Callback):
    """The rank `slow` stays in its first batch until other ranks have reported `batches` batches. late: it does so
    before its first epoch."""

    def __init__(self, world: MPI.Intracomm, slow: int, others: list[int], batches: int, late: bool = False) -> None:
        self._world, self._slow, self._others, self._missing, self._late = world, slow, others, batches, late
        self._first, self._told = True, list[MPI.Request]()
        self.batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._late:
            self._wait()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._wait()

    def _wait(self) -> None:
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
    workers = list(range(flat.size - 1))
    slow = workers[0 if place == "first" else -1]
    stuck = Stuck(world, slow, [rank for rank in workers if rank != slow], 53 - 8)
    with ParameterServerTrainer(network(), flat) as trainer:
        history = trainer.fit(X, Y, 1, len(workers), progress=False, callbacks=[stuck])
    batches = stuck.counts()
    assert 1 <= batches[slow] <= 8
    assert sum(batches[rank] for rank in workers) == 53  # a row each; parts without rows are nobody's batch
    assert batches[-1] == 53  # the server's
    assert applied(history) == [53]


@straggling
@pytest.mark.parametrize("place", ["chief", "last"])
def test_a_step_does_not_wait_for_the_spare_rank(place: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """The spare rank sleeps until the others have done ten steps; then it continues with the newest step."""
    ranks = list(range(flat.size))
    slow = 0 if place == "chief" else ranks[-1]
    stuck = Stuck(world, slow, [rank for rank in ranks if rank != slow], 10 * (flat.size - 1))
    with SpareReplicasTrainer(network(), flat, spare=1) as trainer:
        history = trainer.fit(X, Y, 2, flat.size, progress=False, callbacks=[stuck])
        assert len(set(trainer.parameters_sha256())) == 1
    steps = 2 * -(-ROWS // flat.size)
    batches = stuck.counts()
    assert max(batches) <= steps
    assert 1 <= batches[slow] <= steps - 9  # it has skipped to the newest step
    assert history[0].dropped >= 1


@straggling
@pytest.mark.parametrize("steps", [10, 5])
def test_a_spare_rank_that_begins_late_has_the_newest_parameters(
    steps: int, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    """After all ten steps, and after half of them."""
    others = list(range(flat.size - 1))
    stuck = Stuck(world, flat.size - 1, others, steps * len(others), late=True)
    with SpareReplicasTrainer(network(), flat, spare=1) as trainer:
        rows = slice(10 * flat.size)
        trainer.fit(X[rows], Y[rows], 1, flat.size, progress=False, callbacks=[stuck])
        assert len(set(trainer.parameters_sha256())) == 1
    stuck.counts()


@served
@pytest.mark.parametrize("kind", ["async", "sync", "spare 1"])
def test_fits_of_one_epoch_train_one_after_the_other(kind: str, flat: allreduce.Topology) -> None:
    """Each fit starts anew: the progress of a fit in its epoch does not count in the next fit."""
    with trainer_of(kind, flat, network()) as trainer:
        models = [trainer.parameters_sha256()[0]]
        for _ in range(3):
            trainer.fit(X, Y, 1, BATCH, progress=False)
            models.append(trainer.parameters_sha256()[0])
        assert len(set(models)) == len(models)


@served
@pytest.mark.parametrize("kind", ["async", "sync", "spare", "local"])
def test_discarded_rows_weigh_nothing_in_the_loss(kind: str, flat: allreduce.Topology) -> None:
    """The history's loss is the mean over the rows that took part in an update: without the part with a NaN."""
    x = X.copy()
    x[7] = np.nan
    replica, alone = (network("sgd", lr=1e-30) for _ in range(2))
    with trainer_of(kind, flat, replica) as trainer:
        options: dict[str, Any] = {"shuffle": False, "progress": False, "transforms": [SkipNotFinite()]}
        (loss,) = trainer.fit(x, Y, 1, BATCH, **options).column("loss")
        parts = 1 if kind == "sync" else trainer.strategy.parts  # whose ranks leave a step out together
    spans = [chunk(BATCH, parts, part) for part in range(parts)]
    (gone,) = (span for span in spans if span.start <= 7 < span.stop)
    kept = np.delete(np.arange(ROWS), gone)
    assert loss == pytest.approx(alone.evaluate(x[kept], Y[kept])[0] / len(kept), rel=1e-4)


@few
def test_an_mpi_without_threads(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers request parameters after they have computed; a chief, which must serve while it computes, is
    impossible."""
    monkeypatch.setattr(queue, "thread_error", lambda: UnavailableError("no MPI_THREAD_MULTIPLE"))
    with flat.split(0) as own:  # nobody has started the thread of its worker
        with ParameterServerTrainer(network(), own) as trainer:
            assert applied(trainer.fit(X, Y, 2, BATCH, progress=False)) == [STEPS * (SIZE - 1)] * 2
        with pytest.raises(UnavailableError, match="MPI_THREAD_MULTIPLE") as caught:
            SpareReplicasTrainer(network(), own, spare=1)
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
if SIZE == 3:  # a server, and a worker of two ranks
    BAD += [
        ({"ranks_per_worker": 0}, "ranks_per_worker must be an integer >= 1, got 0"),
        ({"ranks_per_worker": True}, "must be an integer >= 1, got True"),
        ({"ranks_per_worker": 3}, "2 ranks are left for workers: start more ranks, or give at most 2"),
        ({"allreduce": "ring"}, "allreduce='ring' has no use with ranks_per_worker=1"),
        ({"allreduce": "rign", "ranks_per_worker": 2}, "allreduce='rign' is unknown"),
        ({"allreduce": "nccl", "ranks_per_worker": 2}, "nccl"),
        ({"updates": "sync", "ranks_per_worker": 2}, 'ranks_per_worker has no use with updates="sync"'),
    ]


def test_options_that_make_no_sense_are_refused_on_all_ranks(flat: allreduce.Topology) -> None:
    replica = network()
    parameters = replica.parameters
    text = f"spare must be an integer from 0 to {SIZE - 1}, .* got "
    spares = [(SpareReplicasTrainer, {"spare": each}, f"{text}{each!r}") for each in (-1, SIZE, "one")]
    served = [(ParameterServerTrainer, *each) for each in BAD if SIZE > 1 or "servers" in each[0]]
    for kind, options, words in [*spares, *served]:
        with pytest.raises((ArgumentError, AllReduceError), match=words) as caught:
            kind(replica, flat, **options)
        assert isinstance(caught.value, ArgumentError) or "allreduce" in options
        assert caught.value.ranks == tuple(range(SIZE))
        assert replica.parameters is parameters  # nothing was made


@served
def test_a_rank_that_is_gone_after_an_agreement_is_missed(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others wait for next, the wait ends in an error: here the exchange of an epoch's times."""
    ranks = allreduce.Topology(world, timeout=1)
    trainer = MirroredTrainer(network(), "ring", ranks)

    def agree(row: str, error: Exception | None = None) -> None:
        RankGroup.agree(trainer.group, row, error)
        if ranks.rank == ranks.size - 1 and "after the steps" in row:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.group, "agree", agree)
    with pytest.raises((KeyboardInterrupt, CollectiveTimeoutError)):
        trainer.fit(X, Y, 1, BATCH, progress=False)
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


# Workers of several ranks

once = pytest.mark.skipif(SIZE != 3, reason="what happens on three ranks happens on more")


class Checksums(Callback):
    """Records the batches that this rank computes, and the checksum of the parameters with which it does."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.ended = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, zlib.crc32(self.trainer.replica.state()["parameters"].tobytes())))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended += 1
        self.seen.append((batch, zlib.crc32(np.float64(logs["loss"]).tobytes())))


@served
@pytest.mark.every_pair
@pytest.mark.parametrize(
    ("options", "per_node"),
    [
        ({}, None),
        ({"stale": "drop", "max_staleness": 1}, None),
        ({"max_staleness": 0}, 1),
        ({"max_staleness": 2, "servers": 2}, None),
        ({"stale": "scale", "warm_up": 2}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, *[each for each in (2, 3) if each < SIZE]])  # of 5 ranks some workers are smaller
def test_asynchronous_training_visits_every_part_once(
    ranks: int, options: dict[str, Any], per_node: int | None, topology_of: Any, world: MPI.Intracomm
) -> None:
    """Every part of a batch gives one update, however many ranks compute it. They have equal parameters after each
    pull, and memory of their own when the trainer is closed."""
    if SIZE - options.get("servers", 1) < ranks:
        pytest.skip("a worker of fewer ranks")
    sums = Checksums()
    with ParameterServerTrainer(network(), topology_of(per_node), ranks_per_worker=ranks, **options) as trainer:
        first = trainer.evaluate(X, Y)
        history = trainer.fit(X, Y, 6, BATCH, progress=False, callbacks=[sums])
        last = trainer.evaluate(X, Y)
        assert len(set(trainer.parameters_sha256())) == 1
        workers, server = trainer.strategy.workers, trainer.servers[0]
    seen, ended = world.allgather(sums.seen), world.allgather(sums.ended)
    for members in workers:
        assert all(seen[rank] == seen[members[0]] for rank in members)
    assert last["loss"] < first["loss"]
    parts = STEPS * len(workers)
    assert sum(ended[members[0]] for members in workers) == 6 * parts
    assert applied(history) == [parts] * 6  # no batch is so short that a worker has no rows
    assert ended[server] == sum(sum(epoch.staleness) for epoch in history)
    assert len(set(world.allgather(str(history)))) == 1
    bound = options.get("max_staleness")
    assert bound is None or all(len(epoch.staleness) <= bound + 1 for epoch in history)
    assert [epoch.staleness for epoch in history[: options.get("warm_up", 0)]] == [(parts,)] * options.get("warm_up", 0)
    parameters = trainer.replica.parameters
    parameters[:] = world.rank
    world.Barrier()
    assert (parameters == world.rank).all()
    world.Barrier()


@once
def test_a_worker_computes_the_gradient_of_its_parts_as_one_rank(flat: allreduce.Topology) -> None:
    """A single worker's training is that of one rank: if a part has fewer rows than ranks, with weights of rows, with
    clipping and a moving average."""
    options = {"transforms": [Accumulate(2), ClipNorm(0.05), EMA(0.9)], "sample_weight": np.linspace(0, 2, len(X))}
    for rows, given in ((BATCH, {}), (1, {}), (BATCH, options)):
        common: dict[str, Any] = {"progress": False, "validation_data": (X, Y), **given}
        with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
            history = trainer.fit(X, Y, 2, rows, **common)
        with MirroredTrainer(network(), topology=allreduce.Topology(MPI.COMM_SELF)) as alone:
            expected = alone.fit(X, Y, 2, rows, **common)
        for name in ("loss", "validation_loss"):
            np.testing.assert_allclose(history.column(name), expected.column(name), rtol=1e-3)
        for name, array in trainer.replica.state().items():
            np.testing.assert_allclose(array, alone.replica.state()[name], rtol=1e-2, atol=1e-4, err_msg=name)


@once
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_rank_of_a_worker_reaches_all(rank: int, flat: allreduce.Topology) -> None:
    """Of the leader, and of the other rank. Loaders are refused."""
    stopping = [Once("on_train_batch_end", stop, batch=0)] if flat.rank == rank else []
    loader = [(X[flat.rank :: 2], Y[flat.rank :: 2])] if flat.rank < 2 else None
    with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
        with pytest.raises(ArgumentError, match='use ranks_per_worker=1, or updates="sync"'):
            trainer.fit(Loader(loader, rows="divided"), epochs=2, progress=False)
        assert len(trainer.fit(X, Y, 9, BATCH, callbacks=stopping, progress=False)) == 2
        assert len(set(trainer.parameters_sha256())) == 1


# Central storage


class Bare(NumpyNetwork):
    """A replica of which no slice can be updated."""

    def slice_error(self) -> str:
        return "it has no slices"


def test_the_optimizer_of_central_storage_works_on_one_rank_alone(flat: allreduce.Topology) -> None:
    """The model of rank 0 is trained, wherever the storage is."""
    replica = network(seed=1 + flat.rank)
    with CentralStorageTrainer(replica, flat, storage=flat.size - 1) as trainer:
        assert np.array_equal(replica.parameters, network(seed=1).parameters)
        if flat.size > 1:
            assert type(trainer.strategy.owners) is SliceOwners
        trainer.fit(X, Y, 1, progress=False)
        touched = bool(replica.optimizer.state["first_moment"].any())
        assert touched == (flat.rank == flat.size - 1)


@pytest.mark.parametrize("size", [None, 2])
def test_arguments_of_central_storage_that_make_no_sense_leave_nothing_behind(
    size: int | None, topology_of: Callable[[Any], allreduce.Topology]
) -> None:
    topology = topology_of(size)
    owned = len(topology._owned)
    with pytest.raises(
        ArgumentError, match=f"storage must be a rank of this training, 0 to {topology.size - 1}, got {topology.size}"
    ):
        CentralStorageTrainer(network(), topology, storage=topology.size)
    for copies in (0, None, 3):
        with pytest.raises(ArgumentError, match=f"copies={copies}: give 1, or 2"):
            CentralStorageTrainer(network(), topology, copies=copies)  # type: ignore[arg-type]
    if topology.size > 1:
        with pytest.raises(ArgumentError, match=r"CentralStorageTrainer updates slices .*it has no slices"):
            CentralStorageTrainer(Bare([6, 8, 3]), topology)
        with pytest.raises(DisagreementError, match=r"rank 0: .*storage=0.*\n.*rank 1: .*storage=1"):
            CentralStorageTrainer(network(), topology, storage=min(topology.rank, 1))
        with pytest.raises(DisagreementError, match="the ranks disagree"):
            CentralStorageTrainer(NumpyNetwork([6, 3 + topology.rank, 3]), topology)
    assert len(topology._owned) == owned
