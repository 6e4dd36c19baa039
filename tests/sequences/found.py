"""Defects that sequences have found, each as a minimal test: `python -m tests.sequences found`. All are collective."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.errors import ClosedError, DisagreementError, NotAnArrayError, NotContiguousError
from tests.sequences.fits import Does, Incident, Rows, WantedError
from tests.sequences.models import FEATURES, numpy_network
from trainers import MirroredTrainer, ParameterServerTrainer
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.errors import ArgumentError, DataError
from trainers.replica import copy_of


def raised(action: Callable[[], object], *kinds: type[Exception]) -> None:
    try:
        action()
    except kinds:
        return
    raise AssertionError(f"none of {kinds} was raised")


def data(rows: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(rows, FEATURES)).astype("float32")
    return x, np.abs(x[:, :3]).argmax(1)


def a_replica_has_one_trainer() -> None:
    """A second trainer would train in the first trainer's memory, in which other ranks train too."""
    replica, (x, y) = numpy_network("momentum", 1), data()
    with MirroredTrainer(replica, "ring", update="sharded") as trainer:
        for make in (MirroredTrainer, ParameterServerTrainer):
            raised(lambda make=make: make(replica), ArgumentError)
        with MirroredTrainer(copy_of(replica)) as other:  # which nobody has
            other.fit(x, y, 1, 2, progress=False)
        before = trainer.parameters_sha256()
        trainer.fit(x, y, 1, 2, progress=False)
        assert len(set(trainer.parameters_sha256())) == 1
        assert trainer.parameters_sha256() != before


def a_whole_replica_is_taken_over() -> None:
    """By the newest trainer. The previous one raises an error if it is used, and closing it does not change the
    replica."""
    replica, (x, y) = numpy_network("momentum", 1), data()
    former = MirroredTrainer(replica, "ring")
    former.fit(x, y, 1, 2, progress=False)
    with MirroredTrainer(replica, "native") as trainer:
        for action in (lambda: former.fit(x, y), lambda: former.evaluate(x, y)):
            raised(action, ClosedError)
        former.close()
        for _ in range(2):
            before = trainer.parameters_sha256()
            trainer.fit(x, y, 1, 2, progress=False)
            assert trainer.parameters_sha256() != before
        assert len(set(trainer.parameters_sha256())) == 1


def a_block_that_all_ranks_leave_by_an_error_closes_its_trainer() -> None:
    """Otherwise the next trainer of the replica would update shared parameters once per rank."""
    (x, y), results = data(), []
    for fails in (False, True):
        replica = numpy_network("momentum", 1)

        def block(fails: bool = fails, replica: Any = replica) -> None:
            with MirroredTrainer(replica, "ring", update="sharded") as trainer:
                trainer.fit(x, y, 1, 2, progress=False)
                trainer.predict(x[:, 1:] if fails else x)

        raised(block, ArgumentError) if fails else block()
        with MirroredTrainer(replica, "ring") as trainer:
            trainer.fit(x, y, 2, 2, progress=False)
        results.append({name: np.array(array) for name, array in replica.state().items()})
    for name, array in results[0].items():
        assert np.array_equal(results[1][name], array), name


def an_error_is_told_and_not_the_nan_of_an_earlier_fit() -> None:
    """The gradients of a rank with an error are zeros, also for callbacks that check gradients."""
    x, y = data()
    bad = x.copy()
    bad[:] = np.nan
    for servers in (1, (0,)):
        with ParameterServerTrainer(numpy_network("sgd", 1), servers=servers, updates="sync") as trainer:
            trainer.fit(bad, y, 1, 6, progress=False, callbacks=[CheckGradients("skip")])
            does = Does(Incident("raise", "batch_begin", 0, 0, 0))
            callbacks = [CheckGradients("raise"), *([does] if trainer.rank == 1 else [])]
            fit = partial(trainer.fit, x, y, 1, 6, progress=False, callbacks=callbacks)
            raised(fit, WantedError)


