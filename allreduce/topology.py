"""Where the ranks are (nodes, communicators), who uses a topology, and what is left of it when a rank fails."""

import contextlib
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce import machine, notices
from allreduce.errors import ClosedError, CopyError, DisagreementError, OptionError, UnavailableError
from allreduce.health import abort, status_dump
from allreduce.health.stall import STALL, TIMEOUT, StallDetector, seconds
from allreduce.health.status import FAR_ROWS, ROW_BYTES, StatusRows
from allreduce.process import children, launcher
from allreduce.transport import deferred_free, liveness, processes, ulfm
from allreduce.transport.cma import CMA
from allreduce.transport.control import agree, all_values, everywhere, known, root_value
from allreduce.transport.shared_segment import CommonSegment
from allreduce.transport.wait import NamedCall, WaitRecord, record_of, waiting, watched

TAGS = 1 << 15  # every MPI has at least this many
NodeSizes = int | Sequence[int] | None  # `ranks_per_node`
KindT = TypeVar("KindT", bound="OneOfAKind")


class Closeable(Protocol):
    """What uses a communicator of a topology and has to be closed before it."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class OneOfAKind(Closeable, Protocol):
    """What all users of a topology have in common, one object of a kind: see `Topology.once`.

    taken: the numbers of users' parts. take_back: of users who can't give them back. Local, alike on all ranks.
    """

    def taken(self) -> set[int]: ...

    def take_back(self, parts: set[int]) -> None: ...


class Topology:
    """The ranks of a communicator and the nodes that they run on. Creating and closing are collective.

    comm: an intracommunicator, duplicated here; MPI.COMM_WORLD when none is given.
    ranks_per_node: simulates nodes: consecutive ranks form a node, an int for nodes of one size (the
        last may be smaller) or a sequence of sizes that add up to the number of ranks. Ranks that do not
        really share memory are never put on one simulated node.
    timeout: seconds that a rank waits for others before it gives up with a CollectiveTimeoutError; by default
        ALLREDUCE_TIMEOUT_SECONDS, else 1800. After ALLREDUCE_STALL_SECONDS, else 30, a wait is first told.

    Raises LauncherError when a launcher has started several processes and MPI.COMM_WORLD has one rank: torchrun, srun
    without PMI, another MPI's mpirun. `Topology(MPI.COMM_SELF)` and ALLREDUCE_ALONE=1 are for one rank on purpose.

    Communicators (all owned here and freed by `close`):
        world   all ranks
        node    the ranks that share memory with this one
        cross   the ranks with this one's node rank, one on each node that has such a rank
        host    as `node`, before nodes are simulated: the ranks that really share memory

    With uneven nodes, `cross` differs in size from rank to rank; `leaders_only` is then true and only
    node rank 0 of each node should speak for it.
    """

    cores: int  # of this node
    sharing: int  # ranks that share them
    previous_ranks: tuple[int, ...]  # the rank that each rank had in the topology before, for one of `survivors`

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        ranks_per_node: NodeSizes = None,
        timeout: float | None = None,
        *,
        parent: "Topology | None" = None,
        original: "Topology | None" = None,
    ) -> None:
        children.check()
        if original is not None:
            self._duplicate(original)
            return
        status_dump.install()
        comm = _checked(comm)
        asked = f"Topology(ranks_per_node={ranks_per_node!r}, timeout={timeout!r})"
        error = _bad_ranks_per_node(ranks_per_node, comm.size) or _bad_timeout(timeout)
        agree(comm, [zlib.crc32(asked.encode())], asked, error)
        self._begin(parent)
        self.original: Topology | None = None  # what this is a duplicate of
        self._numbers, self.apart, self.is_part = 0, False, parent is not None
        self.simulated, self._ranks_per_node = ranks_per_node is not None, ranks_per_node
        self.timeout = seconds(TIMEOUT, 1800.0) if timeout is None else float(timeout)
        try:
            with waiting(comm, asked):
                first = self.own(comm.Dup())
            revoke = weakref.WeakMethod(self.cut_off)  # MPI keeps the detector with `first`; a topology can be dropped
            self.detector = StallDetector(first, self.timeout, revoke=lambda: (call := revoke()) and call())
            watched(first, self.detector, self.wait_record())
            with waiting(first, asked):
                self._connect(first)
        except BaseException:
            self.closed = True
            self._leave_owned()
            if self._revoked and "detector" in vars(self):  # without a failure others may still wait in it
                self.detector.abandon()
            raise
        if parent is not None:
            self.cores, self.sharing = parent.cores, parent.sharing  # whose ranks need them too

    def _begin(self, parent: "Topology | None") -> None:
        """Become a child before there is anything to wait for: when the parent hears of a failure, so does this."""
        self._owned: list[MPI.Intracomm] = []
        self._users: list[Closeable] = []
        self._children: list[Topology] = []
        self._made_once: dict[Callable[[Topology], Any], Any] = {}
        self._guard = threading.Lock()  # of _owned; held for moments, never while communicating
        self._revoked, self.closed = False, False
        self._unrevoked: MPI.Intracomm | None = None  # of _owned; no failure revokes it
        if parent is not None:
            self._revoked = parent.begin_child(self)

    def begin_child(self, child: "Topology") -> bool:
        """`child` is made from this one, and closed with it. True: a rank was lost already. Local."""
        self._children = [each for each in self._children if not each.closed] + [child]
        return self._revoked

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Make all communicators but the detector's, which is `comm`. Collective."""
        self.world: MPI.Intracomm = self.own(comm.Dup(), watch=True)
        self._control = self.private()
        self._finish = self.detector.wait_record(self.number(), raises=True)  # where `finished` waits, and
        if ulfm.in_force():  # ranks that leave say so on a communicator that no failure revokes
            self._unrevoked = self.own(self.world.Dup())
            self.detector.messages.part_on(self._unrevoked, self._finish)
        self.previous_ranks = tuple(range(self.size))
        self.host: MPI.Intracomm = self.own(self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank), watch=True)
        found = all_values(self.host, [machine.cores(), self.rank, liveness.own()], "learn what this node has")
        self.cores = len(set().union(*(cores for cores, *_ in found)))
        self.sharing = self.host.size
        if self.sharing > self.cores and not self.is_part:  # of which that was said
            text = f"{self.sharing} ranks share the {self.cores} cores of this node: expect no speed-up from more "
            notices.once(self.rank, text + "ranks, and times of communication that are mostly waits for a core")
        self.node: MPI.Intracomm = self.host
        if self._ranks_per_node is not None:
            number = _simulated_node(self.rank, self._ranks_per_node)
            self.node = self.own(self.host.Split(number, key=self.rank), watch=True)
        self.cma = CMA(self.node)
        nodes, self.node_index = self._number_nodes()
        self.node_sizes = tuple(map(len, nodes))
        here = {rank: liveness.of_json(process) for _, rank, process in found if process is not None}
        rows = _shared_rows(self.node)
        # A topology that is dropped leaves its communicators, with which MPI keeps the detector, and so the rows.
        self._release_rows = weakref.finalize(self, _leave_rows, self.detector, rows)
        self._release_rows.atexit = False
        self.detector.connect(nodes, self.node_index, rows, here)
        self.cross: MPI.Intracomm = self.own(self.world.Split(self.node.rank, self.node_index), watch=True)

    def _number_nodes(self) -> tuple[list[list[int]], int]:
        """The ranks of all nodes, and which node is this rank's. Nodes are in the order of their leaders. Collective.

        Ranks compare their versions in the same message.
        """
        leader = root_value(self.node, self.rank, "learn the leader of this node")
        found = all_values(self.world, [leader, machine.digest_of_versions()], "count the nodes")
        _compare_versions(self.world, [digest for _, digest in found])
        ranks: dict[int, list[int]] = {}
        for rank, (of_rank, _) in enumerate(found):
            ranks.setdefault(of_rank, []).append(rank)
        leaders = sorted(ranks)
        return [ranks[each] for each in leaders], leaders.index(leader)

    # Ranks and nodes

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def node_rank(self) -> int:
        return self.node.rank

    @property
    def node_size(self) -> int:
        return self.node.size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.node_sizes)

    @property
    def leaders_only(self) -> bool:
        """True when nodes differ in size, so that only their leaders can pair up across nodes."""
        return len(set(self.node_sizes)) > 1

    def __str__(self) -> str:
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        nodes = f"{self.nodes} {'simulated ' * self.simulated}node{'s' * (self.nodes != 1)}"
        return f"{ranks} on {nodes}" + (f" ({'+'.join(map(str, self.node_sizes))})" if self.nodes > 1 else "")

    # Other topologies

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], name: str, timeout: float | None = None) -> "Topology":
        """The topology of some ranks of MPI.COMM_WORLD, in the given order. Collective over these alone.

        name: tells this call from others that go on at the same time; the same on all of them.
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

    def inside(self) -> "Topology":
        """The topology of this node alone: its ranks, one node. Collective over the node."""
        self.check_open()
        return Topology(self.node, timeout=self.timeout, parent=self)

    def across(self) -> "Topology | None":
        """The topology of one rank per node, each on a node of its own. Collective over the world.

        Equal nodes: the ranks with this rank's node rank. Uneven nodes: the leaders; None on other ranks.
        """
        if self.leaders_only and self.node_rank:
            return None
        return Topology(self.cross, ranks_per_node=1, timeout=self.timeout, parent=self)

    def split(self, colour: int, ranks_per_node: NodeSizes = None, on_error: str = "job") -> "Topology":
        """The topology of the ranks that bring the same `colour`, in the order of their ranks here. Collective.

        It belongs to its user, who closes it before this one (or leaves that to this one's `close`). Its waits,
        agreements and errors are its own: an error that all its ranks raise, and catch, is no other part's concern.

        on_error: what an exception ends that nobody catches: the whole "job", or the programs of this "part" alone
            (alike on its ranks) while the part is open. Its other ranks, which wait for the one that has left, get a
            RankLeftError; other parts go on, and the job's exit code says in the end that one has failed. A wait
            inside of MPI, a thread that dies, and Ctrl-C end the job all the same.
        """
        self.agree([], "Topology.split", _bad_split(colour, on_error))
        with waiting(self.world, "Topology.split"):
            comm = self.own(self.world.Split(colour, self.rank))
        try:
            part = Topology(comm, ranks_per_node, self.timeout, parent=self)
        finally:
            self.release(comm)
        part.agree([on_error == "part"], f"split(on_error={on_error!r})")
        if on_error == "part":
            part.stand_apart()
        return part

    def stand_apart(self) -> None:
        """Errors and failures of ranks of other parts are no concern of this one's from now on. Local."""
        self.apart = True
        abort.contain(self)

    def duplicate(self) -> "Topology":
        """The same ranks and nodes on communicators of its own. Collective.

        For users that make things in the middle of their calls, in whichever thread those run.
        """
        self.check_open()
        return Topology(original=self)

    def _duplicate(self, original: "Topology") -> None:
        self.__dict__.update(vars(original))
        self._begin(original)
        self.original, self._numbers = original, original.number() << 16
        with waiting(original.world, "Topology.duplicate"):
            copies = [self.own(comm.Dup(), watch=True) for comm in (original.world, original.node, original.cross)]
        self.world, self.node, self.cross = copies
        self._control = self.private()

    # Communicators and their users

    def agree(self, values: Sequence[int], text: str, error: Exception | None = None) -> None:
        """Return when all ranks bring equal `values` and no error; raise on all of them otherwise. Collective.

        text: this rank's side in words. At most 8 values.
        """
        self.check_open()
        agree(self._control, values, text, error)

    def private(self, user: Closeable | None = None, wait: WaitRecord | None = None) -> MPI.Intracomm:
        """A duplicate of `world` on which its user's messages are its own. Collective; owned here.

        user: closed before the communicator when the topology is closed.
        wait: the wait record of agreements on it; a record of its own when none is given.
        """
        self.check_open()
        if user is not None and user not in self._users:
            self._users.append(user)
        with waiting(self.world, "make a communicator"):
            comm = self.own(self.world.Dup())
        watched(comm, self.detector, wait or self.detector.wait_record(self.number(), raises=True))
        return comm

    def use(self, user: Closeable) -> None:
        """`user` is closed before the topology, before those that began to use it earlier. Local."""
        self._users.append(user)

    def let_go(self, user: Closeable) -> None:
        """`user` was closed. Local."""
        if user in self._users:
            self._users.remove(user)

    def wait_record(self) -> WaitRecord:
        """A record of a user's waits for other ranks. Collective: all ranks make their records in the same order."""
        return self.detector.wait_record(self.number())

    def own(self, comm: MPI.Comm, watch: bool = False) -> MPI.Intracomm:
        """Free a communicator in the end. Local. watch: waits on it have a record of their own."""
        assert isinstance(comm, MPI.Intracomm)
        with self._guard:
            self._owned.append(comm)
            if self._revoked:  # while it was made; other ranks may not have it
                ulfm.revoke(comm)
        if watch:
            watched(comm, self.detector, self.wait_record())
        return comm

    def release(self, comm: MPI.Intracomm, user: Closeable | None = None) -> None:
        """Free a communicator that `private` gave to `user`. Collective."""
        if user is not None:
            self.let_go(user)
        with self._guard:
            self._owned.remove(comm)
        if (wait := record_of(comm)) is not None:
            self.detector.forget(wait)
        comm.Free()

    def once(self, kind: Callable[["Topology"], KindT]) -> KindT:
        """`kind(self)`, made at the first use and closed with this. Making it is collective, where `kind` says so."""
        self.check_open()
        if kind not in self._made_once:
            self._made_once[kind] = kind(self)
        return self._made_once[kind]

    def number(self) -> int:
        """A number for a user, which no other one has. All ranks ask for theirs in the same order."""
        self._numbers += 1
        return self._numbers

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """What is taken from here inside is given back when it ends in an error. Collective then.

        For constructors that may refuse, on all ranks.
        """
        owned, users, children = list(self._owned), list(self._users), list(self._children)
        taken = {kind: made.taken() for kind, made in self._made_once.items()}
        try:
            yield
        except Exception as error:
            if everywhere(error, self.world):
                for child in [each for each in self._children if each not in children]:
                    child.close()
                self._users = users
                for kind, made in list(self._made_once.items()):
                    if kind in taken:
                        made.take_back(made.taken() - taken[kind])
                    else:
                        self._made_once.pop(kind).close()
                for comm in [each for each in reversed(self._owned) if each not in owned]:
                    self.release(comm)
            elif ulfm.lost(error) is not None:
                self._users = users  # what is half made can't be abandoned
            raise

    # Lifetime

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        if self.closed:
            raise ClosedError("this topology is closed; make a new Topology()")

    def close(self) -> None:
        """Close what still uses this topology, then free every communicator; after a loss `abandon`. Collective."""
        if self.closed:
            return
        try:
            self._close_together()
        except Exception as error:
            if self.detector.loss_of(error) is None:
                raise
            self.closed = False
            self.detector.leave("it has closed the topology")
            self.abandon()

    def _close_together(self) -> None:
        agree(self._control, [], f"close {self}", None)
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.close()
        if self.closed:  # by one of them: a trainer closes the topology that a loss has left it with
            return
        self.closed = True
        for made in [*reversed(self._made_once.values())]:
            made.close()
        if self.original is None:
            self.detector.close()
            self._release_rows()
        for comm in reversed(list(self._owned)):
            self.release(comm)

    def abandon(self) -> None:
        """Let go of everything without the other ranks, who may be lost. Local; communicators stay to the end."""
        if self.closed:
            return
        self.closed = True
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.abandon()
        for made in [*reversed(self._made_once.values())]:
            made.abandon()
        self._leave_owned()
        if self.original is None:
            self.detector.abandon()  # it keeps the rows: others may wait for this rank, and must hear that it leaves
            self._release_rows.detach()

    def _leave_owned(self) -> None:
        """Leave all communicators as they are: other ranks may use them, if they were not revoked."""
        with self._guard:
            if self._revoked:
                deferred_free.free_comms_later(self._owned)
                self._owned = []

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a Topology can't be copied or pickled: its communicators belong to this process. Topology(), or "
            "`duplicate()` of this one, makes another, on all ranks"
        )

    def __enter__(self) -> "Topology":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    # Failures

    def revoke(self) -> None:
        """End every wait, of all ranks, in what this topology and its children communicate with. Local.

        From then on all their calls raise RankLostError, but `finished`, `survivors` and `abandon`. A RankLostError
        was raised after this was done. Parts of `split(on_error="part")` go on. Without ULFM nothing happens.
        """
        if ulfm.in_force() and not self.closed:
            self.detector.lose()

    def cut_off(self) -> None:
        """Revoke what this topology and its children communicate with. Local. For its detector."""
        with self._guard:
            self._revoked = True
            for comm in self._owned:
                if comm is not self._unrevoked:
                    ulfm.revoke(comm)
        for child in list(self._children):
            if not (child.apart or child.closed):
                child.cut_off()
                if "detector" in vars(child):  # it is not still being made
                    child.detector.lose()

    def finished(self, ok: bool = True) -> bool:
        """Whether all ranks that are left come here with `ok`: the same answer on all of them. Collective over those.

        The end of what a loss may interrupt: ranks that have heard of it come with ok=False, others, whose calls have
        all returned, with True. On False all of them call `survivors` and do it again; on True it is done, whoever
        has died meanwhile, and a loss is met in the next call. Nobody must wait for others on the way here but
        in calls of this topology, its children and its backends. Without ULFM the answer is `ok`, and nobody waits.

        Raises RankLeftError when a rank comes no more without being lost: it has ended its program, or closed this.
        """
        self.check_open()
        if not ulfm.in_force():
            return ok
        call = NamedCall("finished: the end of what a lost rank may interrupt")
        self._finish.begin(call)
        try:
            return ulfm.agree(self.world, ok, lambda: self.detector.messages.look_at_end(call))
        finally:
            self._finish.end()

    def survivors(self, admit: bool = True) -> "Topology":
        """The topology of the ranks that are left, in their order, on the nodes they were on. Collective over those.

        When another rank dies meanwhile, it is made again. This topology and all that uses it are revoked and
        abandoned; arrays from `allocate` stay readable. Simulated nodes keep those of their ranks that are left. The
        new topology's `previous_ranks` are the ranks that its ranks had here.

        admit: whether standby ranks join where there are some (see allreduce.spares.man), the same on all ranks.

        Raises UnavailableError where ULFM is not in force.
        """
        self.check_open()
        if not ulfm.in_force():
            raise UnavailableError(
                "ranks can't be outlived in this job: start it with Open MPI's mpirun --with-ft ulfm"
            )
        self.revoke()
        made = type(self).of_survivors(self.world, self._ranks_per_node, self.timeout)
        if self.apart:
            made.stand_apart()
        self.abandon()
        return made

    @classmethod
    def of_survivors(
        cls,
        comm: MPI.Intracomm | None = None,
        ranks_per_node: NodeSizes = None,
        timeout: float | None = None,
    ) -> "Topology":
        """`Topology(...)` of those ranks of `comm` that are alive, whoever dies meanwhile. Collective over those.

        For the start of a program that goes on without lost ranks. Without ULFM it is `Topology(...)`.
        """
        children.check()
        comm = _checked(comm)
        while ulfm.in_force():
            with waiting(comm, "make a topology of the ranks that are left"):
                left = ulfm.shrink(comm)
            previous, made = processes.ranks_in(comm, left), None
            try:
                made = cls(left, nodes_left(ranks_per_node, previous, comm.size), timeout)
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
            done = ulfm.agree(left, made is not None)
            left.Free()
            if made is not None and done:
                made.previous_ranks = previous
                deferred_free.repaired()
                return made
            if made is not None:
                made.revoke()
                made.abandon()
        return cls(comm, ranks_per_node, timeout)


