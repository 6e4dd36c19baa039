"""The rules of servers, without MPI: which worker gets which part, the bound on staleness, the updates of a server."""

import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from allreduce.transport import deferred_free
from trainers import NumpyNetwork, stopwatch
from trainers.data import Arrays, Batch, Batches
from trainers.errors import ArgumentError, DataError, DivergedError
from trainers.replica import copy_of
from trainers.replicas.numpy.optimizers import SGD, Adam
from trainers.strategies import spare_replicas
from trainers.strategies.rule import UpdateRule
from trainers.strategies.servers.asynchronous import (
    DROPPED,
    EMPTY,
    NO_PART,
    Asynchronous,
    Dealer,
    EpochLedger,
    EpochRows,
)
from trainers.strategies.servers.mailbox import (
    ASK,
    BYE,
    END,
    FAILED,
    GRADIENTS,
    NOTHING,
    PUSH,
    STOP,
    UNIT,
    WORK,
    Arrival,
    Client,
    Header,
    Mailbox,
    Message,
    Waiter,
)
from trainers.strategies.servers.options import Options
from trainers.strategies.servers.server import Policy, Server, Shard
from trainers.strategies.spare_replicas import First, SpareReplicas
from trainers.watching.meter import Tally


def treating(stale: str = "keep", most: int | None = None) -> Options:
    """Return the arguments of servers that treat stale gradients like this."""
    return Options(1, "async", stale, most)


def dealing(count: int, workers: int, bound: int | None = None) -> Dealer:
    """Return the dealer of an epoch of arrays."""
    return Dealer([iter(range(count))], workers, bound, count)


def play(dealer: Dealer, workers: int, seed: int) -> tuple[list[int], list[int]]:
    """Simulate an epoch with a random order of events; return the staleness of each update, and its worker."""
    chance = random.Random(seed)
    speed = [chance.choice([1, 1, 5, 40]) for _ in range(workers)]
    version, dealt = 0, list[int]()
    reads: list[list[int]] = [[] for _ in range(workers)]  # versions of the parts in hand
    arrived: list[int] = []  # workers whose oldest gradients wait for the server
    ended: set[int] = set()
    staleness, who = [], []
    while len(ended) < workers or any(reads):
        moved = False
        for worker in sorted(range(workers), key=lambda each: chance.random() * speed[each]):
            if worker not in ended and len(reads[worker]) < 2:
                part = dealer.deal(worker, version)
                if part is not None:
                    moved = True
                    if part == NO_PART:
                        ended.add(worker)
                    else:
                        dealt.append(part)
                        reads[worker].append(version)
            if reads[worker] and worker not in arrived and chance.random() < 1 / speed[worker]:
                arrived.append(worker)
                moved = True
            if worker in arrived and dealer.may_apply(worker, version):
                arrived.remove(worker)
                dealer.done(worker)
                staleness.append(version - reads[worker].pop(0))
                who.append(worker)
                version += 1
                moved = True
        waits = [worker for worker in range(workers) if reads[worker] and worker not in arrived]
        assert moved or waits, "nobody can go on"
    assert dealt == list(range(len(dealt)))
    return staleness, who


@pytest.mark.parametrize("bound", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_part_is_dealt_once_and_no_gradient_is_beyond_the_bound(workers: int, bound: int | None) -> None:
    for seed in range(20):
        staleness, _ = play(dealing(60, workers, bound), workers, seed)
        assert len(staleness) == 60
        assert bound is None or max(staleness) <= bound
        assert workers > 1 or not any(staleness)  # the only worker has always seen its own updates


def test_a_bound_is_used_as_far_as_it_goes() -> None:
    """A bound could also be kept by letting no two workers compute at once."""
    assert max(max(play(dealing(60, 4, 3), 4, seed)[0]) for seed in range(5)) == 3


def test_near_the_end_nobody_is_dealt_a_part_ahead() -> None:
    dealer = dealing(4, 2)
    assert [dealer.deal(0, 0), dealer.deal(0, 0)] == [0, 1]
    assert dealer.deal(0, 0) is None
    assert [dealer.deal(1, 0), dealer.deal(1, 0)] == [2, None]
    dealer.done(0)
    dealer.done(0)
    assert [dealer.deal(0, 2), dealer.deal(1, 2)] == [3, NO_PART]


def test_what_becomes_of_stale_gradients() -> None:
    assert [treating("keep").factor(each) for each in (0, 7)] == [1, 1]
    assert [treating("scale").factor(each) for each in (0, 1, 3)] == [1, 0.5, 0.25]
    assert [treating("drop", 2).factor(each) for each in (0, 2, 3)] == [1, 1, 0]
    assert [treating("keep", 3).bound, treating("scale", 3).bound, treating("drop", 3).bound] == [
        3,
        3,
        None,
    ]


def test_what_becomes_of_parts_is_counted() -> None:
    epoch = begun(7)
    for part, outcome in enumerate((0, 2, EMPTY, 2, 1, DROPPED)):
        epoch.note(part, outcome)
    assert (epoch.staleness, epoch.dropped) == ([1, 1, 2], 1)
    epoch.note(0, 4)  # of which there is a gradient already
    assert (epoch.staleness, [*epoch.outcomes]) == ([1, 1, 2], [*range(6)])


def begun(count: int) -> EpochLedger:
    """Return a server's first epoch, begun."""
    made = EpochLedger()
    made.begin(0, count)
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 1001])
def test_a_parcel_is_one_message(length: int, dtype: Any) -> None:
    sent, received = (Message(3, length, np.dtype(dtype)) for _ in range(2))
    sent.header = header = Header(2, 1 << 40, 7, 1)
    sent.measures[:] = 1.5, -2, np.nan
    sent.body[:] = np.arange(length) % 50
    request = MPI.COMM_SELF.Irecv(received.mpi_buffer(), 0, 1)
    MPI.COMM_SELF.Send(sent.mpi_buffer(), 0, 1)
    request.Wait()
    assert received.header == header
    np.testing.assert_array_equal(received.measures, sent.measures)
    np.testing.assert_array_equal(received.body, sent.body)
    assert sent.mpi_buffer()[1] * UNIT < 3 * UNIT + length * np.dtype(dtype).itemsize
    assert sent.mpi_buffer(with_body=False)[1] == 1


