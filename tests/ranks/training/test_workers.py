"""Workers of several ranks: results equal to one rank's, equal parameters on the ranks of a worker, errors on all
ranks."""

import zlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.training.fits import SIZE, Once, fail, stop
from tests.ranks.training.test_strategies import BATCH, STEPS, applied, data, network
from trainers import EMA, Accumulate, ClipNorm, Loader, MirroredTrainer, NumpyNetwork, ParameterServerTrainer
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback

JOBS = "openmpi 1 2 3 5"

# (servers, ranks of a worker) of which a worker has several ranks here; of 5 ranks some workers are smaller
SHAPES = [(servers, ranks) for servers in (1, 2) for ranks in (2, 3) if ranks <= SIZE - servers]
several = pytest.mark.skipif(SIZE < 3, reason="a server, and a worker of two ranks")
few = pytest.mark.skipif(SIZE != 3, reason="what happens on three ranks happens on more")


class Checksums(Callback):
    """Records the batches that this rank computes, and the checksum of the parameters with which it does."""

    def __init__(self, replica: NumpyNetwork) -> None:
        self._replica = replica
        self.seen: list[tuple[int, int]] = []
        self.ended = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, zlib.crc32(self._replica.state()["parameters"].tobytes())))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended += 1
        self.seen.append((batch, zlib.crc32(np.float64(logs["loss"]).tobytes())))


@several
@pytest.mark.every_pair
@pytest.mark.parametrize(
    ("options", "per_node"),
    [({}, None), ({"max_staleness": 0}, 1), ({"stale": "scale", "warm_up": 1}, 2)],
)
@pytest.mark.parametrize(("servers", "ranks"), SHAPES)
def test_the_ranks_of_an_asynchronous_worker_have_equal_parameters(
    servers: int, ranks: int, options: dict[str, Any], per_node: int | None, topology_of: Any, world: MPI.Intracomm
) -> None:
    """After each pull. Every part of a batch gives one update, however many ranks compute it."""
    x, y = data()
    replica = network()
    sums = Checksums(replica)
    topology = topology_of(per_node)
    given: dict[str, Any] = {"servers": servers, "ranks_per_worker": ranks, **options}
    with ParameterServerTrainer(replica, topology, **given) as trainer:
        first = trainer.evaluate(x, y)
        history = trainer.fit(x, y, 6, BATCH, progress=False, callbacks=[sums])
        last = trainer.evaluate(x, y)
        assert len(set(trainer.parameters_sha256())) == 1
        workers = trainer.ranks_of_workers
    seen, ended = world.allgather(sums.seen), world.allgather(sums.ended)
    for members in workers:
        assert all(seen[rank] == seen[members[0]] for rank in members)
    parts = STEPS * len(workers)
    assert sum(ended[members[0]] for members in workers) == 6 * parts
    assert applied(history) == [parts] * 6
    assert last["loss"] < first["loss"]
    if "max_staleness" in options:
        assert all(len(epoch.staleness) == 1 for epoch in history)


@several
def test_a_replica_has_memory_of_its_own_when_the_trainer_is_closed(flat: allreduce.Topology) -> None:
    x, y = data()
    with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
        trainer.fit(x, y, 1, BATCH, progress=False)
    parameters = trainer.replica.parameters
    parameters[:] = flat.rank  # the ranks of a worker shared these
    flat.world.Barrier()
    assert (parameters == flat.rank).all()
    flat.world.Barrier()


@few
def test_a_worker_computes_the_gradient_of_its_parts_as_one_rank(flat: allreduce.Topology) -> None:
    """A single worker's training is that of one rank: if a part has fewer rows than ranks, with weights of rows, with
    clipping and a moving average."""
    x, y = data()
    options = {"transforms": [Accumulate(2), ClipNorm(0.05), EMA(0.9)], "sample_weight": np.linspace(0, 2, len(x))}
    for rows, given in ((BATCH, {}), (1, {}), (BATCH, options)):
        common: dict[str, Any] = {"progress": False, "validation_data": (x, y), **given}
        with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
            history = trainer.fit(x, y, 2, rows, **common)
        with MirroredTrainer(network(), topology=allreduce.Topology(MPI.COMM_SELF)) as alone:
            expected = alone.fit(x, y, 2, rows, **common)
        for name in ("loss", "validation_loss"):
            np.testing.assert_allclose(history.column(name), expected.column(name), rtol=1e-3)
        for name, array in trainer.replica.state().items():
            np.testing.assert_allclose(array, alone.replica.state()[name], rtol=1e-2, atol=1e-4, err_msg=name)


@few
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_and_a_stop_of_one_rank_reach_all(rank: int, flat: allreduce.Topology) -> None:
    """Of the leader, and of the other rank of the worker."""
    x, y = data()
    failing, stopping = (
        [Once("on_train_batch_end", action, batch=None)] if flat.rank == rank else [] for action in (fail, stop)
    )
    with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
        with pytest.raises(OSError, match="the disk is full") as caught:
            trainer.fit(x, y, 9, BATCH, callbacks=failing, progress=False)
        assert caught.value.ranks == tuple(range(SIZE))  # type: ignore[attr-defined]
        history = trainer.fit(x, y, 9, BATCH, callbacks=stopping, progress=False)
        assert len(history) == 2
        assert len(trainer.fit(x, y, 2, BATCH, progress=False)) == 2
        assert len(set(trainer.parameters_sha256())) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ranks_per_worker": 0}, "ranks_per_worker must be an integer >= 1, got 0"),
    ({"ranks_per_worker": True}, "must be an integer >= 1, got True"),
    ({"ranks_per_worker": 3}, "2 ranks are left for workers: start more ranks, or give at most 2"),
    ({"allreduce": "ring"}, "allreduce='ring' has no use with ranks_per_worker=1"),
    ({"allreduce": "rign", "ranks_per_worker": 2}, "allreduce='rign' is unknown"),
    ({"allreduce": "nccl", "ranks_per_worker": 2}, "nccl"),
    ({"updates": "sync", "ranks_per_worker": 2}, 'ranks_per_worker has no use with updates="sync"'),
]


@few
@pytest.mark.parametrize(("options", "words"), BAD, ids=str)
def test_options_that_make_no_sense_are_refused_on_all_ranks(
    options: dict[str, Any], words: str, flat: allreduce.Topology
) -> None:
    with pytest.raises((ArgumentError, allreduce.errors.AllReduceError), match=words) as caught:
        ParameterServerTrainer(network(), flat, **options)
    assert caught.value.ranks == tuple(range(SIZE))  # type: ignore[union-attr]


@few
def test_workers_of_several_ranks_refuse_loaders(flat: allreduce.Topology) -> None:
    x, y = data()
    loader = [(x[flat.rank :: 2], y[flat.rank :: 2])] if flat.rank < 2 else None
    with ParameterServerTrainer(network(), flat, ranks_per_worker=2) as trainer:
        with pytest.raises(ArgumentError, match='use ranks_per_worker=1, or updates="sync"'):
            trainer.fit(Loader(loader, rows="divided"), epochs=2, progress=False)
        assert len(trainer.fit(x, y, 1, BATCH, progress=False)) == 1
