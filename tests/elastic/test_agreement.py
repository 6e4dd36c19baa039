"""Every interleaving of a recovery: 3 ranks, of which up to 2 fail at any moment, run the library's own retry loops.

A rank's program is `retry` with `recover`, and `Topology.of_survivors`, on a model of MPI. The program runs again from
its beginning for each step: the operations that have already returned get their results from the rank's history, and
the next one ends the run by PendingError. So a state is the histories of the ranks, and all states that can be reached
are visited once. No communication, no threads, no time.

An operation of the model may do all that MPI's standard allows:
- An action on a communicator returns on a rank when all ranks have come to it; in another variant at any time, as a
  broadcast does on its root. If a rank of it has failed, or it was revoked, it may raise an error on any of its ranks.
- An agreement ends when all living ranks have come to it, with the same answer for all. The word of a rank that has
  failed after it came counts, or does not.
- A shrink ends when all living ranks have come to it, with those that live then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

from allreduce import topology as topology_module
from allreduce.elastic import retry
from allreduce.errors import RankLostError
from allreduce.transport import ulfm
from allreduce.transport.control import on_all_ranks

RANKS, FAILURES = 3, 2
OK, FAILED = "ok", "failed"
MOST_STATES = 300_000


class Comm(NamedTuple):
    """A communicator of the model. path: how it was made, the same on all of its ranks. members: ranks of the job."""

    path: tuple[Any, ...]
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def Free(self) -> None:  # noqa: N802
        pass


class Operation(NamedTuple):
    """The operation that a rank waits in. kind: "act", "agree", "shrink", "revoke" or "end". turn: the number of the
    rank's call of this kind on this communicator. word: what it says in an agreement, or its result at the end."""

    kind: str
    comm: Comm
    turn: int = 0
    word: Any = None


class PendingError(BaseException):
    """Ends a run at the first operation without a result."""


class Rank:
    """One run of a rank's program: the results of its operations, and the first operation that has none."""

    def __init__(self, number: int, history: tuple[Any, ...]) -> None:
        self.number, self._left, self._turns = number, list(history), dict[Any, int]()
        self.commits: list[Comm] = []
        self.calls: dict[Any, Operation] = {}  # those that it has made, without their words

    def do(self, kind: str, comm: Comm, word: Any = None) -> Any:
        turn = self._turns[kind, comm] = self._turns.get((kind, comm), -1) + 1
        self.next = self.calls[kind, comm, turn] = Operation(kind, comm, turn, word)
        if not self._left:
            raise PendingError
        return self._left.pop(0)

    def act(self, world: Comm) -> None:
        if self.do("act", world) == FAILED:
            raise RankLostError("told")


running: list[Rank] = []  # the rank whose program runs


class Ranks:
    """A topology of the model, for the library's `retry`, `recover` and `of_survivors`."""

    ranks_per_node = timeout = None
    of_survivors = classmethod(topology_module.Topology.of_survivors.__func__)  # type: ignore[attr-defined]

    def __init__(self, comm: Comm, *_: Any, **__: Any) -> None:
        self.world = Comm((*comm.path, "world"), comm.members)
        if comm.path:
            running[-1].act(comm)

    def revoke(self) -> None:
        running[-1].do("revoke", self.world)

    def abandon(self) -> None:
        pass

    def finished(self, ok: bool) -> bool:
        return ulfm.agree(self.world, ok)  # type: ignore[arg-type]

    def survivors(self, admit: bool = True) -> "Ranks":
        return self.of_survivors(self.world)


EVERYONE: Any = Ranks(Comm((), tuple(range(RANKS))))


def shrink(comm: Comm) -> Comm:
    members = running[-1].do("shrink", comm)
    return Comm((*comm.path, running[-1]._turns["shrink", comm]), members)


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ulfm, "in_force", lambda: True)
    monkeypatch.setattr(ulfm, "shrink", shrink)
    monkeypatch.setattr(ulfm, "revoke", lambda comm: running[-1].do("revoke", comm))
    monkeypatch.setattr(ulfm, "agree", lambda comm, ok, *_: running[-1].do("agree", comm, ok))
    monkeypatch.setattr(topology_module, "_checked", lambda comm: comm)
    monkeypatch.setattr(topology_module, "waiting", lambda *_: nullcontext())
    monkeypatch.setattr(topology_module.processes, "world_ranks", lambda comm: comm.members)
    monkeypatch.setattr(topology_module.processes, "ranks_in", lambda comm, left: left.members)
    monkeypatch.setattr(topology_module.deferred_free, "repaired", lambda: None)
    yield
    program.cache_clear()


def train(rank: Rank, holder: int | None) -> Any:
    """Train, and after a failure repair and train again. Return the ranks of the training. holder: the rank that has
    the only copy of a part of the state."""

    def action(topology: Any) -> tuple[int, ...]:
        rank.act(topology.world)
        return tuple(topology.world.members)

    def repair(topology: Any) -> Callable[[], object]:
        rank.act(topology.world)
        if holder is not None and holder not in topology.world.members:
            raise on_all_ranks(RankLostError("the state is gone"), topology.world)
        return partial(rank.commits.append, topology.world)

    return retry.retry(EVERYONE, action, partial(retry.recover, repair=repair))