def shard_of(optimizer: Any) -> tuple[NumpyNetwork, Shard]:
    replica = NumpyNetwork([3, 5, 2], optimizer=optimizer, seed=4)
    parameters, gradients = (np.zeros(replica.gradient_length, np.float32) for _ in range(2))
    replica.bind(parameters, gradients)
    return replica, Shard(replica, UpdateRule(replica), parameters, gradients, slice(4, 20))


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_factor_is_one_of_the_learning_rate(kind: Any) -> None:
    """Also if the optimizer ignores the scale of gradients."""
    gradients = np.random.default_rng(1).normal(size=16).astype(np.float32)
    (scaled, shard), (slow, other) = shard_of(kind(lr=0.1)), shard_of(kind(lr=0.025))
    before = scaled.parameters.copy()
    for turn in range(3):
        shard.apply(gradients * turn, 0.25)
        other.apply(gradients * turn, 1.0)
    np.testing.assert_allclose(scaled.parameters, slow.parameters, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(scaled.parameters[:4], before[:4])
    assert shard.version == 3
    assert not np.array_equal(scaled.parameters, before)


def test_sums_of_16_bit_floats_are_rounded_once() -> None:
    _, shard = shard_of("sgd")
    shard.gradients = np.ones(16, ml_dtypes.bfloat16)
    shard._accumulator = np.dtype(np.float32)
    few = np.full(16, 2**-8, ml_dtypes.bfloat16)  # is lost when it is added to one in bfloat16
    shard.add_up([shard.gradients, few, few])
    np.testing.assert_array_equal(shard.gradients.astype(np.float32), 1 + 2**-7)


def test_parameters_that_are_no_numbers_are_seen() -> None:
    replica, shard = shard_of("sgd")
    assert shard.is_finite()
    replica.parameters[4] = np.inf
    with pytest.raises(DivergedError, match="parameters became NaN"):
        Tally(("loss",)).collect(MPI.COMM_SELF, shard.is_finite())


def test_an_epoch_is_measured_by_its_rows() -> None:
    tally = Tally(("loss", "accuracy"))
    tally.on_epoch_begin(0)
    tally.add(np.array([1.0, 0.5]), 3, 0)
    tally.add(np.array([2.0, 1.0]), 1, 1)
    tally.collect(MPI.COMM_SELF, finite=True)
    assert (tally.rows, tally.means()) == (4, {"loss": 1.25, "accuracy": 0.625})
    with pytest.raises(DivergedError, match="the loss became nan in epoch 1, step 3"):
        tally.add(np.array([np.nan, 0]), 1, 2)


@pytest.mark.parametrize("ahead", [True, False])
def test_rows_are_fetched_before_they_are_needed(ahead: bool) -> None:
    fetched: list[int] = []

    class Recorded(Batches):
        def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
            fetched.append(step)
            if step == 2:
                raise DataError("no such row")
            return super().share(epoch, step, part, parts)

    x = np.arange(12.0).reshape(12, 1)
    batches = Recorded(Arrays((x, x)), 4, 0, 2, shuffle=False, ahead=1)
    rows = EpochRows(batches, 0, 2, ahead)
    rows.prepare(3)  # the second half of the second batch
    assert fetched == [1] * ahead
    np.testing.assert_array_equal(rows.take(3).data[0][:, 0], [6, 7])
    rows.prepare(4)  # raises nothing
    with pytest.raises(DataError):
        rows.take(4)
    assert fetched == [1, 2]


class Counter(Mailbox):
    """A mailbox that receives these messages, and records the kind and the receiver of each answer."""

    def __init__(self, messages: list[tuple[int, int, Header]]) -> None:
        self.messages = messages
        self.answers: list[tuple[int, int]] = []

    def next(self, text: str) -> Arrival:
        worker, tag, header = self.messages.pop(0)
        message = self.message()
        message.header = header
        return Arrival(worker, tag, message)

    def message(self) -> Message:
        return Message(0, 0, np.dtype(np.float32))

    def reply(self, message: Message, worker: int) -> None:
        self.answers.append((worker, message.header.kind))

    def open(self) -> None: ...
    def clear(self, arrival: Arrival) -> None: ...
    def drain(self) -> None: ...


def none_yet() -> EpochLedger:
    return begun(4)


class NoShard:
    """A shard without parameters. used: the workers of whose gradients each update is made."""

    def __init__(self) -> None:
        self.version, self.parameters, self.used = 0, np.zeros(0, np.float32), list[list[int]]()

    def add_up(self, bodies: list[np.ndarray], share: float) -> None:
        self.used.append([int(body[0]) for body in bodies])

    def weigh(self, means: np.ndarray) -> np.ndarray:
        return means[:1]

    def transform_and_update(self) -> None:
        self.version += 1


def serve(mailbox: Counter, workers: int, policy: Callable[[Any], Policy], shard: Any = None) -> Any:
    """Run an epoch of a server without parameters; returns its policy."""
    shard = shard or NoShard()
    made = policy(shard)
    Server(mailbox, shard).serve(made, range(workers))
    return made


class Pushes(Counter):
    """A mailbox that receives these messages of spare replicas, of a row of four each."""

    def next(self, text: str) -> Arrival:
        worker, tag, header = self.messages.pop(0)
        message = Message(4, 1, np.dtype(np.float32))
        message.header, message.body[0] = header, worker
        message.measures[:] = 1, 0.25, 0.25, 4
        return Arrival(worker, tag, message)

    def message(self) -> Message:
        return Message(4, 0, np.dtype(np.float32))


def test_one_worker_after_the_other_computes_in_the_warm_up() -> None:
    """The worker that has waited longest gets the next part, though the other one asks ahead."""
    dealer = dealing(3, 2, bound=0)
    asks, pushes = Header(), Header(GRADIENTS)
    events = [(0, ASK), (1, ASK), (0, ASK), (0, PUSH), (1, ASK), (1, PUSH), (0, ASK), (0, PUSH)]
    messages = [(worker, tag, asks if tag == ASK else pushes) for worker, tag in events]
    mailbox = Counter([*messages, (1, PUSH, Header(BYE)), (0, PUSH, Header(BYE))])
    serve(mailbox, 2, lambda shard: Asynchronous(shard, treating(), dealer, lambda *_: None, bool, none_yet()))
    assert mailbox.answers == [(0, WORK), (1, WORK), (0, WORK), (1, END), (0, END)]


def test_other_servers_are_not_behind_the_first() -> None:
    """A worker's request may overtake its gradients, which the first server has processed already."""
    mailbox = Counter([(0, ASK, Header(taken=1)), (0, PUSH, Header(GRADIENTS)), (0, PUSH, Header(BYE))])
    done: list[str] = []
    mailbox.reply = lambda *_, **__: done.append("answered")  # type: ignore[assignment]
    applied = lambda *_: done.append("applied")  # noqa: E731
    serve(mailbox, 1, lambda shard: Asynchronous(shard, treating(), None, applied, bool, none_yet()))
    assert done == ["applied", "answered"]


def test_an_epoch_that_goes_on_applies_no_part_twice() -> None:
    """A worker died; its parts are dealt to others, and one server had processed part 3 before."""
    pushes = [(0, PUSH, Header(GRADIENTS, part)) for part in (1, 3)]
    mailbox = Counter([(0, ASK, Header()), (0, ASK, Header()), *pushes, (0, ASK, Header()), (0, PUSH, Header(BYE))])
    epoch = none_yet()
    epoch.outcomes = {0: 0, 2: 0, 3: 0}
    applied: list[int] = []
    dealer = Dealer([iter([1, 3])], 1, count=2)

    def apply(message: Message, factor: float) -> None:
        applied.append(message.header.step)

    serve(mailbox, 1, lambda shard: Asynchronous(shard, treating(), dealer, apply, bool, epoch))
    assert applied == [1]
    assert set(epoch.outcomes) == set(range(4))
    assert not dealer.cut_short


def test_a_replica_that_can_not_be_copied_says_so() -> None:
    replica = NumpyNetwork([4, 6, 3])
    replica.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="this NumpyNetwork can't be copied: TypeError"):
        copy_of(replica)