def a_closed_trainer_says_so() -> None:
    """Also if ranks may fail: it used to ask for the ranks of a freed communicator."""
    x, y = data()
    trainer = MirroredTrainer(numpy_network("sgd", 1))
    trainer.close()
    for action in (lambda: trainer.predict(x), lambda: trainer.fit(x, y), lambda: trainer.surviving(list)):
        raised(action, ClosedError)


def who_comes_to_another_call_than_surviving_is_told() -> None:
    """At once, not after the time-out, also if ranks may fail."""
    x, _ = data()
    with MirroredTrainer(numpy_network("sgd", 1)) as trainer:
        mismatched = partial(trainer.predict, x) if trainer.rank else partial(trainer.surviving, list)
        raised(mismatched, DisagreementError)
        assert trainer.surviving(lambda: 3) == 3


def a_fit_with_checkpoints_reads_its_rows_before_it_begins() -> None:
    """Also in a fit of no epochs: a sample of the rows tells later fits whether they have the same data."""
    x, y = data()
    with MirroredTrainer(numpy_network("sgd", 1)) as trainer, tempfile.TemporaryDirectory() as own:
        folder = MPI.COMM_WORLD.bcast(own)
        before = trainer.parameters_sha256()
        raised(partial(trainer.fit, Rows(x, y, 3), epochs=0, progress=False, checkpoint=folder), DataError)
        assert not os.listdir(folder)
        assert trainer.parameters_sha256() == before
        trainer.fit(Rows(x, y, 3), epochs=0, progress=False)  # without checkpoints no row is read


def the_parameters_of_asynchronous_servers_depend_on_who_is_fast() -> None:
    """`updates` is a public attribute, by which users and these sequences know it."""
    for updates in ("sync", "async"):
        with ParameterServerTrainer(numpy_network("sgd", 1), updates=updates) as trainer:
            assert trainer.updates == updates


def what_is_no_array_is_refused_where_others_compress() -> None:
    """On all ranks. The dtype of the argument is None, which NumPy takes for float64."""
    with allreduce.create("ring", compress="bfloat16") as backend:
        for bad in ("no array", np.ones(6, "float32")[::2]):
            array = np.ones(3, "float32")
            backend(array, "sum")
            wrong = bad if backend.rank == 1 else array
            raised(partial(backend, wrong, "sum"), NotAnArrayError, NotContiguousError)
        assert backend.stack(1).sum() == backend.size


def join_compares_no_rank_that_has_left() -> None:
    """Such a rank gets the parameters at the end, and differs until then, which is not a divergence."""
    import torch

    from trainers.pytorch import MirroredOptimizer

    model = torch.nn.Linear(FEATURES, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with MirroredOptimizer(plain, model, checks=[CheckDivergence(1)]) as optimizer:
        with optimizer.join():
            for _ in range(1 + optimizer.topology.rank):
                optimizer.zero_grad()
                model(torch.ones(2, FEATURES)).sum().backward()
                optimizer.step()
        weight = model.weight.detach().numpy().tobytes()
        assert len(set(optimizer.topology.world.allgather(weight))) == 1


FOUND = (
    a_replica_has_one_trainer,
    a_whole_replica_is_taken_over,
    a_block_that_all_ranks_leave_by_an_error_closes_its_trainer,
    an_error_is_told_and_not_the_nan_of_an_earlier_fit,
    a_closed_trainer_says_so,
    who_comes_to_another_call_than_surviving_is_told,
    a_fit_with_checkpoints_reads_its_rows_before_it_begins,
    the_parameters_of_asynchronous_servers_depend_on_who_is_fast,
    what_is_no_array_is_refused_where_others_compress,
)


FOUND_WITH_TORCH = (join_compares_no_rank_that_has_left,)


def run_found(torch: bool) -> None:
    for check in FOUND + FOUND_WITH_TORCH * torch:
        check()
        if MPI.COMM_WORLD.rank == 0:
            print(check.__name__, flush=True)