children.guard(
    Topology, "__init__", "agree", "inside", "across", "split", "duplicate", "private", "release", "close", "check_open"
)


def _leave_rows(detector: StallDetector, rows: StatusRows | None) -> None:
    """A topology was closed or dropped: other ranks that wait in it hear that this one leaves, then its rows go."""
    with contextlib.suppress(Exception):
        detector.leave("it has dropped the topology")
    if rows is not None:
        rows.release()


def _shared_rows(node: MPI.Intracomm) -> StatusRows | None:
    """The rows of the ranks of `node`, which share memory; None on all of them when it is full. Collective."""
    if node.size == 1:
        return None
    try:
        memory = CommonSegment(node, ROW_BYTES * (node.size + FAR_ROWS), np.dtype(np.uint8)).array
    except UnavailableError:
        return None
    return StatusRows(memory.reshape(-1, ROW_BYTES), node.rank)


def _simulated_node(rank: int, ranks_per_node: int | Sequence[int]) -> int:
    if isinstance(ranks_per_node, int):
        return rank // ranks_per_node
    end = 0
    for index, size in enumerate(ranks_per_node):
        end += size
        if rank < end:
            return index
    raise AssertionError("sizes were checked to cover all ranks")


def nodes_left(ranks_per_node: NodeSizes, left: Sequence[int], ranks: int) -> NodeSizes:
    """`ranks_per_node` of those ranks that are left of `ranks`: each stays on its node."""
    if ranks_per_node is None or _bad_ranks_per_node(ranks_per_node, ranks) is not None:
        return ranks_per_node  # Topology refuses what is bad
    return list(Counter(_simulated_node(rank, ranks_per_node) for rank in left).values())