@cache
def program(number: int, history: tuple[Any, ...], holder: int | None) -> tuple[Operation, dict[Any, Operation]]:
    """Return the operation that a rank waits in after these results, at the end one of the kind "end"; and all of its
    calls until then."""
    rank = Rank(number, history)
    running.append(rank)
    try:
        result: Any = train(rank, holder)
    except PendingError:
        return rank.next, rank.calls
    except RankLostError as error:
        result = str(error)
    finally:
        running.pop()
    return Operation("end", Comm((), ()), 0, (result, tuple(rank.commits))), rank.calls


class State(NamedTuple):
    """histories: the results of each rank's operations. alive: the ranks. revoked: communicators."""

    histories: tuple[tuple[Any, ...], ...]
    alive: frozenset[int]
    revoked: frozenset[Comm]


class Model:
    """The states that follow a state. early: whether an action may return on a rank before all have come to it.

    A step that no other step can prevent or change is done at once: a revocation, and the return from an agreement or a
    shrink that has ended. A rank may fail before that: then it fails in the same step as the agreement ends.
    """

    def __init__(self, early: bool = False, holder: int | None = None) -> None:
        self.early, self.holder = early, holder

    def waits_in(self, state: State, rank: int) -> Operation:
        return program(rank, state.histories[rank], self.holder)[0]

    def came(self, rank: int, state: State, operation: Operation) -> Operation | None:
        """Return the call by which a rank has come to the operation of another rank; None before."""
        return program(rank, state.histories[rank], self.holder)[1].get(operation[:3])

    def next(self, state: State) -> Iterator[State]:
        for rank in state.alive:
            operation = self.waits_in(state, rank)
            if operation.kind == "revoke":  # all revoke at once: the order is the same to all
                revoked = returned(state, [rank], None)._replace(revoked=state.revoked | {operation.comm})
                yield from self.next(revoked)
                return
        yield from ends_of(state)
        for rank in state.alive:
            operation = self.waits_in(state, rank)
            if operation.kind == "act":
                yield from self._acted(state, rank, operation)
            elif operation.kind != "end":
                calls = {each: self.came(each, state, operation) for each in operation.comm.members}
                living = {each: call for each, call in calls.items() if each in state.alive}
                if all(living.values()) and rank == min(living):
                    yield from self._agreed(state, operation, calls, living)

    def _acted(self, state: State, rank: int, operation: Operation) -> Iterator[State]:
        members = operation.comm.members
        if self.early or all(self.came(each, state, operation) for each in members):
            yield returned(state, [rank], OK)
        if operation.comm in state.revoked or not state.alive >= set(members):
            yield returned(state, [rank], FAILED)

    def _agreed(
        self, state: State, operation: Operation, calls: dict[int, Any], living: dict[int, Any]
    ) -> Iterator[State]:
        """The ends of an agreement or a shrink to which all living ranks have come."""
        answers: set[Any] = {tuple(sorted(living))}
        if operation.kind == "agree":
            answers = {all(call.word for call in some.values() if call) for some in (living, calls)}
        for answer in answers:
            for after in (state, *ends_of(state), *(twice for once in ends_of(state) for twice in ends_of(once))):
                yield returned(after, sorted(after.alive & {*living}), answer)


def ends_of(state: State) -> Iterator[State]:
    """The failures that may come."""
    if len(state.alive) > RANKS - FAILURES:
        for rank in state.alive:
            yield state._replace(alive=state.alive - {rank})


def returned(state: State, ranks: Sequence[int], result: Any) -> State:
    """An operation has returned on these ranks."""
    histories = list(state.histories)
    for rank in ranks:
        histories[rank] = (*histories[rank], result)
    return state._replace(histories=tuple(histories))


def explore(model: Model, alarm: bool) -> tuple[int, set[Any]]:
    """Visit all states. Return their number, and the results with which trainings have ended. Raises AssertionError if
    living ranks wait for ever, or end differently.

    alarm: the first topology is revoked before a rank has failed, so that both failures can come during a recovery.
    """
    first = State(((),) * RANKS, frozenset(range(RANKS)), frozenset([EVERYONE.world] * alarm))
    seen, left, ends = {first}, [first], set()
    while left:
        state = left.pop()
        following = list(model.next(state))
        operations = [model.waits_in(state, rank) for rank in sorted(state.alive)]
        ended = [operation.word for operation in operations if operation.kind == "end"]
        assert len(set(ended)) <= 1, f"the ranks {sorted(state.alive)} end differently: {ended}"
        if len(ended) == len(operations):
            ends.add(ended[0])
        elif not any(follower.alive == state.alive for follower in following):
            raise AssertionError(f"the ranks {sorted(state.alive)} wait for ever in {operations}")
        for follower in following:
            if follower not in seen:
                seen.add(follower)
                left.append(follower)
        assert len(seen) < MOST_STATES, "a recovery that never ends"
    return len(seen), ends


@pytest.mark.parametrize(("early", "alarm", "holder"), [(False, True, 2), (True, False, None)])
def test_no_interleaving_divides_the_ranks(early: bool, alarm: bool, holder: int | None) -> None:
    states, ends = explore(Model(early, holder), alarm)
    some = [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]
    assert {result for result, _ in ends} == {
        *(ranks for ranks in some if holder is None or holder in ranks),
        *(["the state is gone"] if holder is not None else []),
    }
    assert states > 5_000
