"""Topology: the ranks of a job, their nodes and communicators, the users of these, and recovery after failures."""

import contextlib
import math
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from mpi4py import MPI

from allreduce import kernels, machine, notices
from allreduce.arrays.arguments import is_integer, is_number
from allreduce.errors import (
    ClosedError,
    CommunicationError,
    CopyError,
    OptionError,
    UnavailableError,
)
from allreduce.health import abort, dump
from allreduce.health.stall import STALL, TIMEOUT, StallDetector, seconds
from allreduce.process import children, launcher, start
from allreduce.transport import deferred_free, liveness, processes, ulfm
from allreduce.transport.cma import CMA
from allreduce.transport.control import agree, all_values, everywhere
from allreduce.transport.layout import NodeLayout, NodeSizes, error_of_sizes, nodes_left, simulated
from allreduce.transport.wait import NamedCall, WaitRecord, record_of, waiting, watched

TAGS = 1 << 15  # every MPI has at least this many
KindT = TypeVar("KindT", bound="Closeable")


class Closeable(Protocol):
    """A user of a topology's communicators, closed before them; or a service that all users share (see `service`)."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Topology:
    """The ranks of a communicator and the nodes that they run on. Creating and closing are collective.

    comm: an intracommunicator, duplicated here; MPI.COMM_WORLD when none is given.
    ranks_per_node: simulates nodes of consecutive ranks: an int for nodes of equal size (the last may be smaller), or a
        sequence of sizes that add up to the number of ranks. Ranks that share no memory never share one.
    timeout: seconds that a rank waits for others before it gives up with a CollectiveTimeoutError; by default
        ALLREDUCE_TIMEOUT_SECONDS, else 1800. After ALLREDUCE_STALL_SECONDS, else 30, a wait is reported.

    Raises LauncherError when a launcher has started several processes and MPI.COMM_WORLD has one rank. Use
    `Topology(MPI.COMM_SELF)` or ALLREDUCE_ALONE=1 for one rank on purpose.

    Communicators (freed by `close`; those with the same ranks may be one and the same):
        world   all ranks
        node    the ranks that share memory with this one
        cross   the ranks with this one's node rank, one on each node that has such a rank
        host    as `node`, before nodes are simulated: the ranks that really share memory
    With uneven nodes `leaders_only` is true: only the leaders' `cross` has a rank of every node.
    """

    layout: NodeLayout  # which ranks run on which node
    nodes: int
    node_sizes: tuple[int, ...]
    simulated: bool  # `ranks_per_node` has divided real nodes
    leaders_only: bool  # nodes differ in size, so only their leaders can pair up across nodes
    node_index: int
    node_rank: int
    node_size: int
    node: MPI.Intracomm
    cross: MPI.Intracomm
    cores: int  # of this node
    sharing: int  # ranks that share these cores
    fewest_cores: int  # `cores` of the node that has the fewest
    most_sharing: int  # `sharing` of the node that has the most
    by_c: bool  # all ranks have the C library
    all_cma: bool  # on every node each rank reaches the memory of the others
    previous_ranks: tuple[int, ...]  # by rank: its rank in the topology before `survivors`; else itself

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        ranks_per_node: NodeSizes = None,
        timeout: float | None = None,
        *,
        parent: "Topology | None" = None,
        on_one_host: bool = False,
        unrevoked: MPI.Intracomm | None = None,
    ) -> None:
        """See the class. Collective over `comm`.

        parent: a topology that contains these ranks, and closes and revokes this one with itself. on_one_host: all
        ranks are known to share memory. unrevoked: a communicator of these ranks that this topology may keep.
        """
        children.check()
        abort.record_lifetime()
        abort.install()
        dump.install()
        comm = _checked(comm)
        if comm.size == MPI.COMM_WORLD.size:
            abort.wait_at_end()
        asked = f"Topology(ranks_per_node={ranks_per_node!r}, timeout={timeout!r})"
        error = error_of_sizes(ranks_per_node, comm.size) or _bad_timeout(timeout)
        versioned = f"{asked}, allreduce {sys.modules['allreduce'].__version__}"  # others may send other messages
        agree(comm, [zlib.crc32(versioned.encode())], versioned, error)
        self._owned: list[MPI.Intracomm] = [] if unrevoked is None else [unrevoked]
        self._users: list[Closeable] = []
        self._children: list[Topology] = []
        self._services: dict[Callable[[Topology], Any], Any] = {}
        self._guard = threading.Lock()  # of _owned; held for moments, never while communicating
        self._unrevoked = unrevoked  # of _owned; no failure revokes it
        self._numbers, self.closed, self.apart = 0, False, False
        self._revoked = False
        if parent is not None and parent.adopt(self):  # before any wait: a failure in the parent then reaches this one
            self._revoked = True
        self.ranks_per_node = ranks_per_node
        self.timeout = seconds(TIMEOUT) if timeout is None else float(timeout)
        try:
            with waiting(comm, asked):
                first = self.own(comm.Dup())
            revoke = weakref.WeakMethod(self.revoke_comms)  # MPI keeps the detector alive after the topology
            self.detector = StallDetector(first, self.timeout, revoke=lambda: (call := revoke()) and call())
            watched(first, self.detector, self.wait_record())
            with waiting(first, asked):
                self._connect(first, on_one_host or (parent is not None and parent.host.size == parent.size), parent)
        except BaseException as error:
            self.closed = True
            if unrevoked is not None and not everywhere(error, unrevoked):
                self.revoke_comms()
            self._defer_free()
            if self._revoked and "detector" in vars(self):  # else other ranks may still wait in it
                self.detector.abandon()
            raise
        if parent is None and self.sharing > self.cores:
            text = f"{self.sharing} ranks share the {self.cores} cores of this node: more ranks give no speed-up, "
            notices.once(self.rank, text + "and communication times are mostly waits for a core")

    def adopt(self, child: "Topology") -> bool:
        """Close and revoke a child topology with this one. Return whether a rank has already failed. Local."""
        self._children = [each for each in self._children if not each.closed] + [child]
        return self._revoked

    def _connect(self, comm: MPI.Intracomm, on_one_host: bool, parent: "Topology | None") -> None:
        """Create all communicators but `comm`. Collective. on_one_host: it is known that all ranks share memory.

        comm: for agreements, and for the detector's messages. Agreements are collective calls, which such a message
            never matches.
        """
        self._control = comm
        self.world: MPI.Intracomm = self.own(comm.Dup(), watch=True)
        self.finish_record = self.detector.wait_record(self.next_number(), raises=True)  # of `finished`
        if ulfm.in_force():  # ranks announce that they leave on a communicator that no failure revokes
            self._unrevoked = self._unrevoked or self.own(self.world.Dup())
            self.detector.messages.use_unrevoked(self._unrevoked, self.finish_record)
        self.previous_ranks = tuple(range(self.size))
        self.host: MPI.Intracomm = self.world if on_one_host else self._ranks_of_this_host()
        mine = [machine.cores(), processes.here()[0], liveness.own()]
        found = all_values(self.host, mine, "count the cores of this node")
        self.cores, self.sharing = len(set().union(*(cores for cores, *_ in found))), self.host.size
        if parent is not None:
            self.cores, self.sharing = parent.cores, parent.sharing  # the parent's other ranks use these cores too
        self.node = self.host
        if ranks_per_node := self.ranks_per_node:
            number = simulated(ranks_per_node, self.size).node_of(self.rank)
            self.node = MPI.COMM_SELF if ranks_per_node == 1 else self.private(ranks=self.host, colour=number)
        self.cma = CMA(self.node)
        self._learn_layout()
        liveness.know({rank: liveness.Process(*process) for _, rank, process in found if process is not None})
        # MPI keeps a dropped topology's communicators; their attributes keep the detector.
        self._finalizer = weakref.finalize(self, _leave, self.detector)
        self._finalizer.atexit = False
        self.cross = MPI.COMM_SELF if self.nodes == 1 else self.world
        if 1 < self.nodes < self.size:
            with waiting(self.world, "make a communicator"):
                self.cross = self.own(self.world.Split(self.node_rank, self.node_index), watch=True)

    def _ranks_of_this_host(self) -> MPI.Intracomm:
        """Return the communicator of the ranks that share memory: `world` if all do. Collective."""
        with waiting(self.world, "make a communicator"):
            host = self.own(self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank), watch=True)
        if host.size < self.size:
            return host
        self.release(host)
        return self.world

    def _learn_layout(self) -> None:
        """Set the layout, and what all ranks have. Collective. The same message tells which rank is not guarded."""
        leader, here = min(processes.ranks_in(self.world, self.node)), [self.cores, self.sharing]
        mine = [leader, start.unguarded(), self.cma.works, kernels.status() == "C", *here]
        found = all_values(self.world, mine, "count the nodes")
        leaders, unguarded, cma, by_c, cores, sharing = zip(*found, strict=True)
        self.all_cma, self.by_c = all(cma), all(by_c)
        self.fewest_cores, self.most_sharing = min(cores), max(sharing)
        if self.size == MPI.COMM_WORLD.size > 1 and any(unguarded):
            notices.once(self.rank, next(filter(None, unguarded)))
        self.layout = layout = NodeLayout.of_leaders(list(leaders), self.ranks_per_node is not None)
        self.nodes, self.node_sizes, self.simulated = layout.nodes, layout.node_sizes, layout.simulated
        self.leaders_only, self.node_index = layout.leaders_only, layout.node_of(self.rank)
        members = layout.members[self.node_index]
        self.cma.works = all(cma[rank] for rank in members)
        self.node_rank, self.node_size = members.index(self.rank), len(members)

    # Ranks and nodes

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else self._of_closed()

    @property
    def size(self) -> int:
        return self.world.size if self.world else self._of_closed()

    def __str__(self) -> str:
        return str(self.layout)

    # Other topologies

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], name: str, timeout: float | None = None) -> "Topology":
        """Return the topology of some ranks of MPI.COMM_WORLD, in the given order. Collective over these ranks only.

        name: distinguishes concurrent calls; must be equal on these ranks.
        """
        children.check()
        everyone = MPI.COMM_WORLD.Get_group()
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(everyone.size)):
            raise OptionError(
                f"ranks {list(ranks)}: give some ranks of MPI, each of them once; there are 0 to {everyone.size - 1}"
            )
        group = everyone.Incl(list(ranks))
        with waiting(MPI.COMM_WORLD, f"Topology.of_ranks({list(ranks)}, {name!r})"):
            comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name.encode()) % TAGS)
        try:
            return cls(comm, timeout=timeout)
        finally:
            comm.Free()
            group.Free()
            everyone.Free()

    def split(self, colour: int, ranks_per_node: NodeSizes = None, on_error: str = "job") -> "Topology":
        """Split the ranks by `colour`, and return the topology of this rank's part, in rank order. Collective.

        The caller may close it; otherwise `close` of this topology does. Its waits, agreements and errors do not
        involve the other parts.

        on_error: what an uncaught exception ends: the whole "job", or only the programs of this "part" while it is
            open. Equal on the ranks of a part. With "part", ranks of the part that wait for the failed one raise
            RankLeftError, other parts continue, and the job's exit code shows the failure. An endless wait inside MPI,
            an exception in a thread, and Ctrl-C still end the job.
        """
        self.agree([], "Topology.split", _bad_split(colour, on_error))
        comm = self.private(colour=colour)
        try:
            part = Topology(comm, ranks_per_node, self.timeout, parent=self)
        finally:
            self.release(comm)
        part.agree([on_error == "part"], f"split(on_error={on_error!r})")
        if on_error == "part":
            part.isolate()
        return part

    def isolate(self) -> None:
        """Isolate this part: failures in the parent don't revoke it, its uncaught errors don't end the job. Local."""
        self.apart = True
        abort.contain(self)

    # Communicators and their users

    def agree(self, values: Sequence[int], text: str, error: Exception | None = None) -> None:
        """Return if all ranks pass equal `values` and no error; otherwise raise the same error on all. Collective.

        values: at most 8. text: this rank's call in words.
        """
        self.check_open()
        agree(self._control, values, text, error)

    def private(
        self,
        user: Closeable | None = None,
        wait: WaitRecord | None = None,
        ranks: MPI.Intracomm | None = None,
        colour: int | None = None,
    ) -> MPI.Intracomm:
        """Return a duplicate of `world` for one user's messages. The topology owns it. Collective.

        user: closed before the communicator when the topology is closed.
        wait: the wait record of agreements on it; by default a new one.
        ranks: a communicator of this topology, in the place of `world`. Collective over its ranks.
        colour: the communicator has only the ranks with the same colour.
        """
        self.check_open()
        if user is not None and user not in self._users:
            self._users.append(user)
        ranks = self.world if ranks is None else ranks
        with waiting(ranks, "make a communicator"):
            comm = self.own(ranks.Dup() if colour is None else ranks.Split(colour, ranks.rank))
        watched(comm, self.detector, wait or self.detector.wait_record(self.next_number(), raises=True))
        return comm

    def register(self, user: Closeable) -> None:
        """Register a user: `close` closes users before the communicators, the last registered first. Local."""
        self._users.append(user)

    def unregister(self, user: Closeable) -> None:
        """Unregister a user that has been closed. Local."""
        if user in self._users:
            self._users.remove(user)

    def wait_record(self) -> WaitRecord:
        """Create a record of a user's waits for other ranks. Local; all ranks create theirs in the same order."""
        return self.detector.wait_record(self.next_number())

    def own(self, comm: MPI.Comm, watch: bool = False) -> MPI.Intracomm:
        """Take ownership of a communicator: `close` frees it. Local. watch: create a wait record for it."""
        assert isinstance(comm, MPI.Intracomm)
        with self._guard:
            self._owned.append(comm)
            if self._revoked:  # while it was created; other ranks may not have it
                ulfm.revoke(comm)
        if watch:
            watched(comm, self.detector, self.wait_record())
        return comm

    def release(self, comm: MPI.Intracomm, user: Closeable | None = None) -> None:
        """Free a communicator of `private` or `own`, and unregister `user` if given. Collective.

        Does nothing to a communicator that `close` has freed already.
        """
        if user is not None:
            self.unregister(user)
        with self._guard:
            if comm not in self._owned:
                return
            self._owned.remove(comm)
        if (wait := record_of(comm)) is not None:
            self.detector.forget(wait)
        comm.Free()

    def service(self, kind: Callable[["Topology"], KindT]) -> KindT:
        """Return the topology's one `kind(self)`, created at the first use (collective if its constructor is)."""
        self.check_open()
        if kind not in self._services:
            self._services[kind] = kind(self)
        return self._services[kind]

    def next_number(self) -> int:
        """Return a new number, unique in this topology. Local; all ranks call it in the same order."""
        self._numbers += 1
        return self._numbers

    # Lifetime

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        if self.closed:
            self._of_closed()

    def _of_closed(self) -> NoReturn:
        raise ClosedError("this topology is closed; make a new Topology()")

    def close(self) -> None:
        """Close all users, then free every communicator; after a failure, do `abandon` instead. Collective."""
        if self.closed:
            return
        try:
            self._close_together()
        except Exception as error:
            if self.detector.failure_behind(error) is None:
                raise
            self.closed = False
            self.detector.leave("it has closed the topology")
            self.abandon()

    def _close_together(self) -> None:
        agree(self._control, [], f"close {self}", None)
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.close()
        if self.closed:  # by a user: a trainer closes the topology that it has formed after a failure
            return
        self.closed = True
        for made in [*reversed(self._services.values())]:
            made.close()
        self.detector.close()
        self._finalizer.detach()
        for comm in reversed(list(self._owned)):
            self.release(comm)

    def abandon(self) -> None:
        """Drop everything without communicating, because ranks may have failed. Local. Frees no communicator now."""
        if self.closed:
            return
        self.closed = True
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.abandon()
        for made in [*reversed(self._services.values())]:
            made.abandon()
        self._defer_free()
        self.detector.abandon()
        self._finalizer.detach()

    def dissolve(self, comm: MPI.Comm) -> None:
        """Abandon this topology, and free its communicators, but those in which a wait was interrupted on any rank.
        Collective over `comm`.

        comm: another communicator of the same ranks. They make no other call of this topology or its users any more.
        """
        comms = [] if self.closed else self.dissolvable()
        unfinished = [(record := record_of(each)) is None or record.unfinished for each in comms]
        self.abandon()
        everyone = all_values(comm, unfinished, "learn which communicators can be freed")
        if all(len(each) == len(comms) for each in everyone):  # else a rank has not made all of them
            for each, *flags in zip(comms, *everyone, strict=True):
                if not any(flags):
                    each.Free()

    def dissolvable(self) -> list[MPI.Intracomm]:
        """Return the communicators of this topology and its children that no status messages use, in the order in
        which they were made. Local."""
        if self._revoked:  # they are freed later
            return []
        used = (self.detector.messages.comm, self._unrevoked)
        own = [each for each in self._owned if each not in used]
        return own + [each for child in self._children if not child.closed for each in child.dissolvable()]

    def _defer_free(self) -> None:
        """Free revoked communicators later; never free the others, because other ranks may use them."""
        with self._guard:
            if self._revoked:
                deferred_free.free_later(*self._owned)
                self._owned = []

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a Topology can't be copied or pickled: its communicators belong to this process. Topology(), or "
            "`split(0)` of this one, makes another, on all ranks"
        )

    def __enter__(self) -> "Topology":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not reach a collective close
            self.close()

    # Failures

    def revoke(self) -> None:
        """Revoke the communicators of this topology and its children: all ranks' waits on them end. Local.

        After that all calls raise RankLostError, except `finished`, `survivors` and `abandon`. When a call raises
        RankLostError, this has already been done. Parts from `split(on_error="part")` are not revoked. Does nothing
        without ULFM.
        """
        if ulfm.in_force() and not self.closed:
            self.detector.handle_failure()

    def revoke_comms(self) -> None:
        """Revoke the communicators of this topology and its children. Local. Called by the detector."""
        with self._guard:
            self._revoked = True
            for comm in self._owned:
                if comm is not self._unrevoked:
                    ulfm.revoke(comm)
        for child in list(self._children):
            if not (child.apart or child.closed):
                child.revoke_comms()
                if "detector" in vars(child):  # else its constructor has not created it yet
                    child.detector.handle_failure()

    def finished(self, ok: bool = True) -> bool:
        """Return whether all surviving ranks pass ok=True, the same on all of them. Collective over these.

        Call it after work that a failure may interrupt, with ok=False if a call raised RankLostError. If the answer is
        False, all ranks call `survivors` and repeat the work. Before it, wait for others only in calls of this
        topology, its children and its backends. Without ULFM it returns `ok` at once.

        Raises RankLeftError if a rank that has not failed has ended its program or closed this topology.
        """
        self.check_open()
        if not ulfm.in_force():
            return ok
        call = NamedCall("finished: agree whether all surviving ranks have completed the work")
        self.finish_record.begin(call)
        try:
            return ulfm.agree(self.world, ok, lambda: self.detector.messages.check_finish(call))
        finally:
            self.finish_record.end()

    def survivors(self, admit: bool = True) -> "Topology":
        """Return a topology of the surviving ranks, in rank order, each on its node. Collective over these.

        If another rank fails meanwhile, the call starts again. This topology and all its users are revoked and
        abandoned; arrays from `allocate` stay readable. Each rank stays on its simulated node. `previous_ranks` of the
        new topology holds the rank that each of its ranks has here.

        admit: whether standby ranks may join, if there are any (`allreduce.standby`); equal on all ranks.

        Raises UnavailableError without ULFM.
        """
        self.check_open()
        if not ulfm.in_force():
            raise UnavailableError(
                "this job can't continue after a rank fails: start it with Open MPI's mpirun --with-ft ulfm"
            )
        self.revoke()
        made = type(self).of_survivors(self.world, self.ranks_per_node, self.timeout, self.host.size == self.size)
        if self.apart:
            made.isolate()
        self.abandon()
        return made

    @classmethod
    def of_survivors(
        cls,
        comm: MPI.Intracomm | None = None,
        ranks_per_node: NodeSizes = None,
        timeout: float | None = None,
        on_one_host: bool = False,
    ) -> "Topology":
        """Create a Topology of the living ranks of `comm`; start again if one fails meanwhile. Collective over these.

        For the start of programs that continue after failures. Without ULFM it is `Topology(...)`.
        on_one_host: all ranks are known to share memory.
        """
        children.check()
        comm = _checked(comm)
        if comm.size == MPI.COMM_WORLD.size:
            abort.wait_at_end()
        tried = 0
        while ulfm.in_force():
            with waiting(comm, "create a topology of the surviving ranks"):
                left = ulfm.shrink(comm)
            previous, made = processes.ranks_in(comm, left), None
            try:
                nodes = nodes_left(ranks_per_node, previous, comm.size)
                made = cls(left, nodes, timeout, on_one_host=on_one_host, unrevoked=left)
            except Exception as error:
                if not everywhere(error, left):  # else some ranks would get another error, and wait for this one
                    ulfm.revoke(left)  # also where no rank of it has failed: others may wait for this one in it
                if ulfm.lost(error) is None and not (ulfm.may_be_failure(error) and left.size != tried):
                    if isinstance(error, MPI.Exception):
                        text = f"MPI can't create the communicators of the {left.size} surviving ranks: {error}"
                        raise CommunicationError(text) from error
                    raise
            tried = left.size
            done = ulfm.agree(left, made is not None)
            if made is not None and done:
                made.previous_ranks = previous
                deferred_free.repaired()
                return made
            if made is not None:
                made.revoke()
                made.abandon()
        return cls(comm, ranks_per_node, timeout)


