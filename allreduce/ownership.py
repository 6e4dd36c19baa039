"""Who owns communicators: a topology does, all of them, and knows who uses them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mpi4py import MPI

from allreduce.engine.consistency import Board
from allreduce.health.stall import Watch
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere, place_of, waiting, watched
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import Wait


class Closeable(Protocol):
    """What uses a communicator of a topology and has to be closed before it."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Owner:
    """The part of a topology that hands out communicators and takes them back."""

    world: MPI.Intracomm
    watch: Watch
    board: Board
    _owned: list[MPI.Intracomm]
    _users: list[Closeable]
    _children: list[Any]  # topologies that were made from this one
    _numbers: int
    _guard: threading.Lock  # of _owned; held for moments, never while communicating
    _revoked: bool
    _unrevoked: MPI.Intracomm | None = None  # of _owned; no loss revokes it
    closed: bool
    apart: bool  # a part that goes on when a rank of another one is lost

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        raise NotImplementedError

    def private(self, user: Closeable | None = None, wait: Wait | None = None) -> MPI.Intracomm:
        """A duplicate of `world` on which its user's messages are its own. Collective; owned here.

        user: closed before the communicator when the topology is closed.
        wait: where agreements on it wait; a place of its own when none is given.
        """
        self.check_open()
        if user is not None and user not in self._users:
            self._users.append(user)
        with waiting(self.world, "make a communicator"):
            comm = self._own(self.world.Dup())
        watched(comm, self.watch, wait or self.watch.place(self._number(), raises=True))
        return comm

    def use(self, user: Closeable) -> None:
        """`user` is closed before the topology, before those that began to use it earlier. Local."""
        self._users.append(user)

    def let_go(self, user: Closeable) -> None:
        """`user` was closed. Local."""
        if user in self._users:
            self._users.remove(user)

    def place(self) -> Wait:
        """A place in which a user's calls wait for other ranks. All ranks ask for theirs in the same order."""
        return self.watch.place(self._number())

    def release(self, comm: MPI.Intracomm, user: Closeable | None = None) -> None:
        """Free a communicator that `private` gave to `user`. Collective."""
        if user is not None:
            self.let_go(user)
        with self._guard:
            self._owned.remove(comm)
        if (place := place_of(comm)) is not None:
            self.watch.forget(place)
        comm.Free()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is taken from here inside is given back when it ends in an error. Collective then.

        For constructors that may refuse, on all ranks.
        """
        owned, users, children = list(self._owned), list(self._users), list(self._children)
        parts = set(self.board.free)
        try:
            yield
        except Exception as error:
            if everywhere(error, self.world):
                for child in [each for each in self._children if each not in children]:
                    child.close()
                self._users = users
                self.board.take_back(parts)
                for comm in [each for each in reversed(self._owned) if each not in owned]:
                    self.release(comm)
            elif ulfm.lost(error) is not None:
                self._users = users  # what is half made can't be abandoned
            raise

    def revoke(self) -> None:
        """End every wait, of all ranks, in what this topology and its children communicate with. Local.

        From then on all their calls raise RankLostError, but `finished`, `survivors` and `abandon`. A RankLostError
        was raised after this was done. Parts of `split(on_error="part")` go on. Without ULFM nothing happens.
        """
        if ulfm.in_force() and not self.closed:
            self.watch.lose()

    def _revoke(self) -> None:
        with self._guard:
            self._revoked = True
            for comm in self._owned:
                if comm is not self._unrevoked:
                    comm.Revoke()
        for child in list(self._children):
            if not (child.apart or child.closed):
                child._revoke()
                if "watch" in vars(child):  # it is not still being made
                    child.watch.lose()

    def _leave_owned(self) -> None:
        """Leave all communicators as they are: other ranks may use them, if they were not revoked."""
        with self._guard:
            if self._revoked:
                free_later(self._owned)
                self._owned = []

    def _leave_half_made(self) -> None:
        """As `_leave_owned`, where creating this has failed. Local. Without a loss others may still wait in it."""
        self._leave_owned()
        if self._revoked and "watch" in vars(self):
            self.watch.abandon()

    def _own(self, comm: MPI.Comm, watch: bool = False) -> MPI.Intracomm:
        """Free it in the end. watch: waits on it are in a place of their own."""
        assert isinstance(comm, MPI.Intracomm)
        with self._guard:
            self._owned.append(comm)
            if self._revoked:  # while it was made; other ranks may not have it
                comm.Revoke()
        if watch:
            watched(comm, self.watch, self.place())
        return comm

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
