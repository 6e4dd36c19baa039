"""Trainers one after the other and side by side on one replica, and the ends of a trainer."""

from typing import Any

import numpy as np
import pytest

import allreduce
from allreduce.errors import ClosedError, DisagreementError
from tests.ranks.training.fits import Once, fail
from trainers import MirroredTrainer, NumpyNetwork, ParameterServerTrainer
from trainers.callbacks import CheckGradients
from trainers.errors import ArgumentError
from trainers.replica import copy_of

JOBS = "openmpi 2 3"
FEATURES = 4
X = np.random.default_rng(3).normal(size=(6, FEATURES)).astype("float32")
Y = np.abs(X[:, :3]).argmax(1)


def network() -> NumpyNetwork:
    return NumpyNetwork([FEATURES, 5, 3], activation="tanh", optimizer="momentum", seed=1, lr=0.05)


def moves(trainer: Any) -> None:
    """A fit changes the parameters, on all ranks alike."""
    before = trainer.parameters_sha256()
    trainer.fit(X, Y, 1, 2, progress=False)
    after = trainer.parameters_sha256()
    assert len(set(after)) == 1
    assert after != before


def test_a_replica_has_one_trainer(flat: allreduce.Topology) -> None:
    """A second trainer would train in the first trainer's memory, in which other ranks train too."""
    replica = network()
    with MirroredTrainer(replica, "ring", flat, update="sharded") as trainer:
        for make in (MirroredTrainer, ParameterServerTrainer):
            with pytest.raises(ArgumentError):
                make(replica, topology=flat)
        with MirroredTrainer(copy_of(replica), topology=flat) as other:  # which nobody has
            other.fit(X, Y, 1, 2, progress=False)
        moves(trainer)


def test_a_whole_replica_is_taken_over(flat: allreduce.Topology) -> None:
    """By the newest trainer. The previous one raises an error if it is used, and closing it does not change the
    replica."""
    replica = network()
    former = MirroredTrainer(replica, "ring", flat)
    former.fit(X, Y, 1, 2, progress=False)
    with MirroredTrainer(replica, "native", flat) as trainer:
        for action in (former.fit, former.evaluate):
            with pytest.raises(ClosedError):
                action(X, Y)
        former.close()
        moves(trainer)
        moves(trainer)


def test_a_block_that_all_ranks_leave_by_an_error_closes_its_trainer(flat: allreduce.Topology) -> None:
    """Otherwise the next trainer of the replica would update shared parameters once per rank."""
    results = []
    for fails in (False, True):
        replica = network()
        try:
            with MirroredTrainer(replica, "ring", flat, update="sharded") as trainer:
                trainer.fit(X, Y, 1, 2, progress=False)
                trainer.predict(X[:, 1:] if fails else X)
        except ArgumentError:
            assert fails
        with MirroredTrainer(replica, "ring", flat) as trainer:
            trainer.fit(X, Y, 2, 2, progress=False)
        results.append({name: np.array(array) for name, array in replica.state().items()})
    for name, array in results[0].items():
        assert np.array_equal(results[1][name], array), name


def test_an_error_is_told_and_not_the_nan_of_an_earlier_fit(flat: allreduce.Topology) -> None:
    """The gradients of a rank with an error are zeros, also for callbacks that check gradients."""
    for servers in (1, (0,)):
        with ParameterServerTrainer(network(), flat, servers=servers, updates="sync") as trainer:
            assert trainer.updates == "sync"
            trainer.fit(np.full_like(X, np.nan), Y, 1, 6, progress=False, callbacks=[CheckGradients("skip")])
            callbacks = [CheckGradients("raise"), *[Once("on_train_batch_begin", fail, 0, 0)] * (trainer.rank == 1)]
            with pytest.raises(OSError, match="disk is full"):
                trainer.fit(X, Y, 1, 6, progress=False, callbacks=callbacks)


def test_a_closed_trainer_says_so(flat: allreduce.Topology) -> None:
    """Also if ranks may fail: it used to ask for the ranks of a freed communicator."""
    trainer = MirroredTrainer(network(), topology=flat)
    trainer.close()
    for action in (lambda: trainer.predict(X), lambda: trainer.fit(X, Y), lambda: trainer.surviving(list)):
        with pytest.raises(ClosedError):
            action()


def test_who_comes_to_another_call_than_surviving_is_told(flat: allreduce.Topology) -> None:
    """At once, not after the time-out, also if ranks may fail."""
    with MirroredTrainer(network(), topology=flat) as trainer:
        with pytest.raises(DisagreementError):
            trainer.predict(X) if trainer.rank else trainer.surviving(list)
        assert trainer.surviving(lambda: 3) == 3
        found = trainer.surviving(lambda: trainer.predict(X))  # a call inside of a call
        assert len(found) == len(X)