def first_of(shard: Any, **options: Any) -> First:
    """Return the policy of spare replicas, for steps of four rows on four ranks, from step 4 on."""
    given = {"workers": 4, "spare": 2, "first": 4, "steps": 6, "divided": False, "holders": None} | options
    return First(shard, Tally(("loss",)), begin_step=lambda step: None, span=lambda kind: nullcontext(), **given)


def test_a_step_takes_the_first_gradients_and_drops_late_ones() -> None:
    ask, byes = (3, ASK, Header()), [(worker, PUSH, Header(BYE)) for worker in range(4)]
    early = [(3, PUSH, Header(GRADIENTS, 4)), ask, (1, PUSH, Header(GRADIENTS, 3)), (2, PUSH, Header(NOTHING, 4))]
    last = [(worker, PUSH, Header(GRADIENTS, 5, 1)) for worker in (2, 1)]
    mailbox = Pushes([*early, (0, PUSH, Header(GRADIENTS, 4)), *last, (0, PUSH, Header(GRADIENTS, 5, 1)), *byes])
    shard = NoShard()
    policy = serve(mailbox, 4, first_of, shard)
    assert shard.used == [[0, 3], [1, 2]]  # in one order, whoever was first
    assert (policy.done, policy.dropped, policy.cut_short) == (6, 2, False)
    assert mailbox.answers == [(3, WORK)]  # of the next step, when its first gradients are in an update


