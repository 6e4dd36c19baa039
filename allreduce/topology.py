"""Who is where: the world, the node and the cross communicators, their owner, and simulated nodes."""

import contextlib
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import NoReturn

from mpi4py import MPI

from allreduce import machine, notices
from allreduce.engine.consistency import Board, shared_rows
from allreduce.engine.queue import Worker
from allreduce.errors import ClosedError, CopyError, OptionError
from allreduce.health import abort, status_dump
from allreduce.health.stall import TIMEOUT, Watch, seconds
from allreduce.health.status_rows import StatusRows
from allreduce.nodes import bad_ranks_per_node, bad_split, bad_timeout, checked, divide, number_nodes
from allreduce.ownership import Closeable
from allreduce.process import children, launcher
from allreduce.survival import Survival
from allreduce.transport import liveness
from allreduce.transport.cma import Reach
from allreduce.transport.control import agree, all_values, waiting, watched

TAGS = 1 << 15  # every MPI has at least this many


def _leave_rows(watch: Watch, rows: StatusRows | None) -> None:
    """A topology was closed or dropped: other ranks that wait in it hear that this one leaves, then its rows go."""
    with contextlib.suppress(Exception):
        watch.leave("it has dropped the topology")
    if rows is not None:
        rows.release()


class Topology(Survival):
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

    With uneven nodes, `cross` differs in size from rank to rank; `leaders_only` is then true and only
    node rank 0 of each node should speak for it.
    """

    cores: int  # of this node
    sharing: int  # ranks that share them

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        ranks_per_node: int | Sequence[int] | None = None,
        timeout: float | None = None,
        *,
        parent: "Topology | None" = None,
    ) -> None:
        children.check()
        status_dump.install()
        comm = self._given(comm)
        asked = f"Topology(ranks_per_node={ranks_per_node!r}, timeout={timeout!r})"
        error = bad_ranks_per_node(ranks_per_node, comm.size) or bad_timeout(timeout)
        agree(comm, [zlib.crc32(asked.encode())], asked, error)
        self._begin(parent)
        self._origin: Topology | None = None  # what this is a duplicate of
        self._numbers, self.apart, self.is_part = 0, False, parent is not None
        self.simulated, self._ranks_per_node = ranks_per_node is not None, ranks_per_node
        self.timeout = seconds(TIMEOUT, 1800.0) if timeout is None else float(timeout)
        try:
            with waiting(comm, asked):
                first = self._own(comm.Dup())
            revoke = weakref.WeakMethod(self._revoke)  # MPI keeps the watch with `first`; a topology can be dropped
            self.watch = Watch(first, self.timeout, revoke=lambda: (call := revoke()) and call())
            watched(first, self.watch, self.place())
            with waiting(first, asked):
                self._connect(first)
        except BaseException:
            self.closed = True
            self._leave_half_made()
            raise
        if parent is not None:
            self.cores, self.sharing = parent.cores, parent.sharing  # whose ranks need them too

    def _begin(self, parent: "Topology | None") -> None:
        """Become a child before there is anything to wait for: when the parent hears of a lost rank, so does this."""
        self._owned: list[MPI.Intracomm] = []
        self._users: list[Closeable] = []
        self._children: list[Topology] = []
        self._worker: Worker | None = None
        self._guard, self._revoked, self.closed = threading.Lock(), False, False
        if parent is not None:
            parent._children = [child for child in parent._children if not child.closed] + [self]
            self._revoked = parent._revoked

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Make all communicators but the watch's, which is `comm`. Collective."""
        self.world: MPI.Intracomm = self._own(comm.Dup(), watch=True)
        self._control = self.private()
        self._finish = self._place_to_finish()
        self.former = tuple(range(self.size))
        real = self._own(self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank), watch=True)
        self.board = Board(real, self.size)
        found = all_values(real, [machine.cores(), self.rank, liveness.own()], "learn what this node has")
        self.cores = len(set().union(*(cores for cores, *_ in found)))
        self.sharing = real.size
        if real.size > self.cores and not self.is_part:  # of which that was said
            text = f"{real.size} ranks share the {self.cores} cores of this node: expect no speed-up from more ranks, "
            notices.once(self.rank, text + "and times of communication that are mostly waits for a core")
        self.node: MPI.Intracomm = self._own(divide(real, self.rank, self._ranks_per_node), watch=True)
        self.reach = Reach(self.node)
        nodes, self.node_index = number_nodes(self.world, self.node)
        self.node_sizes = tuple(map(len, nodes))
        here = {rank: liveness.of_json(process) for _, rank, process in found if process is not None}
        rows = shared_rows(self.node)
        # A topology that is dropped leaves its communicators, with which MPI keeps the watch, and so the rows.
        self._release_rows = weakref.finalize(self, _leave_rows, self.watch, rows)
        self._release_rows.atexit = False
        self.watch.connect(nodes, self.node_index, rows, here)
        self.cross: MPI.Intracomm = self._own(self.world.Split(self.node.rank, self.node_index), watch=True)

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

    @staticmethod
    def _given(comm: MPI.Intracomm | None) -> MPI.Intracomm:
        if comm is None or comm is MPI.COMM_WORLD:
            launcher.check(MPI.COMM_WORLD.size)
        return checked(comm, MPI.COMM_WORLD)

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

    @property
    def worker(self) -> Worker:
        """What runs calls of several users in one order that all ranks follow. Collective at its first use."""
        if self._worker is None:
            self.check_open()
            number = self._number()
            self._worker = Worker(self.private(), self.private(), self.watch, number)
        return self._worker

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

    def agree(self, values: Sequence[int], text: str, error: Exception | None = None) -> None:
        """Return when all ranks bring equal `values` and no error; raise on all of them otherwise. Collective.

        text: this rank's side in words. At most 8 values.
        """
        self.check_open()
        agree(self._control, values, text, error)

    def split(
        self, colour: int, ranks_per_node: int | Sequence[int] | None = None, on_error: str = "job"
    ) -> "Topology":
        """The topology of the ranks that bring the same `colour`, in the order of their ranks here. Collective.

        It belongs to its user, who closes it before this one (or leaves that to this one's `close`). Its waits,
        agreements and errors are its own: an error that all its ranks raise, and catch, is no other part's concern.

        on_error: what an exception ends that nobody catches: the whole "job", or the programs of this "part" alone
            (alike on its ranks) while the part is open. Its other ranks, which wait for the one that has left, get a
            RankLeftError; other parts go on, and the job's exit code says in the end that one has failed. A wait
            inside of MPI, a thread that dies, and Ctrl-C end the job all the same.
        """
        self.agree([], "Topology.split", bad_split(colour, on_error))
        with waiting(self.world, "Topology.split"):
            comm = self._own(self.world.Split(colour, self.rank))
        try:
            part = Topology(comm, ranks_per_node, self.timeout, parent=self)
        finally:
            self.release(comm)
        part.agree([on_error == "part"], f"split(on_error={on_error!r})")
        if on_error == "part":
            part._stand_apart()
        return part

    def _stand_apart(self) -> None:
        self.apart = True
        abort.contain(self)

    def duplicate(self) -> "Topology":
        """The same ranks and nodes on communicators of its own. Collective.

        For users that make things in the middle of their calls, in whichever thread those run.
        """
        self.check_open()
        copy = object.__new__(Topology)
        copy.__dict__.update(self.__dict__)
        copy._begin(self)
        copy._origin, copy._numbers = self, self._number() << 16
        with waiting(self.world, "Topology.duplicate"):
            copies = [copy._own(comm.Dup(), watch=True) for comm in (self.world, self.node, self.cross)]
            nobody = copy._own(MPI.COMM_SELF.Dup())  # those made here are parts of a user, who meet on no board
        copy.world, copy.node, copy.cross = copies
        copy._control = copy.private()
        copy.board = Board(nobody, self.size)
        return copy

    def close(self) -> None:
        """Close what still uses this topology, then free every communicator; after a loss `abandon`. Collective."""
        if self.closed:
            return
        try:
            self._close_together()
        except Exception as error:
            if self.watch.loss_of(error) is None:
                raise
            self.closed = False
            self.watch.leave("it has closed the topology")
            self.abandon()

    def _close_together(self) -> None:
        agree(self._control, [], f"close {self}", None)
        for user in [*reversed(self._users), *reversed(self._children)]:
            user.close()
        if self.closed:  # by one of them: a trainer closes the topology that a loss has left it with
            return
        self.closed = True
        if self._worker is not None:
            self._worker.close()
        self.board.close()
        if self._origin is None:
            self.watch.close()
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
        if self._worker is not None:
            self._worker.abandon()
        self.board.abandon()
        self._leave_owned()
        if self._origin is None:
            self.watch.abandon()  # it keeps the rows: other ranks may wait for this one, and must hear that it leaves
            self._release_rows.detach()

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        if self.closed:
            raise ClosedError("this topology is closed; make a new Topology()")

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


children.guard(
    Topology, "__init__", "agree", "inside", "across", "split", "duplicate", "private", "release", "close", "check_open"
)