children.guard(Topology, "__init__", "agree", "inside", "across", "split", "private", "release", "close", "check_open")


def _leave(detector: StallDetector) -> None:
    """Finalizer of a topology: tell ranks that wait in it that this rank leaves."""
    with contextlib.suppress(Exception):
        detector.leave("it has dropped the topology")


def _bad_split(colour: int, on_error: str) -> OptionError | None:
    if not is_integer(colour, 0, 2**31 - 1):
        return OptionError(f"colour must be an integer >= 0, the same on the ranks of a part, got {colour!r}")
    if on_error not in ("job", "part"):
        return OptionError(f'on_error={on_error!r} is unknown; use "job" or "part"')
    return None


def _bad_timeout(timeout: float | None) -> OptionError | None:
    try:
        seconds(TIMEOUT)
        seconds(STALL)
    except OptionError as error:
        return error
    if timeout in (None, math.inf) or (is_number(timeout) and timeout > 0):
        return None
    return OptionError(f"timeout must be a number of seconds > 0, got {timeout!r}")


def _checked(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return `comm`, or MPI.COMM_WORLD for None. Raises OptionError if it is not a usable intracommunicator."""
    if comm is None or comm is MPI.COMM_WORLD:
        launcher.check(MPI.COMM_WORLD.size)
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        kind = "an intercommunicator" if isinstance(comm, MPI.Intercomm) else type(comm).__qualname__
        raise OptionError(f"Topology takes an intracommunicator of mpi4py (MPI.COMM_WORLD, say), not {kind}")
    if comm == MPI.COMM_NULL:
        raise OptionError("Topology was given MPI.COMM_NULL: a communicator that was freed, or that excludes this rank")
    return comm