@pytest.mark.parametrize("kind", [GRADIENTS, NOTHING])
def test_an_error_of_a_worker_ends_a_step(kind: int) -> None:
    """A worker that asks to stop does not, with rows and without."""
    asks, byes = [(worker, ASK, Header()) for worker in range(2)], [(worker, PUSH, Header(BYE)) for worker in range(2)]
    for halt, steps in ((FAILED, 4), (STOP, 5)):
        pushes = [(0, PUSH, Header(kind, 4, halt=halt)), (1, PUSH, Header(GRADIENTS, 4))]
        mailbox = Pushes([*pushes, *asks, *byes])
        policy = serve(mailbox, 2, lambda shard: first_of(shard, workers=2, spare=int(kind == NOTHING)), NoShard())
        assert policy.done == steps
        assert policy.cut_short == (halt == STOP)
        assert mailbox.answers == [(0, END), (1, END)]


def test_an_epoch_goes_on_after_its_last_step() -> None:
    """A rank that a step did not wait for has failed, and the others learn of it when the chief ends the epoch."""
    strategy = SpareReplicas(NumpyNetwork((4, 3)), "SpareReplicasTrainer", 1)
    strategy.group = SimpleNamespace(comm=None, rank=1)  # type: ignore[assignment]
    strategy._begun, strategy._taken = 1, 3
    run: Any = SimpleNamespace(batches=SimpleNamespace(streams=False, planned=3))
    strategy.run_epoch(run, 1)  # computes no step, of which there are no rows


@pytest.mark.parametrize(("chief", "step"), [(1, 5), (2, 0)])
def test_a_rank_that_a_failure_kept_from_an_epoch_begins_at_its_first_batch(
    chief: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it had ended the epoch before. chief: the epoch that the chief has begun; this rank is in epoch 1."""
    strategy = SpareReplicas(NumpyNetwork((4, 3)), "SpareReplicasTrainer", 0)
    strategy.group = SimpleNamespace(comm=None, rank=1)  # type: ignore[assignment]
    strategy._begun, strategy._own_step = 1, 5
    monkeypatch.setattr(spare_replicas, "all_values", lambda *_: [[chief, 0, False], [1, 5, True]])
    strategy._agree_on_progress()
    assert (strategy._begun, strategy._own_step) == (chief, step)


def test_what_a_loss_has_cut_off_goes_two_losses_later() -> None:
    """Every recovery leaves a mailbox and clients behind, as large as the model."""
    with Topology(MPI.COMM_SELF) as topology:
        waiter, dtype = Waiter(topology, stopwatch.make("cpu")), np.dtype(np.float32)
        mailbox = Mailbox(topology.world, waiter, [0], 1, 8, dtype)
        client = Client(topology.world, waiter, waiter, [0], [slice(0, 8)], 1, dtype)
        held = weakref.ref(mailbox), weakref.ref(client)
        mailbox.abandon()
        client.abandon()
        del mailbox, client
        deferred_free.repaired()  # this loss
        assert all(each() is not None for each in held)
        deferred_free.repaired()
        deferred_free.repaired()
        assert all(each() is None for each in held)