def _bad_ranks_per_node(given: NodeSizes, ranks: int) -> OptionError | None:
    if given is None or _is_positive(given):
        return None
    sizes = list(given) if isinstance(given, Sequence) else []
    if all(map(_is_positive, sizes)) and sum(sizes) == ranks:
        return None
    return OptionError(
        f"ranks_per_node={given!r} can't describe {ranks} ranks: give a positive number of ranks, "
        f"or a sequence of positive node sizes that add up to {ranks}"
    )


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _bad_split(colour: int, on_error: str) -> OptionError | None:
    if isinstance(colour, bool) or not isinstance(colour, int) or not 0 <= colour < 2**31:
        return OptionError(f"colour must be an integer >= 0, the same on the ranks of a part, got {colour!r}")
    if on_error not in ("job", "part"):
        return OptionError(f'on_error={on_error!r} is unknown; use "job" or "part"')
    return None


def _bad_timeout(timeout: float | None) -> OptionError | None:
    try:
        seconds(TIMEOUT, 1800.0)
        seconds(STALL, 30.0)
    except OptionError as error:
        return error
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0):
        return None
    return OptionError(f"timeout must be a number of seconds > 0, got {timeout!r}")


def _checked(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator that was given, or MPI.COMM_WORLD; OptionError when nothing can be done on it."""
    if comm is None or comm is MPI.COMM_WORLD:
        launcher.check(MPI.COMM_WORLD.size)
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        kind = "an intercommunicator" if isinstance(comm, MPI.Intercomm) else type(comm).__qualname__
        raise OptionError(f"Topology takes an intracommunicator of mpi4py (MPI.COMM_WORLD, say), not {kind}")
    if comm == MPI.COMM_NULL:
        raise OptionError("Topology was given MPI.COMM_NULL: a communicator that was freed, or that excludes this rank")
    return comm


def _compare_versions(comm: MPI.Intracomm, digests: Sequence[int]) -> None:
    """Tell which ranks have other versions, where their digests, the same on all of them, differ. Collective.

    Raises DisagreementError on all ranks when it is ours: what they send each other need not mean the same.
    """
    if len(set(digests)) == 1:
        return
    everyone = all_values(comm, machine.versions(), "compare versions")
    for name in dict.fromkeys(name for found in everyone for name in found):
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(everyone):
            if name in found:  # a program may use a package on some ranks only
                holders.setdefault(found[name], []).append(rank)
        if len(holders) < 2:
            continue
        table = "; ".join(f"{version} on ranks {', '.join(map(str, ranks))}" for version, ranks in holders.items())
        if name == machine.OURS:
            raise known(
                DisagreementError(f"the ranks have different versions of {machine.OURS}: {table}; install one"), comm
            )
        notices.once(comm.rank, f"the ranks have different versions of {name}: {table}")
